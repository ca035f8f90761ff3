"""Hopper backward, KV-stationary: a CTA keeps 128 keys and meets all query rows that see them.

Roles: a loader warp (K and V once a tile; Q, dO and their statistics in rings), two compute warp groups of 64
keys each, and a writer warp that adds dQ to global memory. A compute group holds S^T and dP^T of its keys,
keeps P^T and dS^T in registers as the left operand of dV += P^T dO and dK += dS^T Q, and puts dS^T into
shared memory, where both groups read it: each forms one half of dQ's columns over all 128 keys.

    load      K V Q0 dO0 | Q1 dO1 | Q2 dO2 | ...
    group 0   S0 dP0 . P0 . dS0 |x| dV dK dQ0[:, left ] . stage | S1 ...      last: dK dV leave through K, V
    group 1   S0 dP0 . P0 . dS0 |x| dV dK dQ0[:, right] . stage | S1 ...
    reduce                                        add dQ0 to memory | ...
    |x| both groups meet: dS^T of all 128 keys is in shared memory
"""

import triton
import triton.language as tl
import triton.language.extra.tlx as tlx

from jfa.kernels.hopper.backward_compute import GROUPS, Buffers
from jfa.kernels.keys import Keys
from jfa.kernels.parts import Deal, Ring, ring
from jfa.kernels.ragged import ragged_row


@triton.aggregate
class Statistics:
    """Row statistics in global memory: (Hq, ``rows``) float32 each."""

    log2_lse: tl.tensor
    delta: tl.tensor
    rows: tl.tensor

    @triton.jit
    def bring(self, buffers, slot, head, row):
        """Statistics of the rows from ``row`` on, behind dO on its way to the slot."""
        at = head.to(tl.int64) * self.rows + row
        full = buffers.dout.fulls[slot]
        tlx.async_load(self.log2_lse + at, buffers.log2_lse[slot], bulk=True, barrier=full)
        tlx.async_load(self.delta + at, buffers.delta[slot], bulk=True, barrier=full)


@triton.jit
def load(
    keys, deal, buffers, q, k, v, dout, statistics,
    COUNT: tl.constexpr, TILE: tl.constexpr, DRAW: tl.constexpr, PUBLISH: tl.constexpr,
    LOAD_ROWS: tl.constexpr,
):  # fmt: skip
    """Loader: K and V of every tile of every item, then Q and dO of each block of rows that sees them."""
    k_item, turn, tiles = 0, 0, 0  # turns: blocks of query rows so far
    t = DRAW(deal, 0, 0)
    PUBLISH(deal, 0, t)
    while t < deal.items:
        k_item += 1
        following = DRAW(deal, k_item, t)
        PUBLISH(deal, k_item, following)  # before the item's loads: readers look one item ahead
        for i in range(COUNT(keys, t)):
            tile = TILE(keys, t, i)
            place = ragged_row(tile.kv_end, tile.kv_len, tile.key + keys.mine)
            place += (tile.head * buffers.HEAD_DIM,)
            slot = buffers.k.claim(tiles)
            tlx.barrier_expect_bytes(buffers.k.fulls[slot], buffers.k.bytes)
            tlx.async_descriptor_load(k, buffers.k.tiles[slot], place, buffers.k.fulls[slot])
            tlx.async_descriptor_load(v, buffers.v[slot], place, buffers.k.fulls[slot])
            low, high = keys.query_blocks(tile)
            for head in range(tile.head * keys.GROUP, (tile.head + 1) * keys.GROUP):
                for block in range(low, high):
                    LOAD_ROWS(keys, buffers, tile, q, dout, statistics, head, block, turn)
                    turn += 1
            tiles += 1
        t = following


@triton.jit
def load_rows(keys, buffers, tile, q, dout, statistics, head, block, turn):
    """Q, dO and the statistics of one block of query rows of one head."""
    row = block * keys.BLOCK_M
    column = head * buffers.HEAD_DIM
    slot = buffers.q.claim(turn)
    buffers.q.bring(turn, q, tile.q_end, tile.q_len, row, column)
    buffers.dout.bring(turn, dout, tile.dout_end, tile.q_len, row, column)
    statistics.bring(buffers, slot, head, tile.stat + row)


