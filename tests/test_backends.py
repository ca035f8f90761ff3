"""jfa.backends: what can run where, the choice of "auto", and kernels of CPU tensors in the emulator."""

import types

import pytest
import torch

import jfa
import jfa.emulator
from jfa import backends
from jfa.jagged import lengths_to_offsets
from jfa.kernels.problem import Problem

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def problem(**changes):
    facts = {
        "batch": 2,
        "heads_q": 4,
        "heads_kv": 2,
        "head_dim": 64,
        "head_dim_v": 64,
        "total_q": 8,
        "total_kv": 9,
    }
    return Problem(**{**facts, "broadcast_q": True, "scale": 0.1, "device_type": "cuda", **changes})


def call(backend, dim=16, dtype=torch.float32, **options):
    q, k, v = (torch.ones(n, 2, dim, dtype=dtype, requires_grad=True) for n in (3, 5, 5))
    return jfa.jagged_flash_attention(q, k, v, lengths_to_offsets([2, 0, 3]), backend=backend, **options)


@pytest.fixture
def gpu_of(monkeypatch):
    """A machine with a GPU of some compute capability, without one."""

    def pretend(major, minor, without_tlx=None):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (major, minor))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "a GPU")
        monkeypatch.setattr(backends, "_missing_triton", lambda tlx: without_tlx if tlx else None)
        backends._capability.cache_clear()

    yield pretend
    backends._capability.cache_clear()


# ------------------------------------------------------------------------------------------ what runs where


def test_every_backend_runs_on_a_cpu():
    """The reference, and all kernels in the emulator: nothing is missing from the tree."""
    assert backends.available("cpu") == dict.fromkeys(("reference", "triton", "hopper", "blackwell"))
    assert set(backends.NAMES) == {"auto", *backends.available("cpu")}


def test_description():
    text = backends.describe()
    assert text.startswith("cpu (CPU, kernels in the emulator)\n  reference  runs\n  triton     runs")
    if not torch.cuda.is_available():
        assert text.endswith("cuda: this PyTorch sees no GPU")


