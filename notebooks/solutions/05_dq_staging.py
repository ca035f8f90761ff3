"""Solutions to the exercises of notebook 05_dq_staging; run it from anywhere, the tests do."""

import dataclasses

import triton
import triton.language as tl
import triton.language.extra.tlx as tlx

from jfa.kernels.hopper.backward_compute import GROUPS
from jfa.lab import course, faults, ladder, rates, replay, staging

# 1. Ten FLOPs for each key and float of dQ: twice the keys, twice the FLOPs a byte, half the adds.
hopper = rates.RATES["sm_90"]
for keys in (128, 256):
    intensity = staging.turn_flops("hopper", keys) / staging.turn_bytes("hopper")
    needed = hopper.tensor_flops / intensity
    print(f"1. {keys} keys: {intensity:.0f} FLOPs a byte, an SM has to add {needed:.1f} bytes a clock")
assert intensity == 640 and needed == hopper.tensor_flops / 640

# 2. Then the products or the softmax bound a turn, not the adds. On Blackwell the copy out of tensor memory
# still stands before the next dP, so overlap still gains; on Hopper nothing is left to hide.
gains = {}
for arch in ("hopper", "blackwell"):
    known = staging.ladder_of(arch)
    fast = replay.PACES[arch].load
    one, two = (staging.turn_time(known[name], fast) for name in ("dynamic", "dq_staged"))
    gains[arch] = one / two
    print(f"2. {arch}, adds of {fast:.0f} bytes a clock: {one:.0f} and {two:.0f} clocks (predicted)")
assert 0.98 < gains["hopper"] < 1.05 < gains["blackwell"]


# 3. The adds of two turns may be in flight while a third is staged.
@triton.jit
def settle_two_behind(buffers, turn):
    tlx.async_descriptor_store_wait(2 * GROUPS)
    if turn > 1:
        for group in tl.static_range(GROUPS):
            buffers.dq.release((turn - 2) * GROUPS + group)


staged = staging.ladder_of("hopper")["dq_staged"]
rule = staged.tiling
three = dataclasses.replace(
    staged, settle=settle_two_behind, tiling=lambda problem: rule(problem) | {"DQ_STAGES": 3}
)
found = faults.verdict(three, lengths=(300, 0, 129), heads=2)
print(f"3. three staging tiles in the emulator, head dimension 64: {found}")
assert found.kind == "ok"
if course.compiler_missing() is None:
    made = ladder.compiled(three)
    print("3. compiled for a head dimension of 128:", *made.problems())
    assert any("cannot launch" in problem for problem in made.problems())
times = [staging.turn_time(step, like=staged) for step in (staged, three)]
print(f"3. two tiles {times[0]:.0f} clocks a turn, three {times[1]:.0f} (predicted)")
assert abs(times[1] / times[0] - 1) < 0.05
