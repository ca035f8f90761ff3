"""Blackwell backward, step `two_cta`: the roles that differ when two CTAs work on 256 keys of one head.

dQ sums over the keys of both CTAs, so each forms it for half of the query rows, and needs dS of those rows
for the keys of the other: a compute group keeps its part of dS^T or sends it over.
"""

import triton
import triton.language as tl
import triton.language.extra.tlx as tlx

from jfa.kernels.blackwell.backward_parts import HALF, PART, ROWS, load_statistic
from jfa.kernels.blackwell.tmem import NO_ITEM


@triton.jit
def load_rows_in_pair(keys, buffers, tile, views, statistics, head, block, turn, tiles, fresh):
    """As `load_rows`, in halves: rows of Q and dO, columns of Q, dO and the pair's K; all of its K and V."""
    row = block * keys.BLOCK_M
    stat = head.to(tl.int64) * statistics.rows + tile.stat + row
    mine = row + buffers.rank * HALF
    key = tile.key + keys.mine
    column = head * buffers.HEAD_DIM
    side = buffers.rank * (buffers.HEAD_DIM // 2)
    kv_column = tile.head * buffers.HEAD_DIM
    buffers.fill(buffers.q, turn, views.q, tile.q_end, tile.q_len, mine, column)
    load_statistic(buffers.log2_lse, turn, statistics.log2_lse + stat)
    if fresh:
        buffers.fill(buffers.v, tiles, views.v, tile.kv_end, tile.kv_len, key, kv_column)
    buffers.fill(buffers.dout, turn, views.dout, tile.dout_end, tile.q_len, mine, column)
    if fresh:
        buffers.fill(buffers.k, tiles, views.k, tile.kv_end, tile.kv_len, key, kv_column)
    buffers.fill(buffers.dout_sum, turn, views.dout_sum, tile.dout_end, tile.q_len, row, column + side)
    load_statistic(buffers.delta, turn, statistics.delta + stat)
    buffers.fill(buffers.q_sum, turn, views.q_sum, tile.q_end, tile.q_len, row, column + side)
    if fresh:
        buffers.fill(buffers.k_sum, tiles, views.k_sum, tile.kv_end, tile.kv_len, tile.key, kv_column + side)


@triton.jit
def share_in_pair(group: tl.constexpr, keys, buffers, scores):
    """dS^T of this group's rows goes where their dQ is formed: rows 0 to 63 in the first CTA.

    There it lies in the rows of the keys' CTA. The last dQ has read both, and what was sent, before dP came.
    """
    if buffers.rank == group:
        for c in tl.static_range(HALF // PART):
            here = tlx.local_slice(buffers.ds[0], [group * ROWS, c * PART], [ROWS, PART])
            tlx.local_store(here, scores[c])
        tlx.fence("async_shared")  # the tensor core reads it
    else:
        for c in tl.static_range(HALF // PART):
            tlx.local_store(tlx.local_slice(buffers.sent[0], [0, c * PART], [ROWS, PART]), scores[c])
        tlx.fence("async_shared")  # the copy reads it
        there = tlx.local_slice(buffers.ds[0], [(1 - group) * ROWS, 0], [ROWS, HALF])
        landed = buffers.landed[0]
        tlx.async_remote_shmem_copy(there, buffers.sent[0], remote_cta_rank=group, barrier=landed)


@triton.jit
def await_landing(buffers, turn):
    """Wait for the other CTA's part of dS^T in this CTA's shared memory."""
    tlx.barrier_expect_bytes(buffers.landed[0], 2 * ROWS * HALF)
    tlx.barrier_wait(buffers.landed[0], turn & 1)


@triton.jit
def gather_in_pair(buffers, x, turn):
    """First CTA's tensor-core warp: what was exchanged has landed here, and in the second CTA."""
    await_landing(buffers, turn)
    tlx.barrier_wait(buffers.landed[1], turn & 1)


@triton.jit
def relay(keys, deal, buffers, COUNT, TILE, HEAR):
    """Second CTA's tensor-core warp: tells the first what has landed here, turn by turn."""
    k_item, turn = 0, 0
    t = HEAR(deal, k_item)
    while t < deal.items:
        for i in range(COUNT(keys, t)):
            low, high = keys.query_blocks(TILE(keys, t, i))
            for _ in range((high - low) * keys.GROUP):
                await_landing(buffers, turn)
                tlx.fence("async_shared")
                tlx.barrier_arrive(buffers.landed[1], 1, remote_cta_rank=0)
                turn += 1
        k_item += 1
        t = HEAR(deal, k_item)


@triton.jit
def request_launches_in_pair(deal, HEAR):
    """As `request_launches`: the first CTA asks for a pair to cancel, and both get the answer."""
    k = 0
    t = HEAR(deal, k)
    while t < deal.items:
        tlx.clc_producer(deal.context, ((k >> 1) & 1) ^ 1, k=k & 1, multi_ctas=True)
        k += 1
        t = HEAR(deal, k)


@triton.jit
def hear_launch_in_pair(deal, k):
    """As `hear_launch`: the pair's own number first, then the numbers of the pairs that it cancelled."""
    t = deal.program
    if k > 0:
        t = tlx.clc_consumer(deal.context, ((k - 1) >> 1) & 1, k=(k - 1) & 1, multi_ctas=True)
        t = tl.where(t < 0, NO_ITEM, t // 2)
    return t
