"""What every test can rely on: one BLAS thread, no autotuning, and GPU tests that are skipped in sight."""

import os

for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(name, "1")
os.environ.setdefault(
    "JFA_DISABLE_AUTOTUNE", "1"
)  # one known configuration: correctness never pays for tuning
os.environ.setdefault("MPLBACKEND", "agg")

import pytest  # noqa: E402  (the environment comes before everything that reads it)
import torch  # noqa: E402

torch.set_num_threads(1)


def pytest_collection_modifyitems(items):
    """Skip tests marked ``gpu`` where torch sees no CUDA device, and say so."""
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device, and torch sees none")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
