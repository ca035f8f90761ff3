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

from jfa.kernels.blackwell.backward_parts import HALF, RESULT, ROWS, Buffers, make_products, make_ring
from jfa.kernels.blackwell.tmem import LaunchControl, Turns
from jfa.kernels.keys import Keys
from jfa.kernels.ragged import ragged_row


@triton.aggregate
class Statistics:
    """Row statistics in global memory: (Hq, ``rows``) float32 each."""

    log2_lse: tl.tensor
    delta: tl.tensor
    rows: tl.tensor


@triton.jit
def load_queries(keys, buffers, tile, q, statistics, head, block, turn):
    """Q of one block of rows with both of its statistics; one barrier for the three."""
    row = block * keys.BLOCK_M
    stat = head.to(tl.int64) * statistics.rows + tile.stat + row
    slot = buffers.q.claim(turn)  # mma -> load: dK has read the slot's last Q, so compute its statistics
    full = buffers.q.fulls[slot]
    span, end, first = ragged_row(tile.q_end, tile.q_len, row)
    tlx.barrier_expect_bytes(full, buffers.q.bytes + 2 * 4 * ROWS)
    tlx.async_descriptor_load(q, buffers.q.tiles[slot], [span, end, first, head * buffers.HEAD_DIM], full)
    tlx.async_load(statistics.log2_lse + stat, buffers.log2_lse[slot], bulk=True, barrier=full)
    tlx.async_load(statistics.delta + stat, buffers.delta[slot], bulk=True, barrier=full)


@triton.jit
def load(
    keys,
    deal,
    buffers,
    q,
    k,
    v,
    dout,
    statistics,
    COUNT: tl.constexpr,
    TILE: tl.constexpr,
    HEAR: tl.constexpr,
):
    """Loader: Q and dO of every turn; K and V with a tile's first turn, in the order in which slots empty."""
    k_item, turn, tiles = 0, 0, 0
    t = HEAR(deal, k_item)
    while t < deal.items:
        for i in range(COUNT(keys, t)):
            tile = TILE(keys, t, i)
            column = tile.head * buffers.HEAD_DIM
            low, high = keys.query_blocks(tile)
            first = turn
            for head in range(tile.head * keys.GROUP, (tile.head + 1) * keys.GROUP):
                for block in range(low, high):
                    load_queries(keys, buffers, tile, q, statistics, head, block, turn)
                    row = block * keys.BLOCK_M
                    if turn == first:
                        buffers.v.fill(tiles, v, tile.kv_end, tile.kv_len, tile.key, column)
                    buffers.dout.fill(turn, dout, tile.dout_end, tile.q_len, row, head * buffers.HEAD_DIM)
                    if turn == first:
                        buffers.k.fill(tiles, k, tile.kv_end, tile.kv_len, tile.key, column)
                    turn += 1
            tiles += tl.minimum(turn - first, 1)
        k_item += 1
        t = HEAR(deal, k_item)


@triton.jit
def score(buffers, x, k_slot, turn):
    """S^T = K Q^T (128 keys, 128 rows). The P^T it overwrites was read by the last dV, which is in order."""
    slot = buffers.q.await_full(turn)  # load -> mma
    queries = tlx.local_trans(buffers.q.tiles[slot])
    tlx.async_dot(buffers.k.tiles[k_slot], queries, x.s[0], use_acc=False, mBarriers=[x.s_full[0]])


@triton.jit
def weight_gradient(buffers, x, v_slot, turn):
    """dP^T = V dO^T (128 keys, 128 rows)."""
    slot = buffers.dout.await_full(turn)  # load -> mma
    tlx.barrier_wait(x.dq_free[0], (turn & 1) ^ 1)  # reduce -> mma: the last dQ, in the same place, has left
    rows = tlx.local_trans(buffers.dout.tiles[slot])
    tlx.async_dot(buffers.v.tiles[v_slot], rows, x.dp[0], use_acc=False, mBarriers=[x.dp_full[0]])


@triton.jit
def sum_halves(left, ready, right, total, turn, more, done):
    """total (128, D) (+)= left right, as the compute groups get ready with their halves of the 128 rows."""
    for group in tl.static_range(2):
        tlx.barrier_wait(ready[group], turn & 1)  # compute -> mma
        rows = tlx.local_slice(right, [group * HALF, 0], [HALF, total.shape[1]])
        if group == 0:
            tlx.async_dot(left[0], rows, total, use_acc=more)
        else:
            tlx.async_dot(left[2], rows, total, use_acc=True, mBarriers=[done])


