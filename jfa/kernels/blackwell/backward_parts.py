"""What the roles of the Blackwell backward kernels pass to each other: rings, tensor memory, staging.

Names for one CTA alone and for a pair are the same. In a pair (PAIR = 2) both CTAs have 128 keys of their own
and the same query rows, and every product is one of the tensor cores of both: a CTA keeps the keys' half of
the result and gives half of the right operand. So the right operand of S and dP is half of the rows of Q and
dO, and that of the sums dK, dV and dQ is half of the columns of Q, dO and of both CTAs' K. Alone, ``q_sum``,
``dout_sum`` and ``k_sum`` are the rings ``q``, ``dout`` and ``k``.
"""

import triton
import triton.language as tl
import triton.language.extra.tlx as tlx

from jfa.kernels.parts import Ring, ring
from jfa.kernels.ragged import ragged_row

ROWS = tl.constexpr(128)  # keys and query rows of a tile: the lanes of tensor memory
HALF = tl.constexpr(64)  # query rows of a compute group: half of the columns of S^T
S, DP, DQ, DKV = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
P_READY, DS_READY, DQ_FREE, DKV_FREE = tl.constexpr(0), tl.constexpr(2), tl.constexpr(4), tl.constexpr(5)
PART = tl.constexpr(32)  # query rows that a compute group has in hand


@triton.aggregate
class Views:
    """Operands in global memory: TMA descriptors, and row statistics (Hq, ``stat_rows``) float32."""

    q: tl.tensor_descriptor
    k: tl.tensor_descriptor
    v: tl.tensor_descriptor
    dout: tl.tensor_descriptor
    q_sum: tl.tensor_descriptor
    k_sum: tl.tensor_descriptor
    dout_sum: tl.tensor_descriptor
    log2_lse: tl.tensor
    delta: tl.tensor
    stat_rows: tl.tensor


