"""Forward attention on Hopper (sm_90): a loader warp feeds two consumer warp groups of 64 query rows each.

Every step of the ladder is this one kernel with other roles: see ``jfa.kernels.hopper.ladder``.
"""

import triton
import triton.language as tl
import triton.language.extra.tlx as tlx

from jfa.kernels.parts import LN2, Deal, Ring, Work, fill_empty
from jfa.kernels.ragged import ragged_row

ROWS = tl.constexpr(64)  # query rows of a consumer: one wgmma M


@triton.aggregate
class State:
    """What a consumer carries from block to block of keys: O and its statistics in log2 units, and P."""

    acc: tl.tensor  # (ROWS, HEAD_DIM) float32, weighted sum of V so far
    top: tl.tensor  # (ROWS,) largest score * scale so far
    total: tl.tensor  # (ROWS,) sum of the weights so far
    p: tl.tensor  # (ROWS, BLOCK_N) weights of the last block, not yet multiplied with its V


@triton.aggregate
class Group:
    """A consumer warp group: which one it is, the rings it reads, its staging tile for O, and its roles."""

    ME: tl.constexpr
    q: Ring
    k: Ring
    v: Ring
    staging: tlx.buffered_tensor
    HEAD_DIM: tl.constexpr
    DTYPE: tl.constexpr
    SOFTMAX: tl.constexpr
    PINGPONG: tl.constexpr

    @triton.jit
    def rows(self):
        """This group's rows, counted in the tile."""
        return self.ME * ROWS + tl.arange(0, ROWS)

    @triton.jit
    def await_turn(self):
        """Ping-pong: wait until the other group has issued its MMAs, so that its softmax runs under ours."""
        if self.PINGPONG:
            tlx.named_barrier_wait(9 + self.ME, 256)

    @triton.jit
    def pass_turn(self):
        """Ping-pong: our MMAs are issued, the other group may issue its own."""
        if self.PINGPONG:
            tlx.named_barrier_arrive(10 - self.ME, 256)


# ---------------------------------------------------------------------------------------------- role: load


@triton.jit
def load(
    work,
    deal,
    q,
    k,
    v,
    desc_q,
    desc_k,
    desc_v,
    HEAD_DIM: tl.constexpr,
    DRAW: tl.constexpr,
    PUBLISH: tl.constexpr,
    FRESH: tl.constexpr,
):
    """One warp brings, for each item, its Q halves (if fresh) and K and V block by block, last first.

    It looks two items ahead: item k+1 is published before item k's keys are streamed, because consumers
    fetch their next tile early; its record is read meanwhile, and item k+2 is drawn, so that nobody waits
    for the latency of memory or of the counter. With blocks of 64 keys (short sequences) K goes before Q:
    a slot for K is free earlier than one for Q.
    """
    KEYS_FIRST: tl.constexpr = work.BLOCK_N == 64
    t = DRAW(deal, 0, 0)
    PUBLISH(deal, 0, t)
    ahead = DRAW(deal, 1, t)
    tile = work.fetch(t, deal.items)
    # Not `before = tile`: the compiler takes a name that starts as another's copy, and is set to it in the
    # loop, for one that never changes.
    before = work.fetch(t, deal.items)
    turn = 0
    q_item = 0
    item = 0
    while t < deal.items:
        PUBLISH(deal, turn + 1, ahead)
        coming = work.fetch(ahead, deal.items)
        further = DRAW(deal, turn + 2, ahead)
        walk = work.walk(tile)
        column = tile.head // work.GROUP * HEAD_DIM
        row = walk.block(0) * work.BLOCK_N
        if KEYS_FIRST:
            k.fill(item, desc_k, tile.kv_end, tile.kv_len, row, column)
        if (turn == 0) | FRESH(work, tile, before):
            for half in tl.static_range(2):
                q_row = tile.row + half * ROWS
                q.fill(q_item + half, desc_q, tile.q_end, tile.q_len, q_row, tile.head * HEAD_DIM)
            q_item += 2
        if not KEYS_FIRST:
            k.fill(item, desc_k, tile.kv_end, tile.kv_len, row, column)
        v.fill(item, desc_v, tile.kv_end, tile.kv_len, row, column)
        for j in range(1, walk.count):
            row = walk.block(j) * work.BLOCK_N
            k.fill(item + j, desc_k, tile.kv_end, tile.kv_len, row, column)
            v.fill(item + j, desc_v, tile.kv_end, tile.kv_len, row, column)
        item += walk.count
        before = tile
        t = ahead
        ahead = further
        tile = coming
        turn += 1


