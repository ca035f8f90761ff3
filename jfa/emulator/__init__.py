"""Runs TLX and Triton kernels on a CPU; finds deadlocks and races; records what happened.

with jfa.emulator.emulate(seed=3) as e:
    kernel[grid](...)              # lands in the emulator, from unmodified host code
assert not e.errors()
"""

import os as _os

for _name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    _os.environ.setdefault(_name, "1")  # read when numpy loads; see blas.py for when it has loaded already

from .emulate import active, emulate  # noqa: E402
from .errors import CapacityError, DeadlockError, EmulationError, UnknownConstruct  # noqa: E402
from .kernels import mutated  # noqa: E402
from .launch import launch  # noqa: E402
from .report import Finding, Report  # noqa: E402


def install_standin():
    """Where no Triton is installed: puts a stand-in `triton` in its place for kernel modules to import."""
    from . import standin

    standin.install()


__all__ = [
    "CapacityError",
    "DeadlockError",
    "EmulationError",
    "Finding",
    "Report",
    "UnknownConstruct",
    "active",
    "emulate",
    "install_standin",
    "launch",
    "mutated",
]
