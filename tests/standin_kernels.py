"""Kernels that the stand-in test imports in a process without Triton: plain, and roles over rings."""

import triton
import triton.language as tl
import triton.language.extra.tlx as tlx
from triton.language.extra import libdevice
from triton.language.extra.subtile_ops import _join_n_2D, _split_n_2D
from triton.language.extra.tlx.warp_spec import get_bufidx_phase

BLOCK = tl.constexpr(32)
DEPTH = tl.constexpr(2)


@triton.autotune([triton.Config({"SCALE": 2}, num_warps=4), triton.Config({"SCALE": 3})], key=["n"])
@triton.heuristics({"MASKED": lambda args: args["n"] % BLOCK.value != 0})
@triton.jit
def plain(x, out, n, SCALE: tl.constexpr, MASKED: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    keep = offsets < n if MASKED else tl.full([BLOCK], True, tl.int1)
    value = tl.load(x + offsets, mask=keep, other=0.0)
    tl.store(out + offsets, libdevice.tanh(value) * SCALE, mask=keep)


@triton.aggregate
class Ring:
    tiles: tlx.buffered_tensor
    fulls: tlx.mbarrier
    empties: tlx.mbarrier
    depth: tl.constexpr

    @triton.constexpr_function
    def __init__(self, tiles, fulls, empties, depth):
        self.tiles = tiles
        self.fulls = fulls
        self.empties = empties
        self.depth = tl.constexpr(depth)

    @triton.jit
    def slot(self, i):
        return get_bufidx_phase(i, self.depth)


@triton.jit
def load(ring, source, column, steps, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    for i in range(steps):
        slot, phase = ring.slot(i)
        tlx.barrier_wait(ring.empties[slot], phase ^ 1)
        tlx.barrier_expect_bytes(ring.fulls[slot], ROWS * COLUMNS * 2)
        tlx.async_descriptor_load(source, ring.tiles[slot], [i * ROWS, column], ring.fulls[slot])


@triton.jit
def multiply(ring, acc, done, steps):
    for i in range(steps):
        slot, phase = ring.slot(i)
        tlx.barrier_wait(ring.fulls[slot], phase)
        tile = ring.tiles[slot]
        tlx.async_dot(tile, tlx.local_trans(tile), acc[0], use_acc=i > 0, mBarriers=[ring.empties[slot]])
    tlx.tcgen05_commit(done[0])


@triton.jit
def store(acc, done, out, SIDE: tl.constexpr):
    tlx.barrier_wait(done[0], 0)
    total = _join_n_2D(_split_n_2D(tlx.local_load(acc[0]), 2))
    rows = tl.arange(0, SIDE)
    tl.store(out + rows[:, None] * SIDE + rows[None, :], total)


@triton.jit
def gram(
    source, out, steps, LOAD: tl.constexpr, STORE: tl.constexpr, SIDE: tl.constexpr, COLUMNS: tl.constexpr
):
    """Sum over steps of tile @ tile.T, by a loading, a multiplying and a storing role."""
    tiles = tlx.local_alloc((SIDE, COLUMNS), tl.bfloat16, DEPTH)
    ring = Ring(tiles, tlx.alloc_barriers(DEPTH), tlx.alloc_barriers(DEPTH), DEPTH)
    acc = tlx.local_alloc((SIDE, SIDE), tl.float32, 1, tlx.storage_kind.tmem)
    done = tlx.alloc_barriers(1)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            STORE(acc, done, out, SIDE)
        with tlx.async_task(num_warps=1, num_regs=24):
            multiply(ring, acc, done, steps)
        with tlx.async_task(num_warps=1, num_regs=24):
            LOAD(ring, source, 0, steps, SIDE, COLUMNS)