@triton.jit
def mma(keys, deal, buffers, x, COUNT: tl.constexpr, TILE: tl.constexpr, HEAR: tl.constexpr):
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
                for j in range(turns + 1):
                    if j < turns:
                        score(buffers, x, k_slot, turn + j)
                    if j > 0:
                        before = turn + j - 1
                        slot = before % buffers.q.depth
                        rows = buffers.q.tiles[slot]
                        sum_halves(x.ds, x.ds_ready, rows, x.dk[0], before, j > 1, buffers.q.empties[slot])
                        scores = tlx.local_trans(buffers.ds[0])
                        done = [x.dq_full[0]]
                        tlx.async_dot(scores, buffers.k.tiles[k_slot], x.dq[0], use_acc=False, mBarriers=done)
                    if j < turns:
                        weight_gradient(buffers, x, v_slot, turn + j)
                        if j == 0:
                            tlx.barrier_wait(
                                x.dkv_free[0], (tiles & 1) ^ 1
                            )  # reduce -> mma: dV, dK have left
                        if j + 1 == turns:
                            tlx.tcgen05_commit(buffers.v.empties[v_slot])  # mma -> load
                        slot = (turn + j) % buffers.dout.depth
                        rows = buffers.dout.tiles[slot]
                        done = buffers.dout.empties[slot]
                        sum_halves(x.p, x.p_ready, rows, x.dv[0], turn + j, j > 0, done)
                tlx.tcgen05_commit(buffers.k.empties[k_slot])  # mma -> load
                tlx.tcgen05_commit(x.dkv_full[0])  # mma -> reduce
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
    MMA: tl.constexpr,
    COMPUTE: tl.constexpr,
    WALK: tl.constexpr,
    WEIGH: tl.constexpr,
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
    ROW_STAGES: tl.constexpr,
    DQ_STAGES: tl.constexpr,
    SLICE: tl.constexpr,
    HELD: tl.constexpr,
    REGISTERS: tl.constexpr,
    WARP_REGISTERS: tl.constexpr,
):
    """Persistent: items as the deal hands them out."""
    DTYPE: tl.constexpr = q.dtype
    program = tl.program_id(0)
    facts = (records, counts, kv_offsets, q_offsets, batch, query_len, padded_len, left, right)
    keys = Keys(*facts, HEADS, GROUP, BROADCAST, LEFT, RIGHT, ROWS, ROWS, ROWS, program * 0)
    if DRAW is not None:  # heard by load, mma, two compute groups, reduce, and the warp that asks
        context = tlx.clc_create_context(num_consumers=6, num_stages=2)
        deal = LaunchControl(program, tl.num_programs(0), ITEMS(keys), context, 1)
    else:
        deal = Turns(program, tl.num_programs(0), ITEMS(keys), 1)
    staging = tlx.local_alloc((ROWS, SLICE), tl.float32, DQ_STAGES)
    buffers = Buffers(
        make_ring(ROWS, HEAD_DIM, DTYPE, 1),
        make_ring(ROWS, HEAD_DIM, DTYPE, 1),
        make_ring(ROWS, HEAD_DIM, DTYPE, 2),
        make_ring(ROWS, HEAD_DIM, DTYPE, ROW_STAGES),
        tlx.local_alloc((ROWS,), tl.float32, 2),
        tlx.local_alloc((ROWS,), tl.float32, 2),
        tlx.local_alloc((ROWS, ROWS), DTYPE, 1),
        staging,
        tlx.local_alloc((ROWS, RESULT), DTYPE, DQ_STAGES, reuse=staging),
        HEAD_DIM,
        SLICE,
        DQ_STAGES,
        HELD,
    )
    x = make_products(HEAD_DIM, DTYPE, False)
    statistics = Statistics(log2_lse, delta, stat_rows)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            REDUCE(keys, deal, buffers, x, dq, dk, dv, scale, COUNT, TILE, HEAR, DRAIN, STORE)
        with tlx.async_task(num_warps=4, registers=REGISTERS, replicate=2):
            group: tl.constexpr = tlx.async_task_replica_id()
            COMPUTE(group, keys, deal, buffers, x, scale_log2, COUNT, TILE, HEAR, WALK, WEIGH)
        with tlx.async_task(num_warps=1, registers=WARP_REGISTERS):
            MMA(keys, deal, buffers, x, COUNT, TILE, HEAR)
        with tlx.async_task(num_warps=1, registers=WARP_REGISTERS):
            LOAD(keys, deal, buffers, q, k, v, dout, statistics, COUNT, TILE, HEAR)
        if DRAW is not None:
            with tlx.async_task(num_warps=1, registers=WARP_REGISTERS):
                DRAW(deal, HEAR)
