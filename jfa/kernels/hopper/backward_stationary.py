"""Hopper backward, step `stationary`: with a shared query block its gradient never leaves the chip.

dQ of broadcast-Q is one sum over all sequences. Here a persistent CTA stays with one head and one block of
128 query rows, keeps that block's dQ in registers over every key tile it meets, and writes it once at the
end. The reduction that all CTAs contend for is gone, and so is the balancing problem: the list of key tiles
is cut into equal contiguous ranges, in the middle of a sequence if need be.

Two warp groups own 64 query rows each and share the tile's products: both compute S = Q K^T and
dP = dO V^T of their rows, group 0 forms dV = P^T dO over all 128 rows, group 1 forms dK = dS^T Q. More than
128 query rows are split over the CTAs of a pair, which walk the same tiles and hand dK and dV over
(`hand_over`); more than 256 take further launches, which add to what the first one stored.

    load      K0 dO0 V0 | K1 V1 | K2 dO1 V2 | ...
    group 0   S0 dP0 . P0 . dS0 |x| dV0 = P0^T dO0 . dQ += dS0 K0 . store dV0 | S1 ...
    group 1   S0 dP0 . P0 . dS0 |x| dK0 = dS0^T Q  . dQ += dS0 K0 . store dK0 | S1 ...
    |x| both groups meet: P and dS of all 128 rows are in shared memory
"""

import triton
import triton.language as tl
import triton.language.extra.tlx as tlx

from jfa.kernels.parts import Ring, ring
from jfa.kernels.ragged import ragged_row

GROUPS = tl.constexpr(2)  # consumer warp groups
ROWS = tl.constexpr(64)  # query rows of a warp group
BLOCK_M = tl.constexpr(128)  # query rows of a CTA
TILE_READY = tl.constexpr(9)  # named barrier: P and dS of both groups are written
TILE_READ = tl.constexpr(10)  # named barrier: P and dS of both groups are read


@triton.aggregate
class KeyTile:
    """BLOCK_N keys of one sequence."""

    sequence: tl.tensor
    key: tl.tensor  # the first one, counted in the sequence
    end: tl.tensor  # packed row where the sequence ends
    length: tl.tensor  # of the sequence


@triton.aggregate
class Share:
    """What a CTA works on: key tiles [begin, end), one head, and 128 query rows from ``row`` on."""

    records: tl.tensor
    begin: tl.tensor
    end: tl.tensor
    head: tl.tensor
    row: tl.tensor
    rank: tl.tensor  # place in the pair, 0 when the CTA works alone
    query_len: tl.tensor
    BLOCK_N: tl.constexpr
    HEAD_DIM: tl.constexpr
    PAIR: tl.constexpr

    @triton.jit
    def tile(self, i):
        """The tile of record i; past the end the last one, so that a look-ahead may read it."""
        record = self.records + 4 * tl.maximum(tl.minimum(i, self.end - 1), 0)
        length = tl.load(record + 3)
        key = tl.load(record + 1) * self.BLOCK_N
        return KeyTile(tl.load(record), key, tl.load(record + 2) + length, length)


@triton.aggregate
class Buffers:
    """The rings between the loader and the groups, and the tiles that the groups exchange.

    A group releases K when it has read everything else of the tile, so that K's slot stands for V's and dO's,
    and for the statistics', too: their rings are as deep, and the loader waits for K's slot before it fills
    theirs.
    """

    q: Ring
    k: Ring
    v: Ring
    dout: Ring  # dO of a sequence, with
    log2_lse: tlx.buffered_tensor  # its rows' lse in log2 units (+inf where there is no row) and
    delta: tlx.buffered_tensor  # delta, in the slots of the dO ring
    p: tlx.buffered_tensor
    ds: tlx.buffered_tensor
    grad: tlx.buffered_tensor  # staging: dV of group 0, dK of group 1
    stored: tlx.mbarrier  # pair: rank 0's store of a tile is visible (one barrier a group, held by rank 1)
    added: tlx.mbarrier  # pair: rank 1 has seen that (held by rank 0)


