"""Softmax roles of the Blackwell forward kernel: a warp group each for the two streams of score blocks."""

import triton
import triton.language as tl
import triton.language.extra.tlx as tlx

from jfa.kernels.blackwell.tmem import ROWS


@triton.jit
def weigh(work, s, tile, rows, block, u, group, top, total, MASKED: tl.constexpr):
    """One block: scores -> weights; returns the rows' maximum and sum so far."""
    tlx.barrier_wait(s.score_full[group], (u >> 1) & 1)  # mma -> softmax
    x = tlx.local_load(s.scores[group])
    if MASKED:
        x = tl.where(
            work.seen(tile, rows, block * work.BLOCK_N + tl.arange(0, work.BLOCK_N)), x, -float("inf")
        )
    before = top
    top = tl.maximum(top, tl.max(x, 1))
    base = tl.where(top == -float("inf"), 0.0, top) * s.scale  # a row without a key so far: exp2(-inf) = 0
    factor = tl.math.exp2(before * s.scale - base)
    tlx.local_store(s.factor[group], factor[:, None])
    tlx.barrier_arrive(s.factor_full[group])  # softmax -> correction, which rescales while we exponentiate
    p = tl.math.exp2(x * s.scale - base[:, None])
    tlx.local_store(s.weights[group], p.to(s.weights.dtype))
    tlx.barrier_arrive(s.ready[group])  # softmax -> mma
    return top, total * factor + tl.sum(p, 1)


@triton.jit
def packed_fma(a, b, c):
    """a * b + c, two elements an instruction; also for sums, which cost the same."""
    return tl.inline_asm_elementwise(
        "{ .reg .b64 a, b, c; mov.b64 a, {$2, $3}; mov.b64 b, {$4, $5}; mov.b64 c, {$6, $7}; "
        "fma.rn.f32x2 c, a, b, c; mov.b64 {$0, $1}, c; }",
        "=r,=r,r,r,r,r,r,r",
        [a, b, c],
        dtype=tl.float32,
        is_pure=True,
        pack=2,
    )


@triton.jit
def polynomial_exp2(x):
    """2**x without the MUFU, for x < 128: 2**n from the exponent bits, 2**f by a quartic, |f| <= 1/2.

    Relative error 2.7e-6, a hundredth of rounding to float16. -inf gives 0, NaN stays NaN.
    """
    MAGIC: tl.constexpr = (
        12582912.0 + 127.0
    )  # adding it rounds to an integer and leaves n + 127 in the low bits
    x = tl.maximum(x, -127.0, propagate_nan=tl.PropagateNan.ALL)
    shifted = packed_fma(x, 1.0, MAGIC)
    f = packed_fma(packed_fma(shifted, 1.0, -MAGIC), -1.0, x)
    p = packed_fma(f, 0.009570102207362652, 0.05591785907745361)
    p = packed_fma(p, f, 0.240247443318367)
    p = packed_fma(p, f, 0.6931217908859253)
    p = packed_fma(p, f, 0.9999992847442627)
    return p * (shifted.to(tl.int32, bitcast=True) << 23).to(tl.float32, bitcast=True)


@triton.jit
def weigh_lean(work, s, tile, rows, block, u, group, top, total, MASKED: tl.constexpr):
    """One block in quarters: MUFU for three, polynomial for one, so that the tensor core is the bottleneck.

    The maximum that weights refer to may stay behind the true one by a factor 2**8: no rescaling then.
    """
    PART: tl.constexpr = work.BLOCK_N // 4
    tlx.barrier_wait(s.score_full[group], (u >> 1) & 1)  # mma -> softmax
    x = ()
    for c in tl.static_range(4):
        scores = tlx.local_load(tlx.local_slice(s.scores[group], [0, c * PART], [ROWS, PART]))
        if MASKED:
            seen = work.seen(tile, rows, block * work.BLOCK_N + c * PART + tl.arange(0, PART))
            scores = tl.where(seen, scores, -float("inf"))
        x = x + (scores,)
    largest = tl.maximum(tl.maximum(x[0], x[1]), tl.maximum(x[2], x[3]))
    before = top
    top = tl.maximum(before, tl.max(largest, 1))
    top = tl.where((top - before) * s.scale <= 8.0, before, top)
    base = tl.where(top == -float("inf"), 0.0, top) * s.scale  # a row without a key so far: exp2(-inf) = 0
    factor = tl.where(top == before, 1.0, tl.math.exp2(before * s.scale - base))
    tlx.local_store(s.factor[group], factor[:, None])
    tlx.barrier_arrive(s.factor_full[group])  # softmax -> correction, which rescales while we exponentiate
    added = tl.zeros([ROWS, PART], tl.float32)
    for c in tl.static_range(4):
        p = packed_fma(x[c], s.scale, -base[:, None])
        if c < 3:
            p = tl.math.exp2(p)
        else:
            p = polynomial_exp2(p)
        tlx.local_store(tlx.local_slice(s.weights[group], [0, c * PART], [ROWS, PART]), p.to(s.weights.dtype))
        added = packed_fma(p, 1.0, added)
    tlx.barrier_arrive(s.ready[group])  # softmax -> mma
    return top, total * factor + tl.sum(added, 1)


@triton.jit
def walk(work, s, tile, rows, u, group, top, total, WEIGH: tl.constexpr):
    """Every other block of a tile, from the last one down; all of them masked."""
    TILES: tl.constexpr = s.TILES
    last, blocks = work.blocks(tile)
    for i in range((group ^ u) & 1, blocks * TILES, 2):
        top, total = WEIGH(work, s, tile, rows, last - i // TILES, u + i, group, top, total, True)
    return top, total, blocks * TILES


@triton.jit
def walk_peeled(work, s, tile, rows, u, group, top, total, WEIGH: tl.constexpr):
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
        top, total = WEIGH(work, s, tile, rows, last - i // TILES, u + i, group, top, total, True)
    for i in range(bulk, after, 2):
        top, total = WEIGH(work, s, tile, rows, last - i // TILES, u + i, group, top, total, False)
    if work.LEFT:
        for i in range(after, steps, 2):
            top, total = WEIGH(work, s, tile, rows, last - i // TILES, u + i, group, top, total, True)
    return top, total, steps


@triton.jit
def softmax(work, deal, s, group: tl.constexpr, HEAR, WALK, WEIGH):
    """One of two warp groups: the weights of its blocks, a row a thread; at a tile's end sums and maxima."""
    k, u = 0, 0
    t = HEAR(deal, k)
    while t < deal.items:
        tile = work.fetch(t, deal.items)
        rows = tile.row + group * (work.BLOCK_M - ROWS) + tl.arange(0, ROWS)
        top = tl.full([ROWS], -float("inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        top, total, steps = WALK(work, s, tile, rows, u, group, top, total, WEIGH)
        # correction -> softmax: the totals of the turn before were read (this turn may have no block of ours)
        tlx.barrier_wait(s.total_free[group], (k & 1) ^ 1)
        tlx.local_store(s.row_sum[group], total[:, None])
        tlx.local_store(s.row_max[group], top[:, None])
        tlx.barrier_arrive(s.total_full[group])  # softmax -> correction
        u += steps
        k += 1
        t = HEAR(deal, k)
