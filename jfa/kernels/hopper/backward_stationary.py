"""Hopper backward, step `stationary`: with a shared query block its gradient never leaves the chip.

dQ of broadcast-Q is one sum over all sequences. Here a persistent CTA stays with one head and one block of
128 query rows, keeps that block's dQ in registers over every key tile it meets, and writes it once at the
end. The reduction that all CTAs contend for is gone, and so is the balancing problem: the list of key tiles
is cut into equal contiguous ranges, in the middle of a sequence if need be.

Two warp groups own 64 query rows each and share the tile's products: both compute S = Q K^T and
dP = dO V^T of their rows, group 0 forms dV = P^T dO over all 128 rows, group 1 forms dK = dS^T Q. A writer
warp stores what they stage, so that no group waits for the TMA unit.

    load      K0 dO0 V0 | K1 V1 | K2 dO1 V2 | ...
    group 0   S0 dP0 . P0 . dS0 |x| dV0 = P0^T dO0 . dQ += dS0 K0 . stage dV0 | S1 ...
    group 1   S0 dP0 . P0 . dS0 |x| dK0 = dS0^T Q  . dQ += dS0 K0 . stage dK0 | S1 ...
    write                                                     (turn of tile 0) dV0 dK0 | ...
    |x| both groups meet: P and dS of all 128 rows are in shared memory

With more query rows the CTAs of a chain, one for each block of 128 rows, walk the same tiles. Two neighbours
are a pair (a cluster): each loads half of K and V for both. dK and dV of a tile are the sum over the chain:
its first CTA stores its part, each of the others adds its own once the one before has been written. Nothing
has to be cleared before, and the terms are always added in the same order. The sum is in the dtype of dK and
dV, so that its rounding error grows with the root of the number of blocks.

    block 0   tile 0 stored | tile 1 stored | tile 2 ...
                     |  mbarrier of the pair    |
    block 1            tile 0 added  | tile 1 added  | ...
                                |  counter in global memory
    block 2                        tile 0 added | tile 1 ...
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
STORED = tl.constexpr(3)  # words from rank 0 to rank 1 of a pair that may be under way: K's stages + 1
EVERY = tl.constexpr(4)  # tiles that a pair writes between two words to the next one


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
    link: tl.tensor  # place of the pair in the chain
    progress: tl.tensor  # tiles that this pair has written; the number of the pair before lies in front of it
    query_len: tl.tensor
    BLOCK_N: tl.constexpr
    HEAD_DIM: tl.constexpr
    PAIR: tl.constexpr  # CTAs of a pair, 1 or 2
    LINKS: tl.constexpr  # pairs of a chain

    @triton.jit
    def tile(self, i):
        """The tile of record i; past the end the last one, so that a look-ahead may read it."""
        record = self.records + 4 * tl.maximum(tl.minimum(i, self.end - 1), 0)
        length = tl.load(record + 3)
        key = tl.load(record + 1) * self.BLOCK_N
        return KeyTile(tl.load(record), key, tl.load(record + 2) + length, length)


@triton.aggregate
class Buffers:
    """The rings between the roles, and the tiles that the groups exchange.

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
    grad: Ring  # groups -> writer: item 2n is dV of the n-th tile, 2n + 1 its dK
    stored: tlx.mbarrier  # pair: rank 0 has written the n-th tile (held by rank 1, in slot n % STORED)


@triton.jit
def bring_keys(share, ring, n, desc, tile):
    """K or V of the n-th tile: all of it, or this CTA's half for both CTAs of the pair.

    The slot is known to be empty, in both CTAs: both CTAs' groups release it to both loaders. Each CTA's
    barrier counts both halves.
    """
    column = share.head * share.HEAD_DIM
    if share.PAIR == 1:
        ring.bring(n, desc, tile.end, tile.length, tile.key, column)
    else:
        HALF: tl.constexpr = share.BLOCK_N // 2
        slot = n % ring.depth
        full = ring.fulls[slot]
        tlx.barrier_expect_bytes(full, ring.bytes)
        for rank in tl.static_range(2):
            if share.rank == rank:
                half = tlx.local_slice(ring.tiles[slot], [rank * HALF, 0], [HALF, share.HEAD_DIM])
                span, end, key = ragged_row(tile.end, tile.length, tile.key + rank * HALF)
                place = [span, end, key, column]
                tlx.async_descriptor_load(desc, half, place, full, multicast_targets=[0, 1])


