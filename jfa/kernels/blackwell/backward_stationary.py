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

from jfa.kernels.blackwell.backward import score, sum_halves, weight_gradient
from jfa.kernels.blackwell.backward_compute import columns

from jfa.kernels.blackwell.backward_parts import (  # isort: skip
    DKV, DKV_FREE, DS_READY, P_READY, ROWS,
    Buffers, Views, load_statistic, make_products, make_ring, make_statistics,
)  # fmt: skip
from jfa.kernels.keys import FIELDS, Keys
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
        return self.keys.at(tl.load(record), self.head, key, tl.load(record + 2), tl.load(record + 3))

    @triton.jit
    def last_of_sequence(self, tile, i):
        """Whether tile i, which is ``tile``, is the last of its sequence here."""
        return (i + 1 >= self.end) | (self.tile(i + 1).sequence != tile.sequence)


@triton.jit
def load(share, buffers, views):
    """Loader: Q once, K and V of every tile, dO with its statistics whenever the sequence changes.

    K's slot is given back when dK has left through it, the last of its tile: V's slot is free then, and so
    are the statistics of the sequence before the tiles in flight, as their rings have as many slots.
    """
    column, rows = share.head * buffers.HEAD_DIM, share.keys.query_len
    buffers.fill(buffers.q, 0, views.q, rows, rows, share.row, column, False)
    sequences, fresh = 0, True
    for i in range(share.begin, share.end):
        tile, n = share.tile(i), i - share.begin
        buffers.fill(buffers.k, n, views.k, tile.kv_end, tile.kv_len, tile.key, column)
        if fresh:
            at = share.head.to(tl.int64) * views.stat_rows + tile.stat + share.row
            load_statistic(buffers.log2_lse, sequences, views.log2_lse + at, False)
            load_statistic(buffers.delta, sequences, views.delta + at, False)
            buffers.fill(buffers.dout, sequences, views.dout, tile.dout_end, rows, share.row, column)
            sequences += 1
        buffers.fill(buffers.v, n, views.v, tile.kv_end, tile.kv_len, tile.key, column, False)
        fresh = share.last_of_sequence(tile, i)


@triton.jit
def mma(share, buffers, x):
    """Tensor-core warp: the products that need a tile's dS come after the next tile's S."""
    sequences = 0
    q = buffers.q.await_full(0)  # load -> mma
    # Addresses of Q, dO and dS do not change; hoisted, they are more than uniform registers can hold.
    for i in tl.range(share.begin, share.end + 1, disable_licm=True):
        n = i - share.begin
        if i < share.end:
            score(buffers, x, buffers.k.await_full(n), q)  # load -> mma
        if n > 0:
            before = n - 1
            for group in tl.static_range(2):
                tlx.barrier_wait(x.word[DS_READY + group], before & 1)  # compute -> mma
            ds, keys = tlx.local_trans(buffers.ds[0]), buffers.k.tiles[before % buffers.k.depth]
            tlx.async_dot(ds, keys, x.dq[0], use_acc=before > 0, force_async=True)
            tlx.barrier_wait(x.word[DKV_FREE], 0)  # store -> mma: the same tile's dV has left
            # What follows dK follows dQ too: the store group hears of the last dQ with the last dK.
            sum_halves(x, x.ds, None, buffers.q.tiles[q], x.dk[0], before, False, x.full[DKV])
        if i < share.end:
            dout = buffers.dout.await_full(sequences)  # load -> mma
            weight_gradient(buffers, x, buffers.v.await_full(n), dout)  # load -> mma
            tlx.barrier_wait(x.word[DKV_FREE], 1)  # store -> mma: the last tile's dK has left
            sum_halves(x, x.p, P_READY, buffers.dout.tiles[dout], x.dv[0], n, False, x.full[DKV])
            if share.last_of_sequence(share.tile(i), i):
                tlx.tcgen05_commit(buffers.dout.empties[dout])  # mma -> load
                sequences += 1


@triton.jit
def compute(group: tl.constexpr, share, buffers, x, scale_log2, WEIGH, SHARE):
    """A compute group: its half of the query rows of every tile."""
    sequences = 0
    for i in range(share.begin, share.end):
        tile, turn = share.tile(i), i - share.begin
        WEIGH(group, share.keys, tile, buffers, x, 0, turn, sequences, scale_log2, True, SHARE, False)
        if share.last_of_sequence(tile, i):
            sequences += 1