def test_other_devices_run_the_reference_only():
    found = backends.available("mps")
    assert found.pop("reference") is None
    assert set(found.values()) == {"kernels run on cuda and, in the emulator, on cpu tensors, not on mps"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_no_gpu_is_a_reason():
    found = backends.available("cuda")
    assert found.pop("reference") is None
    assert set(found.values()) == {"this PyTorch sees no GPU"}
    assert backends.available() == backends.available("cpu")


@pytest.mark.parametrize("capability, runs", [((9, 0), "hopper"), ((10, 0), "blackwell"), ((8, 0), None)])
def test_a_kernel_runs_on_its_own_gpu(gpu_of, capability, runs):
    gpu_of(*capability)
    found = backends.available("cuda")
    assert found["triton"] is None
    for name, own in backends.CAPABILITIES.items():
        if name == runs:
            assert found[name] is None
        else:
            had = ".".join(map(str, capability))
            assert found[name] == f"it needs compute capability {own[0]}.{own[1]}, this GPU has {had}"
    assert f"a GPU, sm_{capability[0]}{capability[1]}" in backends.describe()


def test_a_broken_module_is_a_reason(monkeypatch):
    """One sentence each for a module that is not there, one that lacks another, one that breaks."""
    monkeypatch.setattr(backends, "_import_obstacle", backends._import_obstacle.__wrapped__)
    monkeypatch.setitem(backends.MODULES, "hopper", "jfa.kernels.nowhere.launch")
    assert backends.available("cpu")["hopper"] == "jfa.kernels.nowhere.launch is not part of this version"

    def broken(name):
        if name == "jfa.kernels.blackwell.launch":
            raise ModuleNotFoundError("No module named 'other'", name="other")
        if name == "jfa.kernels.baseline":
            raise AttributeError("tl has no such thing")
        return types.ModuleType(name)

    monkeypatch.setattr(backends.importlib, "import_module", broken)
    found = backends.available("cpu")
    assert found["blackwell"] == "jfa.kernels.blackwell.launch needs the module other, which is not installed"
    assert found["triton"] == "jfa.kernels.baseline does not import: AttributeError: tl has no such thing"
    with pytest.raises(RuntimeError, match='backend="triton" cannot run here: jfa.kernels.baseline does not'):
        backends.select("triton", problem(), CPU)


# ------------------------------------------------------------------------------------------------- the choice


def test_auto_on_a_cpu_is_the_reference():
    assert backends.select("auto", problem(), CPU) == "reference"
    with jfa.emulator.emulate() as emulation:
        assert torch.equal(call("auto"), call("reference"))
    assert not emulation.reports


@pytest.mark.parametrize(
    "capability, chosen", [((9, 0), "hopper"), ((10, 0), "blackwell"), ((8, 0), "triton")]
)
def test_auto_on_a_gpu_is_the_kernel_made_for_it(gpu_of, capability, chosen):
    gpu_of(*capability)
    assert backends.select("auto", problem(), GPU) == chosen
    assert backends.select("auto", problem(dtype=torch.float32), GPU) == "triton"
    assert backends.select("auto", problem(head_dim=80, head_dim_v=80), GPU) == "triton"


def test_auto_without_tlx_is_triton(gpu_of):
    gpu_of(9, 0, without_tlx="the installed triton has no TLX")
    assert backends.select("auto", problem(), GPU) == "triton"
    with pytest.raises(
        RuntimeError, match='backend="hopper" cannot run here: the installed triton has no TLX'
    ):
        backends.select("hopper", problem(), GPU)


@pytest.mark.parametrize(
    "backend, options, message",
    [
        ("triton", {"dtype": torch.float64}, 'backend="triton" cannot run this call: .*float64'),
        ("triton", {"dim": 512}, 'backend="triton" cannot run this call: .*512'),
        ("hopper", {"dim": 64}, 'backend="hopper" cannot run this call: .*float32'),
        ("blackwell", {"dim": 64}, 'backend="blackwell" cannot run this call: .*float32'),
    ],
)
def test_a_call_that_a_backend_cannot_run(backend, options, message):
    """The limit and what came, and a way out."""
    with pytest.raises(ValueError, match=message + '.*backend="reference" can'):
        call(backend, **options)


@pytest.mark.gpu
def test_auto_on_this_gpu():
    name = backends.select("auto", problem(), GPU)
    assert name == {(9, 0): "hopper", (10, 0): "blackwell"}.get(torch.cuda.get_device_capability(), "triton")
    assert backends.available()[name] is None


# ----------------------------------------------------------------------------------------------- the emulator


@pytest.mark.parametrize(
    "backend, dim, dtype, arch",
    [
        ("triton", 16, torch.float32, None),
        ("hopper", 64, torch.bfloat16, "sm_90"),
        ("blackwell", 64, torch.bfloat16, "sm_100"),
    ],
)
def test_cpu_tensors_run_the_kernel_in_the_emulator(backend, dim, dtype, arch, monkeypatch):
    """Each in an emulation of its architecture, and with the definition's result."""
    emulations = []
    real = jfa.emulator.emulate
    monkeypatch.setattr(
        jfa.emulator, "emulate", lambda **options: emulations.append(real(**options)) or emulations[-1]
    )
    out = call(backend, dim, dtype)
    assert [emulation.options["arch"] for emulation in emulations] == [arch]
    assert emulations[0].reports and not emulations[0].errors()
    torch.testing.assert_close(out, call("reference", dim, dtype))
    assert jfa.emulator.active() is None


def test_a_context_that_is_there_is_kept():
    """A reader's own context decides over seed and policy, and gets the reports, forward and backward."""
    with jfa.emulator.emulate(policy="lazy", seed=3) as emulation:
        out = call("triton")
        forward = len(emulation.reports)
        assert forward > 0
        out.sum().backward()
        assert len(emulation.reports) > forward
    assert not emulation.errors()


def test_a_fault_of_a_kernel_is_raised(monkeypatch):
    """Outside of a context of one's own, a finding is an error and no silent report."""
    monkeypatch.setattr(jfa.emulator.emulate, "errors", lambda self: ["two tasks wrote one buffer"])
    with pytest.raises(
        jfa.emulator.EmulationError, match='backend="triton" is at fault: two tasks wrote one buffer'
    ):
        call("triton")
    with jfa.emulator.emulate():
        call("triton")