@triton.jit
def load(share, buffers, q, k, v, dout, log2_lse, delta, stat_rows, padded_len):
    """Load Q once, K and V of every tile, and dO with its statistics whenever the sequence changes."""
    column = share.head * share.HEAD_DIM
    buffers.q.bring(0, q, share.query_len, share.query_len, share.row, column)
    sequences = 0
    last_sequence = -1
    for i in range(share.begin, share.end):
        tile = share.tile(i)
        n = i - share.begin
        buffers.k.fill(n, k, tile.end, tile.length, tile.key, column)
        if tile.sequence != last_sequence:
            last_sequence = tile.sequence
            end = (tile.sequence + 1) * share.query_len
            slot = buffers.dout.bring(sequences, dout, end, share.query_len, share.row, column)
            stat = share.head.to(tl.int64) * stat_rows + tile.sequence * padded_len + share.row
            full = buffers.dout.fulls[slot]
            tlx.async_load(log2_lse + stat, buffers.log2_lse[slot], bulk=True, barrier=full)
            tlx.async_load(delta + stat, buffers.delta[slot], bulk=True, barrier=full)
            sequences += 1
        buffers.v.bring(n, v, tile.end, tile.length, tile.key, column)


@triton.jit
def leave(group: tl.constexpr, share, buffers, grad, tile, ADD: tl.constexpr):
    """The tile's dV (group 0) or dK (group 1) by TMA: a store, or a reduce-add to what others have left."""
    span, end, key = ragged_row(tile.end, tile.length, tile.key)
    place = [span, end, key, share.head * share.HEAD_DIM]
    tlx.async_descriptor_store(grad, buffers.grad[group], place, store_reduce="add" if ADD else "")


@triton.jit
def await_visible(n):
    """Wait until the bulk stores that this thread issued are visible to others, not only read out of SMEM."""
    return tl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; mov.b32 $0, $1;", "=r,r", [n], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def hand_over(group: tl.constexpr, share, buffers, n, grad, tile, MORE: tl.constexpr):
    """Settle the pair's previous tile: rank 0 has stored its part, rank 1 adds the other on top.

    Rank 0 waits until its store is visible and tells rank 1, whose part lies staged. Nothing has to be
    cleared before, and the two terms are always added in the same order. If there are MORE tiles, rank 1
    acknowledges, because a parity barrier must not run two phases ahead of its reader. Both ranks wait for
    every word of the other, so neither can leave while one is on its way to it.
    """
    if n > 0:
        if share.rank == 0:
            await_visible(n)
            if n >= 2:
                tlx.barrier_wait(buffers.added[group], n & 1)
            tlx.barrier_arrive(buffers.stored[group], 1, remote_cta_rank=1)
        else:
            tlx.barrier_wait(buffers.stored[group], (n - 1) & 1)
            leave(group, share, buffers, grad, tile, True)
            if MORE:
                tlx.barrier_arrive(buffers.added[group], 1, remote_cta_rank=0)


