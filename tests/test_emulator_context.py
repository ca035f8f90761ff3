"""emulate() as a context: patching, threads, exceptions, determinism, the style of kernels it must run."""

import importlib
import linecache
import multiprocessing
import threading

import pytest
import torch
import triton
import triton.language as tl
import triton.language.extra.tlx as tlx
from triton.runtime.autotuner import Autotuner, Heuristics
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from jfa import emulator
from jfa.emulator import emulate
from jfa.emulator.blas import one_blas_thread

ORIGINAL = (JITFunction.run, Autotuner.run, Heuristics.run)
TILE = 64


def patched():
    return (JITFunction.run, Autotuner.run, Heuristics.run) != ORIGINAL


@triton.jit
def add(x, y, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    tl.store(out + at, tl.load(x + at, mask) + tl.load(y + at, mask), mask)


def sums(n=1000, **options):
    """Whether the emulated sum of two vectors is right."""
    x, y = torch.randn(n), torch.randn(n)
    out = torch.zeros(n)
    with emulate(**options) as e:
        add[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](x, y, out, n, BLOCK=128)
    assert e.errors() == []
    return torch.equal(out, x + y)


def test_a_plain_kernel_runs_and_nothing_stays_patched():
    assert not patched()
    with emulate() as e:
        assert patched()
        assert emulator.active() is e
    assert emulator.active() is None
    assert not patched()
    assert sums()


@triton.jit
def fails(out):
    tl.store(out + 100, 1)


def test_an_exception_of_the_kernel_leaves_nothing_behind():
    with emulate() as e, pytest.raises(IndexError, match="100") as caught:
        fails[(3,)](torch.zeros(1))
    assert not patched()
    assert emulator.active() is None
    (found,) = e.errors()
    assert found.kind == "out of bounds"
    assert found.line == fails.starting_line_number + 2
    assert any("in emulated kernel fails" in note for note in caught.value.__notes__)
    assert sums()


def test_an_exception_of_the_host_leaves_nothing_behind():
    with pytest.raises(KeyError), emulate():
        raise KeyError
    assert not patched()


def test_contexts_nest():
    with emulate() as outer:
        with emulate(policy="eager") as inner:
            add[(1,)](torch.zeros(8), torch.zeros(8), torch.zeros(8), 8, BLOCK=8)
        add[(1,)](torch.zeros(8), torch.zeros(8), torch.zeros(8), 8, BLOCK=8)
        assert patched()
    assert (len(outer.reports), len(inner.reports)) == (1, 1)
    assert not patched()


def test_threads_have_their_own_emulation():
    results = {}
    start = threading.Barrier(4)

    def work(k):
        start.wait()
        results[k] = [sums(seed=k, policy=("random", "lazy", "eager")[k % 3]) for _ in range(5)]

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert results == {k: [True] * 5 for k in range(4)}
    assert not patched()


def test_a_thread_outside_of_the_context_reaches_the_original():
    seen = []
    called = []

    def original(self, *args, **kwargs):
        called.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JITFunction, "run", original)
        with emulate() as e:
            thread = threading.Thread(target=lambda: seen.append(add[(1,)](1, 2, 3, 4, BLOCK=8)))
            thread.start()
            thread.join()
        assert JITFunction.run is original
    assert called == [add]
    assert e.reports == []


def test_processes():
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        assert pool.map(sums, [100, 257]) == [True, True]


def test_the_launch_arguments_are_checked():
    with emulate(), pytest.raises(TypeError, match="misses the arguments out, n"):
        add[(1,)](1, 2, BLOCK=8)
    with pytest.raises(ValueError, match="random, eager, lazy"):
        emulate(policy="hasty")


def test_blas_is_held_to_one_thread():
    from threadpoolctl import threadpool_info

    def blas_threads():
        return [lib["num_threads"] for lib in threadpool_info() if lib["user_api"] == "blas"]

    before = blas_threads()
    with one_blas_thread(), one_blas_thread():
        assert set(blas_threads()) == {1}
    assert blas_threads() == before