@triton.jit
def load_rows_in_pair(keys, buffers, tile, q, dout, statistics, head, block, turn):
    """As `load_rows`, but half of the rows, sent to both CTAs of the pair, which need the same Q and dO.

    Each CTA's barrier counts both halves. The descriptors' boxes have half as many rows.
    """
    row = block * keys.BLOCK_M
    column = head * buffers.HEAD_DIM
    slot = buffers.q.claim(turn)  # the groups of both CTAs are done with the slot in both
    send_half(keys, buffers.q, slot, q, tile.q_end, tile.q_len, row, column)
    send_half(keys, buffers.dout, slot, dout, tile.dout_end, tile.q_len, row, column)
    statistics.bring(buffers, slot, head, tile.stat + row)


@triton.jit
def send_half(keys, ring, slot, desc, end, length, row, column):
    """This CTA's half of the rows into the same place of both CTAs' shared memory."""
    HALF: tl.constexpr = keys.BLOCK_M // 2
    full = ring.fulls[slot]
    tlx.barrier_expect_bytes(full, ring.bytes)
    for rank in tl.static_range(2):
        if keys.mine == rank * keys.KEYS:
            half = tlx.local_slice(ring.tiles[slot], [rank * HALF, 0], [HALF, ring.tiles.shape[1]])
            place = ragged_row(end, length, row + rank * HALF) + (column,)
            tlx.async_descriptor_load(desc, half, place, full, multicast_targets=[0, 1])


