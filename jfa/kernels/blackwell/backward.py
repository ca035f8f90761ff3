"""Blackwell backward, KV-stationary: a CTA keeps 128 keys and meets all query rows that see them.

Roles: a loader warp (K and V once a tile; Q with its statistics and dO in rings), a tensor-core warp, two
compute groups that turn S into P and dP into dS, and a group that empties tensor memory: dQ of every turn
by TMA reduce-add, dK and dV of every tile by TMA store. dQ takes the place of dP in tensor memory, so the
next dP waits for it to leave.

    load     Q0 V dO0 K | Q1 dO1 | Q2 ...
    mma      S0 dP0 . dV0 | S1 . dK0 dQ0 . dP1 . dV1 | S2 . dK1 dQ1 . dP2 . dV2 | ... | dK dQ of the last
    group 0     P0 . dS0 .  | P1 . . . . . . . dS1 .   | P2 ...          query rows 0 to 63
    group 1     P0 . dS0 .  | P1 . . . . . . . dS1 .   | P2 ...          query rows 64 to 127
    reduce                             add dQ0         |         add dQ1  | ...        dV dK of the tile
"""

import triton
import triton.language as tl
import triton.language.extra.tlx as tlx

from jfa.kernels.blackwell.backward_parts import (
    DKV_FREE,
    DP,
    DQ,
    DQ_FREE,
    DS_READY,
    HALF,
    P_READY,
    ROWS,
    Buffers,
    S,
    load_statistic,
    make_products,
    make_ring,
    make_statistics,
)
from jfa.kernels.blackwell.tmem import LaunchControl, Turns
from jfa.kernels.keys import Keys


@triton.aggregate
class Statistics:
    """Row statistics in global memory: (Hq, ``rows``) float32 each."""

    log2_lse: tl.tensor
    delta: tl.tensor
    rows: tl.tensor


@triton.aggregate
class Views:
    """TMA descriptors of the operands; in a pair of the parts that one CTA gives to a product."""

    q: tl.tensor_descriptor
    k: tl.tensor_descriptor
    v: tl.tensor_descriptor
    dout: tl.tensor_descriptor
    q_sum: tl.tensor_descriptor
    k_sum: tl.tensor_descriptor
    dout_sum: tl.tensor_descriptor


@triton.jit
def load_rows(keys, buffers, tile, views, statistics, head, block, turn, tiles, fresh):
    """Q, dO, lse and delta of one turn, V and K with the first of a tile; in the order of empty slots."""
    row = block * keys.BLOCK_M
    stat = head.to(tl.int64) * statistics.rows + tile.stat + row
    column = head * buffers.HEAD_DIM
    kv_column = tile.head * buffers.HEAD_DIM
    buffers.fill(buffers.q, turn, views.q, tile.q_end, tile.q_len, row, column)
    load_statistic(buffers.log2_lse, turn, statistics.log2_lse + stat)
    if fresh:
        buffers.fill(buffers.v, tiles, views.v, tile.kv_end, tile.kv_len, tile.key, kv_column)
    buffers.fill(buffers.dout, turn, views.dout, tile.dout_end, tile.q_len, row, column)
    if fresh:
        buffers.fill(buffers.k, tiles, views.k, tile.kv_end, tile.kv_len, tile.key, kv_column)
    load_statistic(buffers.delta, turn, statistics.delta + stat)


@triton.jit
def load(keys, deal, buffers, views, statistics, COUNT, TILE, HEAR, LOAD_ROWS):
    """Loader: the operands of every turn of every tile."""
    k_item, turn, tiles = 0, 0, 0
    t = HEAR(deal, k_item)
    while t < deal.items:
        for i in range(COUNT(keys, t)):
            tile = TILE(keys, t, i)
            low, high = keys.query_blocks(tile)
            first = turn
            for head in range(tile.head * keys.GROUP, (tile.head + 1) * keys.GROUP):
                for block in range(low, high):
                    LOAD_ROWS(keys, buffers, tile, views, statistics, head, block, turn, tiles, turn == first)
                    turn += 1
            tiles += tl.minimum(turn - first, 1)
        k_item += 1
        t = HEAR(deal, k_item)


@triton.jit
def commit(x, barrier):
    """Have the barrier follow all products so far; in a pair the barriers of both CTAs."""
    tlx.tcgen05_commit(barrier, two_ctas=x.TWO)


@triton.jit
def score(buffers, x, k_slot, turn):
    """S^T = K Q^T (128 keys, 128 rows). The P^T it overwrites was read by the last dV, which is in order."""
    slot = buffers.q.await_full(turn)  # load -> mma
    queries = tlx.local_trans(buffers.q.tiles[slot])
    done = [x.full[S]]
    tlx.async_dot(buffers.k.tiles[k_slot], queries, x.s[0], use_acc=False, mBarriers=done, two_ctas=x.TWO)
    if x.TWO:  # alone, the sum dK has yet to read the same Q
        commit(x, buffers.q.empties[slot])


