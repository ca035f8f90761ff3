"""What the emulator reports: deadlocks, races, clobbered aliases, byte counts, capacity, unknown names."""

import pytest
import torch
import triton
import triton.language as tl
import triton.language.extra.tlx as tlx
from triton.tools.tensor_descriptor import TensorDescriptor

from jfa import emulator
from jfa.emulator import DeadlockError, UnknownConstruct, emulate

TILE = 64
POLICIES = ("random", "eager", "lazy")


def tile(rows=TILE, columns=TILE, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator).to(dtype)


def desc(tensor, rows=TILE, columns=TILE):
    return TensorDescriptor.from_tensor(tensor, [rows, columns])


def run(kernel, *args, grid=(1,), **options):
    """The report of one launch; constexprs go in `const`."""
    const = options.pop("const", {})
    with emulate(**options) as e:
        kernel[grid](*args, **const)
    return e.reports[0]


def line_of(kernel, text):
    """Line of the file on which `text` stands in a kernel's source."""
    source, first = kernel.raw_src, kernel.starting_line_number
    return first + next(i for i, line in enumerate(source) if text in line)


def findings(launch, *args, **options):
    """Findings of a launch that may end in a deadlock."""
    try:
        return launch(*args, **options).errors()
    except DeadlockError as e:
        return e.findings


