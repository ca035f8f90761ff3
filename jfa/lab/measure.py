"""Timing that can be traced: interleaved rounds, and rows that say where and how they were taken."""

import contextlib
import csv
import math
import os
import random
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from jfa.lab.machine import PROVENANCE, Monitor, provenance

__all__ = [
    "COLUMNS",
    "Monitor",
    "Remote",
    "add_work",
    "interleave",
    "predicted_row",
    "provenance",
    "read_rows",
    "told",
    "unreadable",
    "unwritable",
    "write_rows",
]

SHAPE = ("suite", "M", "N", "density", "B", "Hq", "Hkv", "D", "causal", "window", "dtype")
WHAT = ("direction", "scope", "impl", "step", "name")
TIMES = ("ms_p20", "ms_p50", "ms_p80", "tflops", "roof_tflops", "rel_error", "budget_share")
HOW = ("timer", "rounds", "settle_ms", "calls", "flushed", "error", "note")
PREDICTED = ("predicted_ms", "predicted_tflops", "model")
COLUMNS = (*SHAPE, *WHAT, *TIMES, *PREDICTED, *HOW, *PROVENANCE)
TIMERS = ("cuda-event", "cuda-graph", "host-clock")
MEASURED = ("ms_p20", "ms_p50", "ms_p80", "tflops")
ONE_THREAD = "one_thread"  # behind a name and a colon: its backward pass in the thread that asks for it
SETTLE_MS = 50.0  # what recordings let pass before a sample (`jfa.lab.neighbours`)


class _Events:
    """Times calls on the current CUDA stream by events; milliseconds a call."""

    timer = "cuda-event"

    def __init__(self):
        import torch

        self.torch = torch

    def prepare(self, fn):
        """The function to call again and again."""
        fn()
        self.torch.cuda.synchronize()
        return fn

    def time(self, fn, calls):
        """Milliseconds of one call, the mean of ``calls`` in a row."""
        cuda = self.torch.cuda
        start, stop = (cuda.Event(enable_timing=True) for _ in range(2))
        cuda.synchronize()
        start.record()
        for _ in range(calls):
            fn()
        stop.record()
        cuda.synchronize()
        return start.elapsed_time(stop) / calls


class _Graphs(_Events):
    """Times replays of a CUDA graph of one call: no launch overhead of the host.

    Captured on the current stream unless that is the default one: autograd runs a backward pass on the stream
    of its forward pass, and only what runs on the capturing stream is captured.
    """

    timer = "cuda-graph"

    def __init__(self):
        super().__init__()
        # One pool for all graphs: they run one after another and nobody reads what a replay leaves there.
        self.pool = self.torch.cuda.graph_pool_handle()
        self.room = self.torch.cuda.get_device_properties(self.torch.cuda.current_device()).total_memory // 2

    def prepare(self, fn):
        cuda = self.torch.cuda
        stream = cuda.current_stream()
        if stream == cuda.default_stream():
            stream = cuda.Stream()
            stream.wait_stream(cuda.current_stream())
        with cuda.stream(stream):
            fn()
            cuda.synchronize()
            if cuda.memory_reserved() > self.room:
                cuda.empty_cache()
            return self.capture(fn).replay

    def capture(self, fn):
        """A graph of one call; torch.cuda.graph would give all cached memory back before every capture."""
        graph = self.torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self.pool)
        try:
            fn()
        except BaseException:
            with contextlib.suppress(RuntimeError):  # the capture is void; what voided it is what matters
                graph.capture_end()
            raise
        graph.capture_end()
        return graph


class Remote:
    """A function that another process runs and times, for `interleave` beside functions of this one.

    ``timer`` says how it times; ``prepare`` makes it ready or raises, ``time`` gives milliseconds a call.
    """

    timer = "cuda-event"

    def prepare(self):
        raise NotImplementedError

    def time(self, calls: int) -> float:
        raise NotImplementedError


class _There:
    """The clock of `Remote` functions: the other process's."""

    def prepare(self, fn):
        fn.prepare()
        return fn

    def time(self, fn, calls):
        return fn.time(calls)


