"""Bulk stores that another CTA updates: complete is not visible, a fence of the storing task makes it so."""

import re

import pytest
import torch
import triton
import triton.language as tl
import triton.language.extra.tlx as tlx
from triton.tools.tensor_descriptor import TensorDescriptor

import jfa
from jfa import jagged
from jfa.emulator import emulate, mutated
from jfa.kernels import launch as shared
from jfa.kernels.hopper import backward_stationary

POLICIES = ("random", "eager", "lazy")
WAIT = "cp.async.bulk.wait_group 0;"
KIND = "store not visible"


@triton.jit
def order(text: tl.constexpr, x):
    """Inline PTX that orders memory; hands x through."""
    return tl.inline_asm_elementwise(
        text + " mov.b32 $0, $1;", "=r,r", [x], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def leave(y, pointer, tile, HOW: tl.constexpr, T: tl.constexpr):
    """The tile goes to global memory, or the tile there is read, by one of several ways."""
    place = tl.arange(0, T)[:, None] * T + tl.arange(0, T)[None, :]
    if HOW == "store":
        tlx.async_descriptor_store(y, tile, [0, 0])
    elif HOW == "bulk store":
        tlx.async_store(pointer, tile, T * T * 4)
    elif HOW == "load":
        landed = tlx.alloc_barriers(1)
        tlx.barrier_expect_bytes(landed[0], T * T * 4)
        tlx.async_descriptor_load(y, tile, [0, 0], landed[0])
        tlx.barrier_wait(landed[0], 0)
    elif HOW == "ordinary load":
        tlx.local_store(tile, tl.load(pointer + place))
    elif HOW == "ordinary store":
        tl.store(pointer + place, tlx.local_load(tile))
    else:
        tlx.async_descriptor_store(y, tile, [0, 0], store_reduce=HOW)


@triton.jit
def pair(
    y, pointer, flag,
    T: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr, TEXT: tl.constexpr, WAY: tl.constexpr,
    READER: tl.constexpr, VALUE: tl.constexpr,
):  # fmt: skip
    """Rank 0 sends a tile off, waits for it and tells rank 1, which goes on with the same bytes."""
    tiles = tlx.local_alloc((T, T), tl.float32, 1)
    done = tlx.alloc_barriers(1)
    rank = tlx.cluster_cta_rank()
    with tlx.async_tasks():
        with tlx.async_task("default"):
            tlx.local_store(tiles[0], tl.zeros([T, T], tl.float32) + tl.where(rank == 0, 1.0, VALUE))
            tlx.fence("async_shared")
            if rank == 0:
                leave(y, pointer, tiles[0], FIRST, T)
                order(TEXT, rank)
                if WAY == "fence":
                    tlx.fence("gpu")
                elif WAY == "proxy fence":
                    tlx.fence("async_shared")
                elif WAY != "":
                    tl.atomic_add(flag, 1, sem=WAY, scope="gpu")
                tlx.barrier_arrive(done[0], 1, remote_cta_rank=1)
            else:
                tlx.barrier_wait(done[0], 0)
                order(READER, rank)
                leave(y, pointer, tiles[0], SECOND, T)
            order("cp.async.bulk.wait_group 0;", rank)
        with tlx.async_task(num_warps=1):
            pass


def findings(kernel=pair, grid=2, policy="random", **const):
    """What is found in one launch of a two-CTA kernel on a tile of 16 x 16 numbers."""
    y = torch.zeros(16, 16)
    flag = torch.zeros(1, dtype=torch.int32)
    if kernel is pair:
        const = dict(FIRST="store", SECOND="add", TEXT=WAIT, WAY="", READER="", VALUE=1.0) | const
    with emulate(arch="sm_90", policy=policy, seed=1) as emulation:
        cluster = dict(ctas_per_cga=(grid, 1, 1))
        kernel[(grid,)](TensorDescriptor.from_tensor(y, [16, 16]), y, flag, T=16, **const, **cluster)
    return emulation.reports[0].findings


@pytest.mark.parametrize("policy", POLICIES)
def test_a_store_that_the_next_cta_adds_to(policy):
    """What went wrong on an H200; the message says how, and what mends it."""
    (found,) = findings(policy=policy)
    assert (found.kind, found.level, found.buffer) == (KIND, "error", "y")
    assert found.task.startswith("default") and found.cta == (1, 0, 0)
    assert re.match(
        r"atomic update of y by tma_reduce_write .* can come before the write by tma_store_write",
        found.message,
    )
    for word in ("wait_group", "H200", "fence.proxy.async", "fence.acq_rel.cluster"):
        assert word in found.message


REACHES = [
    "fence.proxy.async;",
    "fence.acq_rel.cluster;",
    "fence.acq_rel.gpu;",
    "fence.acq_rel.sys;",
    "fence.sc.cluster;",
    "fence.release.cluster;",
    "membar.gl;",
    "membar.sys;",
]
FALLS_SHORT = [
    "fence.acq_rel.cta;",
    "membar.cta;",
    "fence.proxy.async.global;",
    "fence.proxy.async.shared::cta;",
    "fence.proxy.tensormap::generic.release.gpu;",
    "fence.mbarrier_init.release.cluster;",
    "fence.acquire.gpu;",
    "fence.release.sync_restrict::shared::cta.cluster;",
]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("text", REACHES)
def test_fences_that_reach_beyond_the_cta(text, policy):
    assert findings(TEXT=f"{WAIT} {text}", policy=policy) == []


@pytest.mark.parametrize("text", FALLS_SHORT)
def test_fences_that_do_not(text):
    assert [f.kind for f in findings(TEXT=f"{WAIT} {text}")] == [KIND]


@pytest.mark.parametrize("text", REACHES)
def test_a_fence_shows_what_was_complete_before_it(text):
    """Before the wait, and on the reader's side, it is no use."""
    assert [f.kind for f in findings(TEXT=f"{text} {WAIT}")] == [KIND]
    assert [f.kind for f in findings(READER=text)] == [KIND]


@pytest.mark.parametrize("text", REACHES)
def test_a_fence_without_a_full_wait_is_a_race(text):
    assert {f.kind for f in findings(TEXT=f"cp.async.bulk.wait_group.read 0; {text}")} == {"global race"}


WAYS = [
    ("fence", True),
    ("release", True),
    ("acq_rel", True),
    ("proxy fence", False),
    ("acquire", False),
    ("relaxed", False),
]


@pytest.mark.parametrize("way, shows", WAYS)
def test_fences_and_atomics_of_the_language(way, shows):
    assert [f.kind for f in findings(WAY=way)] == ([] if shows else [KIND])


@pytest.mark.parametrize("first", ["store", "bulk store", "add"])
@pytest.mark.parametrize("second", ["store", "bulk store", "add", "load", "ordinary load", "ordinary store"])
def test_every_bulk_write_and_what_may_follow_it(first, second):
    found = findings(FIRST=first, SECOND=second)
    assert [f.kind for f in found] == ([] if first == second == "add" else [KIND])  # sums take any order
    assert findings(FIRST=first, SECOND=second, TEXT=f"{WAIT} fence.proxy.async;") == []


def test_zeros_that_come_too_early_are_a_warning():
    assert [(f.kind, f.level) for f in findings(VALUE=0.0)] == [(KIND, "warning")]


def test_what_the_next_cta_loads_may_be_replaced_there():
    """A read, and an ordinary store, need no fence beyond the word."""
    for first in ("load", "ordinary load", "ordinary store"):
        assert findings(FIRST=first) == []


@triton.jit
def one_cta(y, pointer, flag, T: tl.constexpr):
    """Within a CTA a complete store is visible: one task stores, another one adds."""
    tiles = tlx.local_alloc((T, T), tl.float32, 2)
    done = tlx.alloc_barriers(1)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            tlx.local_store(tiles[0], tl.zeros([T, T], tl.float32) + 1)
            tlx.fence("async_shared")
            tlx.async_descriptor_store(y, tiles[0], [0, 0])
            order("cp.async.bulk.wait_group 0;", T)
            tlx.barrier_arrive(done[0], 1)
        with tlx.async_task(num_warps=4):
            tlx.local_store(tiles[1], tl.zeros([T, T], tl.float32) + 1)
            tlx.fence("async_shared")
            tlx.barrier_wait(done[0], 0)
            tlx.async_descriptor_store(y, tiles[1], [0, 0], store_reduce="add")
            tlx.async_descriptor_store_wait(0)


def test_within_a_cta_nothing_is_needed():
    assert findings(one_cta, grid=1) == []


@triton.jit
def meeting(y, pointer, flag, T: tl.constexpr):
    """The cluster barrier in place of an mbarrier: its arrive has the fence."""
    tiles = tlx.local_alloc((T, T), tl.float32, 1)
    tlx.local_store(tiles[0], tl.zeros([T, T], tl.float32) + 1)
    tlx.fence("async_shared")
    rank = tlx.cluster_cta_rank()
    if rank == 0:
        tlx.async_descriptor_store(y, tiles[0], [0, 0])
        order("cp.async.bulk.wait_group 0;", rank)
    tlx.cluster_barrier()
    if rank == 1:
        tlx.async_descriptor_store(y, tiles[0], [0, 0], store_reduce="add")
        tlx.async_descriptor_store_wait(0)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_cluster_barrier_shows_stores(policy):
    assert findings(meeting, policy=policy) == []


@triton.jit
def two_words(y, pointer, flag, T: tl.constexpr, LATE: tl.constexpr):
    """Rank 0 stores, says so, fences, and says so again; rank 1 adds after one word, or after both."""
    tiles = tlx.local_alloc((T, T), tl.float32, 1)
    done = tlx.alloc_barriers(2)
    rank = tlx.cluster_cta_rank()
    with tlx.async_tasks():
        with tlx.async_task("default"):
            tlx.local_store(tiles[0], tl.zeros([T, T], tl.float32) + 1)
            tlx.fence("async_shared")
            if rank == 0:
                tlx.async_descriptor_store(y, tiles[0], [0, 0])
                order("cp.async.bulk.wait_group 0;", rank)
                tlx.barrier_arrive(done[0], 1, remote_cta_rank=1)
                order("fence.proxy.async;", rank)
                tlx.barrier_arrive(done[1], 1, remote_cta_rank=1)
            else:
                tlx.barrier_wait(done[0], 0)
                if LATE:
                    tlx.barrier_wait(done[1], 0)
                tlx.async_descriptor_store(y, tiles[0], [0, 0], store_reduce="add")
                tlx.async_descriptor_store_wait(0)
                if not LATE:
                    tlx.barrier_wait(done[1], 0)  # stay until the last word has come
        with tlx.async_task(num_warps=1):
            pass


@pytest.mark.parametrize("policy", POLICIES)
def test_only_a_word_after_the_fence_counts(policy):
    assert findings(two_words, policy=policy, LATE=True) == []
    assert [f.kind for f in findings(two_words, policy=policy, LATE=False)] == [KIND]


# ------------------------------------------------------------------------- the kernel in which it was found


def gradients(rows, lengths=(70, 5, 64)):
    """Backward of the Hopper kernel with dQ on chip; its findings."""
    draw = torch.Generator().manual_seed(3)
    q, k, v = (
        torch.randn(n, 1, 64, generator=draw).bfloat16().requires_grad_()
        for n in (rows, sum(lengths), sum(lengths))
    )
    offsets = jagged.lengths_to_offsets(torch.tensor(lengths))
    with emulate(seed=rows) as emulation:
        out = jfa.jagged_flash_attention(q, k, v, offsets, backend="hopper", step="stationary")
        torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    assert any(report.ops["tma_reduce"] for report in emulation.reports)
    return [f for report in emulation.reports for f in report.findings if f.level == "error"]


def waiting(fence):
    """Patch of `await_visible`: behind the wait stands this fence and no other."""

    def patch(source):
        bare = re.sub(r"\b(fence|membar)\.[\w.:]+; *", "", source)
        assert bare.count(f"{WAIT} ") == 1
        return bare.replace(f"{WAIT} ", f"{WAIT} {fence} ")

    return patch


@pytest.mark.parametrize("fence", ["", "fence.proxy.async;", "fence.acq_rel.cluster;"])
def test_a_pair_of_the_hopper_backward(fence):
    """Rank 1 adds to dK and dV of every tile that rank 0 has stored."""
    with mutated(backward_stationary.await_visible, waiting(fence)):
        found = gradients(256)
    assert {(f.kind, f.buffer) for f in found} == (set() if fence else {(KIND, "dk"), (KIND, "dv")})
    assert gradients(256) == []  # the kernel as it is


def test_a_chain_of_pairs_passes_on_by_an_atomic_with_release(monkeypatch):
    """Between pairs, which all add, a release at GPU scope is enough: reported is the word inside a pair."""
    monkeypatch.setattr(shared, "EMULATED_SMS", 4)
    assert gradients(512) == []
    with mutated(backward_stationary.await_visible, waiting("")):
        found = gradients(512)
    assert {f.kind for f in found} == {KIND}
    assert {f.cta[0] % 2 for f in found} == {1}
