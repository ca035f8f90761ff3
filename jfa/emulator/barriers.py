"""Barriers: mbarriers (arrivals, expected bytes, phases), named barriers and the cluster barrier.

An mbarrier completes its phase when no arrivals are pending and the bytes announced with expect_tx have all
come; waiting is by parity, as on the hardware. Arrivals release what the arriving agent has seen, a
successful wait acquires what every completed phase released. Not modelled: the 20-bit limits of counts,
`try_wait` time-outs.
"""

import collections

from .errors import EmulationError
from .tile import Tensor


class Waitable:
    """Something that tasks block on: remembers them and wakes them when its state changes."""

    def __init__(self, machine, cta):
        self.machine = machine
        self.cta = cta
        self.waiters = []
        self.clock = cta.group.clock()  # released into the phase in progress
        self.done_clock = cta.group.clock()  # released into completed phases
        self.sources = []  # trace: who contributed to the phase in progress

    def wake(self):
        waiters = self.waiters
        self.waiters = []
        for task in waiters:
            self.machine.wake(task)


class MBarrier(Waitable):
    """One mbarrier; `warp`: every thread of the arriving warps arrives (tlx.alloc_warp_barrier)."""

    def __init__(self, machine, array, index, count, warp):
        super().__init__(machine, array.cta)
        self.array = array
        self.index = index
        self.count = count
        self.warp = warp
        self.pending = count
        self.bytes = 0  # announced minus arrived
        self.announced = 0
        self.phase = 0
        self.log = collections.deque(maxlen=6)

    @property
    def is_warp_barrier(self):
        """TLX's name for ``warp``, which kernels may read."""
        return self.warp

    @property
    def label(self):
        rank = f"@cta{self.cta.rank}" if len(self.cta.cluster) > 1 else ""
        return f"{self.array.name}[{self.index}]{rank}"

    def passed(self, parity):
        return (self.phase & 1) != parity

    def reached(self, task, wait):
        """The condition of a blocked task; two phases on, its parity is the same again: it may miss both."""
        if self.phase - wait.phase >= 2:
            self.report_overrun(task, wait)
        return self.passed(wait.parity)

    def arrive(self, n, clock, site, source=None):
        """n arrivals; `clock` is what they release."""
        self.sources.append(source)
        if n > self.pending:
            self.report_over_arrival(n, site)
        self.pending -= n
        self.clock.join(clock)
        self.log.append((site, "arrive", n, self.phase))
        self.machine.progress()
        self._complete_if_due()

    def expect(self, nbytes):
        self.bytes += nbytes
        self.announced = nbytes

    def complete_bytes(self, nbytes, clock, site, source=None):
        """nbytes of an asynchronous copy have landed."""
        self.sources.append(source)
        self.bytes -= nbytes
        self.clock.join(clock)
        self.log.append((site, "bytes", nbytes, self.phase))
        self._complete_if_due()

    def _complete_if_due(self):
        if self.pending > 0 or self.bytes != 0:
            return
        self.done_clock.join(self.clock)
        self.phase += 1
        self.pending += self.count
        if self.machine.tracing:
            key = (self.array.cta.pid, self.label, self.phase - 1)
            self.machine.tracer.phase_done(self.label, key, self.sources)
        self.sources = []
        self.wake()

    def report_over_arrival(self, n, site):
        self.machine.findings.add(
            "barrier over-arrival",
            f"{site} arrives {n} on {self.label} (phase {self.phase}) but only {self.pending} of "
            f"{self.count} arrivals "
            f"are outstanding",
            task=site.task,
            line=site.line,
            buffer=self.label,
            phase=self.phase,
            key=("over-arrival", self.array.name, site.line),
        )

    def report_overrun(self, task, wait):
        self.machine.findings.add(
            "phase overrun",
            f"{task.name} (line {task.line}) waits for phase {wait.phase} of {self.label}, but "
            f"phase {self.phase - 1} "
            f"is complete already: its parity wait can hang on hardware",
            task=task,
            line=task.line,
            buffer=self.label,
            phase=wait.phase,
            key=("phase overrun", self.array.name, task.line),
        )

    def state(self):
        """The phase in progress, in words."""
        text = f"phase {self.phase} in progress: {self.count - self.pending}/{self.count} arrivals"
        if self.bytes:
            text += f", {self.bytes} bytes outstanding"
        if not self.log:
            return text + "; never signalled"
        last = [f"{site} {what}({n}) phase {phase}" for site, what, n, phase in self.log]
        return text + "; last: " + " | ".join(last)


