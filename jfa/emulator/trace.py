"""The trace of a launch: what every task did, and what the asynchronous operations did for it.

An event is a tuple (sequence, cta, task, op, what, line, info). Kinds of `op`:
  local_load, local_store        info: mem, bytes
  arrive, expect                 info: count or bytes, phase; the sequence number identifies the arrival
  wait_begin, wait               info: parity; wait also has key = (cta, barrier, phase), the phase it waited
  for issue                          info: id, kind, and bytes, flop, shape, dtype as they apply wait_ops
  info: ids of the operations waited for done:<kind>                    an operation has completed; info: id
  phase_done                     a barrier phase is complete; info: key, src = contributors, each ("t",
  sequence of an
                                 arrive event) or ("o", id of an operation)
Every task event carries `work`: elements, bytes and FLOP by kind since the task's last event. Sequence
numbers order the functional run; they are not time.
"""

import json


class Tracer:
    """Collects the events of one launch (only called when tracing is on)."""

    def __init__(self, machine):
        self.machine = machine
        self.events = []

    def event(self, op, what, **info):
        """An event of the running task; returns its sequence number."""
        machine = self.machine
        task = machine.cur
        last = task.traced_work
        work = {k: n - last.get(k, 0) for k, n in task.work.items() if n != last.get(k, 0)}
        if work:
            info["work"] = work
            task.traced_work = dict(task.work)
        sequence = machine.sequence()
        self.events.append((sequence, task.cta.pid, task.name, op, what, machine.line(), info))
        return sequence

    def issue(self, op, info):
        self.event("issue", op.label, id=op.id, kind=op.kind, **info)

    def done(self, op):
        entry = (
            self.machine.sequence(),
            op.task.cta.pid,
            op.task.name,
            "done:" + op.kind,
            op.label,
            op.line,
            {"id": op.id},
        )
        self.events.append(entry)

    def phase_done(self, label, key, sources):
        info = {"key": key, "src": list(sources)}
        self.events.append((self.machine.sequence(), None, "-", "phase_done", label, None, info))


def perfetto_events(events):
    """Trace events in Chrome/Perfetto form: a process a CTA, a thread a task, and one a kind of engine.

    The time axis is the sequence number of the functional run (1 = 1 microsecond), not hardware time.
    """
    out = []
    issued = {}
    waits = {}
    for sequence, cta, task, op, what, line, info in events:
        if op == "phase_done":
            continue
        pid = f"CTA {cta}"
        args = {
            "line": line,
            **{k: v for k, v in info.items() if k in ("bytes", "flop", "phase", "parity", "work")},
        }
        if op == "issue":
            issued[info["id"]] = (sequence, what, info, args)
        if op.startswith("done:"):
            start, name, _, args = issued.get(info["id"], (sequence, what, info, args))
            kind = op[5:]
            out.append(_span(f"{kind} {name}", kind, pid, kind, start, sequence, args))
        elif op == "wait_begin":
            waits[(cta, task, what)] = sequence
        elif op == "wait":
            out.append(
                _span(
                    f"wait {what}", "wait", pid, task, waits.pop((cta, task, what), sequence), sequence, args
                )
            )
        else:
            out.append(_span(f"{op} {what}", op, pid, task, sequence, sequence + 1, args))
    return out


def _span(name, category, pid, tid, start, end, args):
    duration = max(end - start, 1)
    return {
        "name": name,
        "cat": category,
        "ph": "X",
        "ts": start,
        "dur": duration,
        "pid": pid,
        "tid": tid,
        "args": args,
    }


def write_perfetto(events, path):
    """Writes the events as JSON for ui.perfetto.dev; returns the path."""
    with open(path, "w") as file:
        json.dump({"traceEvents": perfetto_events(events)}, file, default=str)
    return path
