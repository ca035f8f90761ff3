"""Solutions to the exercises of notebook 08_two_cta; run it from anywhere, the tests do."""

import dataclasses

import triton
import triton.language.extra.tlx as tlx

from jfa import steps
from jfa.lab import faults, pair

alone, two = (steps.find("blackwell", "backward", name) for name in pair.TARGETS)

# 1. At 64 the operands of dV and dK are narrow, those of S and dP short: the pair helps dV and dK most, whose
# left operand lies in tensor memory, so that the halved right one is all they read. dQ still gains nothing.
kept = {}
narrow = {step.name: pair.traffic(step, head_dim=64) for step in (alone, two)}
for name in pair.PRODUCTS:
    before, after = narrow["peeled"][name], narrow["two_cta"][name]
    kept[name] = after / before
    print(f"1. {name}: {before / 1024:.0f} KiB alone, {after / 1024:.0f} in a pair")
assert kept["dV"] == kept["dK"] == 0.5 < kept["S"] == kept["dP"] < kept["dQ"] == 1

# 2. Results are right, with a warning: no fence lies between. The compiler puts one before what reads shared
# memory by the asynchronous proxy; the emulator does not know whether it still will in its next version.
with faults.without(two.share, 'tlx.fence("async_shared")  # the copy reads it'):
    found = faults.verdict(two, lengths=(300,), heads=1, policies=("eager",))
print(f"2. without the fence before the copy: {found}")
assert found.kind == "ok" and "no fence" in found.message


# 3. Both waits come before the same product, so their order is free; only leaving one out is a race.
@triton.jit
def gather_theirs_first(buffers, x, turn):
    tlx.barrier_wait(buffers.landed[1], turn & 1)
    tlx.barrier_expect_bytes(buffers.landed[0], buffers.sent.shape[0] * buffers.sent.shape[1] * 2)
    tlx.barrier_wait(buffers.landed[0], turn & 1)


other = dataclasses.replace(two, gather=gather_theirs_first)
found = faults.verdict(other, lengths=(300,), heads=1, policies=("eager", "random"))
print(f"3. the other CTA's word first: {found}")
assert found.kind == "ok"
