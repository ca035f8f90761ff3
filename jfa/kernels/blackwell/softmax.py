"""Softmax roles of the Blackwell forward kernel: a warp group each for the two streams of score blocks."""

import triton
import triton.language as tl
import triton.language.extra.tlx as tlx

from jfa.kernels.blackwell.tmem import ROWS


@triton.jit
def weigh(work, s, tile, rows, block, u, group, scale, top, total, MASKED: tl.constexpr):
    """One block: scores -> weights; returns the rows' maximum and sum so far."""
    tlx.barrier_wait(s.score_full[group], (u >> 1) & 1)  # mma -> softmax
    x = tlx.local_load(s.scores[group])
    if MASKED:
        x = tl.where(work.seen(tile, rows, block * work.BLOCK_N + tl.arange(0, work.BLOCK_N)), x, -float("inf"))
    before = top
    top = tl.maximum(top, tl.max(x, 1))
    base = tl.where(top == -float("inf"), 0.0, top) * scale  # a row without a key so far: exp2(-inf) = 0
    factor = tl.math.exp2(before * scale - base)
    tlx.local_store(s.factor[group], factor[:, None])
    tlx.barrier_arrive(s.factor_full[group])  # softmax -> correction, which rescales while we exponentiate
    p = tl.math.exp2(x * scale - base[:, None])
    tlx.local_store(s.weights[group], p.to(s.weights.dtype))
    tlx.barrier_arrive(s.ready[group])  # softmax -> mma
    return top, total * factor + tl.sum(p, 1)


@triton.jit
def walk(work, s, tile, rows, u, group, scale, top, total, WEIGH: tl.constexpr):
    """Every other block of a tile, from the last one down; all of them masked."""
    TILES: tl.constexpr = s.TILES
    last, blocks = work.blocks(tile)
    for i in range((group ^ u) & 1, blocks * TILES, 2):
        top, total = WEIGH(work, s, tile, rows, last - i // TILES, u + i, group, scale, top, total, True)
    return top, total, blocks * TILES


@triton.jit
def walk_peeled(work, s, tile, rows, u, group, scale, top, total, WEIGH: tl.constexpr):
    """The blocks with an edge in them first, masked; then the bulk; behind a left edge masked again."""
    TILES: tl.constexpr = s.TILES
    last, blocks = work.blocks(tile)
    steps = blocks * TILES
    row = tile.row + group * (work.BLOCK_M - ROWS)
    first, end = work.unmasked(tile, row, ROWS)
    start = (group ^ u) & 1
    # Steps from start on by twos; a step i is at block last - i // TILES.
    bulk = tl.minimum(tl.maximum(last + 1 - end, 0) * TILES, steps)
    bulk += (bulk ^ start) & 1
    after = steps
    if work.LEFT:
        after = tl.maximum(tl.minimum((last + 1 - first) * TILES, steps), bulk)
        after += (after ^ start) & 1
    for i in range(start, bulk, 2):
        top, total = WEIGH(work, s, tile, rows, last - i // TILES, u + i, group, scale, top, total, True)
    for i in range(bulk, after, 2):
        top, total = WEIGH(work, s, tile, rows, last - i // TILES, u + i, group, scale, top, total, False)
    if work.LEFT:
        for i in range(after, steps, 2):
            top, total = WEIGH(work, s, tile, rows, last - i // TILES, u + i, group, scale, top, total, True)
    return top, total, steps


@triton.jit
def softmax(work, deal, s, scale, group: tl.constexpr, HEAR, WALK, WEIGH):
    """One of two warp groups: the weights of its blocks, a row a thread; at a tile's end its sums and maxima."""
    k, u = 0, 0
    t = HEAR(deal, k)
    while t < deal.items:
        tile = work.fetch(t, deal.items)
        rows = tile.row + group * (work.BLOCK_M - ROWS) + tl.arange(0, ROWS)
        top = tl.full([ROWS], -float("inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        top, total, steps = WALK(work, s, tile, rows, u, group, scale, top, total, WEIGH)
        # correction -> softmax: the totals of the turn before were read (this turn may have no block of ours)
        tlx.barrier_wait(s.total_free[group], (k & 1) ^ 1)
        tlx.local_store(s.row_sum[group], total[:, None])
        tlx.local_store(s.row_max[group], top[:, None])
        tlx.barrier_arrive(s.total_full[group])  # softmax -> correction
        u += steps
        k += 1
        t = HEAR(deal, k)