class BarrierArray:
    """tlx.alloc_barriers: `num` mbarriers with one arrival count."""

    def __init__(self, machine, cta, name, named, num, count, warp=False):
        self.cta = cta
        self.name = name
        self.named = named
        self.num = num
        self.is_warp_barrier = warp
        self.index = len(cta.barrier_arrays)
        self.born = (machine.cur.slot, machine.cur.epoch)
        self.bars = [MBarrier(machine, self, i, count, warp) for i in range(num)]
        cta.barrier_arrays.append(self)

    def __getitem__(self, i):
        i = i.d.item() if type(i) is Tensor else int(i)
        if not 0 <= i < self.num:
            raise EmulationError(f"barrier index {i} is outside {self.name} (num={self.num})")
        return self.bars[i]


def one_barrier(bar):
    """The mbarrier itself, when an array of one was given in its place."""
    return bar.bars[0] if isinstance(bar, BarrierArray) and bar.num == 1 else bar


def barrier_on(bar, cta):
    """The same mbarrier in another CTA of the cluster; waits until that CTA has initialized it."""
    if bar.cta is cta:
        return bar
    k = bar.array.index
    bar.machine.wait_for_setup(cta, lambda: len(cta.barrier_arrays) > k)
    return cta.barrier_arrays[k].bars[bar.index]


class NamedBarrier(Waitable):
    """bar.sync / bar.arrive on a hardware barrier id, and the cluster barrier: counts threads."""

    def __init__(self, machine, cta, name):
        super().__init__(machine, cta)
        self.name = name
        self.arrived = 0
        self.need = None
        self.generation = 0
        self.parties = []

    @property
    def label(self):
        return self.name if self.name == "cluster barrier" else f"named barrier {self.name}"

    @property
    def key(self):
        return (self.cta.pid, self.label, self.generation)

    def arrive(self, task, need, threads, source=None):
        """`threads` threads of the task arrive, out of `need`."""
        self.sources.append(source)
        if self.need not in (None, need) and self.arrived:
            self.report(
                task, f"{task.name} uses {self.label} with {need} threads, another party with {self.need}"
            )
        if task in self.parties:
            self.report(task, f"{task.name} arrives twice at {self.label} before it completes", "warning")
        self.need = need
        self.arrived += threads
        self.parties.append(task)
        self.clock.join(task.clock)
        self.machine.progress()
        if self.arrived > need:
            self.report(task, f"{self.label}: {self.arrived} threads arrived, {need} expected")
        if self.arrived >= need:
            self.done_clock.join(self.clock)
            if self.machine.tracing:
                self.machine.tracer.phase_done(self.label, self.key, self.sources)
            self.sources = []
            self.generation += 1
            self.arrived = 0
            self.parties = []
            self.wake()

    def report(self, task, message, level="error"):
        line = self.machine.line()
        self.machine.findings.add(
            "named barrier",
            f"{message} (line {line})",
            level,
            task=task,
            line=line,
            buffer=self.label,
            phase=self.generation,
            key=("named barrier", self.label, line, level),
        )

    def state(self):
        names = ", ".join(t.name for t in self.parties) or "nobody"
        return f"{self.arrived}/{self.need} threads arrived (from {names})"
