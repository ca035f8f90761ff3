"""Global memory between CTAs: which accesses are ordered, and what is reported when they are not."""

import pytest
import torch
import triton
import triton.language as tl
import triton.language.extra.tlx as tlx
from triton.tools.tensor_descriptor import TensorDescriptor

from jfa.emulator import DeadlockError, emulate

POLICIES = ("random", "eager", "lazy")
CTAS = 6


def run(kernel, *args, grid=(CTAS,), const=None, launch=None, **options):
    with emulate(**options) as e:
        kernel[grid](*args, **(const or {}), **(launch or {}))
    return e.reports[0]


def zeros(n=1, dtype=torch.int32):
    return torch.zeros(n, dtype=dtype)


def desc(tensor, rows, columns):
    return TensorDescriptor.from_tensor(tensor, [rows, columns])


@triton.jit
def plain_store(out, SAME: tl.constexpr):
    pid = tl.program_id(0)
    tl.store(out, 7 if SAME else pid + 1)


def test_unordered_stores_of_two_ctas():
    report = run(plain_store, zeros(), const=dict(SAME=False))
    (found,) = report.errors()
    assert found.kind == "global race"
    assert found.buffer == "out"
    assert found.message.startswith("write of out by main of CTA (")
    assert "is not ordered after the write by main of CTA (" in found.message
    assert found.line is not None and found.task == "main" and len(found.cta) == 3


def test_two_ctas_storing_the_same_value_is_a_warning():
    report = run(plain_store, zeros(), const=dict(SAME=True))
    assert report.errors() == []
    assert {f.kind for f in report.warnings()} == {"global race"}


@triton.jit
def read_and_write(x, out):
    pid = tl.program_id(0)
    if pid == 0:
        tl.store(x, 1)
    else:
        tl.store(out + pid, tl.load(x))


@pytest.mark.parametrize("seed", range(3))
def test_a_read_and_an_unordered_write(seed):
    found = run(read_and_write, zeros(), zeros(CTAS), seed=seed).errors()
    assert {f.kind for f in found} == {"global race"}
    assert {f.buffer for f in found} == {"x"}


@triton.jit
def atomics(total, columns, N: tl.constexpr):
    tl.atomic_add(total, tl.program_id(0))
    tl.atomic_add(columns + tl.arange(0, N), tl.zeros([N], tl.float32) + 1, sem="relaxed")


def test_atomics_do_not_race():
    total, columns = zeros(), zeros(64, torch.float32)
    assert run(atomics, total, columns, const=dict(N=64)).findings == []
    assert total.item() == sum(range(CTAS))
    assert (columns == CTAS).all()


@triton.jit
def tile_counter(counter, owner, tiles):
    pid = tl.program_id(0)
    tile = tl.atomic_add(counter, 1, sem="relaxed")
    while tile < tiles:
        tl.store(owner + tile, pid + 1)
        tile = tl.atomic_add(counter, 1, sem="relaxed")


@pytest.mark.parametrize("policy", POLICIES)
def test_an_atomic_counter_deals_tiles_to_interleaved_ctas(policy):
    owner = zeros(40)
    assert run(tile_counter, zeros(), owner, 40, policy=policy).findings == []
    assert (owner > 0).all()
    assert len(owner.unique()) == CTAS


@triton.jit
def peek(counter, out, VOLATILE: tl.constexpr, ATOMIC: tl.constexpr):
    """Every CTA takes a number; before that it looks at the counter and branches on what it sees."""
    if ATOMIC:
        seen = tl.atomic_add(counter, 0, sem="relaxed")
    else:
        seen = tl.load(counter, volatile=VOLATILE)
    if seen < 4:
        tl.store(out + tl.atomic_add(counter, 1, sem="relaxed"), seen)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("volatile", (True, False))
def test_branching_on_a_load_of_a_counter_that_others_add_to(volatile, policy):
    """Lanes load one by one and may see different values: the warp diverges, and can hang on hardware."""
    out = zeros(CTAS)
    found = run(peek, zeros(), out, const=dict(VOLATILE=volatile, ATOMIC=False), policy=policy).errors()
    assert {f.kind for f in found} == {"global race"}
    assert all("lanes of the reading warps may see different values" in f.message for f in found)
    assert {f.buffer for f in found} == {"counter"}
    assert run(peek, zeros(), out, const=dict(VOLATILE=volatile, ATOMIC=True), policy=policy).findings == []


@triton.jit
def message(
    data,
    flag,
    out,
    SEM_OUT: tl.constexpr,
    SEM_IN: tl.constexpr,
    FENCE_OUT: tl.constexpr,
    FENCE_IN: tl.constexpr,
):
    if tl.program_id(0) == 0:
        tl.store(data, 42)
        if FENCE_OUT:
            tlx.fence("gpu")
        tl.atomic_xchg(flag, 1, sem=SEM_OUT)
    else:
        while tl.atomic_add(flag, 0, sem=SEM_IN) == 0:
            pass
        if FENCE_IN:
            tlx.fence("gpu")
        tl.store(out, tl.load(data))


