"""What must come after a CTA's start and before its exit: all that others do to its memory.

A CTA's shared memory is gone when its last thread exits; the next CTA of the grid may own it already. A
remote arrive or store that lands later is a fault on the hardware (unspecified launch failure), a copy that
lands later is that or somebody else's wrong data, and whether either happens is luck: so a visit must be
ordered before its host's exit. A barrier that a task of the host waits for does that; a cluster barrier at
the end does it for what the others have done, or waited for, before it. On Blackwell the compiler puts that
barrier at the end of kernels whose CTAs share MMAs; it does not elsewhere. An MMA reads shared memory and
writes tensor memory of its CTAs, so it must be done by then as well. Not modelled: cp.async, which belongs to
the threads that issue it.

A neighbour must also have started, and have initialized the barrier that is to be signalled. For kernels that
arrive remotely, multicast, or share MMAs the compiler puts all initialization first and lets the cluster meet
behind it (seen in the PTX of fbtriton 3.7.4, with and without async_tasks); for stores and copies to a
neighbour's shared memory alone it does nothing, so those must be ordered by the kernel itself.

A cluster barrier that the kernel spells out waits for every thread of the cluster. With async_tasks the code
outside of them belongs to the default task, and other warps never come by (a hang on an H200).
"""

from dataclasses import dataclass

from .clock import Clock
from .order import Site

UNWAITED = "unwaited load"
IN_FLIGHT = "unwaited mma"
EXITED = "peer exited"
EARLY = "peer not ready"


@dataclass(frozen=True)
class Visit:
    """An access to a host CTA's shared memory by agent ``slot`` of the cluster at its ``epoch``."""

    kind: str
    slot: int
    epoch: int
    site: Site


class Visits:
    """The visits to the CTAs of one cluster, judged when all of them have ended."""

    def __init__(self, group):
        self.group = group
        self.latest = {}  # (host, slot, what, line) -> Visit; who has seen it has seen those before it
        self.exits = {}  # CTA -> clock of its exit
        self.barrier_at_end = False  # the compiler's own
        self.barrier_at_start = False  # likewise
        self.early = {}  # (host, what, line) -> Site of what nothing orders after the host's start
        self.tasks = False  # whether the kernel has async_tasks
        self.meetings = {}  # line -> Site of the cluster barriers that the kernel spells out

    def note_early(self, host, visitor, born, what, line):
        """``visitor`` reaches into ``host``, whose agent ``born`` = (slot, epoch) must have come before."""
        if host is not visitor.cta and not visitor.clock.saw(self.group.id, *born):
            self.early.setdefault((host, what, line), Site(visitor, line))

    def note_mma(self, op, hosts):
        """The tensor-core operation ``op`` uses the memory of these CTAs; who saw it saw older ones too."""
        for host in hosts:
            self.latest[host, op.slot, "mma", 0] = Visit(IN_FLIGHT, op.slot, op.epoch, op.site)

    def note(self, host, visitor, slot, epoch, what, line):
        """``visitor`` (a task) reaches into ``host``; at home its own exit comes later."""
        if host is not visitor.cta:
            self.latest[host, slot, what, line] = Visit(EXITED, slot, epoch, Site(visitor, line))

    def note_copy(self, host, op, what):
        """The asynchronous operation ``op`` writes into ``host``'s shared memory, maybe its own CTA's."""
        self.latest[host, op.slot, what, op.line] = Visit(UNWAITED, op.slot, op.epoch, op.site)

    def leave(self, task):
        """A task of a CTA has ended; the CTA's exit comes after all of them."""
        clock = self.exits.get(task.cta)
        if clock is None:
            clock = self.exits[task.cta] = Clock(self.group)
        clock.join(task.clock)

    def _may_share(self):
        """Whether the kernel holds shared MMAs that this launch never came to: the compiler sees them too."""
        machine = self.group.machine
        return len(self.group.ctas) > 1 and any(function.shares for function in machine.functions())

    def judge(self, findings):
        """Report every visit that comes too early or too late, and meetings that nobody leaves."""
        if self.tasks:
            for line, site in self.meetings.items():
                findings.add(
                    "cluster barrier",
                    f"{site} meets the cluster in a kernel with async_tasks: the warps of its other tasks "
                    f"never arrive, so it hangs (a remote arrive and a wait on each side would do)",
                    task=site.task,
                    line=line,
                    key=("cluster barrier", line),
                )
        if not self.barrier_at_start:
            for (host, what, line), site in self.early.items():
                findings.add(
                    EARLY,
                    f"{site} {what} of cluster CTA {host.rank}, which may not have started or not have "
                    f"initialized its barriers: nothing orders this after it",
                    task=site.task,
                    line=line,
                    key=(EARLY, line),
                )
        if self.barrier_at_end or self._may_share():
            end = Clock(self.group)
            for clock in self.exits.values():
                end.join(clock)
            self.exits = dict.fromkeys(self.exits, end)
        for (host, _, what, line), visit in self.latest.items():
            if not self.exits[host].saw(self.group.id, visit.slot, visit.epoch):
                text = WORDS[visit.kind](host, what, visit)
                line = visit.site.line
                findings.add(visit.kind, text, task=visit.site.task, line=line, key=(visit.kind, what, line))


def _exited(host, what, visit):
    task = visit.site.task
    return (
        f"{task.name} (CTA {task.cta.pid}, line {visit.site.line}) {what} of cluster CTA {host.rank}, "
        f"which may have exited: nothing orders this before its end (a wait of that CTA would, or in a "
        f"kernel without async_tasks a cluster barrier at the end)"
    )


def _unwaited(host, what, visit):
    task = visit.site.task
    whose = "" if host is task.cta else f" of cluster CTA {host.rank}"
    return (
        f"{visit.site.op} of {task.name} (CTA {task.cta.pid}, line {visit.site.line}) {what}{whose}, "
        f"which may exit before that: nothing that its tasks wait for comes after the copy"
    )


def _in_flight(host, what, visit):
    whose = "" if host is visit.site.task.cta else f" and of cluster CTA {host.rank}"
    return (
        f"{visit.site} may still run when its CTA{whose} exits: nothing that its tasks wait for comes "
        f"after it (commit it to a barrier and wait)"
    )


WORDS = {EXITED: _exited, UNWAITED: _unwaited, IN_FLIGHT: _in_flight}