@triton.jit
def empty(share, buffers, x, tile, staged, gradient, factor, PARITY: tl.constexpr, LEAVE: tl.constexpr):
    """dV or dK of one tile: tensor memory -> ``staged``, the tile's dead V or K -> memory.

    LEAVE: "" for the first launch, when dK and dV of a tile have one author; "add" for further ones.
    """
    tlx.barrier_wait(x.full[DKV], PARITY)  # mma -> store; ``staged`` was read before
    for c in tl.static_range(buffers.HEAD_DIM // RESULT):
        part = columns(x.dv[0], c, RESULT) * factor
        tlx.local_store(tlx.local_slice(staged, [0, c * RESULT], [ROWS, RESULT]), part.to(staged.dtype))
    x.tell(DKV_FREE)  # store -> mma
    at = ragged_row(tile.kv_end, tile.kv_len, tile.key) + (share.head * buffers.HEAD_DIM,)
    tlx.async_descriptor_store(gradient, staged, at, store_reduce=LEAVE)


@triton.jit
def store(share, buffers, x, dk, dv, sums, first_row, scale, LEAVE):
    """The group that empties tensor memory: dV and dK of every tile, and dQ when all are done."""
    for i in range(share.begin, share.end):
        tile, n = share.tile(i), i - share.begin
        slot = n % buffers.k.depth
        empty(share, buffers, x, tile, buffers.v.tiles[slot], dv, 1.0, 0, LEAVE)
        if n > 0:  # all but this dV have left: dK of the tile before, and its dV
            tlx.async_descriptor_store_wait(1)
            buffers.k.release(n - 1)  # store -> load
        empty(share, buffers, x, tile, buffers.k.tiles[slot], dk, scale, 1, LEAVE)
    tlx.async_descriptor_store_wait(0)
    for c in tl.static_range(buffers.HEAD_DIM // RESULT):
        part = tl.zeros([ROWS, RESULT], tl.float32)
        if share.end > share.begin:
            part = columns(x.dq[0], c, RESULT)
        tlx.local_store(buffers.staging[c], part)
        column = share.head * buffers.HEAD_DIM + c * RESULT
        tlx.async_descriptor_store(sums, buffers.staging[c], [first_row + share.row, column])
    tlx.async_descriptor_store_wait(0)


@triton.jit(do_not_specialize=["batch", "query_len", "padded_len", "stat_rows", "first_row", "heads"])
def kernel(
    q, k, v, dout, dk, dv, sums,
    log2_lse, delta, records, counts, kv_offsets,
    batch, query_len, padded_len, stat_rows, first_row, heads, scale_log2, scale,
    LOAD: tl.constexpr, MMA: tl.constexpr, COMPUTE: tl.constexpr, WEIGH: tl.constexpr, SHARE: tl.constexpr,
    STORE: tl.constexpr, LEAVE: tl.constexpr, HEAD_DIM: tl.constexpr, KV_STAGES: tl.constexpr,
    DOUT_STAGES: tl.constexpr, REGISTERS: tl.constexpr, WARP_REGISTERS: tl.constexpr,
):  # fmt: skip
    """Persistent: CTA p takes head p % heads and its share of the tile list."""
    DTYPE: tl.constexpr = q.dtype
    program, shares = tl.program_id(0), tl.num_programs(0) // heads
    turn, none = program // heads, program * 0
    tiles = tl.load(counts)
    facts = (records, counts, kv_offsets, kv_offsets, batch, query_len, padded_len, none, none)
    keys = Keys(*facts, 1, 1, True, False, False, ROWS, ROWS, ROWS, none)
    share = Share(keys, tiles * turn // shares, tiles * (turn + 1) // shares, program % heads, first_row)
    q_ring, dout_ring = make_ring(q, 1), make_ring(dout, DOUT_STAGES)
    # The store group gives K's slot back, and with it V's.
    k_ring, v_ring = make_ring(k, KV_STAGES, 4), make_ring(v, KV_STAGES)
    rings = (k_ring, v_ring, q_ring, dout_ring, k_ring, q_ring, dout_ring)
    statistics = (make_statistics(KV_STAGES), make_statistics(KV_STAGES))
    ds = tlx.local_alloc((ROWS, ROWS), DTYPE, 1)
    staging = tlx.local_alloc((ROWS, RESULT), tl.float32, HEAD_DIM // RESULT, reuse=k_ring.tiles)
    x = make_products(HEAD_DIM, DTYPE, 1, True)
    tiles = (ds, ds, x.full, staging, staging)  # nothing is sent or lands
    buffers = Buffers(*rings, *statistics, *tiles, none, HEAD_DIM, RESULT, HEAD_DIM // RESULT, 0, 1)
    views = Views(q, k, v, dout, q, k, dout, log2_lse, delta, stat_rows)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            STORE(share, buffers, x, dk, dv, sums, turn * padded_len, scale, LEAVE)
        with tlx.async_task(num_warps=4, registers=REGISTERS, replicate=2):
            COMPUTE(tlx.async_task_replica_id(), share, buffers, x, scale_log2, WEIGH, SHARE)
        with tlx.async_task(num_warps=1, registers=WARP_REGISTERS):
            MMA(share, buffers, x)
        with tlx.async_task(num_warps=1, registers=WARP_REGISTERS):
            LOAD(share, buffers, views)