ORDERED = [
    ("release", "acquire", False, False),
    ("acq_rel", "acq_rel", False, False),
    ("relaxed", "relaxed", True, True),
]
UNORDERED = [
    ("relaxed", "relaxed", False, False),
    ("release", "relaxed", False, False),
    ("relaxed", "acquire", False, False),
    ("relaxed", "relaxed", True, False),
    ("relaxed", "relaxed", False, True),
]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("way", ORDERED + UNORDERED)
def test_release_and_acquire_through_a_flag(way, policy):
    const = dict(zip(("SEM_OUT", "SEM_IN", "FENCE_OUT", "FENCE_IN"), way))
    out = zeros()
    report = run(message, zeros(), zeros(), out, grid=(2,), const=const, policy=policy)
    assert out.item() == 42
    assert {f.kind for f in report.findings} == (set() if way in ORDERED else {"global race"})


def test_a_cta_that_waits_for_one_that_cannot_start():
    const = dict(SEM_OUT="release", SEM_IN="acquire", FENCE_OUT=False, FENCE_IN=False)

    @triton.jit
    def backwards(data, flag, out):
        if tl.program_id(0) == 1:
            tl.atomic_xchg(flag, 1, sem="release")
        else:
            while tl.atomic_add(flag, 0, sem="acquire") == 0:
                pass

    assert run(message, zeros(), zeros(), zeros(), grid=(2,), const=const, resident=1).findings == []
    assert run(backwards, zeros(), zeros(), zeros(), grid=(2,), resident=2).findings == []
    with pytest.raises(DeadlockError, match="a value in global memory that never comes"):
        run(backwards, zeros(), zeros(), zeros(), grid=(2,), resident=1)


@triton.jit
def reduce_tiles(y, T: tl.constexpr, REDUCE: tl.constexpr):
    a = tlx.local_alloc((T, T), tl.float32, 1)
    tlx.local_store(a[0], tl.zeros([T, T], tl.float32) + 1)
    tlx.fence("async_shared")
    if REDUCE:
        tlx.async_descriptor_store(y, a[0], [0, 0], store_reduce="add")
    else:
        tlx.async_descriptor_store(y, a[0], [0, 0])
    tlx.async_descriptor_store_wait(0)


@pytest.mark.parametrize("policy", POLICIES)
def test_tma_reductions_are_atomic_and_stores_are_not(policy):
    y = torch.zeros(32, 32)
    assert run(reduce_tiles, desc(y, 32, 32), const=dict(T=32, REDUCE=True), policy=policy).findings == []
    assert (y == CTAS).all()
    found = run(reduce_tiles, desc(y, 32, 32), const=dict(T=32, REDUCE=False), policy=policy).errors()
    assert {f.kind for f in found} == {"global race"}
    assert "tma_store_write" in found[0].message


@triton.jit
def neighbours(y, out, W: tl.constexpr, T: tl.constexpr):
    """CTAs store columns side by side: tiles by pointers, with a mask, and one by TMA."""
    pid = tl.program_id(0)
    r = tl.arange(0, T)
    c = tl.arange(0, T)
    tl.store(
        out + r[:, None] * (W * 6) + pid * W + c[None, :],
        tl.zeros([T, T], tl.bfloat16),
        mask=(c < W)[None, :],
    )
    a = tlx.local_alloc((T, T), tl.bfloat16, 1)
    tlx.local_store(a[0], tl.zeros([T, T], tl.bfloat16))
    tlx.fence("async_shared")
    tlx.async_descriptor_store(y, a[0], [0, pid * T])
    tlx.async_descriptor_store_wait(0)


def test_neighbouring_elements_are_no_race():
    out = torch.zeros(16, 5 * CTAS, dtype=torch.bfloat16)
    y = torch.zeros(16, 16 * CTAS, dtype=torch.bfloat16)
    assert run(neighbours, desc(y, 16, 16), out, const=dict(W=5, T=16)).findings == []


@triton.jit
def wait_all(z):
    return tl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; fence.proxy.async; mov.b32 $0, $1;",
        "=r,r", [z], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def hand_over(y, T: tl.constexpr, COMPLETE: tl.constexpr):
    """Rank 0 stores a tile; rank 1 adds to it when told that the store is complete."""
    a = tlx.local_alloc((T, T), tl.float32, 1)
    done = tlx.alloc_barriers(1)
    rank = tlx.cluster_cta_rank()
    with tlx.async_tasks():
        with tlx.async_task("default"):
            tlx.local_store(a[0], tl.zeros([T, T], tl.float32) + 1)
            tlx.fence("async_shared")
            if rank == 0:
                tlx.async_descriptor_store(y, a[0], [0, 0])
                if COMPLETE:
                    wait_all(rank)
                else:
                    tlx.async_descriptor_store_wait(0)
                tlx.barrier_arrive(done[0], 1, remote_cta_rank=1)
            else:
                tlx.barrier_wait(done[0], 0)
                tlx.async_descriptor_store(y, a[0], [0, 0], store_reduce="add")
            tlx.async_descriptor_store_wait(0)
        with tlx.async_task(num_warps=1):
            pass


@pytest.mark.parametrize("policy", POLICIES)
def test_wait_group_read_does_not_order_the_write(policy):
    y = torch.zeros(32, 32)
    options = dict(grid=(2,), launch=dict(ctas_per_cga=(2, 1, 1)), policy=policy)
    assert run(hand_over, desc(y, 32, 32), const=dict(T=32, COMPLETE=True), **options).findings == []
    assert (y == 2).all()
    found = run(hand_over, desc(y, 32, 32), const=dict(T=32, COMPLETE=False), **options).errors()
    assert {f.kind for f in found} == {"global race"}


def test_checks_off():
    assert run(plain_store, zeros(), const=dict(SAME=False), checks=False).findings == []