class _HostClock:
    """Times calls by the host's clock: a CPU's work, or of a GPU's what the host does to start it."""

    timer = "host-clock"

    def prepare(self, fn):
        fn()
        return fn

    def time(self, fn, calls):
        import torch

        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # nothing waits for room in a queue
        start = time.perf_counter()
        for _ in range(calls):
            fn()
        return (time.perf_counter() - start) / calls * 1e3


def clock(graph=False, host_clock=False):
    """What times functions: an object with ``timer``, ``prepare(fn)`` and ``time(prepared, calls)``."""
    import torch

    if host_clock:
        if graph:
            raise ValueError("host_clock: there is no CUDA graph on the host")
        return _HostClock()
    if not torch.cuda.is_available():
        raise RuntimeError(
            "no CUDA device, so there is no GPU time to measure; pass host_clock=True to time the host "
            "itself (the emulator's seconds say nothing about a GPU)"
        )
    return _Graphs() if graph else _Events()


def interleave(
    functions: dict[str, Callable[[], object]],
    rounds: int = 9,
    *,
    sample_ms: float = 20.0,
    settle_ms: float = 0.0,
    warmup_ms: float = 100.0,
    pause_s: float = 0.0,
    graph: bool = False,
    host_clock: bool = False,
    keep_going: bool = False,
    monitor: Monitor | None = None,
) -> list[dict]:
    """Time several functions in turn, round after round, and return one row of columns for each.

    A round takes one sample of every function, each round in a random order, so that nobody always follows
    the same neighbour; a sample repeats its function for at least ``sample_ms`` and counts as its mean.
    ms_p20, ms_p50 and ms_p80 are quantiles over the rounds, in milliseconds a call. ``settle_ms`` repeats the
    function so long before each sample, untimed: at its power limit what ran in the last tenth of a second
    changes a time, presumably by the clock (`jfa.lab.neighbours`). ``pause_s`` lets the GPU cool before each
    sample. ``graph`` times replays of a CUDA graph, so the host's launch time is left out. Rows carry
    `provenance`, with SM clock and power of the run, from a ``monitor`` that is running, or from one of its
    own. A function that is a `Remote` is timed where it runs.

    ``keep_going`` turns a function that raises into a row whose "error" says so. Raises RuntimeError without
    a CUDA device unless ``host_clock`` is given.
    """
    if rounds < 1 or not functions:
        raise ValueError(f"expected functions and at least one round, got {len(functions)} and {rounds}")
    here, there = clock(graph, host_clock), _There()
    ready, failed = {}, {}
    for name, fn in functions.items():
        one = there if isinstance(fn, Remote) else here
        try:
            prepared = one.prepare(fn)
            once = one.time(prepared, 1)
            once = one.time(prepared, max(3, _calls(warmup_ms, once)))
            ready[name] = (one, prepared, _calls(settle_ms, once), _calls(sample_ms, once))
        except Exception as error:
            if not keep_going:
                raise
            failed[name] = told(error)
    samples = {name: [] for name in ready}
    start = time.monotonic()
    with contextlib.nullcontext(monitor) if monitor is not None else Monitor() as watching:
        for _ in range(rounds):
            for name in random.sample(list(samples), len(samples)):
                time.sleep(pause_s)
                one, prepared, before, calls = ready[name]
                try:
                    if settle_ms:
                        one.time(prepared, before)
                    samples[name].append(one.time(prepared, calls))
                except Exception as error:
                    if not keep_going:
                        raise
                    failed[name] = told(error)
                    del samples[name]
    found = provenance(watching, start)
    how = {"rounds": rounds, "settle_ms": settle_ms}
    rows = []
    for name, fn in functions.items():
        if name in failed:
            rows.append({"name": name, "error": failed[name], **found})
            continue
        p20, p50, p80 = np.percentile(samples[name], (20, 50, 80)).tolist()
        times = {"ms_p20": p20, "ms_p50": p50, "ms_p80": p80}
        timer = fn.timer if isinstance(fn, Remote) else here.timer
        calls = ready[name][-1]
        rows.append({"name": name, **times, "timer": timer, **how, "calls": calls, "error": "", **found})
    return rows


