"""Time our kernels and other people's beside them, in one process and in turn.

    python -m jfa.lab.bench --suite jagged --impl jfa fa4 --output figures/09_results.csv

A case is prepared for every implementation, checked against a float32 computation, and timed in rounds of
CUDA graph replays, in turn (eager calls where a graph cannot be captured). One row a measurement: forward,
backward and both, the whole call ("call") and the kernels alone ("kernel"; both passes only as a call). An
implementation that cannot run a case leaves a row that says why. FLOPs are those of the real lengths.
`jfa.lab.results` reads the rows.
"""

import argparse
import contextlib
import faulthandler
import functools
import time
from pathlib import Path

import torch

from jfa.lab import argtypes, cases, child, measure, ours, peak, truth
from jfa.lab.cases import SUITES, Case, make_inputs
from jfa.lab.peers import PEERS, REMOTE, Run

DIRECTIONS = ("forward", "backward", "both")
SCOPES = ("call", "kernel")
# Columns that every row of a file has to which rows are appended.
COLUMNS = {
    "output": (*measure.SHAPE, "direction", "scope", "name"),
    "memory": (*measure.SHAPE, "share_of_kv"),
}
RESERVED = 60 << 30  # bytes that PyTorch may keep for the next case


class Prepared:
    """Everything of one case that takes turns: functions by (name, direction, scope), and why others do not.

    ``facts`` are further columns by the same keys; ``calls`` are the runs of scope "call" by name.
    """

    def __init__(self, case: Case, device: str):
        self.case = case
        self.inputs = make_inputs(case, device)
        self.wanted, self.allowed = truth.expected(self.inputs), truth.budgets(self.inputs)
        self.functions, self.reasons = {}, {}
        self.facts, self.calls = {}, {}

    def add(self, name: str, make, directions, scope: str) -> None:
        """Prepare one implementation: ``make(inputs, scope)`` gives its run."""
        try:
            run: Run = make(self.inputs, scope)
            found = truth.errors(run, self.wanted, self.allowed)
        except Exception as error:
            self.reasons |= {(name, way, scope): measure.told(error) for way in directions}
            return
        for way in directions:
            self.functions[name, way, scope] = getattr(run, way)
            self.facts[name, way, scope] = {"step": run.steps.get(way, ""), **by_direction(found, way)}
        if scope == "call":
            self.calls[name] = run

    def add_remote(self, name: str, process: child.Child, directions, scopes, graph: bool) -> None:
        """Prepare a peer in its child process."""
        keys = {f"{way} {scope}": (name, way, scope) for scope in scopes for way in timed(directions, scope)}
        try:
            answer = process.prepare(self.case, directions, scopes, graph)
        except Exception as error:
            self.reasons |= dict.fromkeys(keys.values(), measure.told(error))
            return
        for said, key in keys.items():
            found = by_direction(answer["errors"].get(key[2], {}), key[1])
            self.facts[key] = {"note": answer["note"], **found}
            if answer["functions"][said]:
                self.reasons[key] = answer["functions"][said]
            else:
                self.functions[key] = child.There(process, said)

    def add_one_thread(self, name: str) -> None:
        """Time the backward pass of an implementation a second time, in the thread that asks for it."""
        for key in [key for key in self.functions if key[0] == name and key[1] != "forward"]:
            again = (f"{name}:{measure.ONE_THREAD}", *key[1:])
            self.functions[again] = in_one_thread(self.functions[key])
            self.facts[again] = self.facts[key] | {"note": "autograd in the calling thread"}

    def add_schedule(self) -> None:
        """Take the time of making a schedule, where our kernels make one."""
        maker = ours.schedule_maker(self.inputs)
        if maker is not None:
            self.functions["jfa", "", "schedule"] = maker

    def row(self, timed_row: dict) -> dict:
        """The columns of one measurement."""
        name, direction, scope = timed_row["name"]
        facts = {"direction": direction, "scope": scope, "impl": name.partition(":")[0], "name": name}
        known = {"step": "", "note": "", "rel_error": "", "budget_share": ""}
        known |= self.facts.get((name, direction, scope), {})
        notes = [note for note in (known["note"], timed_row.get("note")) if note]
        row = timed_row | self.case.columns() | facts | known | {"note": "; ".join(notes)}
        if scope == "schedule":
            for column in ("ms_p20", "ms_p50", "ms_p80"):
                if column in row:
                    row[column] /= ours.IN_A_ROW
            return row | {"note": f"mean of {ours.IN_A_ROW} in a row", "roof_tflops": ""}
        return measure.add_work(row, self.case.work(direction))


