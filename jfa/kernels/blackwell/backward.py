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

from jfa.kernels.blackwell.backward_parts import (  # isort: skip
    DKV_FREE, DP, DQ, DQ_FREE, DS_READY, HALF, P_READY, ROWS, S,
    Buffers, Views, load_statistic, make_products, make_ring, make_statistics,
)  # fmt: skip
from jfa.kernels.blackwell.tmem import LaunchControl, Turns
from jfa.kernels.keys import Keys


@triton.jit
def load_rows(keys, buffers, tile, views, head, block, turn, tiles, fresh):
    """Q, dO, lse and delta of one turn, V and K with the first of a tile; in the order of empty slots.

    In a pair in halves: rows of Q and dO, and, for the sums, columns of Q, dO and the pair's K.
    """
    row, key = block * keys.BLOCK_M, tile.key + keys.mine
    mine, kv = row + buffers.rank * HALF, (tile.kv_end, tile.kv_len)
    column, kv_column = head * buffers.HEAD_DIM, tile.head * buffers.HEAD_DIM
    stat = head.to(tl.int64) * views.stat_rows + tile.stat + row
    buffers.fill(buffers.q, turn, views.q, tile.q_end, tile.q_len, mine, column)
    load_statistic(buffers.log2_lse, turn, views.log2_lse + stat)
    if fresh:
        buffers.fill(buffers.v, tiles, views.v, *kv, key, kv_column)
    buffers.fill(buffers.dout, turn, views.dout, tile.dout_end, tile.q_len, mine, column)
    if fresh:
        buffers.fill(buffers.k, tiles, views.k, *kv, key, kv_column)
    buffers.fill_sum(buffers.dout_sum, turn, views.dout_sum, tile.dout_end, tile.q_len, row, column)
    load_statistic(buffers.delta, turn, views.delta + stat)
    buffers.fill_sum(buffers.q_sum, turn, views.q_sum, tile.q_end, tile.q_len, row, column)
    if fresh:  # K's slot, claimed above, is given back behind the products that read either copy
        buffers.fill_sum(buffers.k_sum, tiles, views.k_sum, *kv, tile.key, kv_column, False)


@triton.jit
def load(keys, deal, buffers, views, COUNT, TILE, HEAR, LOAD_ROWS):
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
                    LOAD_ROWS(keys, buffers, tile, views, head, block, turn, tiles, turn == first)
                    turn += 1
            tiles += tl.minimum(turn - first, 1)
        k_item += 1
        t = HEAR(deal, k_item)


@triton.jit
def score(buffers, x, k, q):
    """S^T = K Q^T (128 keys, 128 rows). The P^T it overwrites was read by the last dV, which is in order."""
    queries = tlx.local_trans(buffers.q.tiles[q])
    tlx.async_dot(buffers.k.tiles[k], queries, x.s[0], use_acc=False, mBarriers=[x.full[S]], two_ctas=x.TWO)
    if x.TWO:  # alone, the sum dK has yet to read the same Q
        tlx.tcgen05_commit(buffers.q.empties[q], two_ctas=x.TWO)


@triton.jit
def weight_gradient(buffers, x, v, dout):
    """dP^T = V dO^T (128 keys, 128 rows)."""
    rows = tlx.local_trans(buffers.dout.tiles[dout])
    tlx.async_dot(buffers.v.tiles[v], rows, x.dp[0], use_acc=False, mBarriers=[x.full[DP]], two_ctas=x.TWO)
    if x.TWO:  # alone, the sum dV has yet to read the same dO
        tlx.tcgen05_commit(buffers.dout.empties[dout], two_ctas=x.TWO)


