"""Blackwell backward, step `stationary`: with a shared query block its gradient never leaves the chip.

dQ of broadcast-Q is one sum over all sequences. Here a persistent CTA stays with one head and one block of
128 query rows, and dQ grows in tensor memory over every key tile the CTA meets; it is written once at the
end. The reduction that all CTAs contend for is gone, and so is the balancing problem: the list of key tiles
is cut into equal contiguous ranges, in the middle of a sequence if need be. More than 128 query rows take
further launches, which add to the dK and dV that the first one stored.

dK and dV now live for one tile only, so they share one place in tensor memory, and leave through the
shared memory of the tile's own K and V, which nothing reads any more.

    load     Q K0 dO0 V0 | K1 V1 | ...
    mma      S0 dP0 . dV0 | S1 . dQ+=0 dK0 . dP1 . dV1 | S2 . dQ+=1 dK1 . dP2 . dV2 | ...
    group 0     P0 . dS0 .  | P1 . . . . . . . . dS1 .   | ...           query rows 0 to 63
    group 1     P0 . dS0 .  | P1 . . . . . . . . dS1 .   | ...           query rows 64 to 127
    store                 dV0  |             dK0 .   dV1 |             dK1 .    | ... at the end dQ
"""

import triton
import triton.language as tl
import triton.language.extra.tlx as tlx

from jfa.kernels.blackwell.backward import Statistics, sum_halves
from jfa.kernels.blackwell.backward_compute import columns
from jfa.kernels.blackwell.backward_parts import (
    DKV,
    DKV_FREE,
    DP,
    DQ,
    DS_READY,
    P_READY,
    ROWS,
    S,
    load_statistic,
    make_products,
    make_ring,
    make_statistics,
)
from jfa.kernels.keys import FIELDS, Keys
from jfa.kernels.parts import Ring
from jfa.kernels.ragged import ragged_row

RESULT = tl.constexpr(64)  # columns that leave tensor memory at a time


@triton.aggregate
class Share:
    """What a CTA works on: key tiles [begin, end) of the list, one head, 128 query rows from ``row`` on."""

    keys: Keys
    begin: tl.tensor
    end: tl.tensor
    head: tl.tensor
    row: tl.tensor

    @triton.jit
    def tile(self, i):
        """The i-th tile of the list; past the share's end its last one, so that a look-ahead may read it."""
        record = self.keys.records + FIELDS * tl.maximum(tl.minimum(i, self.end - 1), 0)
        key = tl.load(record + 1) * ROWS
        return self.keys.at(tl.load(record), self.head, key, tl.load(record + 2), tl.load(record + 3), True)

    @triton.jit
    def last_of_sequence(self, tile, i):
        """Whether tile i, which is ``tile``, is the last of its sequence here."""
        return (i + 1 >= self.end) | (self.tile(i + 1).sequence != tile.sequence)


@triton.aggregate
class Buffers:
    """Shared memory: rings, and dS^T."""

    q: Ring
    k: Ring
    v: Ring
    dout: Ring
    log2_lse: Ring
    delta: Ring
    ds: tlx.buffered_tensor
    staging: tlx.buffered_tensor  # aliases the K ring: dQ on its way out, when all tiles are done
    HEAD_DIM: tl.constexpr


@triton.jit
def load(share, buffers, q, k, v, dout, statistics):
    """Loader: Q once, K and V of every tile, dO with its statistics whenever the sequence changes."""
    column = share.head * buffers.HEAD_DIM
    rows = share.keys.query_len
    buffers.q.fill(0, q, rows, rows, share.row, column)
    sequences = 0
    fresh = True
    for i in range(share.begin, share.end):
        tile = share.tile(i)
        n = i - share.begin
        buffers.k.fill(n, k, tile.kv_end, tile.kv_len, tile.key, column)
        if fresh:
            at = share.head.to(tl.int64) * statistics.rows + tile.stat + share.row
            load_statistic(buffers.log2_lse, sequences, statistics.log2_lse + at)
            load_statistic(buffers.delta, sequences, statistics.delta + at)
            buffers.dout.fill(sequences, dout, tile.dout_end, rows, share.row, column)
            sequences += 1
        buffers.v.fill(n, v, tile.kv_end, tile.kv_len, tile.key, column)
        fresh = share.last_of_sequence(tile, i)