def in_one_thread(function):
    """``function`` without the thread that autograd keeps for a GPU and wakes for every backward."""

    def run():
        with torch.autograd.set_multithreading_enabled(False):
            return function()

    return run


def by_direction(found: dict, direction: str) -> dict:
    """One direction's columns of what `truth.errors` gave."""
    return {column: values.get(direction, "") for column, values in found.items()}


def timed(directions, scope: str) -> list[str]:
    """The directions that a scope times: both passes together only as a user calls them."""
    return [way for way in directions if scope == "call" or way != "both"]


def in_turn(functions: dict, rounds: int, graph: bool, **options) -> list[dict]:
    """Interleaved rows; what cannot be captured in a graph is timed again in eager calls, and says so."""
    if not functions:
        return []
    rows = measure.interleave(functions, rounds, graph=graph, keep_going=True, **options)
    here = {row["name"] for row in rows if row["error"]}
    failed = {name: functions[name] for name in here if not isinstance(functions[name], measure.Remote)}
    if not graph or not failed:
        return rows
    again = in_turn(failed, rounds, False, **options)
    note = "eager calls after the others: no graph could be captured"
    return [row for row in rows if row["name"] not in failed] + [row | {"note": note} for row in again]


def measure_case(case: Case, impls, options, monitor=None, process=None) -> tuple[list[dict], list[dict]]:
    """All rows of one case, and its rows of peak memory; ``options`` are those of the command line."""
    device, host = options.device, options.host or options.device == "cpu"
    graph = not (options.eager or options.host)
    prepared = Prepared(case, device)
    local = [name for name in impls if name not in REMOTE]
    for scope in options.scope:
        directions = timed(options.direction, scope)
        for name in local:
            prepared.add(name, PEERS[name], directions, scope)
            if options.host:
                prepared.add_one_thread(name)
        for name in options.steps if scope == options.scope[0] else ():
            way = name.partition(":")[0]
            make = functools.partial(ours.prepare, step=ours.named_step(name))
            prepared.add(f"jfa:{name.partition(':')[2]}", make, [way], scope)
    for name in set(impls) & set(REMOTE):
        prepared.add_remote(name, process, options.direction, options.scope, graph)
    if "jfa" in impls and not options.host:
        prepared.add_schedule()
    sizes = {"sample_ms": options.sample_ms, "warmup_ms": options.sample_ms, "settle_ms": options.settle_ms}
    sizes["monitor"] = monitor
    groups = [{key: fn} for key, fn in prepared.functions.items()] if options.alone else [prepared.functions]
    rows = []
    for functions in groups:
        rows += in_turn(functions, options.rounds, graph, host_clock=host, **sizes)
    where = measure.provenance()
    rows += [{"name": key, "error": reason, **where} for key, reason in prepared.reasons.items()]
    rows = [prepared.row(row) for row in rows]
    peaks = []
    if options.memory and device != "cpu":
        for name in ("jfa", "fa4"):
            if name in prepared.calls:
                peaks.append(peak.row(prepared.calls[name], prepared.inputs, name) | where)
    return rows, peaks


