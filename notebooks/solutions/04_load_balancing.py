"""Solutions to the exercises of notebook 04_load_balancing; run it from anywhere, the tests do."""

import dataclasses

import triton

from jfa import steps
from jfa.lab import dealing, faults

lengths = dealing.data_sets()["real histories"]
deals = dealing.forward_deals()

# 1. No deal can cut an item: the longest bounds them all. A static deal gives its SM as many items more as
# others get. The dynamic one exceeds the bound by two items only, which the loader drew ahead.
giant = [*lengths, 50 * max(lengths)]
bound = -(-giant[-1] // dealing.BLOCK) + dealing.TILE_COST
times = {name: dealing.plan(step, giant).time for name, step in deals.items()}
for name, time in times.items():
    print(f"1. {name}: {time:.1f} key tiles, the longest item alone {bound:.1f} (predicted)")
assert bound < times["dynamic"] < 1.05 * bound
assert min(times["natural order"], times["sorted"], times["boustrophedon"]) > 1.2 * bound

# 2. 148 SMs have other last rounds: static deals change with how many items are left for them.
for sms in (132, 148):
    busy = {name: dealing.plan(step, lengths, sms=sms).busy for name, step in deals.items()}
    print(f"2. {sms} SMs:", ", ".join(f"{name} {share:.3f}" for name, share in busy.items()))
    assert max(busy.values()) == busy["dynamic"] > 0.97


# 3. Neighbours for each CTA: in natural order as even as chance, in sorted order as uneven as it gets.
@triton.jit
def in_ranges(deal, k, before=0):
    each = (deal.items + deal.programs - 1) // deal.programs
    t = deal.program * each + k
    if k >= each:
        t = deal.items
    return t


balanced = next(step for step in steps.FORWARD["hopper"] if step.name == "balanced")
ranges = dataclasses.replace(balanced, draw=in_ranges, hear=in_ranges)
found = faults.verdict(ranges)
print(f"3. a range of neighbours in the emulator: {found}")
assert found.kind == "ok"
busy = {
    order: dealing.plan(dataclasses.replace(ranges, order=order), lengths).busy
    for order in ("natural", "sorted")
}
print(f"3. busy, predicted: natural {busy['natural']:.2f}, sorted {busy['sorted']:.2f}")
assert busy["sorted"] < busy["natural"]