@triton.jit
def sum_halves(x, left, READY: tl.constexpr, right, total, turn, more, done):
    """total (128, D) (+)= left right, as the compute groups get ready with their halves of the 128 rows.

    READY: the word to wait for; None if both groups have been heard.
    """
    for half in tl.static_range(2):
        if READY is not None:
            tlx.barrier_wait(x.word[READY + half], turn & 1)  # compute -> mma
        rows = tlx.local_slice(right, [half * HALF, 0], [HALF, right.shape[1]])
        acc = more | (half > 0)
        tlx.async_dot(left[2 * half], rows, total, use_acc=acc, two_ctas=x.TWO, force_async=True)
    tlx.tcgen05_commit(done, two_ctas=x.TWO)


@triton.jit
def gather(buffers, x, turn):
    """dS^T of all keys: a CTA alone has them."""


@triton.jit
def sum_keys(buffers, x, k, turn, more, GATHER):
    """dK += dS^T Q, and dQ = dS K, which takes the place of dP: dK reads dS there, in order, before."""
    q = buffers.await_sum(buffers.q_sum, turn)
    queries, done = buffers.q_sum.tiles[q], buffers.q_sum.empties[q]
    sum_halves(x, x.ds, DS_READY, queries, x.dk[0], turn, more, done)
    GATHER(buffers, x, turn)
    ds = tlx.local_trans(buffers.ds[0])
    tlx.async_dot(ds, buffers.k_sum.tiles[k], x.dq[0], use_acc=False, mBarriers=[x.full[DQ]], two_ctas=x.TWO)


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
                v = buffers.v.await_full(tiles)  # load -> mma
                k = buffers.k.await_full(tiles)  # load -> mma
                buffers.await_sum(buffers.k_sum, tiles)
                for j in tl.range(turns + 1, disable_licm=not x.TWO):  # else descriptors would be spilled
                    if j < turns:
                        score(buffers, x, k, buffers.q.await_full(turn + j))  # load -> mma
                    if j > 0:
                        sum_keys(buffers, x, k, turn + j - 1, j > 1, GATHER)
                    if j < turns:
                        dout = buffers.dout.await_full(turn + j)  # load -> mma
                        # reduce -> mma: the last dQ, in the same place as dP, has left
                        tlx.barrier_wait(x.word[DQ_FREE], (turn + j + 1) & 1)
                        weight_gradient(buffers, x, v, dout)
                        if j == 0:  # reduce -> mma: dV and dK of the tile before have left
                            tlx.barrier_wait(x.word[DKV_FREE], (tiles + 1) & 1)
                        if j + 1 == turns:
                            tlx.tcgen05_commit(buffers.v.empties[v], two_ctas=x.TWO)  # mma -> load
                        dout = buffers.await_sum(buffers.dout_sum, turn + j)
                        rows, done = buffers.dout_sum.tiles[dout], buffers.dout_sum.empties[dout]
                        sum_halves(x, x.p, P_READY, rows, x.dv[0], turn + j, j > 0, done)
                tlx.tcgen05_commit(buffers.k.empties[k], two_ctas=x.TWO)  # mma -> load
                turn += turns
                tiles += 1
        k_item += 1
        t = HEAR(deal, k_item)