# ------------------------------------------------------------------------------------------- role: consume


@triton.jit
def consume(
    group,
    work,
    deal,
    desc_o,
    out,
    lse,
    scale,
    HEAR: tl.constexpr,
    FRESH: tl.constexpr,
    ATTEND: tl.constexpr,
    FINISH: tl.constexpr,
):
    """A warp group owns 64 rows of every tile: attend to all its blocks of keys, then write out."""
    fill_empty(work, deal, out, lse, group.ME * ROWS, ROWS, group.HEAD_DIM)  # while the first K travels
    t = HEAR(deal, 0)
    tile = work.fetch(t, deal.items)
    turn = 0
    q_item = group.ME
    item = 0
    if group.ME == 1:
        group.pass_turn()
    while t < deal.items:
        slot = group.q.await_full(q_item)  # loader -> us: Q has arrived
        state, item = ATTEND(group, work, tile, group.q.tiles[slot], item, scale)
        t = HEAR(deal, turn + 1)
        ahead = work.fetch(t, deal.items)  # its latency passes under the epilogue
        FINISH(group, work, tile, state, slot, desc_o, lse)
        if (t >= deal.items) | FRESH(work, ahead, tile):
            group.q.release(q_item)  # us -> loader: room for the next Q
            q_item += 2
        tile = ahead
        turn += 1
    if group.ME == 0:
        group.await_turn()
    tlx.async_descriptor_store_wait(0)


# -------------------------------------------------------------------- role: softmax (of one block of scores)


@triton.jit
def softmax(scores, top, scale, GUARD: tl.constexpr):
    """Weights 2 ** (scores * scale - top), the new top, the factor for earlier sums, and the row sums.

    GUARD: a row may have seen no key yet; -inf - -inf must not become NaN.
    """
    new = tl.maximum(top, tl.max(scores, 1) * scale)
    base = new
    if GUARD:
        base = tl.where(new == -float("inf"), 0.0, new)
    weights = tl.math.exp2(scores * scale - base[:, None])
    return weights, new, tl.math.exp2(top - base), tl.sum(weights, 1)


# ---------------------------------------------------------------- role: attend (one tile, all its key blocks)


@triton.jit
def masked(group, scores, work, tile, block):
    """Scores of keys that a row does not see become -inf: past the sequence's end, or outside the window."""
    columns = block * work.BLOCK_N + tl.arange(0, work.BLOCK_N)
    return tl.where(work.seen(tile, tile.row + group.rows(), columns), scores, -float("inf"))


@triton.jit
def begin(group, work, tile, q, item, block, scale):
    """First block: S = Q K^T and its softmax; there is no P yet to multiply."""
    slot = group.k.await_full(item)  # loader -> us: K has arrived
    group.await_turn()
    scores = tlx.async_dot(q, tlx.local_trans(group.k.tiles[slot]))
    group.pass_turn()
    scores = tlx.async_dot_wait(0, scores)
    group.k.release(item)  # us -> loader: K was read
    nothing = tl.full([ROWS], -float("inf"), tl.float32)
    p, top, alpha, total = group.SOFTMAX(masked(group, scores, work, tile, block), nothing, scale, True)
    return State(tl.zeros([ROWS, group.HEAD_DIM], tl.float32), top, total, p.to(group.DTYPE))