# ---- determinism
@triton.jit
def relay(out, T: tl.constexpr):
    tiles = tlx.local_alloc((T, T), tl.float32, 2)
    full = tlx.alloc_barriers(2)
    empty = tlx.alloc_barriers(2)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            for i in range(6):
                tlx.barrier_wait(full[i % 2], (i // 2) & 1)
                out.store([i * T, 0], tlx.local_load(tiles[i % 2]))
                tlx.barrier_arrive(empty[i % 2])
        with tlx.async_task(num_warps=4):
            for i in range(6):
                tlx.barrier_wait(empty[i % 2], ((i // 2) & 1) ^ 1)
                tlx.local_store(tiles[i % 2], tl.zeros([T, T], tl.float32) + i)
                tlx.barrier_arrive(full[i % 2])


def events(**options):
    out = TensorDescriptor.from_tensor(torch.zeros(6 * TILE, TILE), [TILE, TILE])
    with emulate(trace=True, **options) as e:
        relay[(4,)](out, T=TILE)
    return e.reports[0].events


def test_a_seed_decides_everything():
    assert events(seed=1) == events(seed=1)
    assert len({str(events(seed=seed)) for seed in range(4)}) == 4
    assert events(policy="lazy", preempt=0, seed=1) == events(policy="lazy", preempt=0, seed=2)


# ---- the project's style
@triton.aggregate
class Ring:
    tiles: tlx.buffered_tensor
    full: tlx.mbarrier
    empty: tlx.mbarrier
    depth: tl.constexpr

    @triton.constexpr_function
    def __init__(self, tiles, full, empty, depth):
        self.tiles = tiles
        self.full = full
        self.empty = empty
        self.depth = tl.constexpr(depth)

    @triton.jit
    def slot(self, i):
        return i % self.depth, (i // self.depth) & 1

    @triton.jit
    def fill(self, i, desc, row, BYTES: tl.constexpr):
        b, phase = self.slot(i)
        tlx.barrier_wait(self.empty[b], phase ^ 1)
        tlx.barrier_expect_bytes(self.full[b], BYTES)
        tlx.async_descriptor_load(desc, self.tiles[b], [row, 0], self.full[b])

    @triton.jit
    def take(self, i):
        b, phase = self.slot(i)
        tlx.barrier_wait(self.full[b], phase)
        return self.tiles[b], b


@triton.jit
def load_role(rings, x, n, T: tl.constexpr):
    for i in range(n):
        rings[i % 2 == 1].fill(i // 2, x, i * T, T * T * 4)


@triton.jit
def double(v):
    return v * 2


@triton.jit
def store_role(rings, y, n, POINTWISE: tl.constexpr, T: tl.constexpr):
    for i in range(n):
        tile, b = rings[i % 2 == 1].take(i // 2)
        y.store([i * T, 0], POINTWISE(tlx.local_load(tile)))
        tlx.barrier_arrive(rings[i % 2 == 1].empty[b])


@triton.jit
def staged(x, y, n, LOAD: tl.constexpr, STORE: tl.constexpr, POINTWISE: tl.constexpr, T: tl.constexpr):
    even = Ring(tlx.local_alloc((T, T), tl.float32, 2), tlx.alloc_barriers(2), tlx.alloc_barriers(2), 2)
    odd = Ring(tlx.local_alloc((T, T), tl.float32, 2), tlx.alloc_barriers(2), tlx.alloc_barriers(2), 2)
    rings = (even, odd)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            STORE(rings, y, n, POINTWISE, T)
        with tlx.async_task(num_warps=1):
            LOAD(rings, x, n, T)


def run_staged(**roles):
    x = torch.randn(5 * TILE, TILE)
    y = torch.zeros_like(x)
    roles = dict(LOAD=load_role, STORE=store_role, POINTWISE=double) | roles
    tiles = [TensorDescriptor.from_tensor(t, [TILE, TILE]) for t in (x, y)]
    with emulate() as e:
        staged[(1,)](*tiles, 5, T=TILE, **roles)
    assert e.errors() == []
    return x, y


def test_rings_are_aggregates_and_roles_are_arguments():
    x, y = run_staged()
    assert torch.equal(y, 2 * x)


def test_buffers_of_a_ring_are_named_after_it():
    @triton.jit
    def forgetful(rings, x, n, T: tl.constexpr):
        pass

    with pytest.raises(emulator.DeadlockError, match=r"waits for even\.full\[0\]") as caught:
        run_staged(LOAD=forgetful)
    assert "even.full is signalled by source lines" in str(caught.value)


@triton.jit
def make_ring(DEPTH: tl.constexpr, T: tl.constexpr):
    tiles = tlx.local_alloc((T, T), tl.float32, DEPTH)
    full = tlx.alloc_barriers(DEPTH)
    return Ring(tiles, full, tlx.alloc_barriers(DEPTH), DEPTH)


@triton.jit
def same_ring(ring):
    return ring


@triton.jit
def made_by_a_helper(T: tl.constexpr):
    full = tlx.alloc_barriers(1)
    even = make_ring(2, T)
    odd, last = make_ring(2, T), make_ring(1, T)
    pair = (make_ring(1, T), Ring(even.tiles, full, odd.empty, 1))
    again = same_ring(even)
    for ring in (again, odd, last, pair[0], pair[1]):
        tl.static_print(ring.tiles.alloc.name, ring.full.name, ring.empty.name)


def test_rings_that_one_helper_makes_have_their_own_names(capsys):
    with emulate() as e:
        made_by_a_helper[(1,)](T=TILE)
    assert e.errors() == []
    assert capsys.readouterr().out.splitlines() == [
        "even.tiles even.full even.empty",
        "odd.tiles odd.full odd.empty",
        "last.tiles last.full last.empty",
        "pair.0.tiles pair.0.full pair.0.empty",
        "even.tiles full odd.empty",
    ]


def test_a_role_written_in_a_notebook_cell():
    cell = "import triton\n@triton.jit\ndef negate(v):\n    return -v\n"
    name = "/tmp/ipykernel_1/1234.py"
    linecache.cache[name] = (len(cell), None, cell.splitlines(keepends=True), name)
    scope = {}
    exec(compile(cell, name, "exec"), scope)
    x, y = run_staged(POINTWISE=scope["negate"])
    assert torch.equal(y, -x)


SCALE = tl.constexpr(3)


@triton.jit
def scaled(v):
    return v * SCALE


def test_redefined_globals_are_seen(monkeypatch):
    x, y = run_staged(POINTWISE=scaled)
    assert torch.equal(y, 3 * x)
    monkeypatch.setitem(globals(), "SCALE", tl.constexpr(5))
    x, y = run_staged(POINTWISE=scaled)
    assert torch.equal(y, 5 * x)


def test_mutated_is_undone():
    with emulator.mutated(double, lambda source: source.replace("* 2", "* 4")):
        x, y = run_staged()
        assert torch.equal(y, 4 * x)
    x, y = run_staged()
    assert torch.equal(y, 2 * x)


@triton.autotune(configs=[triton.Config({"BLOCK": b}, num_warps=w) for b, w in ((32, 4), (64, 8))], key=["n"])
@triton.heuristics({"EVEN": lambda args: args["n"] % args["BLOCK"] == 0})
@triton.jit
def tuned(out, n, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    tl.store(out, BLOCK)
    tl.store(out + 1, EVEN)


def test_autotuned_kernels_take_the_first_or_the_picked_configuration():
    out = torch.zeros(2, dtype=torch.int32)
    with emulate():
        tuned[(1,)](out, 64)
        assert out.tolist() == [32, 1]
    with emulate(pick=lambda configs: configs[1]):
        tuned[(1,)](out, 32)
    assert out.tolist() == [64, 0]


def test_arguments_may_be_called_self_or_k():
    @triton.jit
    def odd_names(self, k, grid_size):
        tl.store(self, k + grid_size)

    out = torch.zeros(1, dtype=torch.int32)
    with emulate():
        odd_names[(1,)](out, k=3, grid_size=4)
    assert out.item() == 7


class _ForeignDriver:
    """Stands for the driver of a GPU: the emulator must not ask it for anything."""

    def __getattr__(self, name):
        raise AssertionError(f"the emulator asked the GPU's driver for {name}")


def test_works_where_a_gpu_is_present(monkeypatch):
    """A machine that reports a GPU: CPU tensors still run in the emulator, and its driver is left alone."""
    from triton.runtime import driver

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: (9, 0))
    monkeypatch.setattr(type(driver), "active", property(lambda self: _ForeignDriver()))
    assert sums()
    assert not patched()


MODULE = """import triton
import triton.language as tl


@triton.jit
def kernel(out):
    tl.store(out, 1)
"""


def test_a_file_that_changes_under_a_running_process(tmp_path, monkeypatch):
    """What was imported runs, with its line numbers, as the compiler would have it."""
    path = tmp_path / "changing_kernels.py"
    path.write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("changing_kernels")
    path.write_text("# two lines\n# more\n" + MODULE.replace("1)", "2)"))
    linecache.checkcache()
    out = torch.zeros(1, dtype=torch.int32)
    with emulator.emulate():
        module.kernel[(1,)](out)
    assert out.item() == 1
