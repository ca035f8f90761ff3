"""Solutions to the exercises of notebook 09_full_kernel; run it from anywhere, the tests do."""

import dataclasses

import triton

from jfa import steps
from jfa.lab import cases, faults, flops, onchip

before, last = (steps.find("hopper", "backward", name) for name in onchip.STEPS)

# 1. 256 rows take a pair, one CTA for each 128 rows. Each has a part of dK and dV of every tile: the first
# stores its part, the second adds its own on top, which the step before did not need.
total, added = {}, {}
for step in (before, last):
    counted = onchip.moved(step, lengths=[128, 300, 64], queries=256)
    total[step.name] = sum(counted.values()) / 1024
    added[step.name] = sum(
        count for (tensor, how), count in counted.items() if how == "added" and tensor != "dQ"
    )
    print(
        f"1. {step.name}: {total[step.name]:.0f} KiB a block, dK and dV added {added[step.name] / 1024:.0f}"
    )
assert added["peeled"] == 0 < added["stationary"]
assert total["stationary"] < total["peeled"]

# 2. Backward has 2.5 times the FLOPs of forward on fewer times the bytes: it is bound by compute earlier.
crossed = []
for case in cases.jagged_cases():
    bounds = [
        flops.roofline(case.lengths(), case.M, case.Hq, case.D, direction).bound
        for direction in ("forward", "backward")
    ]
    if bounds == ["memory", "compute"]:
        crossed.append(case)
        print(f"2. M={case.M}, N={case.N}, density {case.density:g}: memory forward, compute backward")
    assert bounds != ["compute", "memory"]
print(f"2. {len(crossed)} shapes")


# 3. Right as before, and Q is read for every tile again.
@triton.jit
def always(work, tile, last):
    return True


kept = steps.FORWARD["hopper"][-1]
reloading = dataclasses.replace(kept, fresh=always)
found = faults.verdict(reloading)
print(f"3. queries reloaded for every tile: {found}")
assert found.kind == "ok"
reads = [onchip.moved(step)["Q", "read"] / 1024 for step in (kept, reloading)]
print(f"3. Q read: {reads[0]:.1f} KiB a block kept, {reads[1]:.1f} reloaded")
assert reads[1] > 2 * reads[0]
