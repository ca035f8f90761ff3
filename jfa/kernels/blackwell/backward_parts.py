"""What the roles of the Blackwell backward kernels pass to each other: rings, tensor memory, staging."""

import triton
import triton.language as tl
import triton.language.extra.tlx as tlx

from jfa.kernels.parts import Ring

ROWS = tl.constexpr(128)  # keys and query rows of a tile: the lanes of tensor memory
HALF = tl.constexpr(64)  # query rows of a compute group: half of the columns of S^T
PART = tl.constexpr(32)  # query rows that a compute group has in hand
RESULT = tl.constexpr(64)  # columns of dK and dV that leave at a time


@triton.aggregate
class Buffers:
    """Shared memory. The statistics lie in the slots of the Q ring; ``results`` aliases ``staging``."""

    k: Ring
    v: Ring
    q: Ring
    dout: Ring
    log2_lse: tlx.buffered_tensor
    delta: tlx.buffered_tensor
    ds: tlx.buffered_tensor  # dS^T (keys, rows): the transposed left operand of dQ
    staging: tlx.buffered_tensor  # columns of dQ, float32, on their way to memory
    results: tlx.buffered_tensor  # columns of dK and dV, likewise
    HEAD_DIM: tl.constexpr
    SLICE: tl.constexpr  # columns of dQ that leave at a time
    STAGES: tl.constexpr  # staging tiles
    HELD: tl.constexpr  # slices of dQ that wait in registers, so that tensor memory is free


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
    dk: tlx.buffered_tensor
    dv: tlx.buffered_tensor
    s_full: tlx.mbarrier  # mma -> compute: S^T is there
    dp_full: tlx.mbarrier  # mma -> compute: dP^T is there
    p_ready: tlx.mbarrier  # compute -> mma, a barrier a group: P^T is there, S^T is dead
    ds_ready: tlx.mbarrier  # compute -> mma, a barrier a group: dS^T is in both memories
    dq_full: tlx.mbarrier  # mma -> reduce
    dq_free: tlx.mbarrier  # reduce -> mma: dQ has left tensor memory, dP^T may come
    dkv_full: tlx.mbarrier  # mma -> reduce: the tile's last products are done
    dkv_free: tlx.mbarrier  # reduce -> mma: dK and dV have left tensor memory


@triton.jit
def make_ring(COUNT, COLUMNS, DTYPE, DEPTH: tl.constexpr):
    """A ring of DEPTH tiles (COUNT, COLUMNS) that TMA fills and one MMA commit gives back."""
    tiles = tlx.local_alloc((COUNT, COLUMNS), DTYPE, DEPTH)
    return Ring(tiles, tlx.alloc_barriers(DEPTH), tlx.alloc_barriers(DEPTH), DEPTH, 2 * COUNT * COLUMNS)


@triton.jit
def make_accumulators(COLUMNS, COUNT: tl.constexpr):
    """Accumulators (128, COLUMNS) float32."""
    return tlx.local_alloc((ROWS, COLUMNS), tl.float32, COUNT, tlx.storage_kind.tmem)


@triton.jit
def make_scores(DTYPE):
    """A product (keys, rows) of 128 columns, and in its place P^T or dS^T in four quarters."""
    place = tlx.storage_alias_spec(storage=tlx.storage_kind.tmem)
    product = tlx.local_alloc((ROWS, ROWS), tl.float32, 1, tlx.storage_kind.tmem, reuse=place)
    result = tlx.local_alloc((ROWS, HALF), DTYPE, 4, tlx.storage_kind.tmem, reuse=place)
    place.set_buffer_overlap(
        tlx.reuse_group(
            product, tlx.reuse_group(result, group_size=4), group_type=tlx.reuse_group_type.shared
        )
    )
    return product, result


@triton.jit
def make_scores_and_dq(HEAD_DIM, DTYPE):
    """As `make_scores`, with dQ in the same place."""
    place = tlx.storage_alias_spec(storage=tlx.storage_kind.tmem)
    product = tlx.local_alloc((ROWS, ROWS), tl.float32, 1, tlx.storage_kind.tmem, reuse=place)
    result = tlx.local_alloc((ROWS, HALF), DTYPE, 4, tlx.storage_kind.tmem, reuse=place)
    dq = tlx.local_alloc((ROWS, HEAD_DIM), tl.float32, 1, tlx.storage_kind.tmem, reuse=place)
    place.set_buffer_overlap(
        tlx.reuse_group(
            product, tlx.reuse_group(result, group_size=4), dq, group_type=tlx.reuse_group_type.shared
        )
    )
    return product, result, dq


@triton.jit
def make_products(HEAD_DIM, DTYPE, STATIONARY: tl.constexpr):
    """TMEM columns: s 128, dp 128, dk and dv HEAD_DIM each, dq in dp's place; 512 at a head dimension of 128.

    When dQ is the one that stays, dk and dv are short-lived and share their place instead.
    """
    s, p = make_scores(DTYPE)
    if STATIONARY:
        dp, ds = make_scores(DTYPE)
        dq = make_accumulators(HEAD_DIM, 1)
        dk = make_accumulators(HEAD_DIM, 1)
        dv = dk
    else:
        dp, ds, dq = make_scores_and_dq(HEAD_DIM, DTYPE)
        dk = make_accumulators(HEAD_DIM, 1)
        dv = make_accumulators(HEAD_DIM, 1)
    s_full = tlx.alloc_barriers(1)
    dp_full = tlx.alloc_barriers(1)
    p_ready = tlx.alloc_warp_barrier(2, num_warps=4)  # every thread of a group arrives: no sync before
    ds_ready = tlx.alloc_warp_barrier(2, num_warps=4)
    dq_full = tlx.alloc_barriers(1)
    dq_free = tlx.alloc_warp_barrier(1, num_warps=4)
    dkv_full = tlx.alloc_barriers(1)
    dkv_free = tlx.alloc_warp_barrier(1, num_warps=4)
    barriers = (s_full, dp_full, p_ready, ds_ready, dq_full, dq_free, dkv_full, dkv_free)
    return Products(s, p, dp, ds, dq, dk, dv, *barriers)