@triton.jit
def advance(group, state, work, tile, q, item, block, scale, MASK: tl.constexpr):
    """Next block: S = Q K^T of it and O += P V of the one before share the tensor cores; then softmax."""
    slot = group.k.await_full(item)  # loader -> us: K of this block
    group.await_turn()
    scores = tlx.async_dot(q, tlx.local_trans(group.k.tiles[slot]))
    slot = group.v.await_full(item - 1)  # loader -> us: V of the block before
    acc = tlx.async_dot(state.p, group.v.tiles[slot], state.acc)
    group.pass_turn()
    scores = tlx.async_dot_wait(1, scores)
    group.k.release(item)  # us -> loader: K was read
    if MASK:
        scores = masked(group, scores, work, tile, block)
    p, top, alpha, total = group.SOFTMAX(scores, state.top, scale, MASK)
    acc = tlx.async_dot_wait(0, acc)
    group.v.release(item - 1)  # us -> loader: V was read
    return State(acc * alpha[:, None], top, state.total * alpha + total, p.to(group.DTYPE))


@triton.jit
def complete(group, state, item):
    """After the last block: its O += P V."""
    slot = group.v.await_full(item)  # loader -> us: V of the last block
    acc = tlx.async_dot(state.p, group.v.tiles[slot], state.acc)
    acc = tlx.async_dot_wait(0, acc)
    group.v.release(item)  # us -> loader: V was read
    return State(acc, state.top, state.total, state.p)


@triton.jit
def attend_masked(group, work, tile, q, item, scale):
    """Every block is masked, whether or not it needs it."""
    walk = work.walk(tile)
    state = begin(group, work, tile, q, item, walk.block(0), scale)
    for j in range(1, walk.count):
        state = advance(group, state, work, tile, q, item + j, walk.block(j), scale, True)
    item += walk.count
    return complete(group, state, item - 1), item


@triton.jit
def attend_peeled(group, work, tile, q, item, scale):
    """Masked blocks of the edges first, then the bulk without masks; with no window one block is masked."""
    walk = work.walk(tile)
    state = begin(group, work, tile, q, item, walk.block(0), scale)
    if work.LEFT or work.RIGHT:
        for j in range(1, walk.masked):
            state = advance(group, state, work, tile, q, item + j, walk.block(j), scale, True)
    for j in range(walk.masked, walk.count):
        state = advance(group, state, work, tile, q, item + j, walk.block(j), scale, False)
    item += walk.count
    return complete(group, state, item - 1), item


# ------------------------------------------------------------------------------------------- role: finish


@triton.jit
def normalize(group, work, tile, state, lse):
    """Store lse (natural logarithm, -inf for a row that saw no key); returns O in the output's dtype."""
    at = lse + work.lse_row(tile) + group.rows()
    tl.store(at, (state.top + tl.log2(state.total)) * LN2, tile.row + group.rows() < tile.q_len)
    norm = 1.0 / tl.where(state.total == 0.0, 1.0, state.total)
    return (state.acc * norm[:, None]).to(group.DTYPE)


@triton.jit
def store(group, work, tile, source, desc_o):
    """Hand O to the TMA unit, which drops rows past the sequence's end."""
    tlx.fence("async_shared")  # our stores -> the TMA unit
    span, end, row = ragged_row(work.out_end(tile), tile.q_len, tile.row + group.ME * ROWS)
    tlx.async_descriptor_store(desc_o, source, [span, end, row, tile.head * group.HEAD_DIM])


@triton.jit
def finish_through_queries(group, work, tile, state, slot, desc_o, lse):
    """O leaves through the tile of Q, which is dead now; the next tile starts when the store has read it."""
    tlx.local_store(group.q.tiles[slot], normalize(group, work, tile, state, lse))
    store(group, work, tile, group.q.tiles[slot], desc_o)
    tlx.async_descriptor_store_wait(0)  # TMA unit -> us: the tile was read


@triton.jit
def finish_staged(group, work, tile, state, slot, desc_o, lse):
    """O leaves through a tile of its own: Q may stay, and the store drains during the next main loop."""
    result = normalize(group, work, tile, state, lse)
    tlx.async_descriptor_store_wait(0)  # TMA unit -> us: the O before was read, long ago
    tlx.local_store(group.staging[group.ME], result)
    store(group, work, tile, group.staging[group.ME], desc_o)


# ------------------------------------------------------------------------------------------------- the kernel


