"""Words for a deadlock: who waits for what, what came of it, and which lines could have signalled it."""

from .barriers import MBarrier, NamedBarrier
from .errors import DeadlockError
from .kernels import signal_sites


def describe_deadlock(machine):
    """The DeadlockError of a machine in which nothing can run; its findings also join the machine's."""
    lines = ["no task can run and no asynchronous operation is in flight:"]
    barriers = {}
    for task in machine.tasks:
        wait = task.wait
        if wait is None or wait.what == "join":
            continue
        where = f"{task.name} (CTA {task.cta.pid}) line {task.line}"
        text = f"{where}: {_waits_for(wait)}"
        lines.append("  " + text)
        bar = wait.on
        label = bar.label if bar is not None else None
        machine.findings.add(
            "deadlock",
            text,
            task=task,
            line=task.line,
            buffer=label,
            phase=wait.phase,
            key=("deadlock", text),
        )
        if isinstance(bar, MBarrier):
            barriers[bar.array.name] = bar
            if bar.pending <= 0 and bar.bytes:
                _expected_bytes(machine, task, bar)
    for name in barriers:
        sites = ", ".join(f"{line} ({what})" for line, what in signal_sites(machine.functions(), name))
        lines.append(f"  {name} is signalled by source lines {sites or '(none found)'}")
    return DeadlockError("\n".join(lines), machine.findings.list)


def _waits_for(wait):
    bar = wait.on
    if isinstance(bar, MBarrier):
        return f"waits for {bar.label} parity {wait.parity} (phase {wait.phase}); barrier is in {bar.state()}"
    if isinstance(bar, NamedBarrier):
        return f"waits at {bar.label}; {bar.state()}"
    return f"waits for {wait.what}"


def _expected_bytes(machine, task, bar):
    """All arrivals are in but the byte count does not come out: the announced size is wrong."""
    too = "more" if bar.bytes > 0 else "fewer"
    machine.findings.add(
        "expected bytes",
        f"{bar.label} phase {bar.phase}: barrier_expect_bytes announced {abs(bar.bytes)} bytes {too} "
        f"than its copies bring "
        f"({task.name} waits in line {task.line})",
        task=task,
        line=task.line,
        buffer=bar.label,
        phase=bar.phase,
        key=("expected bytes", bar.array.name),
    )


def unsettled_barriers(group):
    """Barriers of a finished cluster whose byte count is not zero (copies may still be in flight)."""
    return [bar for cta in group.ctas for array in cta.barrier_arrays for bar in array.bars if bar.bytes]


def check_byte_counts(machine, barriers):
    """At the end no barrier may be owed bytes, or have received more than was announced."""
    for bar in barriers:
        if not bar.bytes:
            continue
        too = "more" if bar.bytes > 0 else "fewer"
        machine.findings.add(
            "expected bytes",
            f"{bar.label}: barrier_expect_bytes announced {abs(bar.bytes)} bytes {too} than its copies "
            f"brought by the end of "
            f"CTA {bar.cta.pid}",
            buffer=bar.label,
            phase=bar.phase,
            key=("expected bytes", bar.array.name),
        )
