"""What one launch found: findings and the report that collects them."""

import collections
import dataclasses

LEVELS = ("error", "warning", "note")


@dataclasses.dataclass
class Finding:
    """One thing that the emulator found.

    kind: short name ("race", "deadlock", "capacity", ...). message: one sentence. level: "error", "warning"
    (legal on some compilers or probably harmless) or "note". task, cta (program ids), line (of the kernel's
    file), buffer and phase say where; None where it does not apply. count: how often it happened.
    """

    kind: str
    message: str
    level: str = "error"
    task: str | None = None
    cta: tuple | None = None
    line: int | None = None
    buffer: str | None = None
    phase: int | None = None
    count: int = 1

    def __str__(self):
        times = f"  (x{self.count})" if self.count > 1 else ""
        return f"[{self.level}] {self.kind}: {self.message}{times}"


class Report:
    """Result of one launch.

    kernel: name. findings: list of Finding. ops: asynchronous operations by kind. work: work units by kind
    (elements, bytes, FLOP). events: the trace (empty unless asked for; see trace.py). waits: {line:
    (executed, added ordering)} of mbarrier waits. steps: scheduler steps. seconds: wall time. deadlock: text
    of the deadlock or None.
    """

    def __init__(self, kernel="", grid=(1, 1, 1)):
        self.kernel = kernel
        self.grid = grid
        self.findings = []
        self.events = []
        self.work = collections.Counter()
        self.ops = collections.Counter()
        self.waits = {}
        self.seconds = 0.0
        self.steps = 0
        self.deadlock = None

    def errors(self):
        """Findings that are faults of the kernel, in the order in which they were found."""
        return [f for f in self.findings if f.level == "error"]

    def warnings(self):
        """Findings that need a look: legal where the compiler helps, or likely harmless."""
        return [f for f in self.findings if f.level == "warning"]

    def of_kind(self, kind):
        """Findings of one kind, at any level."""
        return [f for f in self.findings if f.kind == kind]

    def perfetto(self, path):
        """Writes the trace as Perfetto JSON (needs trace=True)."""
        from .trace import write_perfetto

        return write_perfetto(self.events, path)

    def __str__(self):
        ops = ", ".join(f"{n} {k}" for k, n in sorted(self.ops.items()))
        head = f"{self.kernel}{list(self.grid)}: {self.seconds * 1e3:.0f} ms, {self.steps} steps; {ops}"
        return "\n".join([head] + [str(f) for f in self.findings])

    def __repr__(self):
        counts = collections.Counter(f.level for f in self.findings)
        found = ", ".join(f"{counts[level]} {level}s" for level in LEVELS if counts[level]) or "no findings"
        return f"<Report {self.kernel}{list(self.grid)}: {found}>"


class Findings:
    """Collects findings of a launch; repeated ones (same kind, place and buffer) only count up."""

    def __init__(self):
        self.list = []
        self._seen = {}

    def add(self, kind, message, level="error", task=None, line=None, buffer=None, phase=None, key=None):
        """Adds a finding of `task` (a Task or None) unless one with the same key is there; returns it."""
        if key is None:
            key = (kind, message)
        found = self._seen.get(key)
        if found is not None:
            found.count += 1
            return found
        name = task.name if task is not None else None
        cta = task.cta.pid if task is not None else None
        found = Finding(kind, message, level, name, cta, line, buffer, phase)
        self._seen[key] = found
        self.list.append(found)
        return found