def selected(options) -> list[Case]:
    """The cases that the command line asks for."""
    chosen = [case for suite in options.suite for case in SUITES[suite]()]
    for column in ("M", "N", "density"):
        wanted = getattr(options, column)
        if wanted:
            chosen = [case for case in chosen if getattr(case, column) in wanted]
    if options.few:
        chosen = [case for case in chosen if cases.representative(case)]
    return chosen


def impls_of(case: Case, options) -> list[str]:
    """What runs a case: ``impl`` everywhere, ``more`` on representative cases, remote ones on fewer yet."""
    more = [
        name
        for name in options.more
        if cases.representative(case, cases.FEWER if name in REMOTE else cases.FEW)
    ]
    return list(dict.fromkeys([*options.impl, *more]))


def asked(case: Case, options) -> set:
    """(case, name, direction, scope) of what the command line asks for; a schedule comes with its case."""
    found = set()
    for scope in options.scope:
        for name in impls_of(case, options):
            found |= {(case, name, way, scope) for way in timed(options.direction, scope)}
    if options.host:
        again = [key for key in found if key[1] not in REMOTE and key[2] != "forward"]
        found |= {(case, f"{name}:{measure.ONE_THREAD}", *rest) for _, name, *rest in again}
    for way, _, step in (name.partition(":") for name in options.steps):
        found.add((case, f"jfa:{step}", way, options.scope[0]))
    return found


def done_before(path) -> set:
    """(case, name, direction, scope) of every row of a file that has a time."""
    try:
        rows = measure.read_rows(path)
    except FileNotFoundError:
        return set()
    timed_rows = [row for row in rows if row.get("ms_p50") not in (None, "")]
    return {(Case.of(row), row["name"], row["direction"], row["scope"]) for row in timed_rows}


def lost_device() -> str:
    """What a CUDA call says after an error that no later one survives, or ""."""
    try:
        torch.cuda.synchronize()
        return ""
    except RuntimeError as error:
        return measure.told(error)


def show(row: dict) -> str:
    """One measurement as a line."""
    shape = f"{row['suite']} M={row['M']} N={row['N']} s={row['density']} {row['direction']} {row['scope']}"
    if row.get("error"):
        return f"{shape} {row['name']}: {row['error']}"
    line = f"{shape} {row['name']} {row['step']}: {row['ms_p50'] * 1e3:.1f} us"
    if row["scope"] != "schedule":
        line += f", {row['tflops']:.0f} TFLOPS of {row['roof_tflops']:.0f}, error {row['rel_error']:.4f}"
        if not row["budget_share"] <= 1:
            line += f", {row['budget_share']:.2f} of its budget"
    return line


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m jfa.lab.bench", description=__doc__.splitlines()[0])
    names = [*PEERS, *REMOTE]
    parser.add_argument("--suite", nargs="+", choices=list(SUITES), default=["jagged"])
    parser.add_argument("--impl", nargs="*", choices=names, default=["jfa", "fa4"])
    parser.add_argument("--more", nargs="+", choices=names, default=[], help="on representative cases only")
    parser.add_argument("--direction", nargs="+", choices=DIRECTIONS, default=list(DIRECTIONS))
    parser.add_argument("--scope", nargs="+", choices=SCOPES, default=list(SCOPES))
    parser.add_argument(
        "--steps",
        nargs="+",
        default=[],
        help="our steps as direction:name, or 'all'; in the first scope",
    )
    parser.add_argument("--M", nargs="+", type=int)
    parser.add_argument("--N", nargs="+", type=int)
    parser.add_argument("--density", nargs="+", type=float)
    parser.add_argument("--few", action="store_true", help="representative cases only")
    parser.add_argument("--rounds", type=argtypes.count, default=9)
    parser.add_argument("--sample-ms", type=float, default=10.0)
    parser.add_argument(
        "--settle-ms",
        type=float,
        default=measure.SETTLE_MS,
        help="untimed calls before each sample: its own clock",
    )
    parser.add_argument(
        "--alone",
        action="store_true",
        help="one after the other: each row has the clock and power of its own",
    )
    parser.add_argument("--eager", action="store_true", help="time eager calls instead of graph replays")
    parser.add_argument(
        "--host",
        action="store_true",
        help="time what the host does for an eager call; for the suite of that name, which leaves a GPU idle",
    )
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="start no case after so long")
    parser.add_argument(
        "--flex-limit-s", type=argtypes.seconds, default=child.PREPARE_S, help="to compile one case"
    )
    parser.add_argument(
        "--case-limit-s", type=argtypes.seconds, help="end the process when a case takes longer"
    )
    parser.add_argument(
        "--resume", action="store_true", help="leave out cases of which the output has a time for everything"
    )
    parser.add_argument("--output", help="CSV to write; rows are appended")
    parser.add_argument("--memory", help="CSV of peak memory to write; rows are appended")
    parser.add_argument("--compile", type=argtypes.count, metavar="JOBS", help="fill the compilers' caches")
    parser.add_argument("--device", default="cuda", help=argparse.SUPPRESS)
    return parser


