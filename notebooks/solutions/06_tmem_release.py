"""Solutions to the exercises of notebook 06_tmem_release; run it from anywhere, the tests do."""

import dataclasses

import triton
import triton.language as tl

from jfa.kernels.blackwell.backward_compute import add_slice, columns
from jfa.kernels.blackwell.backward_parts import DQ_FREE, HALF
from jfa.kernels.ragged import ragged_row
from jfa.lab import course, faults, ladder, live, replay, staging

released = staging.ladder_of("blackwell")["dq_released"]
rule = released.tiling
counts_registers = course.compiler_missing() is None and live.missing() is None

# 1. A slice of 16 columns costs a thread 16 registers. There are eight of them, and like the four wide ones
# they make up the whole accumulator: what can be held is the same, in finer steps.
costs = {}
for width, held in ((32, 2), (16, 4)):
    sizes = {"SLICE": width, "HELD": held}
    step = dataclasses.replace(released, tiling=lambda problem, sizes=sizes: rule(problem) | sizes)
    print(f"1. slices of {width} columns: {width} registers each, {128 // width} of them")
    if counts_registers:
        costs[width] = live.at_release(live.drain_loop(ladder.compiled(step)))
        print(f"1. {held} held: {costs[width]} live registers at the release")
assert not costs or abs(costs[32] - costs[16]) < 16

# 2. All of them: the columns are free at once. Then the chain from dP over dS to dQ bounds the turn, since
# neither adds nor tensor cores do.
times = {count: staging.turn_time(staging.holding(count), 60.0, like=released) for count in staging.HELD}
for count, clocks in times.items():
    print(f"2. held {count}: {clocks:.0f} clocks a turn (predicted)")
adds = staging.turn_bytes("blackwell") / 60.0
tensor = staging.turn_flops("blackwell") / replay.PACES["blackwell"].tensor_flops
print(f"2. adds alone {adds:.0f}, tensor cores alone {tensor:.0f}")
assert min(times, key=times.get) in (3, 4) and min(times.values()) > max(adds, tensor)


# 3. Right as before; it needs a slice's registers for every slice, and is what holding all four is.
@triton.jit
def drain_all_first(keys, buffers, x, dq, tile, head, block):
    SLICES: tl.constexpr = buffers.HEAD_DIM // buffers.PAIR // buffers.SLICE
    row = block * keys.BLOCK_M + buffers.rank * HALF
    span, end, row = ragged_row(tile.q_end, tile.q_len, row)
    held = ()
    for c in tl.static_range(SLICES):
        held = held + (columns(x.dq_lanes[0], c, buffers.SLICE),)
    x.tell(DQ_FREE)  # reduce -> mma: everything is in registers
    for c in tl.static_range(SLICES):
        add_slice(buffers, dq, held[c], c, span, end, row, head * buffers.HEAD_DIM)


first = dataclasses.replace(released, drain=drain_all_first)
found = faults.verdict(first, lengths=(300, 0, 129), heads=2)
print(f"3. all slices first, in the emulator: {found}")
assert found.kind == "ok"
if counts_registers:
    alive = [live.at_release(live.drain_loop(ladder.compiled(step))) for step in (first, staging.holding(4))]
    print(f"3. live registers at the release: {alive[0]}, as when four are held: {alive[1]}")
    assert alive[0] == alive[1]
replays = [staging.turn_time(step, staging.FAST, like=released) for step in (first, staging.holding(4))]
print(f"3. {replays[0]:.0f} clocks a turn, four held {replays[1]:.0f} (predicted)")
assert abs(replays[0] / replays[1] - 1) < 0.01
