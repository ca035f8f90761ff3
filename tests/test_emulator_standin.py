"""Kernels import and run where no Triton is installed.

A subprocess hides the installed package from the import system, as if there were none, and does everything
else as a user would.
"""

import os
import pathlib
import subprocess
import sys

import pytest

from jfa.emulator import standin

HERE = pathlib.Path(__file__).parent
HIDE = """
import sys
from importlib.machinery import PathFinder

class NoTriton:
    @staticmethod
    def find_spec(name, path=None, target=None):
        return None if name.split(".")[0] == "triton" else PathFinder.find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = NoTriton
"""


def python(code, timeout=200):
    """Output of a fresh interpreter without Triton that runs this code."""
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join([str(HERE), str(HERE.parent)]))
    command = [sys.executable, "-c", HIDE + code]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)
    assert run.returncode == 0, run.stderr[-4000:]
    return run.stdout.splitlines()


IMPORTS = """
import importlib.util
import jfa
assert "triton" not in sys.modules and "jfa.emulator" not in sys.modules
import torch
import torch.utils._triton
assert not torch.utils._triton.has_triton_package()  # nothing for PyTorch to compile with
print(importlib.util.find_spec("triton").origin)
import triton, triton.language as tl, triton.language.extra.tlx as tlx
from jfa.emulator import standin
print(standin.installed(), triton.__spec__.origin, triton.__version__)
print(hasattr(tlx, "local_alloc"), hasattr(tlx, "no_such_name"), triton.cdiv(7, 2), triton.next_power_of_2(5))
print(tl.constexpr(4).value, int(tl.constexpr(4) + 3), [0, 1, 2][tl.constexpr(1)])
for attempt in (lambda: triton.compile(None), lambda: kernels.plain[(1,)](None, None, 4)):
    try:
        import standin_kernels as kernels
        attempt()
    except RuntimeError as error:
        print(error)
function = torch.compile(lambda x: torch.softmax(2 * x, -1), backend="aot_eager")
print(torch.allclose(function(torch.ones(4, 4)), torch.full((4, 4), 0.25)))
standin.uninstall()
print("triton" in sys.modules)
"""


def test_import_finds_the_stand_in_only_where_it_is_needed():
    lines = python(IMPORTS)
    assert lines[0] == standin.ORIGIN
    assert lines[1] == f"True {standin.ORIGIN} {standin.VERSION}"
    assert lines[2] == "True False 4 8"
    assert lines[3] == "4 7 1"
    assert "cannot be compiled" in lines[4] and "jfa.emulator.emulate" in lines[5]
    assert lines[6:] == ["True", "False"]


RUNS = """
import torch
import jfa.emulator
import standin_kernels as kernels
from triton.tools.tensor_descriptor import TensorDescriptor

x, out = torch.randn(70), torch.zeros(70)
with jfa.emulator.emulate() as e:
    kernels.plain[lambda meta: (3,)](x, out, 70)
    assert not e.errors(), e.errors()
print("plain", torch.allclose(out, torch.tanh(x) * 2))

a, total = torch.randn(5 * 128, 64).bfloat16(), torch.zeros(128, 128)
for seed in range(3):
    with jfa.emulator.emulate(seed=seed) as e:
        source = TensorDescriptor.from_tensor(a, [128, 64])
        kernels.gram[(1,)](source, total, 5, LOAD=kernels.load, STORE=kernels.store, SIDE=128, COLUMNS=64)
    assert not e.errors(), e.errors()
    expected = sum(t.float() @ t.float().T for t in a.view(5, 128, 64))
    print("roles", torch.allclose(total, expected, rtol=1e-4, atol=1e-3), e.reports[0].ops["mma"])

with jfa.emulator.emulate() as e:
    try:
        kernels.gram[(1,)](source, total, 5, LOAD=kernels.store, STORE=kernels.store, SIDE=128, COLUMNS=64)
    except Exception as error:
        print("wrong role", type(error).__name__, len(e.reports[0].errors()) > 0)
"""


def test_plain_and_warp_specialized_kernels_run():
    lines = python(RUNS)
    assert lines[:4] == ["plain True"] + ["roles True 5"] * 3
    assert lines[4].startswith("wrong role") and lines[4].endswith("True")


PROJECT = """
import torch
import jfa

torch.manual_seed(0)
offsets = torch.tensor([0, 5, 5, 45], dtype=torch.int32)
q, k, v = (torch.randn(n, 2, 64, dtype=torch.bfloat16, requires_grad=True) for n in (20, 45, 45))
expected = jfa.jagged_flash_attention(q, k, v, offsets, backend="reference")
wanted = torch.autograd.grad(expected.float().square().sum(), (q, k, v))
for name in ("triton", "hopper", "blackwell"):
    out = jfa.jagged_flash_attention(q, k, v, offsets, backend=name)
    print(name, torch.allclose(out.float(), expected.float(), rtol=2e-2, atol=2e-2))
    if name == "blackwell":
        continue
    grads = torch.autograd.grad(out.float().square().sum(), (q, k, v))
    pairs = [(a.float(), b.float()) for a, b in zip(grads, wanted)]
    print(name, all(torch.allclose(a, b, rtol=3e-2, atol=0.25) for a, b in pairs))
from jfa.emulator import standin
print(standin.installed())
"""


def test_the_project_s_kernels_run():
    names = ["triton", "triton", "hopper", "hopper", "blackwell"]
    assert python(PROJECT) == [f"{name} True" for name in names] + ["True"]


def test_an_installed_triton_is_left_alone():
    triton = pytest.importorskip("triton", reason="Triton is not installed")
    assert not standin.wanted() and not standin.install() and not standin.installed()
    assert sys.modules["triton"] is triton and triton.__spec__.origin != standin.ORIGIN