@triton.jit(do_not_specialize=["q_rows", "left", "right"])
def kernel(
    desc_q,
    desc_k,
    desc_v,
    desc_o,
    out,
    lse,
    records,
    counts,
    q_offsets,
    counter,
    q_rows,
    left,
    right,
    scale,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BROADCAST: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DTYPE: tl.constexpr,
    LOAD: tl.constexpr,
    CONSUME: tl.constexpr,
    ATTEND: tl.constexpr,
    SOFTMAX: tl.constexpr,
    FINISH: tl.constexpr,
    DRAW: tl.constexpr,
    PUBLISH: tl.constexpr,
    HEAR: tl.constexpr,
    FRESH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    Q_DEPTH: tl.constexpr,
    K_DEPTH: tl.constexpr,
    V_DEPTH: tl.constexpr,
    STAGING: tl.constexpr,
    PINGPONG: tl.constexpr,
    CLASSES: tl.constexpr,
    REGISTERS: tl.constexpr,
):
    """One persistent CTA an SM: out = softmax(q k^T * scale) v, with scale in units of log2(e)."""
    # Q: items 2i and 2i+1 are the halves of a tile, each for its own consumer. K and V: one item a block.
    q = Ring(
        tlx.local_alloc((ROWS, HEAD_DIM), DTYPE, 2 * Q_DEPTH),
        tlx.alloc_barriers(2 * Q_DEPTH),
        tlx.alloc_warp_barrier(2 * Q_DEPTH, num_warps=4),
        2 * Q_DEPTH,
        ROWS * HEAD_DIM * 2,
    )
    k = Ring(
        tlx.local_alloc((BLOCK_N, HEAD_DIM), DTYPE, K_DEPTH),
        tlx.alloc_barriers(K_DEPTH),
        tlx.alloc_warp_barrier(K_DEPTH, num_warps=8),
        K_DEPTH,
        BLOCK_N * HEAD_DIM * 2,
    )
    v = Ring(
        tlx.local_alloc((BLOCK_N, HEAD_DIM), DTYPE, V_DEPTH),
        tlx.alloc_barriers(V_DEPTH),
        tlx.alloc_warp_barrier(V_DEPTH, num_warps=8),
        V_DEPTH,
        BLOCK_N * HEAD_DIM * 2,
    )
    staging = q.tiles
    if STAGING:
        staging = tlx.local_alloc((ROWS, HEAD_DIM), DTYPE, 2)
    tickets = tlx.local_alloc((1,), tl.int32, 2)
    told = tlx.alloc_barriers(2)
    heard = tlx.alloc_warp_barrier(2, num_warps=8)
    work = Work(
        records, counts, q_offsets, q_rows, left, right,
        HEADS, GROUP, BROADCAST, LEFT, RIGHT, BLOCK_M, BLOCK_N, 1,
    )  # fmt: skip
    deal = Deal(tl.program_id(0), tl.num_programs(0), work.items(), counter, tickets, told, heard, CLASSES)
    # time ->
    # load         Q K3 V3 K2 V2 K1 V1 | K1 V1 (next tile) ...    runs ahead by the depth of the ring
    # group 0      S3 softmax3 | S2 with O+=P3V3, softmax2 | S1 with O+=P2V2, softmax1 | O+=P1V1, finish
    # group 1      the same for the other 64 rows, out of step: its MMAs run under group 0's softmax
    #
    # K, V         load --fulls--> groups --empties (both groups, 8 warps)--> load
    # Q            load --fulls--> its group --empties (4 warps)--> load
    # tickets      load --told--> groups --heard (8 warps)--> load      (only with a counter)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            group = Group(0, q, k, v, staging, HEAD_DIM, DTYPE, SOFTMAX, PINGPONG)
            CONSUME(group, work, deal, desc_o, out, lse, scale, HEAR, FRESH, ATTEND, FINISH)
        with tlx.async_task(num_warps=4, registers=REGISTERS):
            group = Group(1, q, k, v, staging, HEAD_DIM, DTYPE, SOFTMAX, PINGPONG)
            CONSUME(group, work, deal, desc_o, out, lse, scale, HEAR, FRESH, ATTEND, FINISH)
        with tlx.async_task(num_warps=1, registers=504 - 2 * REGISTERS):
            LOAD(work, deal, q, k, v, desc_q, desc_k, desc_v, HEAD_DIM, DRAW, PUBLISH, FRESH)
