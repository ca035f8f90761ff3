"""A small kernel for the tests of the mutation runner, importable by its worker processes."""

import torch
import triton
import triton.language as tl
import triton.language.extra.tlx as tlx
from triton.tools.tensor_descriptor import TensorDescriptor

from jfa.emulator.target import Target

SIZE = tl.constexpr(64)
DEPTH = tl.constexpr(2)


@triton.aggregate
class Ring:
    """Tiles from a loader to a reader."""

    tiles: tlx.buffered_tensor
    fulls: tlx.mbarrier
    empties: tlx.mbarrier

    @triton.jit
    def claim(self, i):
        """Slot of item i, once it is free."""
        tlx.barrier_wait(self.empties[i % DEPTH], (i // DEPTH & 1) ^ 1)
        return i % DEPTH

    @triton.jit
    def receive(self, i):
        """Slot of item i, once it is full."""
        tlx.barrier_wait(self.fulls[i % DEPTH], i // DEPTH & 1)
        return i % DEPTH


@triton.jit
def load(ring, source, count):
    """Loader."""
    for i in range(count):
        slot = ring.claim(i)
        tlx.barrier_expect_bytes(ring.fulls[slot], 4 * SIZE * SIZE)
        tlx.async_descriptor_load(source, ring.tiles[slot], [i * SIZE, 0], ring.fulls[slot])


@triton.jit
def total(ring, out, count, TWICE: tl.constexpr):
    """Reader: the sum of all tiles. TWICE: waits once more than it must."""
    result = tl.zeros([SIZE, SIZE], tl.float32)
    for i in range(count):
        slot = ring.receive(i)
        if TWICE:
            slot = ring.receive(i)
        result += tlx.local_load(ring.tiles[slot])
        tlx.barrier_arrive(ring.empties[slot])
    rows = tl.arange(0, SIZE)
    tl.store(out + rows[:, None] * SIZE + rows[None, :], result)


@triton.jit
def kernel(source, out, count, LOAD: tl.constexpr, READ: tl.constexpr, TWICE: tl.constexpr):
    ring = Ring(
        tlx.local_alloc((SIZE, SIZE), tl.float32, DEPTH), tlx.alloc_barriers(DEPTH), tlx.alloc_barriers(DEPTH)
    )
    with tlx.async_tasks():
        with tlx.async_task("default"):
            READ(ring, out, count, TWICE)
        with tlx.async_task(num_warps=1):
            LOAD(ring, source, count)


def summing(twice):
    """The kernel on five tiles, against the sum by torch."""

    def make():
        size = SIZE.value
        source = torch.randn(5 * size, size, generator=torch.Generator().manual_seed(0))
        exact = source.view(5, size, size).sum(0)
        out = torch.empty(size, size)
        descriptor = TensorDescriptor.from_tensor(source, [size, size])

        def run():
            kernel[(1,)](descriptor, out, 5, LOAD=load, READ=total, TWICE=twice)
            return float((out - exact).abs().max()) / 1e-5

        return run

    return make


TARGETS = [Target("once", summing(False), fast=True), Target("twice", summing(True))]
FIRST = "total > Ring.receive: tlx.barrier_wait(self.fulls[i % DEPTH], i // DEPTH & 1)"
SECOND = FIRST.replace("receive:", "receive #2:")
WHY = "the other of the two waits is enough"
EXPLAINED = {"twice": {f"{FIRST} | delete wait": WHY, f"{SECOND} | delete wait": WHY}}
TOO_MUCH = {**EXPLAINED, "once": {f"{FIRST} | delete wait": "this one is a fault"}}
TOO_LITTLE = {"twice": {f"{FIRST} | delete wait": WHY}}


@triton.jit
def leave(target, SIDE: tl.constexpr, FENCE: tl.constexpr, ADD: tl.constexpr):
    """A tile leaves by TMA from the task that stored it, then one from a task that it is handed to."""
    tiles = tlx.local_alloc((SIDE, SIDE), tl.float16, 2)
    full = tlx.alloc_warp_barrier(1, num_warps=4)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            tlx.local_store(tiles[0], tl.full([SIDE, SIDE], 1.0, tl.float16))
            if FENCE:
                tlx.fence("async_shared")
            tlx.async_descriptor_store(target, tiles[0], [0, 0])
            tlx.async_descriptor_store_wait(0)
            tlx.local_store(tiles[1], tl.full([SIDE, SIDE], 2.0, tl.float16))
            if FENCE:
                tlx.fence("async_shared")
            tlx.barrier_arrive(full[0])
        with tlx.async_task(num_warps=1):
            tlx.barrier_wait(full[0], 0)
            if ADD:
                tlx.async_descriptor_store(target, tiles[1], [SIDE, 0], store_reduce="add")
            else:
                tlx.async_descriptor_store(target, tiles[1], [SIDE, 0])
            tlx.async_descriptor_store_wait(0)