@triton.jit
def release(share, ring, n):
    """This group is done with K of the n-th tile: every loader that fills the slot must know."""
    if share.PAIR == 1:
        ring.release(n)
    else:
        for rank in tl.static_range(2):
            tlx.barrier_arrive(ring.empties[n % ring.depth], 1, remote_cta_rank=rank)


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
        buffers.k.claim(n)  # the groups (of both CTAs) are done with the tile that was there
        bring_keys(share, buffers.k, n, k, tile)
        if tile.sequence != last_sequence:
            last_sequence = tile.sequence
            end = (tile.sequence + 1) * share.query_len
            slot = buffers.dout.bring(sequences, dout, end, share.query_len, share.row, column)
            stat = share.head.to(tl.int64) * stat_rows + tile.sequence * padded_len + share.row
            full = buffers.dout.fulls[slot]
            tlx.async_load(log2_lse + stat, buffers.log2_lse[slot], bulk=True, barrier=full)
            tlx.async_load(delta + stat, buffers.delta[slot], bulk=True, barrier=full)
            sequences += 1
        bring_keys(share, buffers.v, n, v, tile)
    if share.PAIR > 1:  # the other CTA's last words reach into this one's memory: stay until they are there
        for j in tl.static_range(buffers.k.depth):
            buffers.k.claim(share.end - share.begin + j)