@triton.jit
def mma(share, buffers, x):
    """Tensor-core warp: the products that need a tile's dS come after the next tile's S."""
    sequences = 0
    q_slot = buffers.q.await_full(0)  # load -> mma
    for i in range(share.begin, share.end + 1):
        n = i - share.begin
        if i < share.end:
            k_slot = buffers.k.await_full(n)  # load -> mma
            queries = tlx.local_trans(buffers.q.tiles[q_slot])
            tlx.async_dot(buffers.k.tiles[k_slot], queries, x.s[0], use_acc=False, mBarriers=[x.full[S]])
        if n > 0:
            before = n - 1
            slot = before % buffers.k.depth
            for group in tl.static_range(2):
                x.await_word(DS_READY + group, before)  # compute -> mma
            scores = tlx.local_trans(buffers.ds[0])
            tlx.async_dot(scores, buffers.k.tiles[slot], x.dq[0], use_acc=before > 0, force_async=True)
            x.await_word(DKV_FREE, 0)  # store -> mma: the same tile's dV has left
            done = [x.full[DKV]]
            sum_halves(x, x.ds, DS_READY, buffers.q.tiles[q_slot], x.dk[0], before, False, done)
        if i < share.end:
            tile = share.tile(i)
            slot = buffers.dout.await_full(sequences)  # load -> mma
            v_slot = buffers.v.await_full(n)  # load -> mma
            rows = tlx.local_trans(buffers.dout.tiles[slot])
            tlx.async_dot(buffers.v.tiles[v_slot], rows, x.dp[0], use_acc=False, mBarriers=[x.full[DP]])
            x.await_word(DKV_FREE, 1)  # store -> mma: the last tile's dK has left
            done = [x.full[DKV]]
            sum_halves(x, x.p, P_READY, buffers.dout.tiles[slot], x.dv[0], n, False, done)
            if share.last_of_sequence(tile, i):
                tlx.tcgen05_commit(buffers.dout.empties[slot])  # mma -> load
                sequences += 1
    tlx.tcgen05_commit(x.full[DQ])  # mma -> store


@triton.jit
def compute(group: tl.constexpr, share, buffers, x, scale_log2, WEIGH, SHARE):
    """A compute group: its half of the query rows of every tile."""
    sequences = 0
    for i in range(share.begin, share.end):
        tile = share.tile(i)
        last = share.last_of_sequence(tile, i)
        turn = i - share.begin
        WEIGH(group, share.keys, tile, buffers, x, 0, turn, sequences, last, scale_log2, True, SHARE)
        if last:
            sequences += 1


@triton.jit
def leave_by_store(gradient, staged, at):
    """The first launch: dK and dV of a tile have one author."""
    tlx.async_descriptor_store(gradient, staged, at)


@triton.jit
def leave_by_add(gradient, staged, at):
    """Further launches: on top of what the launch before left."""
    tlx.async_descriptor_store(gradient, staged, at, store_reduce="add")