@triton.jit
def weight_gradient(buffers, x, v_slot, turn):
    """dP^T = V dO^T (128 keys, 128 rows)."""
    slot = buffers.dout.await_full(turn)  # load -> mma
    x.await_word(DQ_FREE, turn + 1)  # reduce -> mma: the last dQ, in the same place, has left
    rows = tlx.local_trans(buffers.dout.tiles[slot])
    done = [x.full[DP]]
    tlx.async_dot(buffers.v.tiles[v_slot], rows, x.dp[0], use_acc=False, mBarriers=done, two_ctas=x.TWO)
    if x.TWO:  # alone, the sum dV has yet to read the same dO
        commit(x, buffers.dout.empties[slot])


@triton.jit
def sum_halves(x, left, READY: tl.constexpr, right, total, turn, more, done):
    """total (128, D) (+)= left right, as the compute groups get ready with their halves of the 128 rows."""
    x.await_word(READY, turn)  # compute -> mma
    rows = tlx.local_slice(right, [0, 0], [HALF, right.shape[1]])
    tlx.async_dot(left[0], rows, total, use_acc=more, two_ctas=x.TWO, force_async=True)
    x.await_word(READY + 1, turn)  # compute -> mma
    rows = tlx.local_slice(right, [HALF, 0], [HALF, right.shape[1]])
    tlx.async_dot(left[2], rows, total, use_acc=True, mBarriers=done, two_ctas=x.TWO)


@triton.jit
def gather(buffers, x, turn):
    """dS^T of all keys: a CTA alone has them."""


@triton.jit
def sum_keys(buffers, x, k_slot, turn, more, GATHER):
    """dK += dS^T Q, and dQ = dS K, which takes the place of dP: dK reads dS there, in order, before."""
    slot = buffers.q_sum.await_full(turn)  # load -> mma
    done = [buffers.q_sum.empties[slot]]
    sum_halves(x, x.ds, DS_READY, buffers.q_sum.tiles[slot], x.dk[0], turn, more, done)
    GATHER(buffers, x, turn)
    scores = tlx.local_trans(buffers.ds[0])
    done = [x.full[DQ]]
    tlx.async_dot(scores, buffers.k_sum.tiles[k_slot], x.dq[0], use_acc=False, mBarriers=done, two_ctas=x.TWO)


@triton.jit
def mma(keys, deal, buffers, x, COUNT, TILE, HEAR, GATHER):
    """Tensor-core warp: the products that need a turn's dS come after the next turn's S."""
    k_item, turn, tiles = 0, 0, 0
    t = HEAR(deal, k_item)
    while t < deal.items:
        for i in range(COUNT(keys, t)):
            low, high = keys.query_blocks(TILE(keys, t, i))
            turns = (high - low) * keys.GROUP
            if turns > 0:
                v_slot = buffers.v.await_full(tiles)  # load -> mma
                k_slot = buffers.k.await_full(tiles)  # load -> mma
                buffers.k_sum.await_full(tiles)  # load -> mma
                for j in range(turns + 1):
                    if j < turns:
                        score(buffers, x, k_slot, turn + j)
                    if j > 0:
                        sum_keys(buffers, x, k_slot, turn + j - 1, j > 1, GATHER)
                    if j < turns:
                        weight_gradient(buffers, x, v_slot, turn + j)
                        if j == 0:
                            x.await_word(DKV_FREE, tiles + 1)  # reduce -> mma: dV, dK have left
                        if j + 1 == turns:
                            commit(x, buffers.v.empties[v_slot])  # mma -> load
                        slot = buffers.dout_sum.await_full(turn + j)  # load -> mma
                        rows = buffers.dout_sum.tiles[slot]
                        done = [buffers.dout_sum.empties[slot]]
                        sum_halves(x, x.p, P_READY, rows, x.dv[0], turn + j, j > 0, done)
                commit(x, buffers.k.empties[k_slot])  # mma -> load
                if x.TWO:
                    commit(x, buffers.k_sum.empties[k_slot])  # mma -> load
                turn += turns
                tiles += 1
        k_item += 1
        t = HEAR(deal, k_item)


