"""tlx: mbarriers, warp barriers, named barriers, the cluster barrier and fences."""

from .agents import Wait
from .barriers import BarrierArray, barrier_on, one_barrier
from .context import CTX
from .errors import EmulationError
from .order import Site
from .tlx_buffers import allocation_name


def alloc_barriers(num_barriers, arrive_count=1):
    return _alloc(num_barriers, int(arrive_count), False)


def alloc_warp_barrier(num_barriers, num_warps=1, num_arrivals=1):
    """A barrier on which every thread of `num_warps` warps arrives, `num_arrivals` times."""
    return _alloc(num_barriers, int(num_warps) * 32 * int(num_arrivals), True)


def _alloc(num, count, warp):
    machine = CTX.machine
    cta = machine.cur.cta
    name, named = allocation_name("barriers")
    array = BarrierArray(machine, cta, name, named, int(num), count, warp)
    for bar in array.bars:
        bar.done_clock.join(machine.cur.clock)
    cta.allocated()
    return array


def holds(pred):
    """A predicate argument: absent means true."""
    return True if pred is None else bool(pred)


def barrier_expect_bytes(bar, size, pred=None):
    """mbarrier.arrive.expect_tx: announces bytes, and arrives once."""
    if not holds(pred):
        return
    machine = CTX.machine
    task = machine.cur
    bar = one_barrier(bar)
    event = None
    if machine.tracing:
        event = machine.trace("expect", bar.label, bytes=int(size), phase=bar.phase)
    bar.expect(int(size))
    bar.arrive(1, task.clock, Site(task, machine.line()), ("t", event))
    task.tick()


def barrier_wait(bar, phase, pred=None):
    """Waits while the barrier's phase parity equals `phase`; acquires what completed phases released."""
    if not holds(pred):
        return
    machine = CTX.machine
    task = machine.cur
    bar = one_barrier(bar)
    if bar.cta is not task.cta:
        raise EmulationError("barrier_wait on a barrier of another CTA")
    machine.maybe_preempt()
    parity = int(phase) & 1
    if not bar.passed(parity):
        if machine.tracing:
            machine.trace("wait_begin", bar.label, parity=parity)
        wait = Wait(bar, parity=parity, phase=bar.phase)
        machine.block_on(lambda: bar.reached(task, wait), bar, wait)
    counts = machine.waits[machine.line()]
    counts[0] += 1
    if not task.clock.covers(bar.done_clock):
        counts[1] += 1
        task.clock.join(bar.done_clock)
    if machine.tracing:
        machine.trace(
            "wait", bar.label, parity=parity, phase=bar.phase - 1, key=(bar.cta.pid, bar.label, bar.phase - 1)
        )


def barrier_arrive(bar, arrive_count=1, remote_cta_rank=None, pred=None):
    machine = CTX.machine
    task = machine.cur
    if remote_cta_rank is not None:
        task.cta.group.visits.barrier_at_start = True
    if not holds(pred):
        return
    bar = one_barrier(bar)
    if machine.checks:
        machine.bodies.note_arrive(task, bar)
    machine.maybe_preempt()
    if remote_cta_rank is not None:
        bar = barrier_on(bar, task.cta.cluster[int(remote_cta_rank)])
    n = int(arrive_count) * (task.threads if bar.warp else 1)
    if not bar.warp:
        task.warp_sync()  # the compiler syncs the task before its one thread arrives
    task.cta.group.visits.note(
        bar.cta, task, task.slot, task.epoch, f"arrives at {bar.label}", machine.line()
    )
    event = machine.trace("arrive", bar.label, count=n, phase=bar.phase) if machine.tracing else None
    bar.arrive(n, task.published(), Site(task, machine.line()), ("t", event))
    task.tick()


def named_barrier_arrive(bar, arrive_count):
    machine = CTX.machine
    task = machine.cur
    event = machine.trace("named_arrive", int(bar))
    task.warp_sync()
    task.cta.named_barrier(int(bar)).arrive(task, int(arrive_count), task.threads, ("t", event))
    task.tick()


def named_barrier_wait(bar, arrive_count):
    """Arrives and waits (bar.sync)."""
    machine = CTX.machine
    named = machine.cur.cta.named_barrier(int(bar))
    _arrive_and_wait(machine, named, int(arrive_count))


def cluster_barrier():
    """barrier.cluster.arrive and wait, by all CTAs of the cluster; see visits.py for kernels with tasks."""
    machine = CTX.machine
    task = machine.cur
    line = machine.line()
    task.cta.group.visits.meetings.setdefault(line, Site(task, line))
    _arrive_and_wait(machine, task.cta.group.cluster_barrier, task.threads * len(task.cta.cluster))


def meet_at_start():
    """Where the cluster meets behind barrier initialization; it arrives relaxed, so this orders no data."""
    task = CTX.machine.cur
    bar = task.cta.group.start_barrier
    _arrive_and_wait(CTX.machine, bar, task.threads * len(task.cta.cluster), orders=False)


def _arrive_and_wait(machine, bar, threads, orders=True):
    task = machine.cur
    generation = bar.generation
    key = bar.key
    task.warp_sync()
    if orders and bar is task.cta.group.cluster_barrier:
        task.show_stores()
    bar.arrive(task, threads, task.threads, ("t", machine.trace("named_arrive", bar.label)))
    task.tick()
    machine.block_on(lambda: bar.generation > generation, bar, Wait(bar, phase=generation))
    if orders:
        task.clock.join(bar.done_clock)
    machine.trace("wait", bar.label, key=key)


def fence(scope):
    """Scope "async_shared" is the fence to the async proxy, "gpu" and "sys" are fence.acq_rel."""
    if scope == "async_shared":
        CTX.machine.ordering("proxy_fence", "shared")
    else:
        CTX.machine.ordering("fence", str(scope))


def fence_async_shared():
    fence("async_shared")


def fence_mbarrier_init_cluster():
    """The emulator makes barrier initialization visible by itself."""


__all__ = [
    "BarrierArray",
    "alloc_barriers",
    "alloc_warp_barrier",
    "barrier_arrive",
    "barrier_expect_bytes",
    "barrier_wait",
    "cluster_barrier",
    "fence",
    "fence_async_shared",
    "fence_mbarrier_init_cluster",
    "holds",
    "named_barrier_arrive",
    "named_barrier_wait",
]