def run(options) -> int:
    """Measure case after case and write the rows of each as they come."""
    start = time.monotonic()
    before = done_before(options.output) if options.resume and options.output else set()
    left = 0
    monitor = measure.Monitor()
    watching = contextlib.nullcontext() if options.host else monitor  # its questions hold up the driver
    with watching, child.Child(prepare_s=options.flex_limit_s) as process:
        monitor.wait()
        for case in selected(options):
            impls = impls_of(case, options)
            if not impls or (before and asked(case, options) <= before):
                continue
            if time.monotonic() - start > options.limit_s:
                left += 1
                continue
            if options.case_limit_s:  # a kernel that hangs ends the process, not the time that was lent
                faulthandler.dump_traceback_later(options.case_limit_s, exit=True)
            began = time.monotonic()
            rows, peaks = measure_case(case, impls, options, monitor, process)
            faulthandler.cancel_dump_traceback_later()
            for row in rows:
                print(show(row), flush=True)
            print(f"{len(rows)} rows in {time.monotonic() - began:.1f} s", flush=True)
            if options.output and rows:
                measure.write_rows(options.output, rows, append=True)
            if options.memory and peaks:
                measure.write_rows(options.memory, peaks, append=True)
            if options.device != "cpu" and (broken := lost_device()):
                print(f"stopped, because this process has lost its GPU: {broken}", flush=True)
                return 1
            process.forget()
            if options.device != "cpu" and torch.cuda.memory_reserved() > RESERVED:
                torch.cuda.empty_cache()
    print(f"{time.monotonic() - start:.0f} s; {left} cases not measured for want of time", flush=True)
    return 0


def main(argv=None) -> int:
    """Measure the selected cases, or fill the caches for them."""
    options = parser().parse_args(argv)
    if options.steps == ["all"]:
        options.steps = ours.all_steps()
    for name in options.steps:
        try:
            ours.named_step(name)
        except ValueError as error:
            parser().error(f"--steps {name}: {error}")
    if not selected(options):
        parser().error("no case of these suites has such an --M, --N and --density (and is one of --few)")
    for option, columns in COLUMNS.items():
        path = getattr(options, option)
        if path and (problem := measure.unwritable(Path(path), *columns)):
            parser().error(f"--{option}: {problem}")
    if options.device != "cpu" and not torch.cuda.is_available():
        parser().error("no CUDA device: there is nothing to measure here")
    if options.compile:
        from jfa.lab import warm

        return warm.fill(options)
    if options.device == "cpu":
        return run(options)
    torch.backends.cuda.matmul.allow_tf32 = False
    with torch.cuda.stream(torch.cuda.Stream()):  # backward is captured only on the stream of its forward
        return run(options)


if __name__ == "__main__":
    raise SystemExit(main())
