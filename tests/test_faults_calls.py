"""Faults of kinds K9 (syncs, graphs), K11 (determinism), K13 (devices, messages); see tests/faults.md."""

import math
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from probes import TARGETS, exact_gradients, index_probe, need, oracle, same

import jfa
from jfa import backends

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(params=TARGETS)
def target(request):
    return need(request.param)


@pytest.fixture
def kernel_target():
    return need(TARGETS[1].values[0])


# ------------------------------------------------------------------------------------------------------- K9


@pytest.mark.gpu
def test_50_graph_replay_follows_the_offsets():
    """transformers #45323, FA #1164: a maximum length baked in at capture dropped keys in a replay."""
    target = need(TARGETS[2].values[0])
    q, k, v, offsets = index_probe(target, [2, 2], rows=1, grad=False)
    v.copy_(torch.arange(1.0, 5.0)[:, None, None])

    def call():
        return target.attention(q, k, v, offsets, return_lse=True, max_kv_len=4)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = call()
    for lengths, means in (([2, 2], [1.5, 3.5]), ([1, 3], [1, 3]), ([4, 0], [2.5, 0])):
        offsets.copy_(target.offsets(lengths))
        graph.replay()
        same(out[:, 0, 0, 0], means)
        same(lse[:, 0, 0], [math.log(n) if n else -math.inf for n in lengths])


@pytest.mark.parametrize("packed", [False, True], ids=["broadcast", "packed"])
def test_51_static_capacity(target, packed):
    """torchtitan #4158: unused offsets repeat the last one; the others keep their bits."""
    q, k, v = target.seeds((4, 2, 16), (5, 2, 16), (5, 2, 16), grad=True)
    results = []
    for unused in ([], [0, 0, 0]):
        q_offsets = target.offsets([1, 3, *unused]) if packed else None
        out, lse = target.attention(q, k, v, target.offsets([3, 2, *unused]), q_offsets, return_lse=True)
        grads = torch.autograd.grad(out.square().sum(), (q, k, v))
        results.append((out, lse, *grads))
    (out, lse, *grads), (padded, padded_lse, *padded_grads) = results
    if packed:
        assert torch.equal(out, padded) and torch.equal(lse, padded_lse)
    else:
        assert torch.equal(out, padded[:2]) and torch.equal(lse, padded_lse[:2])
        assert torch.equal(padded[2:], torch.zeros_like(padded[2:])) and (padded_lse[2:] == -math.inf).all()
    for a, b in zip(grads, padded_grads):
        assert torch.equal(a, b)


def test_52_nothing_waits_for_the_device(kernel_target, monkeypatch):
    """WeatherGenerator #1531, pytorch #159380: a length read on the host waits for the GPU."""
    target = kernel_target
    q, k, v = target.seeds((3, 2, 16), (9, 2, 16), (9, 2, 16), grad=True)
    offsets = target.offsets([4, 0, 5])
    expected = oracle(q, k, v, offsets)
    loud = [torch.ones(()), *target.attention(q, k, v, offsets, return_lse=True)]

    def refuse(*_):
        raise AssertionError("a tensor's value was read on the host")

    with monkeypatch.context() as patch:
        for name in ("item", "tolist", "__bool__", "__int__", "__index__", "__float__"):
            patch.setattr(torch.Tensor, name, refuse)
        with pytest.raises(AssertionError):
            bool(loud[0])
        out, lse = target.attention(q, k, v, offsets, return_lse=True, check=False)
        bounded = target.attention(q, k, v, offsets, max_kv_len=5, check=False)
        grads = torch.autograd.grad(out.sum(), (q, k, v))
    same(out, expected[0])
    same(bounded, expected[0])
    same(lse, expected[1])
    assert all(x.isfinite().all() for x in grads)


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [False, True], ids=["broadcast", "packed"])
@pytest.mark.parametrize("max_kv_len", [None, 5])
def test_52_no_synchronization_on_a_gpu(packed, max_kv_len):
    """The same under CUDA's own watch, forward and backward."""
    target = need(TARGETS[2].values[0])
    q, k, v = target.seeds((4, 2, 16), (9, 2, 16), (9, 2, 16), grad=True)
    offsets = target.offsets([4, 0, 5]), target.offsets([1, 0, 3]) if packed else None

    def call():
        out = target.attention(q, k, v, *offsets, max_kv_len=max_kv_len)
        return out, *torch.autograd.grad(out, (q, k, v), torch.ones_like(out))

    call()  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        out, *_ = call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    same(out, oracle(q, k, v, *offsets)[0])


# ------------------------------------------------------------------------------------------------------ K11


