"""The compute groups of the KV-stationary backward on Hopper: scores, products, walk, epilogue."""

import triton
import triton.language as tl
import triton.language.extra.tlx as tlx

from jfa.kernels.parts import Ring
from jfa.kernels.ragged import ragged_row

GROUPS = tl.constexpr(2)  # compute warp groups
ROWS = tl.constexpr(64)  # keys of a compute group
SCORES_READY = tl.constexpr(9)  # named barrier: dS of both groups is written
SCORES_READ = tl.constexpr(10)  # named barrier: dS and K of both groups are read


@triton.aggregate
class Buffers:
    """The rings between the roles, and the tile that the compute groups exchange.

    Q and dO of a turn are released together, so that the slots of Q stand for those of dO.
    """

    k: Ring  # K and V of the key tile, one barrier for both; one slot
    v: tlx.buffered_tensor
    dk: tlx.buffered_tensor  # staging of the results: the K and V tiles themselves where they are wide enough
    dv: tlx.buffered_tensor
    q: Ring
    dout: Ring  # dO, with
    log2_lse: tlx.buffered_tensor  # the rows' lse in log2 units and
    delta: tlx.buffered_tensor  # delta, in the slots of the dO ring
    ds: tlx.buffered_tensor
    dq: Ring  # compute -> reduce: a part of dQ from either group a turn
    HEAD_DIM: tl.constexpr
    PAIR: tl.constexpr  # CTAs that share Q and dO
    DS_STAGES: tl.constexpr  # tiles of dS

    @triton.jit
    def release_rows(self, turn):
        """This group is done with a turn's Q and dO; in a pair both loaders must know: each fills half."""
        slot = turn % self.q.depth
        if self.PAIR == 1:
            tlx.barrier_arrive(self.q.empties[slot])
        else:
            tlx.barrier_arrive(self.q.empties[slot], 1, remote_cta_rank=0)
            tlx.barrier_arrive(self.q.empties[slot], 1, remote_cta_rank=1)


@triton.jit
def scores(group: tl.constexpr, keys, tile, buffers, block, turn, scale_log2, masked):
    """P^T and dS^T of this group's 64 keys against one block of query rows, in registers."""
    DTYPE: tl.constexpr = buffers.k.tiles.dtype
    mine: tl.constexpr = group * ROWS
    k_rows = tlx.local_slice(buffers.k.tiles[0], [mine, 0], [ROWS, buffers.HEAD_DIM])
    v_rows = tlx.local_slice(buffers.v[0], [mine, 0], [ROWS, buffers.HEAD_DIM])
    slot = buffers.q.await_full(turn)
    s = tlx.async_dot(k_rows, tlx.local_trans(buffers.q.tiles[slot]))
    slot = buffers.dout.await_full(turn)
    dp = tlx.async_dot(v_rows, tlx.local_trans(buffers.dout.tiles[slot]))
    log2_lse = tlx.local_load(buffers.log2_lse[slot])
    s = tlx.async_dot_wait(1, s)
    p = tl.math.exp2(s * scale_log2 - log2_lse[None, :])
    if masked:
        key = tile.key + keys.mine + mine + tl.arange(0, ROWS)
        row = block * keys.BLOCK_M + tl.arange(0, keys.BLOCK_M)
        p = tl.where(keys.seen(tile, key, row), p, 0.0)
    delta = tlx.local_load(buffers.delta[slot])
    dp = tlx.async_dot_wait(0, dp)
    ds = p * (dp - delta[None, :])
    return p.to(DTYPE), ds.to(DTYPE), slot


@triton.jit
def share_scores(group: tl.constexpr, keys, buffers, turn, ds):
    """dS^T of this group's keys into shared memory; returns when both groups' halves are there."""
    mine = tlx.local_slice(buffers.ds[turn % buffers.DS_STAGES], [group * ROWS, 0], [ROWS, keys.BLOCK_M])
    tlx.local_store(mine, ds)
    tlx.fence("async_shared")  # the tensor cores read dS through the asynchronous proxy
    tlx.named_barrier_wait(SCORES_READY, GROUPS * 128)


@triton.jit
def start_dq(group: tl.constexpr, keys, buffers, turn):
    """Start dQ = dS K over all keys of the CTA, this group's half of its columns."""
    WIDTH: tl.constexpr = buffers.HEAD_DIM // GROUPS
    k_half = tlx.local_slice(buffers.k.tiles[0], [0, group * WIDTH], [keys.KEYS, WIDTH])
    return tlx.async_dot(tlx.local_trans(buffers.ds[turn % buffers.DS_STAGES]), k_half)


@triton.jit
def put(group: tl.constexpr, buffers, turn, dq):
    """Compute -> reduce: this group's half of dQ's columns into its staging tile."""
    i = turn * GROUPS + group
    slot = buffers.dq.claim(i)  # the writer's add of the tile's last content has been read
    tlx.local_store(buffers.dq.tiles[slot], dq)
    tlx.fence("async_shared")  # the TMA unit reads it
    tlx.barrier_arrive(buffers.dq.fulls[slot])


