"""One launch: configuration, arguments, grid; then the machine runs it."""

import dataclasses
import functools
import inspect
import re
import time

import numpy as np

from .arguments import Arguments
from .blas import one_blas_thread
from .context import CTX
from .descriptor import OutOfBounds
from .errors import CapacityError, DeadlockError, EmulationError, EndlessError, UnknownConstruct
from .kernels import base_function, kernel, reachable, traceback_line
from .machine import Machine
from .names import map_value
from .report import Finding, Report
from .tile_typing import KernelTypeError

POLICIES = ("random", "eager", "lazy")
ARCHITECTURES = {None: None, "sm_90": "sm_90", "sm90": "sm_90", "sm_100": "sm_100", "sm100": "sm_100"}
UNKNOWN = (
    re.compile(r"module '(?:jfa\.emulator\.)?(\w+)' has no attribute '(\w+)'"),
    re.compile(r"'(Tensor|Buffer|Descriptor|\w*Type)' object has no attribute '(\w+)'"),
    re.compile(r"type object '(\w+)' has no attribute '(\w+)'"),
    re.compile(r"(\w+)\(\) got an unexpected keyword argument '(\w+)'"),
)
KINDS = (
    (UnknownConstruct, "unknown construct"),
    (CapacityError, "capacity"),
    (EndlessError, "endless"),
    (OutOfBounds, "out of bounds"),
    (KernelTypeError, "illegal kernel"),
)


def configure(k, args, kwargs, pick=None):
    """Resolves autotuners and heuristics around a kernel; returns the keyword arguments they decide.

    The first configuration that survives early pruning is taken, or what `pick(configs)` returns.
    """
    kwargs = dict(kwargs)
    names = [p.name for p in inspect.signature(base_function(k)).parameters.values()]
    given = dict(zip(names, args))
    while hasattr(k, "configs") or hasattr(k, "values"):
        if hasattr(k, "configs"):
            config = _choose(k, given, kwargs, pick)
            k.best_config = config
            kwargs.update(config.kwargs)
            kwargs.setdefault("num_warps", config.num_warps)
            if getattr(config, "ctas_per_cga", None):
                kwargs.setdefault("ctas_per_cga", config.ctas_per_cga)
            if config.pre_hook:
                config.pre_hook({**given, **kwargs})
        else:
            for name, heuristic in k.values.items():
                kwargs[name] = heuristic({**given, **kwargs})
        k = k.fn
    return kwargs


def _choose(autotuner, given, kwargs, pick):
    configs = autotuner.configs
    prune = getattr(autotuner, "early_config_prune", None)
    if prune:
        configs = prune(configs, given, **kwargs) or configs
    return pick(configs) if pick else configs[0]


@functools.cache
def launch_options():
    """Names of keyword arguments that a launch takes beside the kernel's parameters."""
    try:
        from triton.backends.nvidia.compiler import CUDAOptions

        known = {field.name for field in dataclasses.fields(CUDAOptions)}
    except ImportError:  # a stand-in for Triton
        known = {"num_warps", "num_stages", "num_ctas", "maxnreg", "ctas_per_cga", "cluster_dims"}
    return known | {"grid", "warmup", "debug"}


def bind(k, args, kwargs):
    """All parameters of the kernel by name, defaults included."""
    names = [p.name for p in k.params]
    if len(args) > len(names):
        raise TypeError(f"{k.__name__}() takes {len(names)} arguments, got {len(args)}")
    bound = {p.name: p.default for p in k.params if p.default is not inspect.Parameter.empty}
    bound.update(zip(names, args))
    bound.update({n: v for n, v in kwargs.items() if n in names})
    unknown = sorted(set(kwargs) - set(names) - launch_options())
    if unknown:
        raise TypeError(f"{k.__name__}() has no parameter {unknown[0]!r}, and no launch option has that name")
    missing = [n for n in names if n not in bound]
    if missing:
        raise TypeError(f"{k.__name__}() misses the arguments {', '.join(missing)}")
    return bound


def check_options(arch, policy):
    """Raises ValueError for an architecture or a policy that the emulator does not know."""
    if arch not in ARCHITECTURES:
        known = ", ".join(str(name) for name in ARCHITECTURES)
        raise ValueError(f"arch must be one of {known}, got {arch!r}")
    if policy not in POLICIES:
        raise ValueError(f"policy must be one of {', '.join(POLICIES)}, got {policy!r}")


