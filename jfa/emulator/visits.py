"""What must come before a CTA exits: all that a neighbour or an asynchronous copy does to its shared memory.

A CTA's shared memory is gone when its last thread exits; the next CTA of the grid may own it already. A
remote arrive or store that lands later is a fault on the hardware (unspecified launch failure), a copy that
lands later is that or somebody else's wrong data, and whether either happens is luck: so a visit must be
ordered before its host's exit. A barrier that a task of the host waits for does that; a cluster barrier at
the end does it for what the others have done, or waited for, before it. On Blackwell the compiler puts that
barrier at the end of kernels whose CTAs share MMAs; it does not elsewhere. Not modelled: cp.async, which
belongs to the threads that issue it, and operations that only read shared memory or write tensor memory.
"""

from dataclasses import dataclass

from .clock import Clock
from .order import Site

UNWAITED = "unwaited load"
EXITED = "peer exited"


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

    def judge(self, findings):
        """Report every visit that is not ordered before its host's exit."""
        if self.barrier_at_end:
            end = Clock(self.group)
            for clock in self.exits.values():
                end.join(clock)
            self.exits = dict.fromkeys(self.exits, end)
        for (host, _, what, line), visit in self.latest.items():
            if not self.exits[host].saw(self.group.id, visit.slot, visit.epoch):
                text = _exited(host, what, visit) if visit.kind == EXITED else _unwaited(host, what, visit)
                findings.add(visit.kind, text, task=visit.site.task, line=line, key=(visit.kind, what, line))


def _exited(host, what, visit):
    task = visit.site.task
    return (
        f"{task.name} (CTA {task.cta.pid}, line {visit.site.line}) {what} of cluster CTA {host.rank}, "
        f"which may have exited: nothing orders this before its end "
        f"(a cluster barrier at the end of the kernel would)"
    )


def _unwaited(host, what, visit):
    task = visit.site.task
    whose = "" if host is task.cta else f" of cluster CTA {host.rank}"
    return (
        f"{visit.site.op} of {task.name} (CTA {task.cta.pid}, line {visit.site.line}) {what}{whose}, "
        f"which may exit before that: nothing that its tasks wait for comes after the copy"
    )