@triton.jit
def empty(share, buffers, x, tile, staged, gradient, factor, PARITY: tl.constexpr, LEAVE):
    """dV or dK of one tile: tensor memory -> ``staged``, the tile's dead V or K -> memory."""
    tlx.barrier_wait(x.full[DKV], PARITY)  # mma -> store; ``staged`` was read before
    for c in tl.static_range(buffers.HEAD_DIM // RESULT):
        part = columns(x.dv[0], c, RESULT) * factor
        tlx.local_store(tlx.local_slice(staged, [0, c * RESULT], [ROWS, RESULT]), part.to(staged.dtype))
    x.tell(DKV_FREE)  # store -> mma
    tlx.fence("async_shared")  # the TMA unit reads it
    span, end, row = ragged_row(tile.kv_end, tile.kv_len, tile.key)
    LEAVE(gradient, staged, [span, end, row, share.head * buffers.HEAD_DIM])
    tlx.async_descriptor_store_wait(1)


@triton.jit
def store(share, buffers, x, dk, dv, sums, first_row, scale, LEAVE):
    """The group that empties tensor memory: dV and dK of every tile, and dQ when all are done."""
    for i in range(share.begin, share.end):
        n = i - share.begin
        tile = share.tile(i)
        slot = n % buffers.k.depth
        empty(share, buffers, x, tile, buffers.v.tiles[slot], dv, 1.0, 0, LEAVE)
        if n > 0:
            buffers.k.release(n - 1)  # store -> load: dK of the tile before has left
        empty(share, buffers, x, tile, buffers.k.tiles[slot], dk, scale, 1, LEAVE)
        buffers.v.release(n)  # store -> load: dV of this tile has left
    tlx.async_descriptor_store_wait(0)
    tlx.barrier_wait(x.full[DQ], 0)  # mma -> store
    for c in tl.static_range(buffers.HEAD_DIM // RESULT):
        part = tl.zeros([ROWS, RESULT], tl.float32)
        if share.end > share.begin:
            part = columns(x.dq[0], c, RESULT)
        tlx.local_store(buffers.staging[c], part)
        tlx.fence("async_shared")  # the TMA unit reads it
        column = share.head * buffers.HEAD_DIM + c * RESULT
        tlx.async_descriptor_store(sums, buffers.staging[c], [first_row + share.row, column])
    tlx.async_descriptor_store_wait(0)


@triton.jit(do_not_specialize=["batch", "query_len", "padded_len", "stat_rows", "first_row", "heads"])
def kernel(
    q,
    k,
    v,
    dout,
    dk,
    dv,
    sums,
    log2_lse,
    delta,
    records,
    counts,
    kv_offsets,
    batch,
    query_len,
    padded_len,
    stat_rows,
    first_row,
    heads,
    scale_log2,
    scale,
    LOAD: tl.constexpr,
    MMA: tl.constexpr,
    COMPUTE: tl.constexpr,
    WEIGH: tl.constexpr,
    SHARE: tl.constexpr,
    STORE: tl.constexpr,
    LEAVE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    KV_STAGES: tl.constexpr,
    DOUT_STAGES: tl.constexpr,
    REGISTERS: tl.constexpr,
    WARP_REGISTERS: tl.constexpr,
):
    """Persistent: CTA p takes head p % heads and its share of the tile list."""
    DTYPE: tl.constexpr = q.dtype
    program = tl.program_id(0)
    shares = tl.num_programs(0) // heads
    turn = program // heads
    tiles = tl.load(counts)
    none = program * 0
    facts = (records, counts, kv_offsets, kv_offsets, batch, query_len, padded_len, none, none)
    keys = Keys(*facts, 1, 1, True, False, False, ROWS, ROWS, ROWS, none)
    share = Share(keys, tiles * turn // shares, tiles * (turn + 1) // shares, program % heads, first_row)
    BYTES: tl.constexpr = 2 * ROWS * HEAD_DIM
    k_tiles = tlx.local_alloc((ROWS, HEAD_DIM), DTYPE, KV_STAGES)
    v_tiles = tlx.local_alloc((ROWS, HEAD_DIM), DTYPE, KV_STAGES)
    k_empty = tlx.alloc_warp_barrier(KV_STAGES, num_warps=4)  # the store group gives K and V back
    v_empty = tlx.alloc_warp_barrier(KV_STAGES, num_warps=4)
    buffers = Buffers(
        make_ring(ROWS, HEAD_DIM, DTYPE, 1),
        Ring(k_tiles, tlx.alloc_barriers(KV_STAGES), k_empty, KV_STAGES, BYTES),
        Ring(v_tiles, tlx.alloc_barriers(KV_STAGES), v_empty, KV_STAGES, BYTES),
        make_ring(ROWS, HEAD_DIM, DTYPE, DOUT_STAGES),
        make_statistics(2),
        make_statistics(2),
        tlx.local_alloc((ROWS, ROWS), DTYPE, 1),
        tlx.local_alloc((ROWS, RESULT), tl.float32, HEAD_DIM // RESULT, reuse=k_tiles),
        HEAD_DIM,
    )
    x = make_products(HEAD_DIM, DTYPE, 1, True)
    statistics = Statistics(log2_lse, delta, stat_rows)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            STORE(share, buffers, x, dk, dv, sums, turn * padded_len, scale, LEAVE)
        with tlx.async_task(num_warps=4, registers=REGISTERS, replicate=2):
            COMPUTE(tlx.async_task_replica_id(), share, buffers, x, scale_log2, WEIGH, SHARE)
        with tlx.async_task(num_warps=1, registers=WARP_REGISTERS):
            MMA(share, buffers, x)
        with tlx.async_task(num_warps=1, registers=WARP_REGISTERS):
            LOAD(share, buffers, q, k, v, dout, statistics)