@triton.jit(do_not_specialize=["batch", "query_len", "padded_len", "stat_rows", "left", "right"])
def kernel(
    q, k, v, dout, q_sum, k_sum, dout_sum, dq, dk, dv,
    log2_lse, delta, records, counts, kv_offsets, q_offsets,
    batch, query_len, padded_len, stat_rows, left, right, scale_log2, scale,
    LOAD: tl.constexpr, LOAD_ROWS: tl.constexpr, MMA: tl.constexpr, GATHER: tl.constexpr, RELAY: tl.constexpr,
    COMPUTE: tl.constexpr, WALK: tl.constexpr, WEIGH: tl.constexpr, SHARE: tl.constexpr,
    REDUCE: tl.constexpr, DRAIN: tl.constexpr, STORE: tl.constexpr,
    ITEMS: tl.constexpr, COUNT: tl.constexpr, TILE: tl.constexpr, DRAW: tl.constexpr, HEAR: tl.constexpr,
    HEADS: tl.constexpr, GROUP: tl.constexpr, BROADCAST: tl.constexpr, LEFT: tl.constexpr,
    RIGHT: tl.constexpr, HEAD_DIM: tl.constexpr, Q_STAGES: tl.constexpr, DQ_STAGES: tl.constexpr,
    SLICE: tl.constexpr, HELD: tl.constexpr, PAIR: tl.constexpr,
    REGISTERS: tl.constexpr, WARP_REGISTERS: tl.constexpr,
):  # fmt: skip
    """Persistent: a CTA, or a pair of them, takes items as the deal hands them out.

    A pair leaves together, so that the last words find their CTA: where CTAs share products the compiler ends
    the kernel with a cluster barrier. A second one would wait for the worker warps, which arrive only once.
    """
    DTYPE: tl.constexpr = q.dtype
    rank = tl.program_id(0) % PAIR
    program, programs = tl.program_id(0) // PAIR, tl.num_programs(0) // PAIR
    facts = (records, counts, kv_offsets, q_offsets, batch, query_len, padded_len, left, right)
    keys = Keys(*facts, HEADS, GROUP, BROADCAST, LEFT, RIGHT, ROWS, PAIR * ROWS, ROWS, rank * ROWS)
    if DRAW is None:
        deal = Turns(program, programs, ITEMS(keys), 1)
    else:  # heard in every CTA by load, mma, two compute groups, reduce, and the warp that asks
        context = tlx.clc_create_context(num_consumers=6 * PAIR, num_stages=2)
        deal = LaunchControl(program, programs, ITEMS(keys), context, 1, PAIR)
    k_ring, v_ring = make_ring(k, 1), make_ring(v, 1)
    q_ring, dout_ring = make_ring(q, Q_STAGES), make_ring(dout, 1)
    ds = tlx.local_alloc((PAIR * ROWS, ROWS // PAIR), DTYPE, 1)
    sums, sent = (k_ring, q_ring, dout_ring), ds
    if PAIR > 1:
        sums = (make_ring(k_sum, 1), make_ring(q_sum, 1), make_ring(dout_sum, 1))
        sent = tlx.local_alloc((ROWS, HALF), DTYPE, 1)
    rings, statistics = (k_ring, v_ring, q_ring, dout_ring), (make_statistics(1), make_statistics(1))
    staging = tlx.local_alloc((ROWS, SLICE), tl.float32, DQ_STAGES)
    results = tlx.local_alloc((ROWS, 2 * SLICE), DTYPE, DQ_STAGES, reuse=staging)
    tiles = (ds, sent, tlx.alloc_barriers(2), staging, results)
    buffers = Buffers(*rings, *sums, *statistics, *tiles, rank, HEAD_DIM, SLICE, DQ_STAGES, HELD, PAIR)
    x = make_products(HEAD_DIM, DTYPE, PAIR, False)
    views = Views(q, k, v, dout, q_sum, k_sum, dout_sum, log2_lse, delta, stat_rows)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            REDUCE(keys, deal, buffers, x, dq, dk, dv, scale, COUNT, TILE, HEAR, DRAIN, STORE)
        with tlx.async_task(num_warps=4, registers=REGISTERS, replicate=2):
            group: tl.constexpr = tlx.async_task_replica_id()
            COMPUTE(group, keys, deal, buffers, x, scale_log2, COUNT, TILE, HEAR, WALK, WEIGH, SHARE)
        with tlx.async_task(num_warps=1, registers=WARP_REGISTERS):
            if PAIR == 1 or rank == 0:  # the first CTA issues the products of both
                MMA(keys, deal, buffers, x, COUNT, TILE, HEAR, GATHER)
            else:
                RELAY(keys, deal, buffers, COUNT, TILE, HEAR)
        with tlx.async_task(num_warps=1, registers=WARP_REGISTERS):
            LOAD(keys, deal, buffers, views, COUNT, TILE, HEAR, LOAD_ROWS)
        if DRAW is not None:
            with tlx.async_task(num_warps=1, registers=WARP_REGISTERS):
                DRAW(deal, HEAR)
