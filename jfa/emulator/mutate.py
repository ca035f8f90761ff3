"""Mutation tests and clean runs: how often the emulator sees a fault, and how often it sees one that is none.

python -m jfa.emulator.mutate                   every mutant of every kernel
python -m jfa.emulator.mutate hopper_forward    every mutant of one kernel
python -m jfa.emulator.mutate --quick           a few mutants of the fast kernels, the same ones each time
python -m jfa.emulator.mutate --clean 200       runs of the kernels as they are, over seeds and policies

A mutant is a kernel with one synchronization statement wrong (see edits.py). It counts as detected by a
finding, a deadlock, an answer outside its error budget, or by never ending, under any of a few schedules. The
exit status is 1 if a survivor has no explanation, or if a mutant that is explained as harmless is detected.
"""

import argparse
import collections
import contextlib
import csv
import dataclasses
import importlib
import multiprocessing
import random
import sys
import time

from . import target as registry
from .mutants import key, shortened
from .trial import Trial, sweep

TARGETS = "jfa.lab.mutants:TARGETS"  # import strings: the emulator itself knows no kernels
CLEAN = "jfa.lab.mutants:CLEAN"
EXPLAINED = "jfa.lab.mutants:EXPLAINED"
COLUMNS = ("kernel", "kind", "where", "line", "call", "verdict", "by", "explanation")
QUICK = 5  # mutants of each kernel in the short form
_trials = {}  # of this process, by kernel


@dataclasses.dataclass(frozen=True)
class Row:
    """The verdict on one mutant.

    kernel: the Target. kind, where, line (a long one cut short), call: as in Mutant. verdict, by: as in
    Verdict. explanation: why a survivor is no fault; "" if there is none.
    """

    kernel: str
    kind: str
    where: str
    line: str
    call: str
    verdict: str
    by: str
    explanation: str = ""

    @property
    def key(self):
        """Names the mutant among those of its kernel."""
        return key(self.where, self.line, self.kind)


def trial(where, name):
    """The Trial of a kernel, made once a process."""
    if name not in _trials:
        _trials[name] = Trial(registry.load(where)[name])
    return _trials[name]


def _judge(task):
    where, name, number = task
    found = trial(where, name)
    mutant = found.mutants[number]
    verdict = found.judge(mutant)
    return Row(
        name, mutant.kind, mutant.where, shortened(mutant.text), mutant.call, verdict.status, verdict.by
    )


def _count(task):
    return len(trial(*task).mutants)


def tasks(where, names, sample=None, seed=0, pool=None):
    """(targets, kernel, number) of every mutant, or of `sample` of each kernel drawn by seed."""
    counts = (pool.map if pool else map)(_count, [(where, name) for name in names])
    found = []
    for name, count in zip(names, counts):
        numbers = range(count)
        if sample is not None and sample < count:
            numbers = sorted(random.Random(f"{seed} {name}").sample(numbers, sample))
        found += [(where, name, number) for number in numbers]
    return found