@triton.aggregate
class Buffers:
    """Shared memory. ``results`` aliases ``staging``."""

    k: Ring
    v: Ring
    q: Ring
    dout: Ring
    k_sum: Ring
    q_sum: Ring
    dout_sum: Ring
    log2_lse: Ring
    delta: Ring
    ds: tlx.buffered_tensor  # dS^T (keys, rows): the transposed left operand of dQ
    sent: tlx.buffered_tensor  # pair: this CTA's keys of the other one's rows of dS^T, on their way
    landed: tlx.mbarrier  # pair: 0, the other CTA's part of dS^T is here; 1 (first CTA), there too
    staging: tlx.buffered_tensor  # columns of dQ, float32, on their way to memory
    results: tlx.buffered_tensor  # columns of dK and dV, likewise
    rank: tl.tensor  # place in the pair
    HEAD_DIM: tl.constexpr
    SLICE: tl.constexpr  # columns of dQ that leave at a time; of dK and dV twice as many
    STAGES: tl.constexpr  # staging tiles
    HELD: tl.constexpr  # slices of dQ that wait in registers, so that tensor memory is free
    PAIR: tl.constexpr

    @triton.jit
    def fill(self, ring, i, desc, end, length, row, column, CLAIM: tl.constexpr = True):
        """Bring this CTA's part of an operand; in a pair the first CTA's barrier counts both parts.

        Without CLAIM the caller knows that the slot's last content was read: the wait for another ring's slot
        covers it, or nothing was there.
        """
        slot, parity = ring.slot(i)
        if CLAIM:
            tlx.barrier_wait(ring.empties[slot], parity ^ 1)  # mma or store -> load, in both CTAs
        full = ring.fulls[slot]
        tlx.barrier_expect_bytes(full, self.PAIR * ring.bytes, pred=self.rank == 0)
        at = ragged_row(end, length, row) + (column,)
        tlx.async_descriptor_load(desc, ring.tiles[slot], at, full, two_ctas=self.PAIR > 1)

    @triton.jit
    def fill_sum(self, ring, i, desc, end, length, row, column, CLAIM: tl.constexpr = True):
        """As `fill`, for a sum's right operand, this CTA's half of the columns; alone another ring has it."""
        if self.PAIR > 1:
            self.fill(ring, i, desc, end, length, row, column + self.rank * (self.HEAD_DIM // 2), CLAIM)

    @triton.jit
    def await_sum(self, ring, i):
        """Slot of item i of such a ring, filled; alone the product before has waited for the same item."""
        slot, parity = ring.slot(i)
        if self.PAIR > 1:
            tlx.barrier_wait(ring.fulls[slot], parity)  # load -> mma
        return slot


@triton.aggregate
class Products:
    """Tensor memory, and who waits for whom there. A turn (one block of query rows) has one parity.

    ``s``, ``dp`` (keys, rows) float32 of 128 columns. A compute group owns half of the columns: it overwrites
    the left half of them with its P^T or dS^T, (keys, HALF) in the input's dtype, buffer 2 * group.
    ``dq`` (rows, D) aliases ``dp``; ``dk`` and ``dv`` (keys, D) stay for the whole key tile.
    """

    s: tlx.buffered_tensor
    p: tlx.buffered_tensor
    dp: tlx.buffered_tensor
    ds: tlx.buffered_tensor
    dq: tlx.buffered_tensor
    dq_lanes: tlx.buffered_tensor  # dq as it lies: in a pair 64 rows of the left columns, 64 of the right
    dk: tlx.buffered_tensor
    dv: tlx.buffered_tensor
    full: tlx.mbarrier  # mma -> compute: S, DP; mma -> reduce: DQ; stationary: DKV, one of dV and dK
    word: tlx.mbarrier  # compute, reduce -> mma: see `tell`; the word of turn t has the parity of t
    TWO: tl.constexpr  # whether the products are those of a pair

    @triton.jit
    def tell(self, word: tl.constexpr):
        """A group's word to the tensor-core warp, which in a pair is the first CTA's.

        P_READY + group: P^T is there, S^T is dead. DS_READY + group: dS^T is in both memories. DQ_FREE: dQ
        has left tensor memory, dP^T may come. DKV_FREE: so have dK and dV.
        """
        if self.TWO:
            tlx.barrier_arrive(self.word[word], 1, remote_cta_rank=0)
        else:
            tlx.barrier_arrive(self.word[word])


@triton.jit
def make_ring(desc, DEPTH: tl.constexpr, WARPS: tl.constexpr = 0):
    """A ring of DEPTH boxes of a descriptor; one commit gives a slot back, or every thread of WARPS warps."""
    tiles = tlx.local_alloc((desc.block_shape[2], desc.block_shape[3]), desc.dtype, DEPTH)
    return ring(tiles, DEPTH, 2 * desc.block_shape[2] * desc.block_shape[3], WARPS)


@triton.jit
def make_statistics(DEPTH: tl.constexpr):
    """A ring of lse or delta of 128 rows, which both compute groups give back."""
    return ring(tlx.local_alloc((ROWS,), tl.float32, DEPTH), DEPTH, 4 * ROWS, 8)


@triton.jit
def load_statistic(ring, i, pointer, CLAIM: tl.constexpr = True):
    """lse or delta of 128 rows. CLAIM: as in `Buffers.fill`."""
    slot, parity = ring.slot(i)
    if CLAIM:
        tlx.barrier_wait(ring.empties[slot], parity ^ 1)  # compute -> load
    tlx.barrier_expect_bytes(ring.fulls[slot], ring.bytes)
    tlx.async_load(pointer, ring.tiles[slot], bulk=True, barrier=ring.fulls[slot])


@triton.jit
def make_scores(HEAD_DIM, DTYPE, PAIR: tl.constexpr):
    """A product (keys, rows) of 128 columns, and in its place P^T or dS^T in four quarters, or dQ.

    In a pair half of dQ's rows, 64 lanes of left columns and 64 of right ones.
    """
    place = tlx.storage_alias_spec(storage=tlx.storage_kind.tmem)
    product = tlx.local_alloc((ROWS, ROWS), tl.float32, 1, tlx.storage_kind.tmem, reuse=place)
    result = tlx.local_alloc((ROWS, HALF), DTYPE, 4, tlx.storage_kind.tmem, reuse=place)
    dq = tlx.local_alloc((ROWS // PAIR, HEAD_DIM), tl.float32, 1, tlx.storage_kind.tmem, reuse=place)
    lanes = tlx.local_alloc((ROWS, HEAD_DIM // PAIR), tl.float32, 1, tlx.storage_kind.tmem, reuse=place)
    place.set_buffer_overlap(tlx.reuse_group(product, tlx.reuse_group(result, group_size=4), dq, lanes))
    return product, result, dq, lanes


@triton.jit
def make_products(HEAD_DIM, DTYPE, PAIR: tl.constexpr, STATIONARY: tl.constexpr):
    """TMEM columns: s 128, dp 128, dk and dv HEAD_DIM each, dq in dp's place; 512 at a head dimension of 128.

    When dQ is the one that stays, dk and dv are short-lived and share their place instead.
    """
    s, p, _, _ = make_scores(HEAD_DIM, DTYPE, PAIR)
    dp, ds, dq, dq_lanes = make_scores(HEAD_DIM, DTYPE, PAIR)
    dk = tlx.local_alloc((ROWS, HEAD_DIM), tl.float32, 1, tlx.storage_kind.tmem)
    dv = tlx.local_alloc((ROWS, HEAD_DIM), tl.float32, 1, tlx.storage_kind.tmem)
    if STATIONARY:
        dq, dq_lanes, dv = dv, dv, dk
    if PAIR == 1:
        words = tlx.alloc_warp_barrier(6, num_warps=4)  # every thread of a group arrives: no sync before
    else:
        words = tlx.alloc_barriers(6, arrive_count=PAIR)
    return Products(s, p, dp, ds, dq, dq_lanes, dk, dv, tlx.alloc_barriers(4), words, PAIR > 1)
