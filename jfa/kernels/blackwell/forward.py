"""The Blackwell forward kernel: its roles, and the kernel that casts them."""

import triton
import triton.language as tl
import triton.language.extra.tlx as tlx

from jfa.kernels.blackwell.tmem import ROWS, LaunchControl, Turns, make_ring, make_streams
from jfa.kernels.parts import LN2, Work, fill_empty
from jfa.kernels.ragged import ragged_row


@triton.jit
def load(work, deal, q, kv, q_desc, k_desc, v_desc, HEAR, FRESH, TILES: tl.constexpr, HEAD_DIM: tl.constexpr):
    """TMA warp: the item's query tiles, then K and V block by block, from the last block down."""
    k, q_item, kv_item = 0, 0, 0
    t = HEAR(deal, k)
    tile = work.fetch(t, deal.items)
    while t < deal.items:
        before = tile
        tile = work.fetch(t, deal.items)
        if (k == 0) | FRESH(work, tile, before):
            for part in tl.static_range(TILES):
                row = tile.row + part * (work.BLOCK_M - ROWS)
                column = (tile.head + part * (work.PACK - 1)) * HEAD_DIM
                q.fill(q_item + part, q_desc, tile.q_end, tile.q_len, row, column)
            q_item += TILES
        column = tile.head // work.GROUP * HEAD_DIM
        last, blocks = work.blocks(tile)
        for i in range(blocks):
            row = (last - i) * work.BLOCK_N
            kv.fill(kv_item, k_desc, tile.kv_end, tile.kv_len, row, column)
            kv.fill(kv_item + 1, v_desc, tile.kv_end, tile.kv_len, row, column)
            kv_item += 2
        k += 1
        t = HEAR(deal, k)


@triton.jit
def score(s, q, kv, q_item, kv_item, u):
    """S = Q K^T of block ``u`` (128 x BLOCK_N): softmax waits for it, the loader gets K's slot back."""
    group = u & 1
    q_slot = q.await_full(q_item)  # load -> mma: Q has arrived
    k_slot = kv.await_full(kv_item)  # load -> mma: K has arrived
    keys = tlx.local_trans(kv.tiles[k_slot])
    done = [s.score_full[group], kv.empties[k_slot]]
    tlx.async_dot(q.tiles[q_slot], keys, s.scores[group], use_acc=False, mBarriers=done)


@triton.jit
def accumulate(s, kv, kv_item, u, i, steps):
    """acc += P V of block ``u``, the i-th of a tile's steps; each group's first one starts from zero."""
    group = u & 1
    v_slot = kv.await_full(kv_item)  # load -> mma: V has arrived
    tlx.barrier_wait(s.ready[group], (u >> 1) & 1)  # softmax: P is there; correction: acc is rescaled
    done = [kv.empties[v_slot]]
    tlx.async_dot(s.weights[group], kv.tiles[v_slot], s.acc[group], use_acc=i >= 2, mBarriers=done)
    if i + 1 == steps:  # mma -> correction
        tlx.tcgen05_commit(s.acc_full[0])