def told(error: Exception) -> str:
    """An error in one line of at most 200 characters."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:180] if text else ''}".strip()


def _calls(milliseconds, one):
    return max(1, math.ceil(milliseconds / max(one, 1e-4)))


def add_work(row: dict, work) -> dict:
    """A row with tflops and roof_tflops of a `jfa.lab.flops.Roofline`, predicted_tflops if predicted."""
    row = dict(row, roof_tflops=work.tflops)
    if row.get("ms_p50"):
        row["tflops"] = work.flops / row["ms_p50"] / 1e9
    if row.get("predicted_ms"):
        row["predicted_tflops"] = work.flops / row["predicted_ms"] / 1e9
    return row


def predicted_row(name: str, milliseconds: float, model: str, **columns) -> dict:
    """A row for a time that was predicted: it fills predicted_ms and ``model``, never a measured column."""
    wrong = [column for column in columns if column in MEASURED]
    if wrong:
        raise ValueError(f"a prediction has no {', '.join(wrong)}")
    return {"name": name, "predicted_ms": milliseconds, "model": model, **columns}


def _text(value):
    if isinstance(value, bool):
        return str(int(value))
    if isinstance(value, float):
        return f"{value:.6g}"
    return "" if value is None else str(value)


def _checked(row):
    timed = [column for column in MEASURED if row.get(column) not in (None, "")]
    if timed and row.get("timer") not in TIMERS:
        raise ValueError(
            f"{timed[0]} is a measured column, but the row's timer is {row.get('timer')!r}; use predicted_ms"
        )
    if row.get("predicted_ms") not in (None, "") and not row.get("model"):
        raise ValueError("predicted_ms needs the model that predicted it")
    return row


def write_rows(path, rows: list[dict], append: bool = False) -> Path:
    """Write rows as CSV: the columns of ``COLUMNS`` that occur, in that order, then others as they come.

    ``append`` keeps the rows that the file has. Floats have six digits. Raises ValueError without rows, and
    for a row whose measured columns were not measured.
    """
    path = Path(path)
    if not rows:
        raise ValueError(f"{path}: there are no rows to write")
    rows = [_checked(row) for row in rows]
    if append and path.exists():
        rows = [*read_rows(path), *rows]
    used = dict.fromkeys(column for row in rows for column in row)
    columns = [column for column in COLUMNS if column in used]
    columns += [column for column in used if column not in COLUMNS]
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="", encoding="utf-8") as handle:
        writer = csv.writer(handle, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows([_text(row.get(column, "")) for column in columns] for row in rows)
    return path


def _value(text):
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


VERSIONS = ("commit", "driver", "cuda", "torch", "fbtriton", "date")
TEXT_COLUMNS = frozenset({*VERSIONS, "window", "step", "name", "error", "note"})


def read_rows(path) -> list[dict]:
    """The rows of a CSV as dicts, numbers as int or float, empty cells as ""; versions stay text.

    Raises ValueError for a row with more or fewer cells than the header.
    """
    with open(path, newline="", encoding="utf-8") as handle:
        rows = list(csv.DictReader(handle))
    for number, row in enumerate(rows, 2):
        if None in row or None in row.values():
            raise ValueError(f"{path}: line {number} has other cells than the header; is the file cut?")
    return [{name: x if name in TEXT_COLUMNS else _value(x) for name, x in row.items()} for row in rows]


def unwritable(path: Path, *columns: str) -> str | None:
    """None if `write_rows` could append rows with these columns to a file, else what is in the way.

    Missing folders are made, and a file without anything in it is as good as none.
    """
    if path.is_dir():
        return f"{path}: is a folder"
    there = path if path.exists() else next(folder for folder in path.absolute().parents if folder.exists())
    if there != path and not there.is_dir():
        return f"{path}: {there} is no folder"
    if not os.access(there, os.W_OK):
        return f"{path}: no permission to write"
    return unreadable(path, *columns) if path.exists() and path.stat().st_size else None


def unreadable(path: Path, *columns: str) -> str | None:
    """None if a file is a whole CSV with these columns, else a sentence that says what is wrong with it."""
    try:
        with path.open(newline="") as file:
            header = next(csv.reader(file), [])
    except (OSError, UnicodeDecodeError) as error:
        return f"{path}: {getattr(error, 'strerror', None) or 'not a text file'}"
    for column in columns:
        if column not in header:
            return f"{path}: expected a CSV with a column {column}"
    try:
        read_rows(path)
    except ValueError as error:
        return str(error)
    return None
