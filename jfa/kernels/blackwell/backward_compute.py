"""Blackwell backward: the groups that compute P and dS, and the group that empties tensor memory."""

import triton
import triton.language as tl
import triton.language.extra.tlx as tlx

from jfa.kernels.blackwell.backward_parts import (  # isort: skip
    DKV_FREE, DP, DQ, DQ_FREE, DS_READY, HALF, P_READY, PART, ROWS, S,
)  # fmt: skip
from jfa.kernels.ragged import ragged_row


@triton.jit
def share(group: tl.constexpr, keys, buffers, scores):
    """dS^T of this group's query rows into shared memory, PART rows after PART rows."""
    for c in tl.static_range(HALF // PART):
        tlx.local_store(tlx.local_slice(buffers.ds[0], [0, group * HALF + c * PART], [ROWS, PART]), scores[c])
    tlx.fence("async_shared")  # the tensor core reads dS through the asynchronous proxy


@triton.jit
def weigh(group: tl.constexpr, keys, tile, buffers, x, block, turn, rows, scale_log2, masked, SHARE, RELEASE):
    """P^T and dS^T of this group's 64 query rows against the tile's 128 keys; a thread has one key.

    PART rows at a time, so that a thread holds its P and little else. ``rows`` counts the blocks of
    statistics so far; with RELEASE each serves one turn, and the loader waits to hear that it was read.
    """
    DTYPE: tl.constexpr = buffers.ds.dtype
    mine: tl.constexpr = group * HALF
    slot = buffers.log2_lse.await_full(rows)  # load -> compute
    tlx.barrier_wait(x.full[S], turn & 1)  # mma -> compute
    weights = ()
    for c in tl.static_range(HALF // PART):
        log2_lse = tlx.local_load(tlx.local_slice(buffers.log2_lse.tiles[slot], [mine + c * PART], [PART]))
        s = tlx.local_load(tlx.local_slice(x.s[0], [0, mine + c * PART], [ROWS, PART]))
        p = tl.math.exp2(s * scale_log2 - log2_lse[None, :])
        if masked:
            key = tile.key + keys.mine + tl.arange(0, ROWS)
            row = block * keys.BLOCK_M + mine + c * PART + tl.arange(0, PART)
            p = tl.where(keys.seen(tile, key, row), p, 0.0)
        tlx.local_store(tlx.local_slice(x.p[2 * group], [0, c * PART], [ROWS, PART]), p.to(DTYPE))
        weights = weights + (p,)
    x.tell(P_READY + group)  # compute -> mma: dV may start
    if RELEASE:
        buffers.log2_lse.release(rows)  # compute -> load
    slot = buffers.delta.await_full(rows)  # load -> compute
    tlx.barrier_wait(x.full[DP], turn & 1)  # mma -> compute; also: the dQ before has read dS
    scores = ()
    for c in tl.static_range(HALF // PART):
        delta = tlx.local_load(tlx.local_slice(buffers.delta.tiles[slot], [mine + c * PART], [PART]))
        dp = tlx.local_load(tlx.local_slice(x.dp[0], [0, mine + c * PART], [ROWS, PART]))
        ds = (weights[c] * (dp - delta[None, :])).to(DTYPE)
        tlx.local_store(tlx.local_slice(x.ds[2 * group], [0, c * PART], [ROWS, PART]), ds)
        scores = scores + (ds,)
    SHARE(group, keys, buffers, scores)
    x.tell(DS_READY + group)  # compute -> mma: dK and dQ may start
    if RELEASE:
        buffers.delta.release(rows)  # compute -> load


@triton.jit
def walk_masked(group: tl.constexpr, keys, tile, buffers, x, low, high, turn, scale_log2, WEIGH, SHARE):
    """Blocks [low, high) of query rows of one head, every one masked."""
    for block in range(low, high):
        now = turn + block - low
        WEIGH(group, keys, tile, buffers, x, block, now, now, scale_log2, True, SHARE, True)


@triton.jit
def walk_peeled(group: tl.constexpr, keys, tile, buffers, x, low, high, turn, scale_log2, WEIGH, SHARE):
    """Blocks [low, high) of query rows of one head; masks only where an edge runs through the tile."""
    first, end = keys.bulk_blocks(tile, low, high)
    for block in range(low, high):
        now = turn + block - low
        masked = (block < first) | (block >= end)
        WEIGH(group, keys, tile, buffers, x, block, now, now, scale_log2, masked, SHARE, True)


@triton.jit
def compute(group: tl.constexpr, keys, deal, buffers, x, scale_log2, COUNT, TILE, HEAR, WALK, WEIGH, SHARE):
    """A compute group: its half of the query rows of every block."""
    k_item, turn = 0, 0
    t = HEAR(deal, k_item)
    while t < deal.items:
        for i in range(COUNT(keys, t)):
            tile = TILE(keys, t, i)
            low, high = keys.query_blocks(tile)
            for _ in range(keys.GROUP):
                WALK(group, keys, tile, buffers, x, low, high, turn, scale_log2, WEIGH, SHARE)
                turn += high - low
        k_item += 1
        t = HEAR(deal, k_item)


@triton.jit
def columns(tile, c, WIDTH: tl.constexpr):
    """The c-th WIDTH columns of an accumulator, in registers."""
    return tlx.local_load(tlx.local_slice(tile, [0, c * WIDTH], [ROWS, WIDTH]))


@triton.jit
def stage(tiles, c, part, STAGES: tl.constexpr):
    """``part`` into a staging tile, once the TMA unit has read what it held.

    No fence: the compiler puts one before every TMA store of what the same task has written.
    """
    tlx.async_descriptor_store_wait(STAGES - 1)
    tlx.local_store(tiles[c % STAGES], part.to(tiles.dtype))


@triton.jit
def add_slice(buffers, dq, part, c, span, end, row, column):
    """The c-th SLICE columns, ``part``, through a staging tile: dq[row:, column + c * SLICE:] += part."""
    stage(buffers.staging, c, part, buffers.STAGES)
    staged = buffers.staging[c % buffers.STAGES]
    COUNT: tl.constexpr = ROWS // buffers.PAIR
    for side in tl.static_range(buffers.PAIR):  # in a pair lanes 64 to 127 hold the right half of the columns
        at = [span, end, row, column + side * (buffers.HEAD_DIM // 2) + c * buffers.SLICE]
        lanes = tlx.local_slice(staged, [side * COUNT, 0], [COUNT, buffers.SLICE])
        tlx.async_descriptor_store(dq, lanes, at, store_reduce="add")


@triton.jit
def drain(keys, buffers, x, dq, tile, head, block):
    """dQ of one turn, slice after slice; tensor memory is free when the last slice is staged."""
    row = block * keys.BLOCK_M + buffers.rank * HALF
    span, end, row = ragged_row(tile.q_end, tile.q_len, row)
    for c in tl.static_range(buffers.HEAD_DIM // buffers.PAIR // buffers.SLICE):
        part = columns(x.dq_lanes[0], c, buffers.SLICE)
        add_slice(buffers, dq, part, c, span, end, row, head * buffers.HEAD_DIM)
    x.tell(DQ_FREE)  # reduce -> mma


@triton.jit
def drain_early(keys, buffers, x, dq, tile, head, block):
    """As `drain`, but the last HELD slices go to registers first: tensor memory is free before they leave."""
    FIRST: tl.constexpr = buffers.HEAD_DIM // buffers.PAIR // buffers.SLICE - buffers.HELD
    row = block * keys.BLOCK_M + buffers.rank * HALF
    span, end, row = ragged_row(tile.q_end, tile.q_len, row)
    for c in tl.static_range(FIRST):
        part = columns(x.dq_lanes[0], c, buffers.SLICE)
        add_slice(buffers, dq, part, c, span, end, row, head * buffers.HEAD_DIM)
    held = ()
    for c in tl.static_range(buffers.HELD):
        held = held + (columns(x.dq_lanes[0], FIRST + c, buffers.SLICE),)
    x.tell(DQ_FREE)  # reduce -> mma
    for c in tl.static_range(buffers.HELD):
        add_slice(buffers, dq, held[c], FIRST + c, span, end, row, head * buffers.HEAD_DIM)


@triton.jit
def store_columns(keys, buffers, accumulator, gradient, tile, turns, factor, SECOND: tl.constexpr):
    """One accumulator of the key tile to memory, zeros when no query saw it; TMA clips the last tile.

    Staging tiles in turn: the SECOND accumulator goes on with the next, and the first of all is dQ's again.
    """
    WIDTH: tl.constexpr = buffers.results.shape[1]
    row = ragged_row(tile.kv_end, tile.kv_len, tile.key + keys.mine)
    for c in tl.static_range(buffers.HEAD_DIM // WIDTH):
        part = tl.zeros([ROWS, WIDTH], tl.float32)
        if turns > 0:
            part = columns(accumulator, c, WIDTH) * factor
        n = c + SECOND * (buffers.HEAD_DIM // WIDTH)
        stage(buffers.results, n, part, buffers.STAGES)
        at = row + (tile.head * buffers.HEAD_DIM + c * WIDTH,)
        tlx.async_descriptor_store(gradient, buffers.results[n % buffers.STAGES], at)


@triton.jit
def store(keys, buffers, x, dk, dv, tile, turns, scale):
    """Epilogue of one key tile: dV, then dK, both complete since the last dQ is: products end in order."""
    store_columns(keys, buffers, x.dv[0], dv, tile, turns, 1.0, False)
    store_columns(keys, buffers, x.dk[0], dk, tile, turns, scale, True)
    if turns > 0:
        x.tell(DKV_FREE)  # reduce -> mma: the next tile may start its sums


@triton.jit
def reduce(keys, deal, buffers, x, dq, dk, dv, scale, COUNT, TILE, HEAR, DRAIN, STORE):
    """The group that empties tensor memory: adds every turn's dQ to memory, stores every tile's dK and dV."""
    k_item, turn = 0, 0
    t = HEAR(deal, k_item)
    while t < deal.items:
        for i in range(COUNT(keys, t)):
            tile = TILE(keys, t, i)
            low, high = keys.query_blocks(tile)
            for head in range(tile.head * keys.GROUP, (tile.head + 1) * keys.GROUP):
                for block in range(low, high):
                    tlx.barrier_wait(x.full[DQ], turn & 1)  # mma -> reduce
                    DRAIN(keys, buffers, x, dq, tile, head, block)
                    turn += 1
            STORE(keys, buffers, x, dk, dv, tile, (high - low) * keys.GROUP, scale)
        k_item += 1
        t = HEAR(deal, k_item)
    tlx.async_descriptor_store_wait(0)