@triton.jit
def mma(work, deal, q, kv, s, HEAR, FRESH):
    """Tensor-core warp: S of two blocks ahead, then for each block P V and the S that takes its place."""
    TILES: tl.constexpr = s.TILES
    k, u, q_item, kv_item = 0, 0, 0, 0
    t = HEAR(deal, k)
    while t < deal.items:
        tile = work.fetch(t, deal.items)
        last, blocks = work.blocks(tile)
        steps = blocks * TILES
        for group in tl.static_range(2):
            # correction -> mma: the tile before has left TMEM, statistics and accumulator
            tlx.barrier_wait(s.total_free[group], (k & 1) ^ 1)
        for i in range(-2, steps):
            if i >= 0:
                accumulate(s, kv, kv_item + i // TILES * 2 + 1, u + i, i, steps)
            if i + 2 < steps:  # its scores overwrite the weights just read; MMAs run in order
                score(s, q, kv, q_item + (i + 2) % TILES, kv_item + (i + 2) // TILES * 2, u + i + 2)
        u += steps
        kv_item += blocks * 2
        for part in tl.static_range(TILES):  # mma -> load: Q may be replaced
            tlx.tcgen05_commit(q.empties[(q_item + part) % q.depth])
        q_item += TILES
        k += 1
        t = HEAR(deal, k)


@triton.jit
def mma_across(work, deal, q, kv, s, HEAR, FRESH):
    """Tensor-core warp that never drains: P V trails S by two blocks, also across the end of a tile."""
    TILES: tl.constexpr = s.TILES
    k, u, q_item, kv_item = 0, 0, 0, 0
    v0, i0, steps0, v1, i1, steps1 = 0, 0, 0, 0, 0, 0  # of the two blocks whose P V is due
    t = HEAR(deal, k)
    tile = work.fetch(t, deal.items)
    while t < deal.items:
        last, blocks = work.blocks(tile)
        steps = blocks * TILES
        for i in range(steps):
            if u >= 2:
                accumulate(s, kv, v0, u - 2, i0, steps0)
            if i < 2:  # correction -> mma: it has read the group's totals of the tile before
                tlx.barrier_wait(s.total_free[u & 1], (k & 1) ^ 1)
            score(s, q, kv, q_item + i % TILES, kv_item + i // TILES * 2, u)
            v0, i0, steps0 = v1, i1, steps1
            v1, i1, steps1 = kv_item + i // TILES * 2 + 1, i, steps
            u += 1
        if steps == 1:  # the other group's too: a parity may not fall two turns behind
            tlx.barrier_wait(s.total_free[u & 1], (k & 1) ^ 1)
        kv_item += blocks * 2
        k += 1
        t = HEAR(deal, k)
        before = tile
        tile = work.fetch(t, deal.items)
        if FRESH(work, tile, before):
            for part in tl.static_range(TILES):  # mma -> load: Q may be replaced
                tlx.tcgen05_commit(q.empties[(q_item + part) % q.depth])
            q_item += TILES
    if u >= 2:
        accumulate(s, kv, v0, u - 2, i0, steps0)
    if u >= 1:
        accumulate(s, kv, v1, u - 1, i1, steps1)


@triton.jit
def rescale(s, group):
    """acc *= factor, SLICE columns at a time."""
    factor = tlx.local_load(s.factor[group])
    for c in tl.static_range(s.HEAD_DIM // s.SLICE):
        columns = tlx.local_slice(s.acc[group], [0, c * s.SLICE], [ROWS, s.SLICE])
        tlx.local_store(columns, tlx.local_load(columns) * factor)


@triton.jit
def rescale_if_needed(s, group):
    """The same when any row's maximum has moved; softmax gives exactly 1 where it has not."""
    if tl.min(tl.reshape(tlx.local_load(s.factor[group]), [ROWS]), 0) < 1.0:
        rescale(s, group)


@triton.jit
def correction(work, deal, s, o, lse, HEAR, RESCALE, OVERLAP: tl.constexpr):
    """Warp group that owns the accumulators between MMAs: rescales them, then writes the tile out.

    Returns the first item past those with keys that the deal gave this CTA.
    """
    k, u, o_item = 0, 0, 0
    t = HEAR(deal, k)
    while t < deal.items:
        tile = work.fetch(t, deal.items)
        last, blocks = work.blocks(tile)
        for i in range(blocks * s.TILES):
            group = u & 1
            tlx.barrier_wait(s.factor_full[group], (u >> 1) & 1)  # softmax -> correction
            if i >= 2:  # S of this block came after P V of the block before: the accumulator is at rest
                RESCALE(s, group)
            tlx.barrier_arrive(s.ready[group])  # correction -> mma
            u += 1
        sum0, max0 = totals(s, 0, k, OVERLAP)
        sum1, max1 = totals(s, 1, k, OVERLAP)
        tlx.barrier_wait(s.acc_full[0], k & 1)  # mma -> correction: all P V of the tile are done
        finish(work, tile, s, o, o_item, lse, sum0, max0, sum1, max1)
        if not OVERLAP:  # correction -> mma, softmax: the tile has left TMEM
            tlx.barrier_arrive(s.total_free[0])
            tlx.barrier_arrive(s.total_free[1])
        o_item += s.TILES
        k += 1
        t = HEAR(deal, k)
    return t


@triton.jit
def totals(s, group, k, OVERLAP: tl.constexpr):
    """Row sum and maximum (128, 1) that a softmax group leaves at the end of turn ``k``."""
    tlx.barrier_wait(s.total_full[group], k & 1)  # softmax -> correction
    row_sum, row_max = tlx.local_load(s.row_sum[group]), tlx.local_load(s.row_max[group])
    if OVERLAP:  # correction -> mma, softmax: the next tile's S may come; its P V waits for ``ready``
        tlx.barrier_arrive(s.total_free[group])
    return row_sum, row_max


@triton.jit
def finish(work, tile, s, o, o_item, lse, sum0, max0, sum1, max1):
    """Epilogue: accumulators / row sums -> O tiles in shared memory, and lse; two tiles, or one in two."""
    if s.TILES == 2:
        emit(work, tile, 0, s, o, o_item, lse, sum0, max0, 1 / sum0, sum0)
        emit(work, tile, 1, s, o, o_item + 1, lse, sum1, max1, 1 / sum1, sum1)
    else:
        # The groups saw different keys of the same rows: bring both to the larger maximum and add them.
        top = tl.maximum(max0, max1)
        part0 = tl.where(max0 == -float("inf"), 0.0, tl.math.exp2((max0 - top) * s.scale))
        part1 = tl.where(max1 == -float("inf"), 0.0, tl.math.exp2((max1 - top) * s.scale))
        total = sum0 * part0 + sum1 * part1
        emit(work, tile, 0, s, o, o_item, lse, total, top, part0 / total, part1 / total)


@triton.jit
def emit(work, tile, part, s, o, o_item, lse, total, top, weight, weight1):
    """One O tile (128, HEAD_DIM) and its lse; a row that saw no key has sum 0 and gets 0 and -inf."""
    slot = o.claim(o_item)  # store -> correction: the slot's last tile has left
    for c in tl.static_range(s.HEAD_DIM // s.SLICE):
        out = tlx.local_load(tlx.local_slice(s.acc[part], [0, c * s.SLICE], [ROWS, s.SLICE])) * weight
        out = tl.where((total == 0) | (weight == 0), 0.0, out)
        if s.TILES == 1:
            other = tlx.local_load(tlx.local_slice(s.acc[1], [0, c * s.SLICE], [ROWS, s.SLICE])) * weight1
            out += tl.where((total == 0) | (weight1 == 0), 0.0, other)
        columns = tlx.local_slice(o.tiles[slot], [0, c * s.SLICE], [ROWS, s.SLICE])
        tlx.local_store(columns, out.to(o.tiles.dtype))
    tlx.fence("async_shared")  # the store warp's TMA reads what these threads wrote
    tlx.barrier_arrive(o.fulls[slot])  # correction -> store
    rows = part * (work.BLOCK_M - ROWS) + tl.arange(0, ROWS)
    start = work.lse_row(tile) + part * (work.PACK - 1) * work.q_rows
    value = (tl.reshape(top, [ROWS]) * s.scale + tl.math.log2(tl.reshape(total, [ROWS]))) * LN2
    tl.store(lse + start + rows, value, tile.row + rows < tile.q_len)


@triton.jit
def store(work, deal, o, o_desc, HEAR, TILES: tl.constexpr, HEAD_DIM: tl.constexpr):
    """TMA warp: O tiles to global memory; rows past the sequence's last are clipped."""
    k, o_item = 0, 0
    t = HEAR(deal, k)
    while t < deal.items:
        tile = work.fetch(t, deal.items)
        for part in tl.static_range(TILES):
            slot = o.await_full(o_item)  # correction -> store
            row = tile.row + part * (work.BLOCK_M - ROWS)
            column = (tile.head + part * (work.PACK - 1)) * HEAD_DIM
            span, end, first = ragged_row(work.out_end(tile), tile.q_len, row)
            tlx.async_descriptor_store(o_desc, o.tiles[slot], [span, end, first, column])
            tlx.async_descriptor_store_wait(0)
            o.release(o_item)  # store -> correction
            o_item += 1
        k += 1
        t = HEAR(deal, k)


@triton.jit(do_not_specialize=["q_rows", "left", "right"])
def kernel(
    q_desc,
    k_desc,
    v_desc,
    o_desc,
    out,
    lse,
    records,
    counts,
    q_offsets,
    q_rows,
    left,
    right,
    scale,
    LOAD: tl.constexpr,
    MMA: tl.constexpr,
    SOFTMAX: tl.constexpr,
    WALK: tl.constexpr,
    WEIGH: tl.constexpr,
    CORRECTION: tl.constexpr,
    RESCALE: tl.constexpr,
    STORE: tl.constexpr,
    DRAW: tl.constexpr,
    HEAR: tl.constexpr,
    FRESH: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BROADCAST: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PACK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILES: tl.constexpr,
    Q_DEPTH: tl.constexpr,
    KV_DEPTH: tl.constexpr,
    O_DEPTH: tl.constexpr,
    OVERLAP: tl.constexpr,
    CLASSES: tl.constexpr,
    SLICE: tl.constexpr,
    SOFTMAX_REGS: tl.constexpr,
    WARP_REGS: tl.constexpr,
):
    """Persistent: each CTA takes items until none is left. ``scale`` is in log2 units."""
    DTYPE: tl.constexpr = tlx.dtype_of(q_desc)
    q = make_ring(ROWS, HEAD_DIM, DTYPE, Q_DEPTH, 1)
    kv = make_ring(BLOCK_N, HEAD_DIM, DTYPE, KV_DEPTH, TILES)  # every query tile lets go of a K/V tile
    o = make_ring(ROWS, HEAD_DIM, DTYPE, O_DEPTH, 1)
    s = make_streams(scale, BLOCK_N, HEAD_DIM, DTYPE, TILES, SLICE)
    batch = (records, counts, q_offsets, q_rows, left, right)
    work = Work(*batch, HEADS, GROUP, BROADCAST, LEFT, RIGHT, BLOCK_M, BLOCK_N, PACK)
    if DRAW is not None:  # heard by load, mma, two softmax groups, correction, store, and the warp that asks
        context = tlx.clc_create_context(num_consumers=7, num_stages=2)
        deal = LaunchControl(tl.program_id(0), tl.num_programs(0), work.items(), context, CLASSES, 1)
    else:
        deal = Turns(tl.program_id(0), tl.num_programs(0), work.items(), CLASSES)
    # Blocks 0, 1, 2, ... of a tile, even ones to group 0, odd ones to group 1; time runs to the right.
    #
    #   load        Q K0 V0 K1 V1 | K2 V2 ...        ring: a slot comes back when its MMA is done
    #   mma         S0 S1 ........ PV0 S2 PV1 S3 PV2 S4 PV3 ...        S is two blocks ahead of P V
    #   softmax 0      [max exp P]0 ...... [max exp P]2 ......         each has the tensor core's time
    #   softmax 1         [max exp P]1 ...... [max exp P]3             of the other's block to hide in
    #   correction      (0)  (1)      a*=2    a*=3   ...    [O = a / sum, lse]    while exp is going on
    #   store                                                          [O -> HBM]
    #   draw        asks for the next item while this one is worked on
    # From step ``stationary`` on the next tile's S0 S1 come before this tile's last two P V.
    with tlx.async_tasks():
        with tlx.async_task("default"):
            t = CORRECTION(work, deal, s, o, lse, HEAR, RESCALE, OVERLAP)
            empty = deal.program
            if DRAW is not None:  # only the CTA that heard of an item may fill it
                empty = t - deal.items
            rest = Turns(empty, deal.programs, deal.items, CLASSES)
            fill_empty(work, rest, out, lse, 0, BLOCK_M, HEAD_DIM)
        with tlx.async_task(num_warps=4, registers=SOFTMAX_REGS, replicate=2):
            SOFTMAX(work, deal, s, tlx.async_task_replica_id(), HEAR, WALK, WEIGH)
        with tlx.async_task(num_warps=1, registers=WARP_REGS):
            MMA(work, deal, q, kv, s, HEAR, FRESH)
        with tlx.async_task(num_warps=1, registers=WARP_REGS):
            LOAD(work, deal, q, kv, q_desc, k_desc, v_desc, HEAR, FRESH, TILES, HEAD_DIM)
        with tlx.async_task(num_warps=1, registers=WARP_REGS):
            STORE(work, deal, o, o_desc, HEAR, TILES, HEAD_DIM)
        if DRAW is not None:
            with tlx.async_task(num_warps=1, registers=WARP_REGS):
                DRAW(deal, HEAR)
