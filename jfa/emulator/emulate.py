"""The context in which kernel[grid](...) lands in the emulator.

Triton's run methods are replaced once, by a dispatcher that looks for an emulation of the calling thread and
else calls the original; the last context to leave (in any thread, also by an exception) puts the originals
back.
"""

import threading

from .context import CTX
from .launch import check_options, launch
from .report import Report

_LOCK = threading.Lock()
_PATCHED = {}  # class -> original run
_USERS = [0]


def active():
    """The innermost `emulate` that this thread has entered, or None."""
    return CTX.emulations[-1] if CTX.emulations else None


def _classes():
    """The classes of the installed Triton whose `run` launches kernels (none without Triton)."""
    try:
        from triton.runtime.autotuner import Autotuner, Heuristics
        from triton.runtime.jit import JITFunction
    except ImportError:
        return ()
    return JITFunction, Autotuner, Heuristics


def _dispatcher(original):
    def run(self, /, *args, grid=None, warmup=False, **kwargs):
        emulation = active()
        if emulation is None:
            return original(self, *args, grid=grid, warmup=warmup, **kwargs)
        return None if warmup else emulation.launch(self, grid, args, kwargs)

    return run


def _patch():
    with _LOCK:
        _USERS[0] += 1
        if _USERS[0] == 1:
            for cls in _classes():
                _PATCHED[cls] = cls.run
                cls.run = _dispatcher(cls.run)


def _unpatch():
    with _LOCK:
        _USERS[0] -= 1
        if _USERS[0] == 0:
            for cls, original in _PATCHED.items():
                cls.run = original
            _PATCHED.clear()


class emulate:
    """Context manager: kernel[grid](...) in unmodified host code runs on the emulator.

    arch: "sm_90" or "sm_100" to also check that the architecture has what the kernel uses, None for either;
    ValueError for another.
    policy: when asynchronous effects land: "random" (by `seed`), "eager" or "lazy". checks: happens-before
    checks (races, uninitialised reads, ...); deadlocks are found either way. trace: records events. preempt:
    probability that a task yields at a synchronization point. resident: clusters that run interleaved, the
    rest of the grid follows as they finish (default 8, and 2 for kernels with cluster launch control). pick:
    chooses a configuration of an autotuned kernel (configs -> config).

    `reports` has one Report a launch. A kernel that cannot go on raises DeadlockError or another
    EmulationError, and its report is there too. Contexts may nest; each thread has its own.
    """

    def __init__(self, arch=None, policy="random", seed=0, checks=True, trace=False, **options):
        check_options(arch, policy)
        self.options = dict(arch=arch, policy=policy, seed=seed, checks=checks, trace=trace, **options)
        self.reports = []

    def launch(self, k, grid, args, kwargs):
        report = Report()
        self.reports.append(report)
        launch(k, grid, args, kwargs, report=report, **self.options)

    def errors(self):
        """Findings at error level of all launches so far."""
        return [f for report in self.reports for f in report.errors()]

    def __enter__(self):
        _patch()
        CTX.emulations.append(self)
        return self

    def __exit__(self, *exc):
        CTX.emulations.remove(self)
        _unpatch()
        return False