@triton.jit
def add_turn(keys, buffers, tile, dq, head, block, turn):
    """Start the reduce-adds of all parts of one turn's dQ; rows past the sequence's queries are dropped."""
    place = ragged_row(tile.q_end, tile.q_len, block * keys.BLOCK_M)
    for group in tl.static_range(GROUPS):
        slot = buffers.dq.await_full(turn * GROUPS + group)
        column = head * buffers.HEAD_DIM + group * (buffers.HEAD_DIM // GROUPS)
        tlx.async_descriptor_store(dq, buffers.dq.tiles[slot], place + (column,), store_reduce="add")


@triton.jit
def settle_at_once(buffers, turn):
    """One staging buffer: wait until this turn's parts are read before the groups may stage the next."""
    tlx.async_descriptor_store_wait(0)
    for group in tl.static_range(GROUPS):
        buffers.dq.release(turn * GROUPS + group)


@triton.jit
def settle_one_behind(buffers, turn):
    """Two staging buffers: this turn's adds stay in flight, those of the turn before have been read."""
    tlx.async_descriptor_store_wait(GROUPS)
    if turn > 0:
        for group in tl.static_range(GROUPS):
            buffers.dq.release((turn - 1) * GROUPS + group)


@triton.jit
def reduce(
    keys, deal, buffers, dq,
    COUNT: tl.constexpr, TILE: tl.constexpr, HEAR: tl.constexpr, SETTLE: tl.constexpr,
):  # fmt: skip
    """Writer: adds every turn's dQ to global memory, in float32, by TMA."""
    k_item, turn = 0, 0
    t = HEAR(deal, 0)
    while t < deal.items:
        k_item += 1
        following = HEAR(deal, k_item)
        for i in range(COUNT(keys, t)):
            tile = TILE(keys, t, i)
            low, high = keys.query_blocks(tile)
            for head in range(tile.head * keys.GROUP, (tile.head + 1) * keys.GROUP):
                for block in range(low, high):
                    add_turn(keys, buffers, tile, dq, head, block, turn)
                    SETTLE(buffers, turn)
                    turn += 1
        t = following
    tlx.async_descriptor_store_wait(0)


@triton.jit(do_not_specialize=["batch", "query_len", "padded_len", "stat_rows", "left", "right"])
def kernel(
    q, k, v, dout, dq, dk, dv, log2_lse, delta,
    records, counts, kv_offsets, q_offsets, counter,
    batch, query_len, padded_len, stat_rows, left, right, scale_log2, scale,
    LOAD: tl.constexpr, LOAD_ROWS: tl.constexpr, COMPUTE: tl.constexpr, WALK: tl.constexpr,
    MULTIPLY: tl.constexpr, STORE: tl.constexpr, REDUCE: tl.constexpr, SETTLE: tl.constexpr,
    ITEMS: tl.constexpr, COUNT: tl.constexpr, TILE: tl.constexpr,
    DRAW: tl.constexpr, PUBLISH: tl.constexpr, HEAR: tl.constexpr,
    HEADS: tl.constexpr, GROUP: tl.constexpr, BROADCAST: tl.constexpr, LEFT: tl.constexpr,
    RIGHT: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    ROW_STAGES: tl.constexpr, DS_STAGES: tl.constexpr, DQ_STAGES: tl.constexpr, PAIR: tl.constexpr,
    REGISTERS: tl.constexpr,
):  # fmt: skip
    """Persistent: one CTA an SM (a pair of CTAs on two), items as the deal hands them out."""
    KEYS: tl.constexpr = BLOCK_N // PAIR
    DTYPE: tl.constexpr = q.dtype
    ROW_BYTES: tl.constexpr = 2 * BLOCK_M * HEAD_DIM
    STAT_BYTES: tl.constexpr = 2 * 4 * BLOCK_M
    PARTS: tl.constexpr = GROUPS * DQ_STAGES
    program, programs = tl.program_id(0) // PAIR, tl.num_programs(0) // PAIR
    mine = program * 0
    if PAIR > 1:
        mine = tlx.cluster_cta_rank() * KEYS
    keys = Keys(
        records, counts, kv_offsets, q_offsets, batch, query_len, padded_len, left, right,
        HEADS, GROUP, BROADCAST, LEFT, RIGHT, BLOCK_M, BLOCK_N, KEYS, mine,
    )  # fmt: skip
    tickets = tlx.local_alloc((1,), tl.int32, 2)
    heard = tlx.alloc_warp_barrier(2, num_warps=9)  # two compute groups and the writer
    deal = Deal(program, programs, ITEMS(keys), counter, tickets, tlx.alloc_barriers(2), heard, 1)
    k_tiles = tlx.local_alloc((KEYS, HEAD_DIM), DTYPE, 1)
    v_tiles = tlx.local_alloc((KEYS, HEAD_DIM), DTYPE, 1)
    dk_tiles, dv_tiles = k_tiles, v_tiles
    if HEAD_DIM == 64:  # half a K tile is half a swizzle atom wide, which a TMA store cannot read
        dk_tiles = tlx.local_alloc((KEYS, HEAD_DIM), DTYPE, 1)
        dv_tiles = tlx.local_alloc((KEYS, HEAD_DIM), DTYPE, 1)
    q_tiles = tlx.local_alloc((BLOCK_M, HEAD_DIM), DTYPE, ROW_STAGES)
    # Q and dO are released by every warp of a CTA's groups, in a pair by one thread of each of four groups.
    q_ring = ring(q_tiles, ROW_STAGES, ROW_BYTES, 8 if PAIR == 1 else 0, PAIR * GROUPS)
    dout_tiles = tlx.local_alloc((BLOCK_M, HEAD_DIM), DTYPE, ROW_STAGES)
    dq_tiles = tlx.local_alloc((BLOCK_M, HEAD_DIM // GROUPS), tl.float32, PARTS)
    buffers = Buffers(
        ring(k_tiles, 1, 2 * 2 * KEYS * HEAD_DIM, 8),
        v_tiles,
        dk_tiles,
        dv_tiles,
        q_ring,
        ring(dout_tiles, ROW_STAGES, ROW_BYTES + STAT_BYTES),
        tlx.local_alloc((BLOCK_M,), tl.float32, ROW_STAGES),
        tlx.local_alloc((BLOCK_M,), tl.float32, ROW_STAGES),
        tlx.local_alloc((KEYS, BLOCK_M), DTYPE, DS_STAGES),
        Ring(dq_tiles, tlx.alloc_warp_barrier(PARTS, num_warps=4), tlx.alloc_barriers(PARTS), PARTS, 0),
        HEAD_DIM,
        PAIR,
        DS_STAGES,
    )
    statistics = Statistics(log2_lse, delta, stat_rows)
    leave = tlx.alloc_barriers(1)
    lists: tl.constexpr = (COUNT, TILE, HEAR)
    work: tl.constexpr = (WALK, MULTIPLY, STORE)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            COMPUTE(0, keys, deal, buffers, dk, dv, scale_log2, scale, *lists, *work)
        with tlx.async_task(num_warps=4, registers=REGISTERS):
            COMPUTE(1, keys, deal, buffers, dk, dv, scale_log2, scale, *lists, *work)
        with tlx.async_task(num_warps=1, registers=24):
            LOAD(keys, deal, buffers, q, k, v, dout, statistics, COUNT, TILE, DRAW, PUBLISH, LOAD_ROWS)
        with tlx.async_task(num_warps=1, registers=24):
            REDUCE(keys, deal, buffers, dq, COUNT, TILE, HEAR, SETTLE)
    if PAIR > 1:
        # The other CTA's last arrivals still reach into this one's shared memory: leave together. (A cluster
        # barrier would wait for the worker warps, which never arrive at it.)
        tlx.barrier_arrive(leave[0], 1, remote_cta_rank=1 - tlx.cluster_cta_rank())
        tlx.barrier_wait(leave[0], 0)
