"""What ran before a kernel changes its time: one kernel, sampled on from the end of different neighbours.

    python -m jfa.lab.neighbours --output figures/10_neighbours.csv        (on a GPU)

At its power limit a GPU presumably sets its clock by what it did lately. On an H200 a kernel was fast for
some 30 ms after any other one; busy neighbours agreed after 50 ms, idle ones after 85. Later than 0.2 s
times part again; why is not known. A benchmark has to let such a time pass before it may believe a sample.
"""

import random
import sys
import time

import torch

from jfa.lab import measure
from jfa.lab.measure import SETTLE_MS as SETTLE_MS
from jfa.lab.rounds import SHAPE, graph_of, milliseconds, record
from jfa.lab.targets import BASELINE, Target, prepare

SUBJECT = Target("forward", "staged", **SHAPE)
IDLE, COPY = "an idle GPU", "a copy of memory"
BEFORE = {
    IDLE: None,
    COPY: None,
    "the baseline": Target("forward", BASELINE, **SHAPE),
    "itself": SUBJECT,
    "a backward pass": Target("backward", "stationary", **SHAPE),
}


def _neighbours() -> dict:
    """Name of a neighbour -> a CUDA graph of it; None for the idle GPU."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    copied = torch.empty_like(source)
    found = {name: target and graph_of(prepare(target)) for name, target in BEFORE.items()}
    return found | {COPY: graph_of(lambda: copied.copy_(source))}


def recorded(repeats: int = 9, before_ms: float = 150.0, span_ms: float = 300.0, sample_ms: float = 5.0):
    """Yield a row a sample: ``before``, ``repeat``, ``at_ms`` (its middle, from the neighbour's end), time.

    Every repeat visits all neighbours in a random order: ``before_ms`` of the neighbour, then ``span_ms`` of
    the subject in samples of about ``sample_ms``, without a pause in between.
    """
    work = SUBJECT.case.work("forward")
    subject, graphs = graph_of(prepare(SUBJECT)), _neighbours()
    calls = max(1, round(sample_ms / milliseconds(subject, 5)))
    lengths = {name: graph and milliseconds(graph, 5) for name, graph in graphs.items()}
    samples, found = max(2, round(span_ms / sample_ms)), []
    with measure.Monitor() as monitor:
        monitor.wait()
        for repeat in range(repeats):
            for name in random.sample(list(graphs), len(graphs)):
                marks = [torch.cuda.Event(enable_timing=True) for _ in range(samples + 1)]
                torch.cuda.synchronize()
                if graphs[name] is None:
                    time.sleep(before_ms / 1e3)
                else:
                    for _ in range(max(1, round(before_ms / lengths[name]))):
                        graphs[name].replay()
                marks[0].record()
                for mark in marks[1:]:
                    for _ in range(calls):
                        subject.replay()
                    mark.record()
                torch.cuda.synchronize()
                for one, other in zip(marks, marks[1:]):
                    took, middle = one.elapsed_time(other), marks[0].elapsed_time(one)
                    found.append((name, repeat, middle + took / 2, took / calls))
    where = measure.provenance(monitor)
    for name, repeat, at, took in found:
        columns = {**SUBJECT.columns(), "before": name, "repeat": repeat, "at_ms": round(at, 2)}
        columns |= {"ms_p50": took, "timer": "cuda-graph", "calls": calls}
        yield measure.add_work({**columns, **where}, work)


def curves(rows, step_ms: float = 10.0):
    """Median milliseconds: a DataFrame, a line a stretch of ``step_ms``, a column a neighbour."""
    stretch = (rows["at_ms"] // step_ms + 0.5) * step_ms
    table = rows.assign(stretch=stretch).groupby(["stretch", "before"])["ms_p50"].median().unstack()
    return table[[name for name in BEFORE if name in table]].dropna()


def spread(table):
    """Per stretch of `curves`: the slowest neighbour's time over the fastest's, less one."""
    return table.max(axis=1) / table.min(axis=1) - 1


def main(arguments: list[str] | None = None) -> int:
    """Record all neighbours and print the medians."""
    table = curves(record(arguments, "neighbours", __doc__, "repeats", 9, recorded), 20.0)
    print(table.assign(spread=spread(table)).round(4).to_string(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
