"""A role to try: row sums stay apart by columns modulo 8 and are added up once a tile.

The lanes that share a row then need not exchange their sums for every block of keys. Experiment of
jfa.lab.ladder; on `peeled` it gained 1 to 4 % on five of nine shapes of an H200 and lost 4 % on dense ones.
"""

import triton
import triton.language as tl
import triton.language.extra.tlx as tlx

from jfa.kernels.hopper.forward import State, begin, complete, masked


@triton.jit
def advance(group, state, work, tile, q, item, block, scale, MASK: tl.constexpr):
    """As in jfa.kernels.hopper.forward, with sums (rows, 8): each thread adds what it holds."""
    slot = group.k.await_full(item)
    group.await_turn()
    scores = tlx.async_dot(q, tlx.local_trans(group.k.tiles[slot]))
    slot = group.v.await_full(item - 1)
    acc = tlx.async_dot(state.p, group.v.tiles[slot], state.acc)
    group.pass_turn()
    scores = tlx.async_dot_wait(1, scores)
    group.k.release(item)
    if MASK:
        scores = masked(group, scores, work, tile, block)
    top = tl.maximum(state.top, tl.max(scores, 1) * scale)
    base = top
    if MASK:
        base = tl.where(top == -float("inf"), 0.0, top)
    weights = tl.math.exp2(scores * scale - base[:, None])
    alpha = tl.math.exp2(state.top - base)
    sums = tl.sum(tl.reshape(weights, (scores.shape[0], work.BLOCK_N // 8, 8)), 1)
    acc = tlx.async_dot_wait(0, acc)
    group.v.release(item - 1)
    return State(acc * alpha[:, None], top, state.total * alpha[:, None] + sums, weights.to(group.DTYPE))


@triton.jit
def attend(group, work, tile, q, item, scale):
    """Masked blocks of the edges, then the bulk, then the sums of the sums."""
    walk = work.walk(tile)
    first = begin(group, work, tile, q, item, walk.block(0), scale)
    total = tl.where(tl.arange(0, 8)[None, :] == 0, first.total[:, None], 0.0)
    state = State(first.acc, first.top, total, first.p)
    if work.LEFT or work.RIGHT:
        for j in range(1, walk.masked):
            state = advance(group, state, work, tile, q, item + j, walk.block(j), scale, True)
    for j in range(walk.masked, walk.count):
        state = advance(group, state, work, tile, q, item + j, walk.block(j), scale, False)
    item += walk.count
    last = complete(group, state, item - 1)
    return State(last.acc, last.top, tl.sum(last.total, 1), last.p), item