@triton.jit
def score(group: tl.constexpr, share, buffers, n, sequences, left, scale_log2, DTYPE: tl.constexpr):
    """P and dS of this group's 64 rows against the tile's keys, both written to shared memory."""
    mine: tl.constexpr = group * ROWS
    q = tlx.local_slice(buffers.q.tiles[0], [mine, 0], [ROWS, share.HEAD_DIM])
    slot = buffers.k.await_full(n)
    s = tlx.async_dot(q, tlx.local_trans(buffers.k.tiles[slot]))
    rows = buffers.dout.await_full(sequences)
    slot = buffers.v.await_full(n)
    dout = tlx.local_slice(buffers.dout.tiles[rows], [mine, 0], [ROWS, share.HEAD_DIM])
    dp = tlx.async_dot(dout, tlx.local_trans(buffers.v.tiles[slot]))
    log2_lse = tlx.local_load(tlx.local_slice(buffers.log2_lse[rows], [mine], [ROWS]))
    delta = tlx.local_load(tlx.local_slice(buffers.delta[rows], [mine], [ROWS]))
    s = tlx.async_dot_wait(1, s)
    p = tl.math.exp2(s * scale_log2 - log2_lse[:, None])
    p = tl.where((tl.arange(0, share.BLOCK_N) < left)[None, :], p, 0.0)
    tlx.named_barrier_wait(TILE_READ, GROUPS * 128)  # both groups have read the last tile's P and dS
    tlx.local_store(tlx.local_slice(buffers.p[0], [mine, 0], [ROWS, share.BLOCK_N]), p.to(DTYPE))
    dp = tlx.async_dot_wait(0, dp)
    ds = (p * (dp - delta[:, None])).to(DTYPE)
    tlx.local_store(tlx.local_slice(buffers.ds[0], [mine, 0], [ROWS, share.BLOCK_N]), ds)
    tlx.fence("async_shared")  # the tensor cores read P and dS through the asynchronous proxy
    return ds


@triton.jit
def accumulate(
    group: tl.constexpr, share, buffers, grad, scale_log2, scale, SCORE: tl.constexpr, ADD: tl.constexpr
):
    """One group's walk over the tiles: P and dS of its rows, one of dV and dK, and the sum of its dQ."""
    DTYPE: tl.constexpr = grad.dtype
    dq = tl.zeros([ROWS, share.HEAD_DIM], tl.float32)
    sequences = 0
    tile = share.tile(share.begin)
    before = share.tile(share.begin)
    buffers.q.await_full(0)
    for i in range(share.begin, share.end):
        n = i - share.begin
        following = share.tile(i + 1)
        ds = SCORE(group, share, buffers, n, sequences, tile.length - tile.key, scale_log2, DTYPE)
        if share.PAIR > 1:
            hand_over(group, share, buffers, n, grad, before, True)
        tlx.async_descriptor_store_wait(0)  # the last tile's gradient has left its staging tile
        tlx.named_barrier_wait(TILE_READY, GROUPS * 128)  # P and dS of all 128 rows are written
        if group == 0:
            rows = sequences % buffers.dout.depth
            x = tlx.async_dot(tlx.local_trans(buffers.p[0]), buffers.dout.tiles[rows])
        else:
            x = tlx.async_dot(tlx.local_trans(buffers.ds[0]), buffers.q.tiles[0])
        dq = tlx.async_dot(ds, buffers.k.tiles[n % buffers.k.depth], dq)
        x = tlx.async_dot_wait(1, x)
        if group == 1:
            x = x * scale
        tlx.local_store(buffers.grad[group], x.to(DTYPE))
        tlx.fence("async_shared")  # the TMA unit reads the staging tile
        if share.rank == 0:  # rank 1 keeps its part staged until `hand_over` before the next tile
            leave(group, share, buffers, grad, tile, ADD)
        dq = tlx.async_dot_wait(0, dq)
        buffers.k.release(n)  # the loader may replace K and V, and dO when its sequence has ended
        if following.sequence != tile.sequence:
            sequences += 1
        before = tile
        tile = following
    if share.PAIR > 1:
        hand_over(group, share, buffers, share.end - share.begin, grad, before, False)
    return dq


@triton.jit
def flush(group: tl.constexpr, share, staging, dq, sums, slot_row):
    """Write the group's finished dQ, in float32, to this CTA's own rows of ``sums``."""
    tlx.named_barrier_wait(TILE_READY, GROUPS * 128)  # the staging tiles alias dO, which both have read
    tlx.local_store(staging[group], dq)
    tlx.fence("async_shared")  # the TMA unit reads the staging tile
    row = slot_row + share.row + group * ROWS
    tlx.async_descriptor_store(sums, staging[group], [row, share.head * share.HEAD_DIM])
    tlx.async_descriptor_store_wait(0)


