"""Whatever reaches into a CTA's memory must come after the CTA's start and be done before its exit."""

import pytest
import torch
import triton
import triton.language as tl
import triton.language.extra.tlx as tlx
from triton.tools.tensor_descriptor import TensorDescriptor

from jfa import emulator
from jfa.lab.report import compile_report


@triton.jit
def ring_a_bell(out, WAIT: tl.constexpr, MEET: tl.constexpr, LEAVE: tl.constexpr):
    """Every CTA arrives at its neighbour's barrier; the neighbour may wait for it, at once or at the end."""
    bells = tlx.alloc_barriers(1)
    left = tlx.alloc_barriers(1)
    rank = tlx.cluster_cta_rank()
    if MEET == "before":
        tlx.cluster_barrier()
    with tlx.async_tasks():
        with tlx.async_task("default"):
            tl.store(out + rank, rank)
            tlx.barrier_arrive(bells[0], 1, remote_cta_rank=1 - rank)
            if MEET == "inside":
                tlx.cluster_barrier()
        with tlx.async_task(num_warps=1, registers=24):
            if WAIT:
                tlx.barrier_wait(bells[0], 0)
    if MEET == "behind":
        tlx.cluster_barrier()
    if LEAVE:
        tlx.barrier_arrive(left[0], 1, remote_cta_rank=1 - rank)
        tlx.barrier_wait(left[0], 0)


@triton.jit
def ring_alone(out, WAIT: tl.constexpr, MEET: tl.constexpr):
    """The same by the default task, without others."""
    bells = tlx.alloc_barriers(1)
    rank = tlx.cluster_cta_rank()
    tl.store(out + rank, rank)
    tlx.barrier_arrive(bells[0], 1, remote_cta_rank=1 - rank)
    if WAIT:
        tlx.barrier_wait(bells[0], 0)
    if MEET:
        tlx.cluster_barrier()


def findings(seed, kernel=ring_a_bell, **roles):
    if kernel is ring_a_bell:
        roles = {"MEET": "", "LEAVE": False} | roles
    out = torch.zeros(2, dtype=torch.int32)
    with emulator.emulate(arch="sm_90", seed=seed) as emulation:
        kernel[(2,)](out, num_warps=4, ctas_per_cga=(2, 1, 1), **roles)
    assert out.tolist() == [0, 1]
    return [finding for finding in emulation.reports[0].errors()]


@pytest.mark.parametrize("seed", range(4))
def test_an_arrive_that_nobody_waits_for_may_come_after_the_exit(seed):
    for found in (findings(seed, WAIT=False), findings(seed, ring_alone, WAIT=False, MEET=False)):
        assert {finding.kind for finding in found} == {"peer exited"}
        assert "arrives at bells[0]" in str(found[0])
        assert "may have exited" in str(found[0])


@pytest.mark.parametrize("seed", range(4))
def test_a_wait_or_a_handshake_at_the_end_orders_it(seed):
    assert findings(seed, WAIT=True) == []
    assert findings(seed, WAIT=False, LEAVE=True) == []
    assert findings(seed, ring_alone, WAIT=True, MEET=False) == []
    assert findings(seed, ring_alone, WAIT=False, MEET=True) == []


@pytest.mark.parametrize("where", ["before", "inside", "behind"])
def test_a_cluster_barrier_of_a_kernel_with_tasks_hangs(where):
    """Measured on an H200: the default task alone arrives, and barrier.cluster waits for every warp."""
    (found,) = findings(0, WAIT=True, MEET=where)
    assert found.kind == "cluster barrier"
    assert "the warps of its other tasks never arrive, so it hangs" in found.message
    line = ring_a_bell.raw_src[found.line - ring_a_bell.starting_line_number]
    assert line.strip() == "tlx.cluster_barrier()"


TILE = 64
POLICIES = ("random", "eager", "lazy")