@triton.jit
def await_turn(share, buffers, n, seen):
    """Writer: wait until the CTA before in the chain has written the n-th tile; first in the chain: go ahead.

    ``seen``: what the counter of the pair before was found to be. Only a lower-numbered CTA is waited for.
    """
    if share.PAIR > 1:
        if share.rank > 0:
            tlx.barrier_wait(buffers.stored[n % STORED], (n // STORED) & 1)
    if share.LINKS > 1:
        if (share.link > 0) & (share.rank == 0):
            while seen <= n:
                seen = tl.atomic_add(share.progress - 1, 0, sem="acquire", scope="gpu")
    return seen


@triton.jit
def await_visible(n):
    """Wait until the bulk stores that this thread issued are visible to the whole GPU.

    A finished group is visible to this thread only: without the fence the next CTA's add has been overtaken
    by the store on an H200, in a few lines of cold memory (figures/03_visibility.csv).
    """
    return tl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; fence.proxy.async; mov.b32 $0, $1;",
        "=r,r", [n], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def pass_on(share, buffers, n):
    """Writer: tell the next CTA of the chain, if there is one, that the n-th tile is written.

    The next pair hears of EVERY tiles at once: its word needs a fence of the whole GPU's memory.
    Rank 0 needs no answer before it uses a slot of ``stored`` again: K of tile n came only after rank 1 had
    released that of tile n - 2. So rank 1 has staged tile n - 2, so its writer has sent tile n - 3 off and
    has seen the word of tile n - 3, which was the last one in this slot.
    """
    if share.PAIR > 1:
        if share.rank == 0:
            await_visible(n)
            tlx.barrier_arrive(buffers.stored[n % STORED], 1, remote_cta_rank=1)
    if share.LINKS > 1:
        due = (n % EVERY == EVERY - 1) | (share.begin + n + 1 >= share.end)
        if (share.link < share.LINKS - 1) & (share.rank == share.PAIR - 1) & due:
            await_visible(n)
            tl.atomic_xchg(share.progress, n + 1, sem="release", scope="gpu")


@triton.jit
def write(share, buffers, dv, dk, ADD: tl.constexpr):
    """Writer: dV and dK of every tile, stored by the first CTA of the chain, added by the others in turn."""
    seen = 0
    first = (share.link + share.rank == 0) & (not ADD)
    for i in range(share.begin, share.end):
        tile = share.tile(i)
        n = i - share.begin
        span, end, key = ragged_row(tile.end, tile.length, tile.key)
        place = [span, end, key, share.head * share.HEAD_DIM]
        seen = await_turn(share, buffers, n, seen)
        for group in tl.static_range(GROUPS):
            slot = buffers.grad.await_full(n * GROUPS + group)  # the group has staged and fenced it
            desc = dk if group else dv
            if first:
                tlx.async_descriptor_store(desc, buffers.grad.tiles[slot], place)
            else:
                tlx.async_descriptor_store(desc, buffers.grad.tiles[slot], place, store_reduce="add")
        tlx.async_descriptor_store_wait(1)  # dV is read out of its staging tile: group 0 may stage the next
        buffers.grad.release(n * GROUPS)
        tlx.async_descriptor_store_wait(0)
        buffers.grad.release(n * GROUPS + 1)
        pass_on(share, buffers, n)


@triton.jit
def score(group: tl.constexpr, share, buffers, n, sequences, left, scale_log2, ds_scale, DTYPE: tl.constexpr):
    """P and dS (times ds_scale) of this group's 64 rows against the tile's keys, both to shared memory."""
    mine: tl.constexpr = group * ROWS
    q = tlx.local_slice(buffers.q.tiles[0], [mine, 0], [ROWS, share.HEAD_DIM])
    slot = buffers.k.await_full(n)
    s = tlx.async_dot(q, tlx.local_trans(buffers.k.tiles[slot]))
    rows = buffers.dout.await_full(sequences)  # with its statistics
    slot = buffers.v.await_full(n)
    dout = tlx.local_slice(buffers.dout.tiles[rows], [mine, 0], [ROWS, share.HEAD_DIM])
    dp = tlx.async_dot(dout, tlx.local_trans(buffers.v.tiles[slot]))
    log2_lse = tlx.local_load(tlx.local_slice(buffers.log2_lse[rows], [mine], [ROWS]))
    delta = tlx.local_load(tlx.local_slice(buffers.delta[rows], [mine], [ROWS])) * ds_scale
    s = tlx.async_dot_wait(1, s)
    p = tl.math.exp2(s * scale_log2 - log2_lse[:, None])
    p = tl.where((tl.arange(0, share.BLOCK_N) < left)[None, :], p, 0.0)
    tlx.named_barrier_wait(TILE_READ, GROUPS * 128)  # both groups have read the last tile's P and dS
    tlx.local_store(tlx.local_slice(buffers.p[0], [mine, 0], [ROWS, share.BLOCK_N]), p.to(DTYPE))
    dp = tlx.async_dot_wait(0, dp)
    ds = (p * (dp * ds_scale - delta[:, None])).to(DTYPE)
    tlx.local_store(tlx.local_slice(buffers.ds[0], [mine, 0], [ROWS, share.BLOCK_N]), ds)
    tlx.fence("async_shared")  # the tensor cores read P and dS through the asynchronous proxy
    return ds


@triton.jit
def accumulate(
    group: tl.constexpr, share, buffers, scale_log2, ds_scale, dk_scale, DTYPE: tl.constexpr,
    SCORE: tl.constexpr,
):  # fmt: skip
    """One group's walk over the tiles: P and dS of its rows, one of dV and dK, and the sum of its dQ."""
    dq = tl.zeros([ROWS, share.HEAD_DIM], tl.float32)
    sequences = 0
    tile = share.tile(share.begin)
    buffers.q.await_full(0)
    for i in range(share.begin, share.end):
        n = i - share.begin
        following = share.tile(i + 1)
        left = tile.length - tile.key
        ds = SCORE(group, share, buffers, n, sequences, left, scale_log2, ds_scale, DTYPE)
        tlx.named_barrier_wait(TILE_READY, GROUPS * 128)  # P and dS of all 128 rows are written
        if group == 0:
            rows = sequences % buffers.dout.depth
            x = tlx.async_dot(tlx.local_trans(buffers.p[0]), buffers.dout.tiles[rows])
        else:
            x = tlx.async_dot(tlx.local_trans(buffers.ds[0]), buffers.q.tiles[0])
        dq = tlx.async_dot(ds, buffers.k.tiles[n % buffers.k.depth], dq)
        x = tlx.async_dot_wait(1, x)
        if group == 1 and DTYPE == tl.float16:
            x = x * dk_scale
        slot = buffers.grad.claim(n * GROUPS + group)  # the writer has sent the last tile's gradient off
        tlx.local_store(buffers.grad.tiles[slot], x.to(DTYPE))
        tlx.fence("async_shared")  # the writer's TMA store reads the staging tile
        tlx.barrier_arrive(buffers.grad.fulls[slot])
        dq = tlx.async_dot_wait(0, dq)
        release(share, buffers.k, n)  # the loaders may replace K and V, and dO when its sequence has ended
        if following.sequence != tile.sequence:
            sequences += 1
        tile = following
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
    records, count, progress, query_len, padded_len, stat_rows, first_row, heads,
    scale_log2, ds_scale, dk_scale,
    LOAD: tl.constexpr, ACCUMULATE: tl.constexpr, SCORE: tl.constexpr, WRITE: tl.constexpr,
    FLUSH: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, KV_STAGES: tl.constexpr,
    DOUT_STAGES: tl.constexpr, PAIR: tl.constexpr, LINKS: tl.constexpr, ADD: tl.constexpr,
    REGISTERS: tl.constexpr,
):  # fmt: skip
    """Persistent: the LINKS pairs of chain c, pairs c * LINKS and following, take head c % heads and their
    share of the tile list. ADD: earlier launches have left dK and dV of other rows, to which this one adds.

    Pairs of a chain wait for each other, the later ones for the earlier. So the host launches no more pairs
    with LINKS > 1 than the device holds at once. Where other work keeps some of them out, the device still
    starts CTAs in the order of their numbers, and a pair only waits for one with a lower number.
    """
    DTYPE: tl.constexpr = q.dtype
    KV_BYTES: tl.constexpr = 2 * BLOCK_N * HEAD_DIM
    ROW_BYTES: tl.constexpr = 2 * BLOCK_M * HEAD_DIM
    WARPS: tl.constexpr = 8 if PAIR == 1 else 0  # every warp releases K, in a pair each of 2 x 2 groups
    tl.static_assert(DOUT_STAGES >= KV_STAGES, "K's slot stands for dO's")
    tl.static_assert(KV_STAGES < STORED, "rank 0 may be KV_STAGES tiles ahead of what rank 1 has seen")
    pair = tl.program_id(0) // PAIR
    rank = pair * 0
    if PAIR > 1:
        rank = tlx.cluster_cta_rank()
    chain = pair // LINKS
    link = pair % LINKS
    shares = tl.num_programs(0) // (PAIR * LINKS) // heads
    turn = chain // heads
    tiles = tl.load(count)
    begin = tiles * turn // shares
    end = tiles * (turn + 1) // shares
    row = first_row + (link * PAIR + rank) * BLOCK_M
    share = Share(
        records, begin, end, chain % heads, row, rank, link, progress + pair, query_len,
        BLOCK_N, HEAD_DIM, PAIR, LINKS,
    )  # fmt: skip
    dout_tiles = tlx.local_alloc((BLOCK_M, HEAD_DIM), DTYPE, DOUT_STAGES)
    staging = tlx.local_alloc((ROWS, HEAD_DIM), tl.float32, GROUPS, reuse=dout_tiles)
    k_tiles = tlx.local_alloc((BLOCK_N, HEAD_DIM), DTYPE, KV_STAGES)
    v_tiles = tlx.local_alloc((BLOCK_N, HEAD_DIM), DTYPE, KV_STAGES)
    grad_tiles = tlx.local_alloc((BLOCK_N, HEAD_DIM), DTYPE, GROUPS)
    grad_fulls = tlx.alloc_warp_barrier(GROUPS, num_warps=4)
    buffers = Buffers(
        ring(tlx.local_alloc((BLOCK_M, HEAD_DIM), DTYPE, 1), 1, ROW_BYTES),
        ring(k_tiles, KV_STAGES, KV_BYTES, WARPS, PAIR * GROUPS),
        ring(v_tiles, KV_STAGES, KV_BYTES),
        ring(dout_tiles, DOUT_STAGES, ROW_BYTES + 2 * 4 * BLOCK_M),
        tlx.local_alloc((BLOCK_M,), tl.float32, DOUT_STAGES),
        tlx.local_alloc((BLOCK_M,), tl.float32, DOUT_STAGES),
        tlx.local_alloc((BLOCK_M, BLOCK_N), DTYPE, 1),
        tlx.local_alloc((BLOCK_M, BLOCK_N), DTYPE, 1),
        Ring(grad_tiles, grad_fulls, tlx.alloc_barriers(GROUPS), GROUPS, 0),
        tlx.alloc_barriers(STORED),
    )
    slot_row = turn * padded_len
    with tlx.async_tasks():
        with tlx.async_task("default"):
            dq = ACCUMULATE(0, share, buffers, scale_log2, ds_scale, dk_scale, DTYPE, SCORE)
            FLUSH(0, share, staging, dq, sums, slot_row)
        with tlx.async_task(num_warps=4, registers=REGISTERS):
            dq_ = ACCUMULATE(1, share, buffers, scale_log2, ds_scale, dk_scale, DTYPE, SCORE)
            FLUSH(1, share, staging, dq_, sums, slot_row)
        with tlx.async_task(num_warps=1, registers=24):
            LOAD(share, buffers, q, k, v, dout, log2_lse, delta, stat_rows, padded_len)
        with tlx.async_task(num_warps=1, registers=24):
            WRITE(share, buffers, dv, dk, ADD)