def run(where, names, explained, *, sample=None, seed=0, processes=1, each=lambda row: None):
    """Rows of the kernels' mutants, in order. explained: {kernel: {key: why it is no fault}}."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(processes) if processes > 1 else contextlib.nullcontext() as pool:
        todo = tasks(where, names, sample, seed, pool)
        rows = []
        for row in pool.imap(_judge, todo, chunksize=4) if pool else map(_judge, todo):
            why = explained.get(row.kernel, {}).get(row.key, "")
            row = dataclasses.replace(row, explanation=why)
            each(row)
            rows.append(row)
    return rows


def unexpected(rows):
    """Survivors without an explanation, and explained ones that are detected after all."""
    silent = [row for row in rows if row.verdict == "survived" and not row.explanation]
    wrong = [row for row in rows if row.verdict in ("detected", "warned") and row.explanation]
    return silent, wrong


def score(rows):
    """(detected, equivalent, run) of some rows: an explained survivor is equivalent to the kernel as it is.

    Mutants that no run came to are left out.
    """
    ran = [row for row in rows if row.verdict != "not run"]
    detected = sum(row.verdict in ("detected", "warned") for row in ran)
    equivalent = sum(row.verdict == "survived" and bool(row.explanation) for row in ran)
    return detected, equivalent, len(ran)


def table(rows):
    """Lines of text: the score of each kernel and of each kind, then the survivors."""
    lines = []
    for name in ("kernel", "kind"):
        groups = collections.defaultdict(list)
        for row in rows:
            groups[getattr(row, name).partition(" signal ")[0]].append(row)
        lines += ["", f"{name:34s} detected    of all  equivalent  of the rest  not run"]
        for group, members in [*groups.items(), ("all", rows)]:
            detected, equivalent, ran = score(members)
            lines.append(
                f"{group:34s} {detected:4d}/{ran:<4d} {_share(detected, ran)} {equivalent:8d}   "
                f"{_share(detected, ran - equivalent)} {len(members) - ran:10d}"
            )
    for row in rows:
        if row.verdict == "survived":
            lines += ["", f"{row.kernel}: {row.key}", f"    {row.explanation or 'NOT EXPLAINED'}"]
    return lines


def _share(part, whole):
    return f"{part / whole:9.1%}" if whole else " " * 9


def write(path, rows):
    """Rows as CSV."""
    with open(path, "w", newline="") as file:
        out = csv.writer(file, lineterminator="\n")
        out.writerow(COLUMNS)
        out.writerows(dataclasses.astuple(row) for row in rows)


def read(path):
    """Rows of such a CSV."""
    with open(path, newline="") as file:
        return [Row(**row) for row in csv.DictReader(file)]


def _value(where):
    module, _, name = where.partition(":")
    return getattr(importlib.import_module(module), name)


def _arguments(argv):
    parser = argparse.ArgumentParser(prog="python -m jfa.emulator.mutate", description=__doc__.split("\n")[0])
    parser.add_argument("kernels", nargs="*", help="names of kernels (default: all)")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK} mutants of each fast kernel")
    parser.add_argument("--clean", type=int, metavar="N", help="N runs of the kernels as they are")
    parser.add_argument("--csv", metavar="PATH", help="write the verdicts")
    parser.add_argument("--seed", type=int, default=0, help="of the sample that --quick draws")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument(
        "--targets", metavar="MODULE:LIST", help=f"where the kernels are (default: {TARGETS})"
    )
    parser.add_argument("--explained", default=EXPLAINED, metavar="MODULE:DICT", help="known survivors")
    args = parser.parse_args(argv)
    if args.csv and args.clean is not None:
        parser.error("--csv: clean runs have no verdicts to write, leave out --clean or --csv")
    return args


def main(argv=None):
    """The command; returns the exit status."""
    args = _arguments(argv)
    where = args.targets or (TARGETS if args.clean is None else CLEAN)
    try:
        targets, explained = registry.load(where), _value(args.explained)
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        print(f"--targets or --explained: expected package.module:NAME; {error}", file=sys.stderr)
        return 2
    names = args.kernels or [name for name, target in targets.items() if target.fast or not args.quick]
    unknown = [name for name in names if name not in targets]
    if unknown:
        print(f"unknown kernel {unknown[0]}; there are {', '.join(targets)}", file=sys.stderr)
        return 2
    if args.clean is not None:
        _, alarms = sweep([targets[name] for name in names], args.clean)
        return int(bool(alarms))
    if args.csv:
        try:
            open(args.csv, "a").close()  # now rather than when every mutant has run
        except OSError as error:
            print(f"--csv {args.csv}: {error.strerror}", file=sys.stderr)
            return 2
    start = time.perf_counter()
    sample = QUICK if args.quick else None

    def progress(row):
        print(f"{row.verdict:9s} {row.by:22s} {row.kernel}: {row.key}", flush=True)

    options = {"sample": sample, "seed": args.seed, "processes": args.processes, "each": progress}
    rows = run(where, names, explained, **options)
    print("\n".join(table(rows)))
    print(f"\n{len(rows)} mutants in {time.perf_counter() - start:.0f} s")
    if args.csv:
        write(args.csv, rows)
    silent, wrong = unexpected(rows)
    for row in wrong:
        print(f"explained as harmless, but detected ({row.by}): {row.kernel}: {row.key}")
    return int(bool(silent or wrong))


if __name__ == "__main__":
    sys.exit(main())
