"""Runs TLX and Triton kernels on a CPU; finds deadlocks and races; records what happened."""

import os as _os

for _v in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    _os.environ.setdefault(_v, "1")
from . import aliases as _aliases  # noqa: E402,F401
from .frontend import Report, emulate, launch  # noqa: E402,F401
from .machine import DeadlockError, EmulationError  # noqa: E402,F401