# ---- a correct pipeline, and what happens when one statement of it goes
@triton.jit
def pipeline(x, y, n, T: tl.constexpr, DEPTH: tl.constexpr):
    tiles = tlx.local_alloc((T, T), tl.float32, DEPTH)
    full = tlx.alloc_barriers(DEPTH)
    empty = tlx.alloc_barriers(DEPTH)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            for i in range(n):
                b = i % DEPTH
                tlx.barrier_wait(full[b], (i // DEPTH) & 1)
                v = tlx.local_load(tiles[b])
                y.store([i * T, 0], v * 2)
                tlx.barrier_arrive(empty[b], 1)
        with tlx.async_task(num_warps=1):
            for i in range(n):
                b = i % DEPTH
                tlx.barrier_wait(empty[b], ((i // DEPTH) & 1) ^ 1)
                tlx.barrier_expect_bytes(full[b], T * T * 4)
                tlx.async_descriptor_load(x, tiles[b], [i * T, 0], full[b])


def run_pipeline(replace=None, n=5, **options):
    x = tile(n * TILE)
    y = torch.zeros_like(x)
    args = (desc(x), desc(y), n)
    const = dict(T=TILE, DEPTH=2)
    if replace is None:
        report = run(pipeline, *args, const=const, **options)
        assert torch.equal(y, 2 * x)
        return report
    old, new = replace
    assert pipeline.src.count(old) == 1
    with emulator.mutated(pipeline, lambda source: source.replace(old, new)):
        return run(pipeline, *args, const=const, **options)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(4))
def test_a_correct_pipeline_has_no_findings(policy, seed):
    report = run_pipeline(policy=policy, seed=seed, preempt=(0, 0.05, 0.5)[seed % 3])
    assert report.findings == []
    assert report.ops["tma_load"] == 5


def test_deadlock_says_who_waits_for_what_and_which_lines_signal_it():
    with pytest.raises(DeadlockError) as caught:
        run_pipeline(("tlx.barrier_arrive(empty[b], 1)", "pass"))
    text = str(caught.value)
    wait = line_of(pipeline, "barrier_wait(empty")
    assert f"line {wait}: waits for empty[0] parity 0 (phase 0)" in text
    assert "barrier is in phase 0 in progress: 0/1 arrivals; never signalled" in text
    assert "empty is signalled by source lines (none found)" in text
    expect = line_of(pipeline, "barrier_expect_bytes")
    assert f"full is signalled by source lines {expect} (barrier_expect_bytes)" in text
    found = {f.buffer: f for f in caught.value.findings if f.kind == "deadlock"}
    assert found["empty[0]"].line == wait
    assert found["empty[0]"].phase == 0
    assert found["empty[0]"].cta == (0, 0, 0)
    assert found["empty[0]"].task.startswith("task1@L")


def test_the_report_of_a_deadlock_is_kept():
    with emulate() as e, pytest.raises(DeadlockError) as caught:
        with emulator.mutated(pipeline, lambda s: s.replace("tlx.barrier_arrive(empty[b], 1)", "pass")):
            pipeline[(1,)](desc(tile(5 * TILE)), desc(tile(5 * TILE)), 5, T=TILE, DEPTH=2)
    assert e.reports[0].deadlock == str(caught.value)
    assert [f.kind for f in e.errors()] == ["deadlock", "deadlock"]


def test_race_when_the_full_wait_is_missing():
    """(Without that wait the consumer also runs ahead of the loader, which can end in a deadlock.)"""
    mutant = ("tlx.barrier_wait(full[b], (i // DEPTH) & 1)", "pass")
    found = [f for seed in range(4) for f in findings(run_pipeline, mutant, seed=seed)]
    race = next(f for f in found if f.kind == "race")
    assert race.buffer.startswith("tiles[")
    assert f"(line {line_of(pipeline, 'async_descriptor_load')})" in race.message
    assert f"(line {line_of(pipeline, 'local_load')})" in race.message
    for policy in ("eager", "lazy"):
        assert findings(run_pipeline, mutant, policy=policy)[0].kind == "uninitialised read"


@pytest.mark.parametrize("policy", POLICIES)
def test_race_when_the_empty_wait_is_missing(policy):
    mutant = ("tlx.barrier_wait(empty[b], ((i // DEPTH) & 1) ^ 1)", "pass")
    assert {"race", "barrier over-arrival"} <= {f.kind for f in findings(run_pipeline, mutant, policy=policy)}
    assert "race" not in {f.kind for f in findings(run_pipeline, mutant, policy=policy, checks=False)}


@triton.jit
def unordered(out, T: tl.constexpr, WAIT: tl.constexpr):
    a = tlx.local_alloc((T, T), tl.float32, 1)
    ready = tlx.alloc_barriers(1)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            tlx.local_store(a[0], tl.zeros([T, T], tl.float32) + 3)
            tlx.barrier_arrive(ready[0])
        with tlx.async_task(num_warps=4):
            if WAIT:
                tlx.barrier_wait(ready[0], 0)
            r = tl.arange(0, T)
            tl.store(out + r[:, None] * T + r[None, :], tlx.local_load(a[0]))


def test_races_are_found_when_the_schedule_hides_them():
    """Tasks run in order of declaration and the numbers come out right; the missing order is seen anyway."""
    out = tile()
    report = run(unordered, out, const=dict(T=TILE, WAIT=False), policy="eager", preempt=0)
    assert (out == 3).all()
    assert [f.kind for f in report.errors()] == ["race"]
    assert run(unordered, out, const=dict(T=TILE, WAIT=True)).findings == []


def test_announcing_too_many_bytes():
    with pytest.raises(DeadlockError) as caught:
        run_pipeline(("T * T * 4)", "T * T * 4 + 32)"))
    found = [f for f in caught.value.findings if f.kind == "expected bytes"]
    assert "announced 32 bytes more than its copies bring" in found[0].message
    assert found[0].buffer == "full[0]"
    assert "32 bytes outstanding" in str(caught.value)


def test_announcing_too_few_bytes():
    with pytest.raises(DeadlockError) as caught:
        run_pipeline(("T * T * 4)", "T * T * 2)"))
    assert {f.kind for f in caught.value.findings} >= {"expected bytes"}


def test_a_double_arrival_is_reported():
    found = findings(run_pipeline, ("tlx.barrier_arrive(empty[b], 1)", "tlx.barrier_arrive(empty[b], 2)"))
    over = [f for f in found if f.kind == "barrier over-arrival"]
    assert over[0].line == line_of(pipeline, "barrier_arrive(empty")
    assert "arrives 2 on empty[0]" in over[0].message


# ---- single faults
@triton.jit
def phase_overrun(out):
    bar = tlx.alloc_barriers(1)
    go = tlx.alloc_barriers(1)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            tlx.barrier_arrive(go[0])
            tlx.barrier_wait(bar[0], 0)
            tl.store(out, 1)
        with tlx.async_task(num_warps=1):
            tlx.barrier_wait(go[0], 0)
            tlx.barrier_arrive(bar[0])
            tlx.barrier_arrive(bar[0])


def test_a_barrier_that_runs_ahead_of_a_waiting_task():
    """A wait that is there when both phases end overruns; one that comes later hangs, by parity."""
    kinds = set()
    for seed in range(20):
        kinds |= {f.kind for f in findings(run, phase_overrun, torch.zeros(1, dtype=torch.int32), seed=seed)}
    assert kinds == {"phase overrun", "deadlock"}


@triton.jit
def clobbered(out, T: tl.constexpr):
    storage = tlx.storage_alias_spec(storage=tlx.storage_kind.smem)
    a = tlx.local_alloc((T, T), tl.float32, 1, reuse=storage)
    b = tlx.local_alloc((T, T), tl.float32, 1, reuse=storage)
    storage.set_buffer_overlap(tlx.reuse_group(a, b, group_type=tlx.reuse_group_type.shared))
    tlx.local_store(a[0], tl.zeros([T, T], tl.float32))
    tlx.local_store(b[0], tl.zeros([T, T], tl.float32) + 1)
    r = tl.arange(0, T)
    tl.store(out + r[:, None] * T + r[None, :], tlx.local_load(a[0]))


def test_alias_clobber_names_both_allocations():
    report = run(clobbered, tile(), const=dict(T=TILE))
    found = report.of_kind("alias clobber")[0]
    assert found in report.errors()
    assert "reads a[0], but those bytes were last written as b[0]" in found.message
    assert found.line == line_of(clobbered, "local_load(a[0])")


@triton.jit
def uninitialised(out, T: tl.constexpr):
    a = tlx.local_alloc((T, T), tl.float32, 1)
    r = tl.arange(0, T)
    tl.store(out + r[:, None] * T + r[None, :], tlx.local_load(a[0]))


def test_uninitialised_shared_memory():
    out = tile()
    report = run(uninitialised, out, const=dict(T=TILE))
    found = report.errors()[0]
    assert found.kind == "uninitialised read"
    assert found.buffer == "a[0]"
    assert torch.isnan(out).all()


@triton.jit
def store_not_waited(y, T: tl.constexpr, WAIT: tl.constexpr):
    a = tlx.local_alloc((T, T), tl.float32, 1)
    tlx.local_store(a[0], tl.zeros([T, T], tl.float32))
    tlx.fence("async_shared")
    tlx.async_descriptor_store(y, a[0], [0, 0])
    if WAIT:
        tlx.async_descriptor_store_wait(0)


def test_store_that_nobody_waits_for():
    report = run(store_not_waited, desc(tile()), const=dict(T=TILE, WAIT=False))
    found = report.errors()[0]
    assert found.kind == "unwaited store"
    assert found.line == line_of(store_not_waited, "async_descriptor_store(y")
    assert run(store_not_waited, desc(tile()), const=dict(T=TILE, WAIT=True)).errors() == []


@triton.jit
def overwritten_before_read(y, T: tl.constexpr, WAIT: tl.constexpr):
    a = tlx.local_alloc((T, T), tl.float32, 1)
    for i in range(2):
        if WAIT:
            tlx.async_descriptor_store_wait(0)
        tlx.local_store(a[0], tl.zeros([T, T], tl.float32) + i)
        tlx.fence("async_shared")
        tlx.async_descriptor_store(y, a[0], [i * T, 0])
    tlx.async_descriptor_store_wait(0)


@pytest.mark.parametrize("policy", POLICIES)
def test_staging_tile_overwritten_while_a_store_reads_it(policy):
    y = tile(2 * TILE)
    assert run(overwritten_before_read, desc(y), const=dict(T=TILE, WAIT=True), policy=policy).findings == []
    assert (y[:TILE] == 0).all() and (y[TILE:] == 1).all()
    bad = run(overwritten_before_read, desc(y), const=dict(T=TILE, WAIT=False), policy=policy)
    assert {f.kind for f in bad.errors()} == {"race"}


@triton.jit
def too_much(ROWS: tl.constexpr, COLUMNS: tl.constexpr, NUM: tl.constexpr, TENSOR: tl.constexpr):
    if TENSOR:
        first = tlx.local_alloc((128, COLUMNS), tl.float32, NUM, tlx.storage_kind.tmem)
        second = tlx.local_alloc((128, 128), tl.float32, 1, tlx.storage_kind.tmem)
    else:
        first = tlx.local_alloc((ROWS, COLUMNS), tl.bfloat16, NUM)
        second = tlx.local_alloc((16, 16), tl.bfloat16, 1)
    tl.static_assert(first.dtype.primitive_bitwidth + second.dtype.primitive_bitwidth > 0)


def test_capacity_of_tensor_and_shared_memory():
    fits = run(too_much, const=dict(ROWS=128, COLUMNS=128, NUM=3, TENSOR=True))
    assert fits.findings == []
    found = run(too_much, const=dict(ROWS=128, COLUMNS=256, NUM=2, TENSOR=True)).errors()[0]
    assert found.kind == "capacity"
    assert "640 columns allocated, a CTA has 512" in found.message
    assert found.line == line_of(too_much, "second = tlx.local_alloc((128")
    shared = run(too_much, const=dict(ROWS=128, COLUMNS=128, NUM=7, TENSOR=False))
    assert shared.findings == []
    found = run(too_much, const=dict(ROWS=128, COLUMNS=128, NUM=8, TENSOR=False)).errors()[0]
    assert "262144 bytes allocated, a CTA has 232448" in found.message


def test_one_allocation_beyond_tensor_memory_ends_the_launch():
    with emulate() as e, pytest.raises(emulator.CapacityError, match="768 tensor-memory columns"):
        too_much[(1,)](ROWS=128, COLUMNS=256, NUM=3, TENSOR=True)
    assert [f.kind for f in e.errors()] == ["capacity"]


@triton.jit
def unknown_name(out):
    tl.store(out, 1)
    tlx.no_such_operation(out)


@triton.jit
def unknown_keyword(out, T: tl.constexpr):
    a = tlx.local_alloc((T, T), tl.float32, 1)
    tlx.local_load(a[0], flavour=3)


def test_unknown_constructs_are_named_with_their_line():
    with emulate() as e, pytest.raises(UnknownConstruct, match=r"tlx\.no_such_operation.*line \d+"):
        unknown_name[(1,)](torch.zeros(1, dtype=torch.int32))
    found = e.errors()[0]
    assert found.kind == "unknown construct"
    assert found.line == line_of(unknown_name, "no_such_operation")
    with pytest.raises(UnknownConstruct, match=r"local_load\(flavour=\)"):
        run(unknown_keyword, torch.zeros(1), const=dict(T=TILE))


@triton.jit
def crosses_tasks(out, T: tl.constexpr, FENCE: tl.constexpr, TENSOR: tl.constexpr):
    a = tlx.local_alloc((T, T), tl.bfloat16, 2)
    acc = tlx.local_alloc((T, T), tl.float32, 1, tlx.storage_kind.tmem)
    ready = tlx.alloc_barriers(1)
    done = tlx.alloc_barriers(1)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            tlx.local_store(a[0], tl.zeros([T, T], tl.bfloat16))
            tlx.local_store(a[1], tl.zeros([T, T], tl.bfloat16))
            if FENCE:
                tlx.fence("async_shared")
            tlx.barrier_arrive(ready[0])
            tlx.barrier_wait(done[0], 0)
            r = tl.arange(0, T)
            tl.store(out + r[:, None] * T + r[None, :], tlx.local_load(acc[0]))
        with tlx.async_task(num_warps=1):
            tlx.barrier_wait(ready[0], 0)
            tlx.async_dot(a[0], a[1], acc[0], use_acc=TENSOR, mBarriers=[done[0]])


@triton.jit
def fill(x, N: tl.constexpr):
    tl.store(x + tl.arange(0, N), 1.0)


def test_a_launch_takes_no_unknown_option():
    x = torch.zeros(4)
    with emulate():
        fill[(1,)](x, N=4, num_warps=8, num_stages=2)
        with pytest.raises(TypeError, match="no parameter 'nun_warps'"):
            fill[(1,)](x, N=4, nun_warps=8)


def test_missing_proxy_fence_is_a_warning():
    report = run(crosses_tasks, tile(), const=dict(T=TILE, FENCE=False, TENSOR=False))
    assert report.errors() == []
    assert {f.kind for f in report.warnings()} == {"proxy fence"}
    assert run(crosses_tasks, tile(), const=dict(T=TILE, FENCE=True, TENSOR=False)).findings == []


def test_accumulating_into_nothing_is_an_error():
    report = run(crosses_tasks, tile(), const=dict(T=TILE, FENCE=True, TENSOR=True))
    assert [f.kind for f in report.errors()] == ["uninitialised read"]
    assert report.errors()[0].buffer == "acc[0]"


@triton.jit
def hopper_dot(out, T: tl.constexpr, WAIT: tl.constexpr):
    a = tlx.local_alloc((T, T), tl.bfloat16, 1)
    tlx.local_store(a[0], tl.zeros([T, T], tl.bfloat16) + 1)
    tlx.fence("async_shared")
    d = tlx.async_dot(a[0], a[0])
    if WAIT:
        d = tlx.async_dot_wait(0, d)
    r = tl.arange(0, T)
    tl.store(out + r[:, None] * T + r[None, :], d)


def test_reading_wgmma_registers_before_the_wait():
    out = tile()
    assert run(hopper_dot, out, const=dict(T=TILE, WAIT=True), arch="sm_90").findings == []
    assert (out == TILE).all()
    found = run(hopper_dot, out, const=dict(T=TILE, WAIT=False), arch="sm_90").errors()
    assert [f.kind for f in found] == ["register hazard"]
    assert torch.isnan(out).all()


def test_the_architecture_is_checked():
    with pytest.raises(TypeError, match="accumulator must be in tensor memory"):
        run(hopper_dot, tile(), const=dict(T=TILE, WAIT=True), arch="sm_100")
    with pytest.raises(emulator.EmulationError, match="only available on Blackwell"):
        run(too_much, const=dict(ROWS=128, COLUMNS=128, NUM=1, TENSOR=True), arch="sm_90")


def test_an_unknown_architecture_is_refused():
    for arch in ("sm_80", "hopper", "sm_103", 90):
        with pytest.raises(ValueError, match="arch must be one of None, sm_90, .*got"):
            emulate(arch=arch)
        with pytest.raises(ValueError, match="arch must be one of"):
            emulator.launch(named, (1,), (torch.zeros(1), 256), arch=arch)
    for arch in (None, "sm_90", "sm90", "sm_100", "sm100"):
        out = torch.zeros(1, dtype=torch.int32)
        assert run(named, out, const=dict(THREADS=256), arch=arch).findings == []


@triton.jit
def turns_round(out, n, HOW: tl.constexpr):
    i = 0
    if HOW == "range":
        for k in range(n):
            i += k & 1
    elif HOW == "while":
        while i >= 0:
            i = i & 1
    elif HOW == "passed":
        bars = tlx.alloc_barriers(1)
        while tlx.thread_id(0) + i >= 0:
            tlx.barrier_wait(bars[0], 1)
    else:
        while i < n:
            i += 1
    tl.store(out, i)


@pytest.mark.parametrize(
    ("how", "line"),
    [("range", "for k in range"), ("while", "while i >= 0"), ("passed", "while tlx.thread_id")],
)
@pytest.mark.parametrize("options", [{}, {"max_steps": 1000}], ids=["default", "max_steps"])
def test_a_loop_that_never_ends_is_found_at_its_line(how, line, options):
    out = torch.zeros(1, dtype=torch.int32)
    with emulate(preempt=0, **options) as e, pytest.raises(emulator.EndlessError, match="turns"):
        turns_round[(1,)](out, 2**31 - 1, HOW=how)
    (found,) = e.errors()
    assert (found.kind, found.line) == ("endless", line_of(turns_round, line))


def test_loops_that_end_may_be_long():
    out = torch.zeros(1, dtype=torch.int32)
    for how, value in (("range", 2500), ("counted", 5000)):
        assert run(turns_round, out, 5000, const=dict(HOW=how), max_steps=1000).findings == []
        assert out.item() == value


@triton.jit
def named(out, THREADS: tl.constexpr):
    with tlx.async_tasks():
        with tlx.async_task("default"):
            tlx.named_barrier_wait(9, 256)
            tl.store(out, 1)
        with tlx.async_task(num_warps=4):
            tlx.named_barrier_wait(9, THREADS)


def test_named_barriers_count_threads():
    out = torch.zeros(1, dtype=torch.int32)
    assert run(named, out, const=dict(THREADS=256)).findings == []
    found = findings(run, named, out, const=dict(THREADS=384))
    assert {"256", "384"} <= set(found[0].message.split())
    assert found[0].kind == "named barrier"
    with pytest.raises(DeadlockError, match="waits at named barrier 9; 128/512 threads|256/512 threads"):
        run(named, out, const=dict(THREADS=512), policy="lazy", preempt=0)


def test_findings_read_as_text():
    report = run(uninitialised, tile(), const=dict(T=TILE))
    assert str(report.findings[0]).startswith("[error] uninitialised read: main (line ")
    assert "uninitialised[1, 1, 1]" in str(report)
    assert repr(report) == "<Report uninitialised[1, 1, 1]: 1 errors>"
