"""Solutions to the exercises of notebook 03_warp_specialization; run it from anywhere, the tests do."""

import dataclasses

import triton
import triton.language as tl
import triton.language.extra.tlx as tlx

from jfa import steps
from jfa.kernels.hopper import forward
from jfa.kernels.hopper.forward import State, begin, complete, masked
from jfa.lab import course, faults, ladder, pipeline

hopper = steps.FORWARD["hopper"][0]

# 1. The arrive says that Q's slot is free for the next tile; a CTA that has no next tile never waits for it.
with faults.without(forward.consume, "group.q.release(q_item)"):
    kinds = [faults.verdict(hopper, heads=heads, lengths=(640,)).kind for heads in (1, 8)]
print(f"1. without releasing Q: one tile {kinds[0]}, several tiles a CTA {kinds[1]}")
assert kinds == ["ok", "deadlock"]

# 2. With one slot the loader can ask for the next K only when this one was read: every copy is waited for.
compiles = course.compiler_missing() is None
softmax = pipeline.block_clocks(ladder.compiled(hopper).text("sass")) if compiles else 712.0
rule = hopper.tiling
shallow = dataclasses.replace(hopper, tiling=lambda problem: rule(problem) | {"K_DEPTH": 1, "V_DEPTH": 1})
busy = {}
for name, step in (("three tiles", hopper), ("one tile", shallow)):
    busy[name] = pipeline.busy(pipeline.specialized(step, softmax))
    print(f"2. rings of {name}: tensor cores busy {100 * busy[name]:.0f} % (predicted)")
assert busy["one tile"] < 0.9 * busy["three tiles"]


# 3. The slot stays taken during the softmax: right as before, and never faster.
@triton.jit
def advance_holding(group, state, work, tile, q, item, block, scale, MASK: tl.constexpr):
    slot = group.k.await_full(item)
    group.await_turn()
    scores = tlx.async_dot(q, tlx.local_trans(group.k.tiles[slot]))
    slot = group.v.await_full(item - 1)
    acc = tlx.async_dot(state.p, group.v.tiles[slot], state.acc)
    group.pass_turn()
    scores = tlx.async_dot_wait(1, scores)
    scores = masked(group, scores, work, tile, block)
    p, top, alpha, total = group.SOFTMAX(scores, state.top, scale, MASK)
    group.k.release(item)  # here instead of before the softmax
    acc = tlx.async_dot_wait(0, acc)
    group.v.release(item - 1)
    return State(acc * alpha[:, None], top, state.total * alpha + total, p.to(group.DTYPE))


@triton.jit
def attend_holding(group, work, tile, q, item, scale):
    walk = work.walk(tile)
    state = begin(group, work, tile, q, item, walk.block(0), scale)
    for j in range(1, walk.count):
        state = advance_holding(group, state, work, tile, q, item + j, walk.block(j), scale, True)
    item += walk.count
    return complete(group, state, item - 1), item


holding = dataclasses.replace(hopper, attend=attend_holding)
found = faults.verdict(holding)
print(f"3. K released after the softmax: {found}")
assert found.kind == "ok"
for name, sizes in (("three tiles", {}), ("one K tile", {"K_DEPTH": 1})):
    sized = [
        dataclasses.replace(step, tiling=lambda problem, sizes=sizes: rule(problem) | sizes)
        for step in (hopper, holding)
    ]
    early, late = (max(s["end"] for s in pipeline.specialized(step, softmax)) for step in sized)
    print(f"3. rings of {name}: {early:.0f} clocks, released late {late:.0f} (predicted)")
    assert late >= early