@pytest.mark.parametrize("ask", ["argument", "torch"])
def test_60_deterministic_gradients(target, ask):
    """flash-attention #414, #988, #1596: dq, a sum over the whole batch, differs between runs."""
    batch = 64 if target.device == "cuda" else 12
    q, k, v = target.seeds((16, 2, 16), (batch * 9, 1, 16), (batch * 9, 1, 16), grad=True)
    offsets = target.offsets([9 if b % 3 else 18 if b % 2 else 0 for b in range(batch)])
    runs = []
    torch.use_deterministic_algorithms(ask == "torch")
    try:
        for run in range(20 if target.device == "cuda" else 5):
            with emulation(target, seed=run):
                out = target.attention(q, k, v, offsets, deterministic=ask == "argument")
                runs.append(torch.autograd.grad(out.square().sum(), (q, k, v)))
    finally:
        torch.use_deterministic_algorithms(False)
    for run in runs[1:]:
        for first, again in zip(runs[0], run):
            assert torch.equal(first, again)


def emulation(target, seed):
    """Another interleaving of the CTAs in every run, where the emulator decides it."""
    from contextlib import nullcontext

    if target.device != "cpu" or target.backend == "reference":
        return nullcontext()
    import jfa.emulator

    return jfa.emulator.emulate(seed=seed)


def test_60_backends_are_told(monkeypatch):
    """The flag, or torch's own, reaches the backend's backward."""
    asked = []
    real = backends.Reference.backward

    def spy(*args, deterministic, **options):
        asked.append(deterministic)
        return real(*args, deterministic=deterministic, **options)

    monkeypatch.setattr(backends.Reference, "backward", staticmethod(spy))
    target = TARGETS[0].values[0]
    q, k, v = target.seeds((2, 1, 16), (3, 1, 16), (3, 1, 16), grad=True)
    for deterministic in (False, True):
        target.attention(q, k, v, target.offsets([3]), deterministic=deterministic).sum().backward()
    torch.use_deterministic_algorithms(True)
    try:
        target.attention(q, k, v, target.offsets([3])).sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert asked == [False, True, True]


def test_61_neighbours_do_not_change_bits(target):
    """vllm #51902, pytorch #167865: a neighbour's length chose other tiles and so other bits."""
    q, k, v = target.seeds((15, 2, 16), (15, 2, 16), (15, 2, 16))

    def run(*pieces):
        lengths = [len(range(*piece)) for piece in pieces]
        rows = torch.cat([torch.arange(*piece) for piece in pieces])
        tensors = [x[rows].requires_grad_() for x in (q, k, v)]
        offsets = target.offsets(lengths)
        out = target.attention(*tensors, offsets, offsets)
        grads = torch.autograd.grad(out.square().sum(), tensors)
        return [x.split(lengths) for x in (out, *grads)]

    five, ten = (0, 5), (5, 15)
    for a, b, c in zip(run(five, (5, 14)), run(five, ten), run(ten, five)):
        assert torch.equal(a[0], b[0])
        assert torch.equal(b[0], c[1])
        assert torch.equal(b[1], c[0])


# ------------------------------------------------------------------------------------------------------ K13


def test_70_the_device_of_q_is_made_current(monkeypatch):
    """triton #2441, #5205, #2404: tensors on cuda:1 while cuda:0 is current."""
    entered = []

    class Guard:
        def __init__(self, device):
            self.device = device

        def __enter__(self):
            entered.append(self.device)

        def __exit__(self, *_):
            entered.append(None)

    monkeypatch.setattr(torch.cuda, "device", Guard)
    with backends.running("triton", torch.device("cuda", 1)):
        assert entered == [torch.device("cuda", 1)]
    assert entered[1:] == [None]


def test_70_both_directions_run_inside_the_guard(monkeypatch):
    """The guard is around forward and backward alike, whatever thread autograd uses."""
    seen = []
    real = backends.running
    monkeypatch.setattr(
        backends, "running", lambda name, device: seen.append((name, device)) or real(name, device)
    )
    target = TARGETS[0].values[0]
    q, k, v = target.seeds((2, 1, 16), (3, 1, 16), (3, 1, 16), grad=True)
    target.attention(q, k, v, target.offsets([3])).sum().backward()
    assert seen == [("reference", q.device)] * 2


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_70_second_gpu():
    """All inputs on cuda:1 while cuda:0 is current."""
    target = need(TARGETS[2].values[0])
    q, k, v = (x.to("cuda:1").requires_grad_() for x in target.seeds((2, 1, 16), (3, 1, 16), (3, 1, 16)))
    out = target.attention(q, k, v, target.offsets([3]).to("cuda:1"))
    same(out, oracle(q, k, v, target.offsets([3]))[0])
    out.sum().backward()
    assert torch.cuda.current_device() == 0 and v.grad.device == out.device == torch.device("cuda:1")