@triton.jit
def pipeline(x, y, n, EXTRA: tl.constexpr, DEPTH: tl.constexpr, T: tl.constexpr):
    """Doubles n tiles; the producer loads EXTRA more, which nobody waits for."""
    tiles = tlx.local_alloc((T, T), tl.float32, DEPTH)
    full = tlx.alloc_barriers(DEPTH)
    empty = tlx.alloc_barriers(DEPTH)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            for i in range(n):
                tlx.barrier_wait(full[i % DEPTH], (i // DEPTH) & 1)
                y.store([i * T, 0], tlx.local_load(tiles[i % DEPTH]) * 2)
                tlx.barrier_arrive(empty[i % DEPTH], 1)
        with tlx.async_task(num_warps=1):
            for i in range(n + EXTRA):
                tlx.barrier_wait(empty[i % DEPTH], ((i // DEPTH) & 1) ^ 1)
                tlx.barrier_expect_bytes(full[i % DEPTH], T * T * 4)
                tlx.async_descriptor_load(x, tiles[i % DEPTH], [i * T, 0], full[i % DEPTH])


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_load_that_nobody_waits_for(policy, depth):
    """Found by order: under the policy "eager" the copy lands at once, and the numbers are right."""
    for extra in (0, 1):
        x = torch.randn(5 * TILE, TILE)
        y = torch.zeros_like(x)
        views = [TensorDescriptor.from_tensor(t, [TILE, TILE]) for t in (x, y)]
        with emulator.emulate(policy=policy, seed=depth) as emulation:
            pipeline[(1,)](*views, 5, EXTRA=extra, DEPTH=depth, T=TILE)
        assert torch.equal(y, 2 * x)
        found = emulation.errors()
        assert [finding.kind for finding in found] == ["unwaited load"] * extra
    assert found[0].message.startswith("tma_load of task1")
    assert f"writes tiles[{5 % depth}]" in found[0].message
    assert "async_descriptor_load" in pipeline.raw_src[found[0].line - pipeline.starting_line_number]


@triton.jit
def send(
    out, HOW: tl.constexpr, READY: tl.constexpr, WAIT: tl.constexpr, MEET: tl.constexpr, T: tl.constexpr
):
    """Each CTA of a pair puts a tile into the other's shared memory."""
    inbox = tlx.local_alloc((T, T), tl.float32, 1)
    outbox = tlx.local_alloc((T, T), tl.float32, 1)
    full = tlx.alloc_barriers(1)
    rank = tlx.cluster_cta_rank()
    tile = tl.full((T, T), 1.0, tl.float32)
    tlx.local_store(outbox[0], tile)
    tlx.fence("async_shared")
    if HOW != "plain":
        tlx.barrier_expect_bytes(full[0], T * T * 4)
    if READY == "meet":
        tlx.cluster_barrier()
    if READY == "arrive":
        ready = tlx.alloc_barriers(1)
        tlx.barrier_arrive(ready[0], 1, remote_cta_rank=1 - rank)
        tlx.barrier_wait(ready[0], 0)
    if HOW == "store":
        tlx.async_remote_shmem_store(inbox[0], tile, 1 - rank, full[0])
    elif HOW == "copy":
        tlx.async_remote_shmem_copy(inbox[0], outbox[0], 1 - rank, full[0])
    else:
        tlx.remote_shmem_store(inbox[0], tile, 1 - rank)
    if WAIT:
        tlx.barrier_wait(full[0], 0)
    if MEET:
        tlx.cluster_barrier()
    tl.store(out + rank, rank)


@triton.jit
def send_by_task(out, HELLO: tl.constexpr, T: tl.constexpr):
    """A task sends; with HELLO the kernel arrives remotely as well, so the compiler lets the cluster meet."""
    inbox = tlx.local_alloc((T, T), tl.float32, 1)
    full = tlx.alloc_barriers(1)
    hello = tlx.alloc_barriers(1)
    rank = tlx.cluster_cta_rank()
    with tlx.async_tasks():
        with tlx.async_task("default"):
            if HELLO:
                tlx.barrier_arrive(hello[0], 1, remote_cta_rank=1 - rank)
                tlx.barrier_wait(hello[0], 0)
            tile = tl.full((T, T), 1.0, tl.float32)
            tlx.async_remote_shmem_store(inbox[0], tile, 1 - rank, full[0])
        with tlx.async_task(num_warps=1):
            tlx.barrier_expect_bytes(full[0], T * T * 4)
            tlx.barrier_wait(full[0], 0)
            tl.store(out + rank, rank)


@pytest.mark.parametrize("policy", POLICIES)
def test_what_is_sent_to_a_neighbour_that_has_not_started(policy):
    """The compiler lets a cluster meet at the start if it arrives remotely, multicasts or shares MMAs."""
    for how in ("store", "copy", "plain"):
        roles = {"HOW": how, "WAIT": how != "plain", "MEET": how == "plain", "policy": policy}
        assert pair(send, READY="arrive", **roles) == []
        assert pair(send, READY="meet", **roles) == []
        found = [finding for finding in pair(send, READY="", **roles) if finding.kind == "peer not ready"]
        assert len(found) == 1 and "inbox[0]" in found[0].message
        assert "may not have started" in found[0].message
    assert pair(send_by_task, HELLO=True, policy=policy) == []
    assert [finding.kind for finding in pair(send_by_task, HELLO=False, policy=policy)] == ["peer not ready"]


@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
@pytest.mark.parametrize("ready", ["", "meet", "arrive"])
@pytest.mark.parametrize("how", ["store", "copy", "plain"])
def test_where_the_compiler_lets_a_cluster_meet(arch, ready, how):
    """What the rule above rests on: the code of the installed compiler."""
    constants = {"HOW": how, "READY": ready, "WAIT": True, "MEET": False, "T": TILE}
    report = compile_report(send, {"out": "*i32"}, constants, arch, ctas_per_cga=(2, 1, 1))
    assert ("barrier.cluster.wait" in report.text("ptx")) == (ready != "")


@triton.jit
def unfinished(a, b, out, WAIT: tl.constexpr, EARLY: tl.constexpr, T: tl.constexpr):
    """Two products, of which EARLY ones are committed to the barrier that is waited for."""
    tiles = tlx.local_alloc((T, T), tl.bfloat16, 2)
    acc = tlx.local_alloc((T, T), tl.float32, 1, tlx.storage_kind.tmem)
    full = tlx.alloc_barriers(1)
    done = tlx.alloc_barriers(1)
    tlx.barrier_expect_bytes(full[0], T * T * 4)
    tlx.async_descriptor_load(a, tiles[0], [0, 0], full[0])
    tlx.async_descriptor_load(b, tiles[1], [0, 0], full[0])
    tlx.barrier_wait(full[0], 0)
    tlx.async_dot(tiles[0], tiles[1], acc[0], use_acc=False, force_async=True)
    if EARLY:
        tlx.tcgen05_commit(done[0])
    tlx.async_dot(tiles[0], tiles[1], acc[0], use_acc=True, force_async=True)
    if not EARLY:
        tlx.tcgen05_commit(done[0])
    if WAIT:
        tlx.barrier_wait(done[0], 0)
    tl.store(out, 1)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_product_that_nobody_waits_for(policy):
    a, b = (TensorDescriptor.from_tensor(torch.randn(128, 128).bfloat16(), [128, 128]) for _ in range(2))

    def run(**roles):
        with emulator.emulate(arch="sm_100", policy=policy) as emulation:
            unfinished[(1,)](a, b, torch.zeros(1, dtype=torch.int32), num_warps=4, T=128, **roles)
        return emulation.errors()

    assert run(WAIT=True, EARLY=False) == []
    for roles in (dict(WAIT=False, EARLY=False), dict(WAIT=True, EARLY=True)):
        (found,) = run(**roles)
        assert found.kind == "unwaited mma"
        assert "mma issued by main" in found.message and "may still run when its CTA exits" in found.message
        line = unfinished.raw_src[found.line - unfinished.starting_line_number]
        assert "use_acc=True" in line, "the last one; older ones are done before it"


@triton.jit
def multicast(x, out, WAITERS: tl.constexpr, MEET: tl.constexpr, T: tl.constexpr):
    """CTA 0 loads a tile for both; WAITERS of the two wait for it."""
    inbox = tlx.local_alloc((T, T), tl.float32, 1)
    full = tlx.alloc_barriers(1)
    rank = tlx.cluster_cta_rank()
    tlx.barrier_expect_bytes(full[0], T * T * 4)
    tlx.cluster_barrier()
    if rank == 0:
        tlx.async_descriptor_load(x, inbox[0], [0, 0], full[0], multicast_targets=[0, 1])
    if rank < WAITERS:
        tlx.barrier_wait(full[0], 0)
    if MEET:
        tlx.cluster_barrier()
    tl.store(out + rank, rank)


def pair(kernel, *args, policy="random", **roles):
    """Findings of one launch on a cluster of two."""
    with emulator.emulate(policy=policy) as emulation:
        kernel[(2,)](
            *args, torch.zeros(2, dtype=torch.int32), ctas_per_cga=(2, 1, 1), num_warps=4, T=TILE, **roles
        )
    return emulation.errors()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("how", ["store", "copy"])
def test_what_is_sent_to_a_neighbour_is_waited_for(policy, how):
    assert pair(send, policy=policy, HOW=how, READY="meet", WAIT=True, MEET=False) == []
    for meet in (False, True):  # a cluster barrier alone does not wait for copies in flight
        (found,) = pair(send, policy=policy, HOW=how, READY="meet", WAIT=False, MEET=meet)
        assert found.kind == "unwaited load"
        assert f"dsmem_{how} of main" in found.message
        assert "writes inbox[0] of cluster CTA" in found.message
        assert found.count == 2


@pytest.mark.parametrize("policy", POLICIES)
def test_a_multicast_is_waited_for_by_everybody(policy):
    x = TensorDescriptor.from_tensor(torch.randn(TILE, TILE), [TILE, TILE])
    assert pair(multicast, x, policy=policy, WAITERS=2, MEET=False) == []
    for meet in (False, True):  # the barrier of CTA 0 knows nothing of the bytes that go to CTA 1
        (found,) = pair(multicast, x, policy=policy, WAITERS=1, MEET=meet)
        assert found.kind == "unwaited load"
        assert "writes inbox[0] of cluster CTA 1" in found.message


@triton.jit
def bulk(x, out, FROM: tl.constexpr, TO: tl.constexpr, INSIDE: tl.constexpr, N: tl.constexpr):
    """Copies N elements through shared memory with bulk copies."""
    line = tlx.local_alloc((N + 16,), tl.float32, 1)
    full = tlx.alloc_barriers(1)
    part = tlx.local_slice(line[0], [INSIDE], [N])
    tlx.barrier_expect_bytes(full[0], N * 4)
    tlx.async_load(x + FROM, part, bulk=True, barrier=full[0])
    tlx.barrier_wait(full[0], 0)
    tlx.async_store(out + TO, part, N * 4)
    tlx.async_descriptor_store_wait(0)


@pytest.mark.parametrize(
    ("places", "said"),
    [
        (dict(FROM=4, TO=8, INSIDE=4, N=48), None),
        (dict(FROM=1, TO=8, INSIDE=4, N=48), "bulk load of .*: its global address, 4 bytes into x"),
        (dict(FROM=4, TO=2, INSIDE=4, N=48), "bulk store of .*: its global address, 8 bytes into out"),
        (dict(FROM=4, TO=8, INSIDE=3, N=48), "bulk load of .*: its shared address, 12 bytes into line"),
        (dict(FROM=4, TO=8, INSIDE=4, N=46), "bulk load of .*: its size, 184 bytes"),
    ],
)
def test_bulk_copies_move_lines_of_16_bytes(places, said):
    x, out = torch.randn(96), torch.zeros(96)
    with emulator.emulate() as emulation:
        if said is None:
            bulk[(1,)](x, out, **places)
            assert emulation.errors() == []
            assert torch.equal(out[8:56], x[4:52])
            return
        with pytest.raises(TypeError, match=said + ".* no multiple of 16 bytes"):
            bulk[(1,)](x, out, **places)
    assert [finding.kind for finding in emulation.errors()] == ["illegal kernel"]
