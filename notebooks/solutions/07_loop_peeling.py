"""Solutions to the exercises of notebook 07_loop_peeling; run it from anywhere, the tests do."""

import dataclasses

import torch
import triton

import jfa
from jfa import emulator
from jfa.lab import check, course, edges, ladder, live, staging

# 1. Twice as many tiles, nearly as many tails, so a smaller share; and each masked tile is half as large.
histories = edges.length_sets()["real histories"]
areas = {}
for block in (64, 128):
    share = edges.edge_share(histories, block_n=block)
    areas[block] = block * sum(length % block > 0 for length in histories)
    print(f"1. tiles of {block} keys: {100 * share:.0f} % have an edge, {areas[block]} masked keys a row")
assert areas[64] < 0.6 * areas[128]

# 2. A row of tiles has one on the diagonal and one at the rim of the window when the window is a multiple of
# the tile, so two tiles of bulk between them: 384 keys. Otherwise the rim crosses two tiles.
shares = {}
for window in (128, 256, 384, 448, 512):
    found = edges.tile_map(4096, 4096, window, 0)[8:]  # past the beginning
    shares[window] = int((found == edges.BULK).sum()) / int((found > 0).sum())
    print(f"2. window of {window} keys: {100 * shares[window]:.0f} % of the walked tiles are bulk")
assert abs(shares[384] - 0.5) < 0.02 and shares[448] < shares[512]


# 3. Right at every edge. The kernel holds the turn three times, so its code grows; each loop is its own.
@triton.jit
def walk_in_loops(group, keys, tile, buffers, x, low, high, turn, scale_log2, WEIGH, SHARE):
    first, end = keys.bulk_blocks(tile, low, high)
    for block in range(low, first):
        now = turn + block - low
        WEIGH(group, keys, tile, buffers, x, block, now, now, scale_log2, True, SHARE, True)
    for block in range(first, end):
        now = turn + block - low
        WEIGH(group, keys, tile, buffers, x, block, now, now, scale_log2, False, SHARE, True)
    for block in range(end, high):
        now = turn + block - low
        WEIGH(group, keys, tile, buffers, x, block, now, now, scale_log2, True, SHARE, True)


peeled = staging.ladder_of("blackwell")["peeled"]
loops = dataclasses.replace(peeled, walk=walk_in_loops)
lengths = [0, 1, 129, 300]
draw = torch.Generator().manual_seed(0)
q, k, v = (torch.randn(sum(lengths), 2, 64, generator=draw).bfloat16() for _ in "qkv")
offsets = jfa.jagged.lengths_to_offsets(lengths)
wanted = check.expected(q, k, v, offsets, offsets, causal=True, window=(200, 0))
with emulator.emulate(arch="sm_100") as machine:
    results = check.results_of(jfa.jagged_flash_attention, wanted.inputs, backend="blackwell", step=loops)
verdict = wanted.check(results)
print(f"3. loops instead of a branch: within the budget {verdict.passed}, findings {len(machine.errors())}")
assert verdict.passed and not machine.errors()
if course.compiler_missing() is None and live.missing() is None:
    for name, step in (("a branch", peeled), ("loops", loops)):
        made = ladder.compiled(step)
        sizes = [len(loop) for loop in live.block_loops(made)]
        print(f"3. {name}: {made.instructions} instructions, turns of {sizes}")