BAD_OFFSETS = [
    ([0, 3, 5], TypeError, "kv_offsets: expected a torch.Tensor of int32 or int64, got list"),
    (torch.tensor([0.0, 3, 5]), TypeError, "kv_offsets: expected dtype .* got torch.float32"),
    (torch.tensor([[0, 3, 5]]), ValueError, r"kv_offsets: expected one dimension .* got shape \(1, 3\)"),
    (torch.zeros(0, dtype=torch.int32), ValueError, "kv_offsets: expected B .* 1 elements.* got none"),
    (torch.tensor([1, 5]), ValueError, r"kv_offsets: expected to start at 0, got kv_offsets\[0\] = 1"),
    (
        torch.tensor([0, 5, 3]),
        ValueError,
        r"never to decrease, got kv_offsets\[1\] = 5 before kv_offsets\[2\] = 3",
    ),
    (torch.tensor([0, 9]), ValueError, r"within the 5 packed rows, got kv_offsets\[-1\] = 9"),
    (
        torch.zeros(3, dtype=torch.int32, device="meta"),
        ValueError,
        "kv_offsets: expected to be on cpu.* got meta",
    ),
    (None, TypeError, "kv_offsets: expected a torch.Tensor of int32 or int64, got NoneType"),
]


@pytest.mark.parametrize("offsets, error, message", BAD_OFFSETS, ids=[case[2][:60] for case in BAD_OFFSETS])
def test_71_bad_offsets(offsets, error, message):
    """LightX2V #1031, FA #545, #742: bad offsets gave opaque errors, or none."""
    target = TARGETS[0].values[0]
    q, k, v = target.seeds((2, 1, 16), (5, 1, 16), (5, 1, 16))
    with pytest.raises(error, match=message):
        target.attention(q, k, v, offsets)


def test_71_good_offsets(target):
    """int32, int64 and a strided slice are all the same offsets; [0] is a batch of none."""
    q, k, v = target.seeds((2, 1, 16), (5, 1, 16), (5, 1, 16))
    narrow = target.offsets([3, 2])
    strided = target.offsets([1, 2, 1, 1])[::2]
    assert strided.tolist() == narrow.tolist() and not strided.is_contiguous()
    right = target.attention(q, k, v, narrow)
    for offsets in (narrow.long(), strided, strided.long()):
        assert torch.equal(target.attention(q, k, v, offsets), right)
        assert torch.equal(target.attention(q, k, v, offsets, torch.zeros_like(offsets)), torch.zeros_like(q))
    assert target.attention(q, k, v, narrow[:1]).shape == (0, 2, 1, 16)


def test_72_autocast_and_mixed_dtypes(target):
    """transformers #35945, diffusers #14104: under autocast norms leave float32 q and k beside v."""
    q, k = target.seeds((3, 2, 16), (5, 2, 16), grad=True)
    v = target.randn(5, 2, 16, dtype=torch.bfloat16, seed=3, grad=True)
    offsets = target.offsets([3, 2])
    with pytest.raises(TypeError, match="got q torch.float32, k torch.float32, v torch.bfloat16"):
        target.attention(q, k, v, offsets)
    with torch.autocast(target.device, dtype=torch.bfloat16):
        out = target.attention(q, k, v, offsets)
        weight = (out * 3).square().sum()
    assert out.dtype == torch.bfloat16
    weight.backward()
    assert [x.grad.dtype for x in (q, k, v)] == [torch.float32, torch.float32, torch.bfloat16]
    low = [x.detach().bfloat16() for x in (q, k, v)]
    same(out, oracle(*low, offsets)[0])
    for x, exact in zip((q, k, v), exact_gradients(lambda out, lse: 9 * out.square().sum(), *low, offsets)):
        same(x.grad, exact, 0.1)


def test_72_autocast_leaves_the_arithmetic_alone(target):
    """The backend's own float32 products are not cast: the same bits as without, backward included."""
    tensors = target.seeds((3, 2, 16), (5, 2, 16), (5, 2, 16), dtype=torch.bfloat16, grad=True)
    offsets = target.offsets([2, 3])
    results = []
    for enabled in (False, True):
        with torch.autocast(target.device, dtype=torch.bfloat16, enabled=enabled):
            out, lse = target.attention(*tensors, offsets, return_lse=True)
            grads = torch.autograd.grad((out, lse), tensors, (torch.ones_like(out), torch.ones_like(lse)))
        results.append((out, lse, *grads))
    for plain, cast in zip(*results):
        assert plain.dtype == cast.dtype and torch.equal(plain, cast)


