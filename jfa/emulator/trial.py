"""Runs a target, as it is or as a mutant, under several schedules, and says what gave it away."""

import contextlib
import dataclasses
import signal
import threading
import time

from . import kernels
from .arguments import Arguments
from .emulate import emulate
from .mutants import Program
from .names import map_value

SCHEDULES = (("random", 0), ("lazy", 0), ("eager", 0))
MORE = (("random", 1), ("random", 2), ("random", 3), ("random", 4))  # for what survives the first three
PREEMPT = (0.05, 0.3, 0.0)  # by seed: how often a task yields at a synchronization point
SECONDS = 60  # a run that takes longer counts as one that never ends


class NeverEnds(Exception):
    """A mutant that is still running when its time is up."""


@dataclasses.dataclass(frozen=True)
class Verdict:
    """status: "detected", "warned" (only a new warning), "survived" or "not run" (no schedule came to it).

    by: the kind of the finding, "deadlock", "wrong numbers", "never ends" or an exception; "" if none.
    """

    status: str
    by: str = ""


class _Watched(emulate):
    """Remembers what was launched, to find the functions that a kernel can reach."""

    def __init__(self, **options):
        super().__init__(**options)
        self.launched = []

    def launch(self, k, grid, args, kwargs):
        self.launched.append((k, args, kwargs))
        super().launch(k, grid, args, kwargs)


def options_of(target, policy, seed):
    """Options of `emulate` for one schedule of a target."""
    return {"policy": policy, "seed": seed, "preempt": PREEMPT[seed % len(PREEMPT)], **target.options}


def mutants(target):
    """Every Mutant of a target's kernel, in the functions that one clean run calls."""
    target.run  # noqa: B018  (inputs may need launches of their own)
    for function in kernels.known():
        function.code = None  # compiled again when called, so that only what this run calls has code
    with _Watched(**options_of(target, "eager", 0)) as emulation:
        target.run()
    found = []
    seen = set()
    for k, args, kwargs in emulation.launched:
        root = kernels.kernel(k)
        if root in seen or (target.kernel and root.__name__ != target.kernel):
            continue
        seen.add(root)
        found += Program(root, _functions([*args, *kwargs.values()])).mutants()
    return found


def _functions(values):
    """The arguments of a launch that are functions or classes, mapped; data of the host is left out."""
    mapped = (map_value(v) for v in values if callable(v) or hasattr(v, "fn"))
    return [v for v in mapped if not isinstance(v, Arguments)]


@contextlib.contextmanager
def time_limit(seconds):
    """Raises NeverEnds in the body after so many seconds (only in a main thread that has signals)."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return

    def ring(signum, frame):
        raise NeverEnds

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def attempt(target, policy, seed, **options):
    """One run: (what is wrong, [] if nothing; kinds and lines of warnings; scheduler steps)."""
    wrong = []
    share = 0.0
    with emulate(**options_of(target, policy, seed), **options) as emulation:
        try:
            with time_limit(SECONDS):
                share = target.run()
        except NeverEnds:
            wrong.append("never ends")
        except Exception as error:  # whatever stops a broken kernel gives it away
            wrong.append(type(error).__name__)
    kinds = [f.kind for f in emulation.errors() if f.kind not in target.known]
    if any(report.deadlock for report in emulation.reports):
        kinds.append("deadlock")
    wrong = kinds + [name for name in wrong if not kinds]
    if not wrong and not share <= 1:
        wrong.append("wrong numbers")
    warnings = {(f.kind, f.line) for report in emulation.reports for f in report.warnings()}
    steps = sum(report.steps for report in emulation.reports)
    return wrong, warnings, steps


class Trial:
    """A target whose clean runs are known, so that mutants can be told from it."""

    def __init__(self, target):
        self.target = target
        self.mutants = mutants(target)
        self.usual = set()  # warnings of the kernel as it is
        self.steps = 0
        for policy, seed in SCHEDULES:
            wrong, warnings, steps = attempt(target, policy, seed)
            if wrong:
                raise AssertionError(
                    f"{target.name} is not clean as it is ({policy}, seed {seed}): {wrong[0]}"
                )
            self.usual |= warnings
            self.steps = max(self.steps, steps)

    def judge(self, mutant, schedules=SCHEDULES + MORE):
        """The Verdict on a mutant: the first schedule that gives it away ends the trial."""
        hits = []
        warned = ""
        limit = 20 * self.steps + 20_000
        with mutant.active(lambda: hits.append(True) if not hits else None):
            for number, (policy, seed) in enumerate(schedules):
                wrong, warnings, _ = attempt(self.target, policy, seed, max_steps=limit)
                if wrong:
                    return Verdict("detected", wrong[0])
                new = sorted(kind for kind, line in warnings - self.usual)
                warned = warned or (new[0] if new else "")
                if number + 1 >= len(SCHEDULES) and not hits:
                    return Verdict("not run")
        return Verdict("warned", warned) if warned else Verdict("survived")


def sweep(targets, runs, report=print):
    """Clean runs of the targets in turn over policies and seeds: (runs made, false alarms as sentences)."""
    alarms = []
    made = 0
    start = time.perf_counter()
    while made < runs:
        target = targets[made % len(targets)]
        round_ = made // len(targets)
        policy = ("random", "random", "lazy", "random", "eager")[round_ % 5]
        wrong, _, _ = attempt(target, policy, round_)
        made += 1
        if wrong:
            alarms.append(f"{target.name}, {policy}, seed {round_}: {wrong[0]}")
            report(f"false alarm: {alarms[-1]}")
    seconds = time.perf_counter() - start
    report(f"{made} clean runs of {len(targets)} kernels in {seconds:.0f} s, {len(alarms)} false alarms")
    return made, alarms
