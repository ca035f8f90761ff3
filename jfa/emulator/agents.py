"""Who acts: tasks (warp groups running a role), asynchronous operations, CTAs and clusters."""

import collections
import contextvars

from greenlet import greenlet

from .barriers import NamedBarrier
from .clock import Clock
from .errors import EmulationError
from .visits import Visits

MAX_AGENTS = 4096


class Wait:
    """What a blocked task waits for: an object with `label`, and for an mbarrier its parity and phase."""

    __slots__ = ("on", "what", "parity", "phase")

    def __init__(self, on=None, what="", parity=None, phase=None):
        self.on = on
        self.what = what
        self.parity = parity
        self.phase = phase


class Group:
    """The CTAs of one cluster: they start together and share a vector-clock space."""

    def __init__(self, machine, index, pids):
        self.machine = machine
        self.id = index
        self.width = 64 * ((len(pids) + 1) // 2 + 1)
        self.slots = 0
        self.free_slots = []  # [slot, last epoch] of asynchronous operations without a queue
        self.live = 0  # tasks that have not finished
        self.in_flight = 0  # asynchronous operations that have not completed
        self.ctas = [CTA(machine, self, rank, pid) for rank, pid in enumerate(pids)]
        for cta in self.ctas:
            cta.cluster = self.ctas
        self.cluster_barrier = NamedBarrier(machine, self.ctas[0], "cluster barrier")
        self.start_barrier = NamedBarrier(machine, self.ctas[0], "cluster barrier")  # the compiler's
        self.visits = Visits(self)

    def clock(self):
        return Clock(self)

    def new_slot(self):
        self.slots += 1
        if self.slots > self.width:
            self.width *= 2
        if self.slots > MAX_AGENTS:
            raise EmulationError(
                f"more than {MAX_AGENTS} concurrent agents: asynchronous operations are issued and "
                f"never waited for"
            )
        return self.slots - 1

    def release(self):
        """Frees the memory of a cluster that has ended (records may still name its tasks)."""
        for cta in self.ctas:
            for storage in cta.storages:
                storage.bytes = None
                storage.records = []
            cta.storages = []
            cta.allocations = []
            cta.barrier_arrays = []
            cta.queues = {}

    def async_slot(self, clock):
        """(slot, epoch) of an operation issued at `clock`; reuses a slot whose last operation came before."""
        if len(clock.v) < self.width:
            clock.widen()
        seen = clock.v
        for entry in self.free_slots:
            if entry[1] <= seen.item(entry[0]):
                entry[1] += 1
                return entry[0], entry[1]
        slot = self.new_slot()
        self.free_slots.append([slot, 1])
        return slot, 1


class CTA:
    """One CTA: its memory, barriers and in-order engine queues."""

    def __init__(self, machine, group, rank, pid):
        self.machine = machine
        self.group = group
        self.rank = rank
        self.pid = pid
        self.cluster = [self]
        self.storages = []
        self.allocations = []
        self.barrier_arrays = []
        self.named = {}
        self.queues = {}  # in-order engines: key -> Queue
        self.setup_waiters = []
        self.born = (0, 1)  # agent slot and epoch of its first task's start
        self.clc = None

    def named_barrier(self, index):
        bar = self.named.get(index)
        if bar is None:
            bar = self.named[index] = NamedBarrier(self.machine, self, index)
        return bar

    def allocated(self):
        """An allocation was made: peers that waited for it look again."""
        waiters = self.setup_waiters
        self.setup_waiters = []
        for task in waiters:
            self.machine.wake(task)


class Queue:
    """An in-order engine of one CTA (tcgen05 or wgmma operations of one task)."""

    __slots__ = ("slot", "clock", "last")

    def __init__(self, group):
        self.slot = group.new_slot()
        self.clock = group.clock()
        self.last = None


class AsyncOp:
    """One asynchronous operation: issued now, executed by `run` when the scheduler completes it."""

    __slots__ = (
        "kind", "buffer", "task", "run", "clock", "slot", "epoch",
        "previous", "next", "done", "line", "id", "waiters", "site",
    )  # fmt: skip

    @property
    def label(self):
        return self.buffer if isinstance(self.buffer, str) else self.buffer.label

    def saw(self, clock):
        """True when `clock` is ordered after this operation's completion."""
        return clock.saw(clock.group.id, self.slot, self.epoch)


class Task:
    """One role of a CTA: a greenlet, its vector clock and what it has in flight."""

    def __init__(self, machine, cta, name, body, threads=128, replica=0):
        self.machine = machine
        self.cta = cta
        self.name = name
        self.threads = threads
        self.replica = replica
        group = cta.group
        self.slot = group.new_slot()
        self.clock = group.clock()
        self.wait = None
        self.line = None
        self.done = False
        self.on_done = None
        self.work = collections.Counter()
        self.traced_work = {}
        self.stores = []  # bulk stores whose writes were not waited for: (read stage, write stage)
        self.hidden = []  # sites of those that were: complete, but no fence has shown them to other CTAs
        self.copies = []  # cp.async operations, committed groups as lists
        self.dots = []  # wgmma not waited for
        self.fences = []  # epochs that fences to the async proxy began
        self.sub_slots = None  # one slot a warp group of a task of eight or more warps
        self.released = None  # clock at the last gpu-scope fence (fence-release pattern)
        self.observed = None  # what relaxed atomics have read (acquired by the next fence)
        self.poll_line = None
        self.clock.v[self.slot] = 1
        self.greenlet = greenlet(body, machine.hub)
        self.greenlet.gr_context = contextvars.copy_context()  # numpy keeps its error state there

    @property
    def epoch(self):
        return self.clock.v.item(self.slot)

    def tick(self):
        """A release: what follows is a new epoch."""
        self.clock.v[self.slot] += 1

    def show_stores(self):
        """A fence that reaches beyond the CTA: other CTAs may see the bulk stores that were waited for."""
        if self.hidden:
            self.tick()
            for site in self.hidden:
                site.shown = self.epoch
            self.hidden = []

    def warp_sync(self):
        """All warps of the task meet (bar.sync, also the one the compiler puts before an mbarrier arrive)."""
        if self.sub_slots:
            self._merge_sub_slots(self.clock)
            self.tick()

    def published(self):
        """The clock that a release of the whole task makes visible; includes all its warp groups."""
        if not self.sub_slots:
            return self.clock
        clock = self.clock.copy()
        self._merge_sub_slots(clock)
        return clock

    def _merge_sub_slots(self, clock):
        clock.widen()
        for slot in self.sub_slots:
            clock.v[slot] = clock.v[self.slot]

    def warp_groups(self):
        """Slots of the task's warp groups, which only explicit synchronization orders among themselves."""
        if self.sub_slots is None:
            group = self.cta.group
            self.sub_slots = [group.new_slot() for _ in range(self.threads // 128)]
            self.clock.widen()
        return self.sub_slots
