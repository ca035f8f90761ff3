"""Blackwell backward: the groups that compute P and dS, and the group that empties tensor memory."""

import triton
import triton.language as tl
import triton.language.extra.tlx as tlx

from jfa.kernels.blackwell.backward_parts import HALF, PART, RESULT, ROWS
from jfa.kernels.ragged import ragged_row


@triton.jit
def weigh(group: tl.constexpr, keys, tile, buffers, x, slot, block, turn, scale_log2, masked):
    """P^T and dS^T of this group's 64 query rows against the tile's 128 keys; a thread has one key.

    PART rows at a time, so that a thread holds its P and little else.
    """
    DTYPE: tl.constexpr = buffers.ds.dtype
    mine: tl.constexpr = group * HALF
    tlx.barrier_wait(x.s_full[0], turn & 1)  # mma -> compute
    weights = ()
    for c in tl.static_range(HALF // PART):
        log2_lse = tlx.local_load(tlx.local_slice(buffers.log2_lse[slot], [mine + c * PART], [PART]))
        s = tlx.local_load(tlx.local_slice(x.s[0], [0, mine + c * PART], [ROWS, PART]))
        p = tl.math.exp2(s * scale_log2 - log2_lse[None, :])
        if masked:
            key = tile.key + keys.mine + tl.arange(0, ROWS)
            row = block * keys.BLOCK_M + mine + c * PART + tl.arange(0, PART)
            p = tl.where(keys.seen(tile, key, row), p, 0.0)
        tlx.local_store(tlx.local_slice(x.p[2 * group], [0, c * PART], [ROWS, PART]), p.to(DTYPE))
        weights = weights + (p,)
    tlx.barrier_arrive(x.p_ready[group])  # compute -> mma: dV may start
    tlx.barrier_wait(x.dp_full[0], turn & 1)  # mma -> compute; also: the dQ before has read dS
    for c in tl.static_range(HALF // PART):
        delta = tlx.local_load(tlx.local_slice(buffers.delta[slot], [mine + c * PART], [PART]))
        dp = tlx.local_load(tlx.local_slice(x.dp[0], [0, mine + c * PART], [ROWS, PART]))
        ds = (weights[c] * (dp - delta[None, :])).to(DTYPE)
        tlx.local_store(tlx.local_slice(x.ds[2 * group], [0, c * PART], [ROWS, PART]), ds)
        tlx.local_store(tlx.local_slice(buffers.ds[0], [0, mine + c * PART], [ROWS, PART]), ds)
    tlx.fence("async_shared")  # the tensor core reads dS through the asynchronous proxy
    tlx.barrier_arrive(x.ds_ready[group])  # compute -> mma: dK and dQ may start


@triton.jit
def walk_masked(
    group: tl.constexpr, keys, tile, buffers, x, low, high, turn, scale_log2, WEIGH: tl.constexpr
):
    """Blocks [low, high) of query rows of one head, every one masked."""
    for block in range(low, high):
        now = turn + block - low
        slot = buffers.q.await_full(now)  # load -> compute: the statistics have arrived
        WEIGH(group, keys, tile, buffers, x, slot, block, now, scale_log2, True)


@triton.jit
def walk_peeled(
    group: tl.constexpr, keys, tile, buffers, x, low, high, turn, scale_log2, WEIGH: tl.constexpr
):
    """Blocks [low, high) of query rows of one head; masks only where an edge runs through the tile."""
    first, end = keys.bulk_blocks(tile, low, high)
    for block in range(low, high):
        now = turn + block - low
        slot = buffers.q.await_full(now)  # load -> compute: the statistics have arrived
        masked = (block < first) | (block >= end)
        WEIGH(group, keys, tile, buffers, x, slot, block, now, scale_log2, masked)


@triton.jit
def compute(
    group: tl.constexpr,
    keys,
    deal,
    buffers,
    x,
    scale_log2,
    COUNT: tl.constexpr,
    TILE: tl.constexpr,
    HEAR: tl.constexpr,
    WALK: tl.constexpr,
    WEIGH: tl.constexpr,
):
    """A compute group: its half of the query rows of every block."""
    k_item, turn = 0, 0
    t = HEAR(deal, k_item)
    while t < deal.items:
        for i in range(COUNT(keys, t)):
            tile = TILE(keys, t, i)
            low, high = keys.query_blocks(tile)
            for _ in range(keys.GROUP):
                WALK(group, keys, tile, buffers, x, low, high, turn, scale_log2, WEIGH)
                turn += high - low
        k_item += 1
        t = HEAR(deal, k_item)


@triton.jit
def columns(tile, c, WIDTH: tl.constexpr):
    """The c-th WIDTH columns of an accumulator, in registers."""
    return tlx.local_load(tlx.local_slice(tile, [0, c * WIDTH], [ROWS, WIDTH]))


@triton.jit
def add_slice(buffers, dq, part, c, span, end, row, column):
    """Through a staging tile, once the TMA unit has read what it held: dq[row:, column:] += part."""
    staged = buffers.staging[c % buffers.STAGES]
    tlx.async_descriptor_store_wait(buffers.STAGES - 1)
    tlx.local_store(staged, part)
    tlx.fence("async_shared")  # the TMA unit reads it
    at = [span, end, row, column + c * buffers.SLICE]
    tlx.async_descriptor_store(dq, staged, at, store_reduce="add")


@triton.jit
def drain(keys, buffers, x, dq, tile, head, block):
    """dQ of one turn, slice after slice; tensor memory is free when the last slice is staged."""
    span, end, row = ragged_row(tile.q_end, tile.q_len, block * keys.BLOCK_M)
    for c in tl.static_range(buffers.HEAD_DIM // buffers.SLICE):
        part = columns(x.dq[0], c, buffers.SLICE)
        add_slice(buffers, dq, part, c, span, end, row, head * buffers.HEAD_DIM)
    tlx.barrier_arrive(x.dq_free[0])  # reduce -> mma


@triton.jit
def drain_early(keys, buffers, x, dq, tile, head, block):
    """As `drain`, but the last HELD slices go to registers first: tensor memory is free before they leave."""
    SLICES: tl.constexpr = buffers.HEAD_DIM // buffers.SLICE
    span, end, row = ragged_row(tile.q_end, tile.q_len, block * keys.BLOCK_M)
    for c in tl.static_range(SLICES - buffers.HELD):
        part = columns(x.dq[0], c, buffers.SLICE)
        add_slice(buffers, dq, part, c, span, end, row, head * buffers.HEAD_DIM)
    held = ()
    for c in tl.static_range(SLICES - buffers.HELD, SLICES):
        held = held + (columns(x.dq[0], c, buffers.SLICE),)
    tlx.barrier_arrive(x.dq_free[0])  # reduce -> mma
    for c in tl.static_range(buffers.HELD):
        n = SLICES - buffers.HELD + c
        add_slice(buffers, dq, held[c], n, span, end, row, head * buffers.HEAD_DIM)


@triton.jit
def store_columns(keys, buffers, accumulator, gradient, tile, turns, factor, FIRST: tl.constexpr):
    """One accumulator of the key tile to memory, zeros when no query saw it; TMA clips the last tile."""
    span, end, row = ragged_row(tile.kv_end, tile.kv_len, tile.key + keys.mine)
    for c in tl.static_range(buffers.HEAD_DIM // RESULT):
        part = tl.zeros([ROWS, RESULT], tl.float32)
        if turns > 0:
            part = columns(accumulator, c, RESULT) * factor
        tlx.async_descriptor_store_wait(buffers.STAGES - 1)
        staged = buffers.results[(FIRST + c) % buffers.STAGES]
        tlx.local_store(staged, part.to(buffers.results.dtype))
        tlx.fence("async_shared")  # the TMA unit reads it
        at = [span, end, row, tile.head * buffers.HEAD_DIM + c * RESULT]
        tlx.async_descriptor_store(gradient, staged, at)


@triton.jit
def store(keys, buffers, x, dk, dv, tile, tiles, turns, scale):
    """Epilogue of one key tile: dV, then dK."""
    if turns > 0:
        tlx.barrier_wait(x.dkv_full[0], tiles & 1)  # mma -> reduce
    store_columns(keys, buffers, x.dv[0], dv, tile, turns, 1.0, 0)
    store_columns(keys, buffers, x.dk[0], dk, tile, turns, scale, buffers.HEAD_DIM // RESULT)
    if turns > 0:
        tlx.barrier_arrive(x.dkv_free[0])  # reduce -> mma: the next tile may start its sums


@triton.jit
def reduce(
    keys,
    deal,
    buffers,
    x,
    dq,
    dk,
    dv,
    scale,
    COUNT: tl.constexpr,
    TILE: tl.constexpr,
    HEAR: tl.constexpr,
    DRAIN: tl.constexpr,
    STORE: tl.constexpr,
):
    """The group that empties tensor memory: adds every turn's dQ to memory, stores every tile's dK and dV."""
    k_item, turn, tiles = 0, 0, 0
    t = HEAR(deal, k_item)
    while t < deal.items:
        for i in range(COUNT(keys, t)):
            tile = TILE(keys, t, i)
            low, high = keys.query_blocks(tile)
            for head in range(tile.head * keys.GROUP, (tile.head + 1) * keys.GROUP):
                for block in range(low, high):
                    tlx.barrier_wait(x.dq_full[0], turn & 1)  # mma -> reduce
                    DRAIN(keys, buffers, x, dq, tile, head, block)
                    turn += 1
            turns = (high - low) * keys.GROUP
            STORE(keys, buffers, x, dk, dv, tile, tiles, turns, scale)
            tiles += tl.minimum(turns, 1)
        k_item += 1
        t = HEAR(deal, k_item)
    tlx.async_descriptor_store_wait(0)
