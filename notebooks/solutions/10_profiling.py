"""Solutions to the exercises of notebook 10_profiling; run it from anywhere, the tests do."""

import dataclasses

from jfa import emulator, steps
from jfa.lab import ablation, course, drawings_profile, figures, ladder, targets

# 1. Sectors that L2 was asked for fall, bytes that the SMs received do not: a multicast is asked once and
# delivered twice. The rest of L2's work, adding dQ, stays.
if figures.path_of("10_counters").exists():
    table = drawings_profile.by_pass(figures.read("10_counters"))
    everything = table[~table["case"].str.contains(" ")]  # the shape on which all steps were counted
    backward = everything[everything["direction"] == "backward"].set_index(["M", "step"])
    for M in backward.index.unique("M"):
        for column in ("l2_read_sectors", "sm_received_mb", "l2_red_sectors"):
            ratio = backward.loc[(M, "two_cta"), column] / backward.loc[(M, "peeled"), column]
            print(f"1. M = {M}: {column} of two_cta over peeled {ratio:.2f}")
else:
    print("1. columns l2_read_sectors and sm_received_mb; nothing is recorded yet")

# 2. Where the accumulator of dQ, P, dS and their addresses no longer fit, values move to local memory.
if course.compiler_missing() is None:
    whole = steps.BACKWARD["hopper"][-1]
    rule = whole.tiling
    spilled = {}
    for registers in (240, 208, 176, 144):
        sized = dataclasses.replace(
            whole, tiling=lambda problem, registers=registers: rule(problem) | {"REGISTERS": registers}
        )
        spilled[registers] = ladder.compiled(sized).spill_store_bytes
        print(f"2. {registers} registers: {spilled[registers]} bytes of spill stores a thread")
    assert spilled[240] == 0 < spilled[144]

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