def launch(
    k,
    grid,
    args=(),
    kwargs=None,
    *,
    arch=None,
    policy="random",
    seed=0,
    checks=True,
    trace=False,
    preempt=0.05,
    resident=None,
    pick=None,
    max_steps=20_000_000,
    report=None,
):
    """Runs kernel[grid](*args, **kwargs) in the emulator and returns its Report.

    max_steps: scheduler steps of the launch; a single loop is bounded too (machine.py). Raises ValueError for
    an unknown arch or policy, and DeadlockError, or another EmulationError, when the kernel cannot go on; an
    exception of the kernel itself (device_assert, out-of-bounds access, a type error) passes through with the
    kernel's line added as a note.
    """
    check_options(arch, policy)
    report = Report() if report is None else report
    kwargs = configure(k, args, kwargs or {}, pick)
    root = kernel(k)
    bound = bind(root, args, kwargs)
    if callable(grid):
        grid = grid(bound)
    grid = tuple(int(g) for g in grid) + (1,) * (3 - len(grid))
    report.kernel = root.__name__
    report.grid = grid
    arguments = Arguments()
    call = {n: map_value(v) if n in root.constexprs else arguments.convert(v, n) for n, v in bound.items()}
    machine = Machine(
        grid,
        int(kwargs.get("num_warps") or 4),
        seed,
        policy,
        checks,
        preempt,
        trace,
        ARCHITECTURES[arch],
    )
    machine.prepare(lambda: root(**call), lambda: reachable(root, call.values()))
    for function in machine.functions():
        if function.code is not None:
            function.bind()
    cluster = tuple(kwargs.get("ctas_per_cga") or kwargs.get("cluster_dims") or (1, 1, 1))
    _run(machine, report, cluster, resident, max_steps)
    return report


def _heads(grid, cluster):
    """Program ids of the first CTA of every cluster, in launch order."""
    gx, gy, gz = grid
    cx, cy, cz = cluster
    return [(x, y, z) for z in range(0, gz, cz) for y in range(0, gy, cy) for x in range(0, gx, cx)]


def _run(machine, report, cluster, resident, max_steps):
    outer = (CTX.machine, CTX.work)
    CTX.machine = machine
    CTX.work = report.work
    start = time.perf_counter()
    errors = np.seterr(all="ignore")
    try:
        with one_blas_thread():
            machine.run(_heads(machine.grid, cluster), cluster, resident, max_steps)
    except DeadlockError as e:
        report.deadlock = str(e)
        raise
    except Exception as e:
        _report_exception(machine, report, e)
        raise
    finally:
        machine.close()
        np.seterr(**errors)
        CTX.machine, CTX.work = outer
        report.seconds = time.perf_counter() - start
        report.steps = machine.steps
        report.findings.extend(machine.findings.list)
        report.events = machine.tracer.events
        report.ops = machine.ops
        report.waits = {line: tuple(counts) for line, counts in machine.waits.items()}


def _report_exception(machine, report, error):
    """An exception of the kernel becomes a finding; one about an unknown name becomes UnknownConstruct."""
    line = traceback_line(error)
    task = machine.cur
    kind = next((kind for cls, kind in KINDS if isinstance(error, cls)), "exception")
    message = str(error) if kind != "exception" else f"{type(error).__name__}: {error}"
    unknown = _unknown_name(error)
    if unknown:
        kind, message = "unknown construct", unknown
    where = f" ({task.name}, CTA {task.cta.pid}, line {line})" if task is not None else f" (line {line})"
    name = task.name if task is not None else None
    cta = task.cta.pid if task is not None else None
    report.findings.append(Finding(kind, message + where, "error", name, cta, line))
    if unknown or isinstance(error, UnknownConstruct):
        raise UnknownConstruct(f"{report.kernel}: the emulator does not know {message}{where}") from error
    error.add_note(f"in emulated kernel {report.kernel}{where}")
    if isinstance(error, EmulationError) and not error.findings:
        error.findings = machine.findings.list


def _unknown_name(error):
    """The name that a Python error says the emulator lacks, or None."""
    if not isinstance(error, (AttributeError, TypeError)):
        return None
    for pattern in UNKNOWN:
        match = pattern.search(str(error))
        if match:
            return (
                f"{match[1]}.{match[2]}" if isinstance(error, AttributeError) else f"{match[1]}({match[2]}=)"
            )
    return None
