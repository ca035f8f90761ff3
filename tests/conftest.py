"""What every test can rely on: one BLAS thread, no autotuning, and GPU tests that are skipped in sight."""

import importlib.util
import os
import re

for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(name, "1")
os.environ.setdefault(
    "JFA_DISABLE_AUTOTUNE", "1"
)  # one known configuration: correctness never pays for tuning
os.environ.setdefault("MPLBACKEND", "agg")

import pytest  # noqa: E402  (the environment comes before everything that reads it)
import torch  # noqa: E402

torch.set_num_threads(1)

# What the tests of the course and the emulator import; a GPU machine may run its tests without.
OPTIONAL = ("greenlet", "hypothesis", "nbformat", "papermill", "threadpoolctl")
MISSING = [name for name in OPTIONAL if importlib.util.find_spec(name) is None]
left_out = []


def pytest_ignore_collect(collection_path):
    """Leave out test files that import what is not installed; the summary names them, and CI fails."""
    if not MISSING or collection_path.suffix != ".py" or not collection_path.name.startswith("test_"):
        return None
    needs = list(MISSING)
    if "nbformat" in MISSING:
        needs.append(r"jfa\.lab import (?:\w+, )*(?:notebooks|runner)")
    emulator = {"greenlet", "threadpoolctl"} & set(MISSING)
    if emulator:
        needs.append(r"jfa\.emulator")
    source = collection_path.read_text(encoding="utf-8")
    emulated = emulator and collection_path.name.startswith("test_emulator_")
    if emulated or re.search(rf"^(?:import|from) (?:{'|'.join(needs)})\b", source, re.MULTILINE):
        left_out.append(collection_path.name)
        return True
    return None


def pytest_terminal_summary(terminalreporter):
    """Say which files were left out."""
    if left_out:
        names = ", ".join(sorted(left_out))
        terminalreporter.write_line(f"left out, because {', '.join(MISSING)} is not installed: {names}")


def pytest_sessionstart():
    """CI has everything: there, a missing package is an error."""
    if MISSING and os.environ.get("CI"):
        raise pytest.UsageError(f"not installed: {', '.join(MISSING)}")


def pytest_collection_modifyitems(items):
    """Skip tests marked ``gpu`` where torch sees no CUDA device, and say so."""
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device, and torch sees none")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
