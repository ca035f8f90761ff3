"""The TLX tutorial kernels inside the fbtriton wheel, callable on a machine without a GPU.

They are third-party code and the emulator's best test: imported from the wheel as they are, never copied.
Only the questions that their host code asks of a GPU are answered here, and only while `host()` is active.
"""

import contextlib
import functools
import importlib.util
import sys
import types
from pathlib import Path
from unittest import mock

import torch

SMS = 4  # multiprocessors that host code is told of: persistent kernels get several tiles for each CTA
TORCHAO = (
    "torchao",
    "torchao.prototype",
    "torchao.prototype.mx_formats",
    "torchao.prototype.mx_formats.mx_tensor",
)


def folder():
    """Where the installed wheel keeps the tutorials."""
    from triton.language.extra import tlx

    return Path(tlx.__file__).parent / "tutorials"


class _Driver:
    """Stands in for the GPU driver of Triton: a Blackwell GPU whose torch device is the CPU."""

    def get_active_torch_device(self):
        return torch.device("cpu")

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 100, 32)

    def get_current_device(self):
        return 0


@contextlib.contextmanager
def _torchao():
    """Empty modules in place of torchao, if it is not installed: only test data of a tutorial needs it."""
    if "torchao" in sys.modules or importlib.util.find_spec("torchao") is not None:
        yield
        return
    for name in TORCHAO:
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__getattr__ = lambda attribute: None
    try:
        yield
    finally:
        for name in TORCHAO:
            del sys.modules[name]


@contextlib.contextmanager
def host(sms=SMS):
    """While active, host code finds a GPU: a Triton driver, `sms` multiprocessors, and tensors on CUDA.

    Everything patched is as before afterwards, the allocator that tutorials set included.
    """
    from triton.runtime import _allocation, driver

    properties = types.SimpleNamespace(multi_processor_count=sms, major=10, minor=0, name="emulated")
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(driver, "_active", _Driver()))
        stack.enter_context(mock.patch.object(torch.cuda, "get_device_properties", lambda *a: properties))
        stack.enter_context(mock.patch.object(torch.cuda, "get_device_capability", lambda *a: (10, 0)))
        stack.enter_context(
            mock.patch.object(torch.Tensor, "is_cuda", property(lambda self: True), create=True)
        )
        allocator = _allocation._allocator.get()
        stack.callback(_allocation._allocator.set, allocator)
        yield


@functools.cache
def load(name):
    """The tutorial module of that file name (without .py), imported once from the wheel."""
    spec = importlib.util.spec_from_file_location(name.replace("-", "_"), folder() / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    with host(), _torchao():
        spec.loader.exec_module(module)
    return module


def share_of_budget(found, exact, low):
    """Error of a result as a share of its budget; above 1 (or NaN or inf) is wrong.

    found: the kernel's tensor. exact: the answer in float64. low: PyTorch's answer with every operand rounded
    as the kernel's tensor cores need it. The budget is twice low's error and one rounding of the result, once
    by the largest error and once by the root mean square; the worse of the two counts.
    """
    rounded = exact.to(found.dtype).double()
    found, low = found.double(), low.double()
    if not torch.isfinite(found).all():
        return float("inf")
    shares = []
    for size in (lambda x: x.abs().max(), lambda x: x.square().mean().sqrt()):
        budget = 2 * size(low - exact) + size(rounded - exact) + 2.0**-16 * size(exact)
        shares.append(float(size(found - exact) / budget))
    return max(shares)