@triton.jit(do_not_specialize=["query_len", "padded_len", "stat_rows", "first_row", "heads"])
def kernel(
    q, k, v, dout, dk, dv, sums, log2_lse, delta,
    records, count, query_len, padded_len, stat_rows, first_row, heads, scale_log2, scale,
    LOAD: tl.constexpr, ACCUMULATE: tl.constexpr, SCORE: tl.constexpr, FLUSH: tl.constexpr,
    BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, KV_STAGES: tl.constexpr, DOUT_STAGES: tl.constexpr,
    PAIR: tl.constexpr, ADD: tl.constexpr, REGISTERS: tl.constexpr,
):  # fmt: skip
    """Persistent: CTA p (pair p with PAIR = 2) takes head p % heads and its share of the tile list.

    ADD: earlier launches have left dK and dV of other query rows, to which this one adds.
    """
    DTYPE: tl.constexpr = q.dtype
    KV_BYTES: tl.constexpr = 2 * BLOCK_N * HEAD_DIM
    ROW_BYTES: tl.constexpr = 2 * BLOCK_M * HEAD_DIM
    tl.static_assert(DOUT_STAGES >= KV_STAGES, "K's slot stands for dO's")
    pair = tl.program_id(0) // PAIR
    rank = pair * 0
    if PAIR > 1:
        rank = tlx.cluster_cta_rank()
    shares = tl.num_programs(0) // PAIR // heads
    turn = pair // heads
    tiles = tl.load(count)
    begin = tiles * turn // shares
    end = tiles * (turn + 1) // shares
    row = first_row + rank * BLOCK_M
    share = Share(records, begin, end, pair % heads, row, rank, query_len, BLOCK_N, HEAD_DIM, PAIR)
    dout_tiles = tlx.local_alloc((BLOCK_M, HEAD_DIM), DTYPE, DOUT_STAGES)
    staging = tlx.local_alloc((ROWS, HEAD_DIM), tl.float32, GROUPS, reuse=dout_tiles)
    buffers = Buffers(
        ring(tlx.local_alloc((BLOCK_M, HEAD_DIM), DTYPE, 1), 1, ROW_BYTES),
        ring(tlx.local_alloc((BLOCK_N, HEAD_DIM), DTYPE, KV_STAGES), KV_STAGES, KV_BYTES, 8),
        ring(tlx.local_alloc((BLOCK_N, HEAD_DIM), DTYPE, KV_STAGES), KV_STAGES, KV_BYTES),
        ring(dout_tiles, DOUT_STAGES, ROW_BYTES + 2 * 4 * BLOCK_M),
        tlx.local_alloc((BLOCK_M,), tl.float32, DOUT_STAGES),
        tlx.local_alloc((BLOCK_M,), tl.float32, DOUT_STAGES),
        tlx.local_alloc((BLOCK_M, BLOCK_N), DTYPE, 1),
        tlx.local_alloc((BLOCK_M, BLOCK_N), DTYPE, 1),
        tlx.local_alloc((BLOCK_N, HEAD_DIM), DTYPE, GROUPS),
        tlx.alloc_barriers(GROUPS),
        tlx.alloc_barriers(GROUPS),
    )
    slot_row = turn * padded_len
    with tlx.async_tasks():
        with tlx.async_task("default"):
            dq = ACCUMULATE(0, share, buffers, dv, scale_log2, scale, SCORE, ADD)
            FLUSH(0, share, staging, dq, sums, slot_row)
        with tlx.async_task(num_warps=4, registers=REGISTERS):
            dq_ = ACCUMULATE(1, share, buffers, dk, scale_log2, scale, SCORE, ADD)
            FLUSH(1, share, staging, dq_, sums, slot_row)
        with tlx.async_task(num_warps=1, registers=24):
            LOAD(share, buffers, q, k, v, dout, log2_lse, delta, stat_rows, padded_len)
