"""Why rounds are interleaved: the same kernel timed twice, block after block and in turn.

    python -m jfa.lab.rounds --output figures/10_rounds.csv        (on a GPU)

A GPU that begins to work is cool and clocks high; seconds later it is warm or at its power limit. What is
timed first then looks faster. Every sample is a row, so that a figure can show it.
"""

import argparse
import statistics
import sys
import time

from jfa.lab import argtypes, measure
from jfa.lab.targets import Target, prepare

SHAPE = {"M": 256, "N": 4096, "density": 0.9, "B": 384}
RUNS = {"staged": "staged", "the same again": "staged", "peeled": "peeled"}


def in_blocks(names, samples: int) -> list[str]:
    """All samples of the first name, then all of the second, and so on."""
    return [name for name in names for _ in range(samples)]


def in_turn(names, samples: int) -> list[str]:
    """A sample of every name, again and again, every round beginning with another one."""
    names = list(names)
    return [
        name for turn in range(samples) for name in names[turn % len(names) :] + names[: turn % len(names)]
    ]


def mean_places(arrange, names, samples: int = 4) -> list[float]:
    """Where the samples of each name stand on average in an order of ``samples`` of all, from 0."""
    order = arrange(names, samples)
    return [statistics.mean(place for place, who in enumerate(order) if who == name) for name in names]


ORDERS = {"block after block": in_blocks, "in turn": in_turn}


def graph_of(function):
    """A CUDA graph of one call."""
    import torch

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        function()
    return graph


def milliseconds(graph, calls: int) -> float:
    """Mean time of a replay over ``calls`` in a row."""
    import torch

    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(calls):
        graph.replay()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop) / calls


def recorded(samples: int = 60, sample_ms: float = 10.0, rest_s: float = 3.0):
    """Yield a row a sample: order, name, place in the run, milliseconds, and the provenance of its run."""
    targets = {name: Target("forward", step, **SHAPE) for name, step in RUNS.items()}
    case = targets["staged"].case
    work = case.work("forward")
    graphs = {name: graph_of(prepare(target)) for name, target in targets.items()}
    calls = {name: max(1, round(sample_ms / milliseconds(graph, 3))) for name, graph in graphs.items()}
    for order, arrange in ORDERS.items():
        time.sleep(rest_s)  # every order begins on a rested GPU
        found = []
        with measure.Monitor() as monitor:
            began = time.perf_counter()
            for name in arrange(graphs, samples):
                took = milliseconds(graphs[name], calls[name])
                found.append((name, time.perf_counter() - began, took))
        where = measure.provenance(monitor)
        for place, (name, seconds, took) in enumerate(found):
            columns = {**targets[name].columns(), "order": order, "name": name, "place": place}
            times = {"at_s": round(seconds, 4), "ms_p50": took, "timer": "cuda-graph", "calls": calls[name]}
            yield measure.add_work({**columns, **times, **where}, work)


def middles(rows, middle: str = "median") -> dict[tuple[str, str], float]:
    """(order, name) -> "median" or "mean" milliseconds, from rows (a DataFrame)."""
    return rows.groupby(["order", "name"], sort=False)["ms_p50"].agg(middle).to_dict()


def record(arguments, name: str, about: str, count: str, default: int, rows_of):
    """The command line of a recording: --output, and --COUNT for ``rows_of``. Its rows as a DataFrame."""
    import pandas
    import torch

    parser = argparse.ArgumentParser(prog=f"python -m jfa.lab.{name}", description=about.splitlines()[0])
    parser.add_argument("--output", help="CSV to write")
    parser.add_argument(f"--{count}", type=argtypes.count, default=default)
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("no CUDA device: there is nothing to measure here")
    rows = list(rows_of(getattr(options, count)))
    if options.output:
        measure.write_rows(options.output, rows)
    return pandas.DataFrame(rows)


def main(arguments: list[str] | None = None) -> int:
    """Record both orders."""
    rows = record(arguments, "rounds", __doc__, "samples", 60, recorded)
    for (order, name), took in middles(rows).items():
        print(f"{order:<18} {name:<15} {took:.4f} ms", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
