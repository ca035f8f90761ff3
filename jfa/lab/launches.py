"""What a launch hands to the compiler: launches recorded instead of run, their arguments specialized."""

import contextlib
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock


@dataclass(frozen=True)
class Launch:
    """One recorded kernel launch: the jit kernel, its grid, arguments and compile options.

    ``grid`` is a tuple of three ints. ``args`` are positional and ``kwargs`` named kernel arguments and
    options, an autotuned kernel's configuration (the first one that pruning leaves) included.
    """

    kernel: Any
    grid: tuple[int, int, int]
    args: tuple = ()
    kwargs: dict = field(default_factory=dict)

    @property
    def name(self):
        """Name of the kernel function."""
        return self.kernel.__name__

    @property
    def arguments(self):
        """Kernel arguments by parameter name, defaults included."""
        named = {name: value for name, value in self.kwargs.items() if name in self.kernel.arg_names}
        bound = self.kernel.signature.bind(*self.args, **named)
        bound.apply_defaults()
        return dict(bound.arguments)

    @property
    def options(self):
        """Compile options by name (num_warps, ctas_per_cga, ...), only those that the launch gave."""
        return {name: value for name, value in self.kwargs.items() if name not in self.kernel.arg_names}

    def report(self, arch, **options):
        """Compile report of this launch for "sm_90" or "sm_100"; options replace the launch's own."""
        from jfa.lab.report import compile_report

        return compile_report(self.kernel, arch=arch, args=self.args, kwargs={**self.kwargs, **options})


def unwrap(kernel):
    """The JITFunction inside autotune and heuristics decorators; TypeError for anything else."""
    from triton.runtime.jit import JITFunction

    found = kernel
    while not isinstance(found, JITFunction):
        inner = getattr(found, "fn", None)
        if inner is None or inner is found:
            raise TypeError(f"expected a @triton.jit kernel, got {kernel!r}")
        found = inner
    return found


def _first_config(tuner, args, kwargs):
    """The configuration an autotuner would try first for these arguments, its pre_hook run."""
    tuner.nargs = dict(zip(tuner.arg_names, args))
    try:
        config = tuner.prune_configs(kwargs)[0] if len(tuner.configs) > 1 else tuner.configs[0]
        if config.pre_hook is not None:
            config.pre_hook({**tuner.nargs, **kwargs, **config.all_kwargs()})
    finally:
        tuner.nargs = None
    return config


def _resolved_grid(grid, launch):
    if callable(grid):
        grid = grid({**launch.arguments, **launch.kwargs})
    grid = tuple(grid) if isinstance(grid, (tuple, list)) else (grid,)
    return tuple(int(size) for size in grid) + (1,) * (3 - len(grid))


def _record(kernel, args, kwargs, grid):
    """The Launch that a call makes, through the autotune and heuristics decorators of the kernel."""
    from triton.runtime.autotuner import Autotuner, Heuristics
    from triton.runtime.jit import JITFunction

    kwargs = dict(kwargs)
    while not isinstance(kernel, JITFunction):
        if isinstance(kernel, Autotuner):
            kwargs |= _first_config(kernel, args, kwargs).all_kwargs()
        elif isinstance(kernel, Heuristics):
            for name, value in kernel.values.items():
                kwargs[name] = value({**dict(zip(kernel.arg_names, args)), **kwargs})
        else:
            raise TypeError(f"expected a @triton.jit kernel, got {kernel!r}")
        kernel = kernel.fn
    launch = Launch(kernel, (1, 1, 1), args, kwargs)
    return replace(launch, grid=_resolved_grid(grid, launch))


@contextlib.contextmanager
def capture_launches():
    """Record every Triton launch inside the block instead of running it; gives the list of Launch, in order.

    Works with CPU tensors and without a GPU, also where the emulator would run the launch. Outputs of the
    kernels are not written. Autotuned kernels record their first configuration that is not pruned. Launches
    of other threads are recorded too, and with nested use the innermost block records.
    """
    from triton.runtime.autotuner import Autotuner, Heuristics
    from triton.runtime.jit import JITFunction

    launches = []

    def run(self, *args, grid, warmup=False, **kwargs):
        launches.append(_record(self, args, kwargs, grid))

    def getitem(self, grid):
        return lambda *args, **kwargs: launches.append(_record(self, args, kwargs, grid))

    with contextlib.ExitStack() as patches:
        for kind in (JITFunction, Autotuner, Heuristics):
            patches.enter_context(mock.patch.object(kind, "run", run))
            patches.enter_context(mock.patch.object(kind, "__getitem__", getitem))
        yield launches


def capture(kernel, args, kwargs=None, grid=(1, 1, 1)):
    """The Launch that ``kernel[grid](*args, **kwargs)`` would make, autotuning and heuristics resolved."""
    return _record(kernel, args, kwargs or {}, grid)


def specialize(launch, backend):
    """(options, signature, constants, attributes) as Triton's launch path hands them to its compiler.

    ``backend`` is Triton's backend for the target. Pointers divisible by 16, ints equal to 1 and tensor
    descriptors are specialized exactly as in a real launch. CPU tensors are fine.
    """
    from triton.runtime.jit import create_function_from_signature

    kernel = launch.kernel
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    kwargs = {"debug": bool(kernel.debug), **launch.kwargs}
    bound, specialization, given = bind(*launch.args, **kwargs)
    return kernel._pack_args(backend, kwargs, bound, specialization, given)