@triton.jit
def multiply(group: tl.constexpr, keys, tile, buffers, block, turn, dk, dv, scale_log2, masked):
    """One block of query rows: dV, dK, and this group's half of dQ's columns in one piece.

    dV needs no wait of its own: products end in the order of their start.
    """
    p, ds, slot = scores(group, keys, tile, buffers, block, turn, scale_log2, masked)
    dv = tlx.async_dot(p, buffers.dout.tiles[slot], dv)
    share_scores(group, keys, buffers, turn, ds)
    dk = tlx.async_dot(ds, buffers.q.tiles[slot], dk)
    dq = start_dq(group, keys, buffers, turn)
    dk = tlx.async_dot_wait(1, dk)
    buffers.release_rows(turn)  # the loader may replace Q and dO
    dq = tlx.async_dot_wait(0, dq)
    tlx.named_barrier_wait(SCORES_READ, GROUPS * 128)
    put(group, buffers, turn, dq)
    return dk, dv


@triton.jit
def multiply_dq_first(group: tl.constexpr, keys, tile, buffers, block, turn, dk, dv, scale_log2, masked):
    """As `multiply`, but dQ before dK: its registers leave for staging while the tensor cores form dK.

    With a second tile of dS the groups need not meet again: who fills a tile has met the other group since
    its last turn with that tile ended.
    """
    p, ds, slot = scores(group, keys, tile, buffers, block, turn, scale_log2, masked)
    dv = tlx.async_dot(p, buffers.dout.tiles[slot], dv)
    share_scores(group, keys, buffers, turn, ds)
    dq = start_dq(group, keys, buffers, turn)
    dk = tlx.async_dot(ds, buffers.q.tiles[slot], dk)
    dq = tlx.async_dot_wait(1, dq)
    put(group, buffers, turn, dq)
    dk = tlx.async_dot_wait(0, dk)
    buffers.release_rows(turn)  # the loader may replace Q and dO
    if buffers.DS_STAGES == 1:
        tlx.named_barrier_wait(SCORES_READ, GROUPS * 128)
    return dk, dv


@triton.jit
def walk_masked(
    group: tl.constexpr, keys, tile, buffers, low, high, turn, dk, dv, scale_log2, MULTIPLY: tl.constexpr
):
    """Blocks [low, high) of query rows of one head, every one masked."""
    for block in tl.range(low, high, disable_licm=True):  # else addresses would be spilled
        dk, dv = MULTIPLY(group, keys, tile, buffers, block, turn, dk, dv, scale_log2, True)
        turn += 1
    return dk, dv, turn


@triton.jit
def walk_peeled(
    group: tl.constexpr, keys, tile, buffers, low, high, turn, dk, dv, scale_log2, MULTIPLY: tl.constexpr
):
    """Blocks [low, high) of query rows of one head; masks only where an edge runs through the tile."""
    first, end = keys.bulk_blocks(tile, low, high)
    for block in tl.range(low, high, disable_licm=keys.GROUP > 1):  # else addresses would be spilled
        masked = (block < first) | (block >= end)
        dk, dv = MULTIPLY(group, keys, tile, buffers, block, turn, dk, dv, scale_log2, masked)
        turn += 1
    return dk, dv, turn


@triton.jit
def store(group: tl.constexpr, keys, tile, buffers, dk, dv, dk_out, dv_out, scale):
    """Epilogue: dK and dV leave through this group's rows of the K and V tiles; TMA clips the last tile.

    The groups meet at SCORES_READ behind their last dQ, which read the other group's K rows too.
    """
    DTYPE: tl.constexpr = buffers.k.tiles.dtype
    mine: tl.constexpr = group * ROWS
    dk_rows = tlx.local_slice(buffers.dk[0], [mine, 0], [ROWS, buffers.HEAD_DIM])
    dv_rows = tlx.local_slice(buffers.dv[0], [mine, 0], [ROWS, buffers.HEAD_DIM])
    place = ragged_row(tile.kv_end, tile.kv_len, tile.key + keys.mine + mine)
    place += (tile.head * buffers.HEAD_DIM,)
    if buffers.DS_STAGES > 1:
        tlx.named_barrier_wait(SCORES_READ, GROUPS * 128)
    tlx.local_store(dk_rows, (dk * scale).to(DTYPE))
    tlx.local_store(dv_rows, dv.to(DTYPE))
    tlx.fence("async_shared")  # the TMA unit reads them
    tlx.async_descriptor_store(dk_out, dk_rows, place)
    tlx.async_descriptor_store(dv_out, dv_rows, place)
    tlx.async_descriptor_store_wait(0)  # read out: the loader may overwrite K and V


@triton.jit
def compute(
    group: tl.constexpr, keys, deal, buffers, dk_out, dv_out, scale_log2, scale,
    COUNT: tl.constexpr, TILE: tl.constexpr, HEAR: tl.constexpr,
    WALK: tl.constexpr, MULTIPLY: tl.constexpr, STORE: tl.constexpr,
):  # fmt: skip
    """A compute group: dK and dV of its 64 keys of every tile, and its columns of every dQ."""
    k_item, turn, tiles = 0, 0, 0
    t = HEAR(deal, 0)
    while t < deal.items:
        k_item += 1
        following = HEAR(deal, k_item)
        for i in range(COUNT(keys, t)):
            tile = TILE(keys, t, i)
            low, high = keys.query_blocks(tile)
            dk = tl.zeros([ROWS, buffers.HEAD_DIM], tl.float32)
            dv = tl.zeros([ROWS, buffers.HEAD_DIM], tl.float32)
            buffers.k.await_full(tiles)
            for _ in range(keys.GROUP):
                dk, dv, turn = WALK(group, keys, tile, buffers, low, high, turn, dk, dv, scale_log2, MULTIPLY)
            STORE(group, keys, tile, buffers, dk, dv, dk_out, dv_out, scale)
            buffers.k.release(tiles)
            tiles += 1
        t = following