def test_73_float32_is_ieee(target):
    """triton #1821, #4174, #7216: float32 products in TF32 made the backward wrong."""
    q, k, v = target.seeds((128, 1, 32), (128, 1, 32), (128, 1, 32), grad=True)
    offsets = target.offsets([128])
    out = target.attention(q, k, v, offsets, offsets, causal=True)
    actual = torch.autograd.grad(out.square().sum(), (q, k, v))
    right = exact_gradients(lambda out, lse: out.square().sum(), q, k, v, offsets, offsets, causal=True)
    same(out, oracle(q, k, v, offsets, offsets, causal=True)[0], 1e-5)
    for grad, exact in zip(actual, right):
        same(grad, exact, 1e-4)


def test_74_second_derivative_is_refused(target):
    """pytorch #116350: a second derivative is an error, not zeros."""
    q, k, v = target.seeds((3, 2, 16), (5, 2, 16), (5, 2, 16), grad=True)
    out = target.attention(q, k, v, target.offsets([3, 2]))
    first = torch.autograd.grad(out.square().sum(), (q, k, v), create_graph=True)
    with pytest.raises(RuntimeError, match="first derivatives only"):
        torch.autograd.grad(sum(x.square().sum() for x in first), q)


@pytest.mark.parametrize("wanted", ["q", "k", "v", "qv"])
def test_74_some_inputs_need_no_gradient(target, wanted, monkeypatch):
    """long-context-attention #149: only some inputs ask for gradients; others cost nothing."""
    asked = []
    module = backends.module(target.backend)
    real = module.backward

    def spy(*args, needs, **options):
        asked.append(needs)
        return real(*args, needs=needs, **options)

    monkeypatch.setattr(module, "backward", staticmethod(spy) if isinstance(module, type) else spy)
    tensors = dict(zip("qkv", target.seeds((3, 2, 16), (5, 2, 16), (5, 2, 16))))
    for name in wanted:
        tensors[name].requires_grad_()
    out = target.attention(*tensors.values(), target.offsets([3, 2]))
    out.square().sum().backward()
    assert asked == [tuple(name in wanted for name in "qkv")]
    right = exact_gradients(lambda out, lse: out.square().sum(), *tensors.values(), target.offsets([3, 2]))
    for name, exact in zip("qkv", right):
        if name in wanted:
            same(tensors[name].grad, exact)
        else:
            assert tensors[name].grad is None


IMPORT = """
import importlib.machinery
import sys
if ABSENT:
    find = importlib.machinery.PathFinder.find_spec
    hide = lambda name, *rest: None if name == "triton" else find(name, *rest)
    importlib.machinery.PathFinder.find_spec = hide
import jfa
assert jfa.jagged_flash_attention and jfa.jagged and jfa.reference
heavy = [name for name in ("triton", "jfa.kernels.baseline", "jfa.emulator") if sys.modules.get(name)]
assert not heavy, heavy
import torch
x = torch.ones(2, 1, 16)
offsets = torch.tensor([0, 2])
out = jfa.jagged_flash_attention(x, x, x, offsets)
assert not sys.modules.get("triton")
assert torch.equal(jfa.jagged_flash_attention(x, x, x, offsets, backend="triton"), out)
assert sys.modules["triton"].__spec__.origin.endswith("standin") == ABSENT
assert not torch.cuda.is_initialized()
print(jfa.backends.describe())
print(jfa.backends.available("cuda")["triton"])
print(jfa.backends._missing_triton(tlx=True))
"""


@pytest.mark.parametrize("absent", [False, True], ids=["triton there", "no triton"])
def test_75_import_without_gpu_or_triton(absent):
    """flash-attention #246, #309, FBGEMM #2191: import failed without a GPU; kernels run here too."""
    need(TARGETS[1].values[0])
    done = subprocess.run(
        [sys.executable, "-c", IMPORT.replace("ABSENT", str(absent))],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "reference  runs" in done.stdout and "triton     runs" in done.stdout
    assert "this PyTorch sees no GPU" in done.stdout
    assert ("the package triton is not installed" in done.stdout) == absent


def test_75_building_needs_no_torch():
    """flash-attention #1421, #1639: a build that imports torch; ours needs setuptools alone."""
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]
    assert build["build-backend"] == "setuptools.build_meta"
    assert [requirement.split(">")[0] for requirement in build["requires"]] == ["setuptools"]
    assert not (ROOT / "setup.py").exists()


def test_errors_name_a_missing_backend(monkeypatch):
    """A backend that cannot run says so in one line, not in a traceback of an import."""
    monkeypatch.setitem(backends.MODULES, "hopper", "jfa.kernels.nowhere")
    backends._import_obstacle.cache_clear()
    target = TARGETS[0].values[0]
    q, k, v = target.seeds((2, 1, 16), (5, 1, 16), (5, 1, 16))
    with pytest.raises(
        RuntimeError, match='backend="hopper" cannot run here: jfa.kernels.nowhere is not part'
    ):
        jfa.jagged_flash_attention(q, k, v, target.offsets([5]), backend="hopper")
