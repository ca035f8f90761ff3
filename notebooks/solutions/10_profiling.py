"""Solutions to the exercises of notebook 10_profiling; run it from anywhere, the tests do."""

import dataclasses

from jfa import emulator, steps
from jfa.lab import ablation, course, drawings_profile, figures, ladder, targets

# 1. Sectors that L2 was asked for fall: a multicast is asked once and delivered twice. Bytes that the SMs
# received do not fall; they and the adds of dQ rise, presumably for tiles that one CTA of a pair has in vain.
table = drawings_profile.by_pass(figures.read("10_counters"))
everything = table[~table["case"].str.contains(" ")]  # the shape on which all steps were counted
backward = everything[everything["direction"] == "backward"].set_index(["M", "step"])
for M in backward.index.unique("M"):
    ratios = {}
    for column in ("l2_read_sectors", "sm_received_mb", "l2_red_sectors"):
        ratios[column] = backward.loc[(M, "two_cta"), column] / backward.loc[(M, "peeled"), column]
        print(f"1. M = {M}: {column} of two_cta over peeled {ratios[column]:.2f}")
    assert ratios["l2_read_sectors"] < 0.9 and 1 < ratios["sm_received_mb"]

# 2. Where the accumulator of dQ, P, dS and their addresses no longer fit, values move to local memory. Steps
# of 8 find the place: 176 still fit, 168 spill a little. From 152 down to 120 ptxas spills the same bytes
# each time; why is not known to us.
if course.compiler_missing() is None:
    whole = steps.BACKWARD["hopper"][-1]
    rule = whole.tiling
    spilled = {}
    for registers in (240, 216, 192, 168, 144, 120):
        sized = dataclasses.replace(
            whole, tiling=lambda problem, registers=registers: rule(problem) | {"REGISTERS": registers}
        )
        spilled[registers] = ladder.compiled(sized).spill_store_bytes
        print(f"2. {registers} registers: {spilled[registers]} bytes of spill stores a thread")
    assert spilled[192] == 0 < spilled[168] < spilled[144]

# 3. The factor matters when a later block raises the maximum, so a sequence of one block is still right.
ablation.FORWARD["rescaling"] = [(r"acc \* alpha\[:, None\]", "acc")]
shape = {"M": 70, "N": 900, "density": 0.3, "B": 8, "D": 64}  # on average long enough for blocks of 128
results = {}
for step, stage in ((targets.BASELINE, ""), ("stationary", "rescaling")):
    with emulator.emulate(arch="sm_90"):
        target = targets.Target("forward", step, **shape, left_out=stage)
        results[step] = targets.prepare(target, "cpu")()[0].float()
for sequence, length in enumerate(target.case.lengths().tolist()):
    found, wanted = (results[step][sequence] for step in ("stationary", targets.BASELINE))
    error = float((found - wanted).norm() / wanted.norm().clamp_min(1e-30))
    print(f"3. {length} keys: differs by {error:.4f}")
    assert (error < 0.01) == (length <= 128)
