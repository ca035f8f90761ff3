"""Blackwell backward, step `two_cta`: the roles that differ when two CTAs work on 256 keys of one head.

dQ sums over the keys of both CTAs, so each forms it for half of the query rows, and needs dS of those rows
for the keys of the other: a compute group keeps its part of dS^T or sends it over.
"""

import triton
import triton.language as tl
import triton.language.extra.tlx as tlx

from jfa.kernels.blackwell.backward_parts import HALF, PART, ROWS


@triton.jit
def share_in_pair(group: tl.constexpr, keys, buffers, scores):
    """dS^T of this group's rows goes where their dQ is formed: rows 0 to 63 in the first CTA.

    There it lies in the rows of the keys' CTA. The last dQ has read both, and what was sent, before dP came.
    """
    if buffers.rank == group:
        for c in tl.static_range(HALF // PART):
            tlx.local_store(tlx.local_slice(buffers.ds[0], [group * ROWS, c * PART], [ROWS, PART]), scores[c])
        tlx.fence("async_shared")  # the tensor core reads it
    else:
        for c in tl.static_range(HALF // PART):
            tlx.local_store(tlx.local_slice(buffers.sent[0], [0, c * PART], [ROWS, PART]), scores[c])
        tlx.fence("async_shared")  # the copy reads it
        there = tlx.local_slice(buffers.ds[0], [(1 - group) * ROWS, 0], [ROWS, HALF])
        tlx.async_remote_shmem_copy(there, buffers.sent[0], remote_cta_rank=group, barrier=buffers.landed[0])


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
                await_landing(buffers, turn)  # it came through the asynchronous proxy: no fence
                tlx.barrier_arrive(buffers.landed[1], 1, remote_cta_rank=0)
                turn += 1
        k_item += 1
        t = HEAR(deal, k_item)
