"""What a CTA does to the shared memory of another CTA of its cluster, and whether that one still lives.

A CTA's shared memory is gone when its last thread exits. A remote arrive, store, copy or multicast that lands
later is a fault on the hardware (unspecified launch failure), and whether it does is luck: so a visit must be
ordered before its host's exit, by a barrier that the host waits for or by a cluster barrier at the end. On
Blackwell the compiler puts that barrier at the end of kernels whose CTAs share MMAs; it does not elsewhere.
"""

from dataclasses import dataclass

from .clock import Clock
from .order import Site


@dataclass(frozen=True)
class Visit:
    """An access to a host CTA's shared memory by agent ``slot`` of the cluster at its ``epoch``."""

    host: object
    slot: int
    epoch: int
    what: str
    site: Site


class Visits:
    """The visits among the CTAs of one cluster, judged when all of them have ended."""

    def __init__(self, group):
        self.group = group
        self.all = []
        self.exits = {}  # CTA -> clock of its exit
        self.barrier_at_end = False  # the compiler's own

    def note(self, host, visitor, slot, epoch, what, line):
        """``visitor`` (a task) reaches into ``host``; nothing to note at home."""
        if host is not visitor.cta:
            self.all.append(Visit(host, slot, epoch, what, Site(visitor, line)))

    def leave(self, task):
        """A task of a CTA has ended; the CTA's exit comes after all of them."""
        clock = self.exits.get(task.cta)
        if clock is None:
            clock = self.exits[task.cta] = Clock(self.group)
        clock.join(task.clock)

    def judge(self, findings):
        """Report every visit that is not ordered before its host's exit."""
        if self.barrier_at_end:
            return
        for visit in self.all:
            if not self.exits[visit.host].saw(self.group.id, visit.slot, visit.epoch):
                task, line = visit.site.task, visit.site.line
                findings.add(
                    "peer exited",
                    f"{task.name} (CTA {task.cta.pid}, line {line}) {visit.what} of cluster CTA "
                    f"{visit.host.rank}, which may have exited: nothing orders this before its end "
                    f"(a cluster barrier at the end of the kernel would)",
                    task=task,
                    line=line,
                    key=("peer exited", visit.what, line),
                )