@triton.jit(do_not_specialize=["batch", "query_len", "padded_len", "stat_rows", "left", "right"])
def kernel(
    q,
    k,
    v,
    dout,
    q_sum,
    k_sum,
    dout_sum,
    dq,
    dk,
    dv,
    log2_lse,
    delta,
    records,
    counts,
    kv_offsets,
    q_offsets,
    batch,
    query_len,
    padded_len,
    stat_rows,
    left,
    right,
    scale_log2,
    scale,
    LOAD: tl.constexpr,
    LOAD_ROWS: tl.constexpr,
    MMA: tl.constexpr,
    GATHER: tl.constexpr,
    RELAY: tl.constexpr,
    COMPUTE: tl.constexpr,
    WALK: tl.constexpr,
    WEIGH: tl.constexpr,
    SHARE: tl.constexpr,
    REDUCE: tl.constexpr,
    DRAIN: tl.constexpr,
    STORE: tl.constexpr,
    ITEMS: tl.constexpr,
    COUNT: tl.constexpr,
    TILE: tl.constexpr,
    DRAW: tl.constexpr,
    HEAR: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BROADCAST: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    Q_STAGES: tl.constexpr,
    DQ_STAGES: tl.constexpr,
    SLICE: tl.constexpr,
    HELD: tl.constexpr,
    PAIR: tl.constexpr,
    REGISTERS: tl.constexpr,
    WARP_REGISTERS: tl.constexpr,
):
    """Persistent: a CTA, or a pair of them, takes items as the deal hands them out."""
    DTYPE: tl.constexpr = q.dtype
    PART_ROWS: tl.constexpr = ROWS // PAIR
    PART_DIM: tl.constexpr = HEAD_DIM // PAIR
    rank = tl.program_id(0) % PAIR
    program = tl.program_id(0) // PAIR
    facts = (records, counts, kv_offsets, q_offsets, batch, query_len, padded_len, left, right)
    keys = Keys(*facts, HEADS, GROUP, BROADCAST, LEFT, RIGHT, ROWS, PAIR * ROWS, ROWS, rank * ROWS)
    if (
        DRAW is not None
    ):  # heard in every CTA by load, mma, two compute groups, reduce, and the warp that asks
        context = tlx.clc_create_context(num_consumers=6 * PAIR, num_stages=2)
        deal = LaunchControl(program, tl.num_programs(0) // PAIR, ITEMS(keys), context, 1)
    else:
        deal = Turns(program, tl.num_programs(0) // PAIR, ITEMS(keys), 1)
    k_ring, v_ring = make_ring(ROWS, HEAD_DIM, DTYPE, 1), make_ring(ROWS, HEAD_DIM, DTYPE, 1)
    q_ring = make_ring(PART_ROWS, HEAD_DIM, DTYPE, Q_STAGES)
    dout_ring = make_ring(PART_ROWS, HEAD_DIM, DTYPE, 1)
    ds = tlx.local_alloc((PAIR * ROWS, PART_ROWS), DTYPE, 1)
    sent = ds
    sum_rings = (k_ring, q_ring, dout_ring)
    if PAIR > 1:
        k_sum_ring = make_ring(PAIR * ROWS, PART_DIM, DTYPE, 1)
        sum_rings = (k_sum_ring, make_ring(ROWS, PART_DIM, DTYPE, 1), make_ring(ROWS, PART_DIM, DTYPE, 1))
        sent = tlx.local_alloc((ROWS, PART_ROWS), DTYPE, 1)
    rings = (k_ring, v_ring, q_ring, dout_ring)
    stat_rings = (make_statistics(1), make_statistics(1))
    staging = tlx.local_alloc((ROWS, SLICE), tl.float32, DQ_STAGES)
    results = tlx.local_alloc((ROWS, 2 * SLICE), DTYPE, DQ_STAGES, reuse=staging)
    tiles = (ds, sent, tlx.alloc_barriers(2), staging, results)
    buffers = Buffers(*rings, *sum_rings, *stat_rings, *tiles, rank, HEAD_DIM, SLICE, DQ_STAGES, HELD, PAIR)
    x = make_products(HEAD_DIM, DTYPE, PAIR, False)
    statistics = Statistics(log2_lse, delta, stat_rows)
    views = Views(q, k, v, dout, q_sum, k_sum, dout_sum)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            REDUCE(keys, deal, buffers, x, dq, dk, dv, scale, COUNT, TILE, HEAR, DRAIN, STORE)
        with tlx.async_task(num_warps=4, registers=REGISTERS, replicate=2):
            group: tl.constexpr = tlx.async_task_replica_id()
            COMPUTE(group, keys, deal, buffers, x, scale_log2, COUNT, TILE, HEAR, WALK, WEIGH, SHARE)
        with tlx.async_task(num_warps=1, registers=WARP_REGISTERS):
            if PAIR == 1:
                MMA(keys, deal, buffers, x, COUNT, TILE, HEAR, GATHER)
            else:
                if rank == 0:  # the first CTA issues the products of both
                    MMA(keys, deal, buffers, x, COUNT, TILE, HEAR, GATHER)
                else:
                    RELAY(keys, deal, buffers, COUNT, TILE, HEAR)
        with tlx.async_task(num_warps=1, registers=WARP_REGISTERS):
            LOAD(keys, deal, buffers, views, statistics, COUNT, TILE, HEAR, LOAD_ROWS)
        if DRAW is not None:
            with tlx.async_task(num_warps=1, registers=WARP_REGISTERS):
                DRAW(deal, HEAR)
    if PAIR > 1:  # the other CTA's last words may still be on their way
        tlx.cluster_barrier()
