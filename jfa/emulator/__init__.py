"""Runs TLX and Triton kernels on a CPU; finds deadlocks and races; records what happened.

with jfa.emulator.emulate(seed=3) as e:
    kernel[grid](...)              # lands in the emulator, from unmodified host code
assert not e.errors()
"""

import os as _os

for _name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    _os.environ.setdefault(_name, "1")  # read when numpy loads; see blas.py for when it has loaded already

from importlib.util import find_spec as _find_spec  # noqa: E402

_MISSING = [_name for _name in ("greenlet", "ml_dtypes", "threadpoolctl") if _find_spec(_name) is None]

if not _MISSING:
    from .emulate import active, emulate
    from .errors import CapacityError, DeadlockError, EmulationError, EndlessError, UnknownConstruct
    from .kernels import mutated
    from .launch import launch
    from .report import Finding, Report


def __getattr__(name):
    """Where a dependency is missing (a GPU machine needs no emulator), the names say so when used."""
    if name in __all__ and _MISSING:
        raise ImportError(f"jfa.emulator needs {', '.join(_MISSING)}, which this Python does not have")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def install_standin():
    """Where no Triton is installed: puts a stand-in `triton` in its place for kernel modules to import."""
    from . import standin

    standin.install()


__all__ = [
    "CapacityError",
    "DeadlockError",
    "EmulationError",
    "EndlessError",
    "Finding",
    "Report",
    "UnknownConstruct",
    "active",
    "emulate",
    "install_standin",
    "launch",
    "mutated",
]
