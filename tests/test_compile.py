"""torch.compile, fake tensors, registration of the operator: faults of kind K8, see tests/faults.md."""

import dataclasses
import itertools
import math
import shutil

import pytest
import torch
from probes import TARGETS, Target, exact_gradients, need, oracle, same
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import jfa
from jfa.jagged import lengths_to_offsets, to_nested


@pytest.fixture(params=TARGETS)
def target(request):
    torch.compiler.reset()
    return need(request.param)


def compiled(function, backend="aot_eager"):
    """The function under torch.compile, and the counter of its graphs."""
    counter = CompileCounterWithBackend(backend)
    return torch.compile(function, backend=counter, fullgraph=True, dynamic=True), counter


def random_lengths(batch, seed, top=9):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, top, (batch,), generator=generator)
    lengths[seed % batch] = 0
    lengths[(seed + 1) % batch] = top
    return lengths.tolist()


def gradients_agree(target, function, fast, tensors, *args):
    """Outputs and gradients of the compiled function equal those of the eager one."""
    expected, actual = function(*tensors, *args), fast(*tensors, *args)
    leaves = [x for x in tensors if x.requires_grad]
    for a, b in zip(actual, expected):
        same(a, b, 1e-6)
    douts = [target.randn(*x.shape, seed=20 + n) for n, x in enumerate(expected)]
    grads = [torch.autograd.grad(x, leaves, douts) for x in (actual, expected)]
    for a, b in zip(*grads):
        same(a, b, 1e-5)


def with_statistics(target, **options):
    """out and lse (0 where it is -inf), between two other operators, as in a model."""

    def function(q, k, v, *offsets):
        out, lse = target.attention(q * 2, k, v, *offsets, return_lse=True, **options)
        return out + 1, lse.masked_fill(lse == -math.inf, 0)

    return function


def test_44_no_length_is_baked_in(target):
    """pytorch #124205: compiled code kept the first batch's maximum length and was wrong on the next."""
    function = with_statistics(target, causal=True)
    fast, counter = compiled(function)
    for lengths in ([4, 4], [2, 9], [9, 2], [3, 5], [8, 0]):
        tensors = target.seeds((5, 6, 16), (sum(lengths), 3, 16), (sum(lengths), 3, 32), grad=True)
        gradients_agree(target, function, fast, tensors, target.offsets(lengths))
    assert counter.frame_count <= 2


@pytest.mark.parametrize("packed", [False, True], ids=["broadcast", "packed"])
@pytest.mark.parametrize("batches", [(7,), (7, 9, 4)], ids=["one batch size", "any batch size"])
def test_45_two_graphs_for_twenty_batches(target, packed, batches):
    """quack #150, keys_values #55, FA #1894: a graph for every batch until the limit, then silently none."""
    function = with_statistics(target)
    fast, counter = compiled(function)
    for step in range(20):
        batch = batches[step % len(batches)]
        lengths, q_lengths = random_lengths(batch, step), random_lengths(batch, 50 + step, top=5)
        q, k, v = target.seeds(
            (sum(q_lengths) if packed else 5, 6, 16),
            (sum(lengths) + step % 3, 3, 16),
            (sum(lengths) + step % 3, 3, 32),
        )
        offsets = target.offsets(lengths), target.offsets(q_lengths) if packed else None
        for a, b in zip(fast(q, k, v, *offsets), function(q, k, v, *offsets)):
            same(a, b, 1e-6)
    assert counter.frame_count <= 2


def test_45_maximum_length_as_an_argument(target):
    """The bound may change from call to call without another graph."""

    def function(q, k, v, offsets, most):
        return target.attention(q, k, v, offsets, max_kv_len=most)

    fast, counter = compiled(function)
    for step in range(8):
        lengths = random_lengths(5, step)
        q, k, v = target.seeds((4, 2, 16), (sum(lengths), 2, 16), (sum(lengths), 2, 32))
        same(
            fast(q, k, v, target.offsets(lengths), 9 + step),
            function(q, k, v, target.offsets(lengths), 9 + step),
        )
    assert counter.frame_count <= 2


SUBSETS = [subset for n in range(4) for subset in itertools.combinations("qkv", n)]


@pytest.mark.parametrize("subset", SUBSETS, ids=lambda s: "".join(s) or "none")
@pytest.mark.parametrize("transposed", [False, True], ids=["contiguous", "transposed"])
def test_46_opcheck(target, subset, transposed):
    """pytorch #177115, #183002, prime-rl #3567: fake results with other strides than the real ones."""
    q, k, v = target.seeds((5, 6, 16), (7, 3, 16), (7, 3, 32))
    tensors = dict(q=q, k=k, v=v)
    for name, x in tensors.items():
        if transposed:
            tensors[name] = x.transpose(0, 1).contiguous().transpose(0, 1)
        tensors[name].requires_grad_(name in subset)
    offsets = target.offsets([4, 0, 3])
    q_offsets = target.offsets([1, 3, 1]) if len(subset) % 2 else None
    options = (None, -1, 0, None, target.backend, None, False, None)
    arguments = (*tensors.values(), offsets, q_offsets, *options)
    torch.library.opcheck(torch.ops.jfa.forward.default, arguments)


@pytest.mark.parametrize("needs", list(itertools.product([False, True], repeat=3)), ids=str)
def test_46_opcheck_of_the_backward(target, needs):
    """The same for the operator that computes the gradients; what is not needed is an empty tensor."""
    q, k, v = target.seeds((5, 6, 16), (7, 3, 16), (7, 3, 32))
    offsets = target.offsets([4, 0, 3])
    out, lse = target.attention(q, k, v, offsets, return_lse=True)
    dout = target.randn(3, 6, 5, 32, seed=5).transpose(1, 2)
    options = (None, -1, -1, None, target.backend, None, False, list(needs), [])
    arguments = (dout, None, q, k, v, out, lse, offsets, None, *options)
    torch.library.opcheck(torch.ops.jfa.backward.default, arguments)
    for grad, x, needed in zip(torch.ops.jfa.backward(*arguments), (q, k, v), needs):
        assert grad.shape == (x.shape if needed else (0,))


def test_47_no_result_is_an_input(target):
    """FA #1769: an operator returned its input, or asked a tensor for its truth."""
    q, k, v = target.seeds((1, 2, 16), (1, 2, 16), (1, 2, 16), grad=True)
    for offsets in (target.offsets([1]), target.offsets([])):  # offsets of one element are still offsets
        arguments = (q, k, v, offsets, None, None, -1, -1, None, target.backend, None, False, None)
        torch.library.opcheck(torch.ops.jfa.forward.default, arguments, test_utils="test_schema")
        out, lse = torch.ops.jfa.forward(*arguments)
        inputs = {x.untyped_storage().data_ptr() for x in (q, k, v, offsets)}
        assert not inputs & {x.untyped_storage().data_ptr() for x in (out, lse) if x.numel()}


def test_48_symbolic_sizes(target):
    """vllm-omni #7220, FA #2154: symbolic sizes reached the kernel's compiler."""
    function = with_statistics(target)
    fast, counter = compiled(function)
    for lengths in ([3, 4, 5], [6, 1, 2, 8]):
        q, k, v = target.seeds((5, 6, 16), (sum(lengths), 3, 16), (sum(lengths), 3, 32))
        offsets = target.offsets(lengths)
        torch._dynamo.mark_dynamic(k, 0)
        torch._dynamo.mark_dynamic(v, 0)
        torch._dynamo.mark_dynamic(offsets, 0)
        for a, b in zip(fast(q, k, v, offsets), function(q, k, v, offsets)):
            same(a, b, 1e-6)
    assert counter.frame_count == 1


@pytest.mark.parametrize("backend", ["auto", "triton", "hopper", "blackwell"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_48_fake_tensors_need_no_gpu(backend, device):
    """Results come from shapes alone, for every backend, on a GPU that need not be there."""
    grad = device == "cpu" or torch.cuda.is_available()  # a CPU build of torch has no autograd for cuda
    with FakeTensorMode(shape_env=ShapeEnv()):
        q = torch.empty(5, 6, 16, device=device, dtype=torch.bfloat16, requires_grad=grad)
        k = torch.empty(3, 11, 16, device=device, dtype=torch.bfloat16).transpose(0, 1).requires_grad_(grad)
        v = torch.empty(11, 3, 32, device=device, dtype=torch.bfloat16, requires_grad=grad)
        offsets = torch.empty(5, device=device, dtype=torch.int32)
        out, lse = jfa.jagged_flash_attention(q, k, v, offsets, backend=backend, return_lse=True)
        assert out.shape == (4, 5, 6, 32) and out.dtype == torch.bfloat16 and out.is_contiguous()
        assert lse.shape == (4, 6, 5) and lse.dtype == torch.float32 and lse.device.type == device
        packed = jfa.jagged_flash_attention(q, k, v, offsets, offsets, backend=backend)
        assert packed.shape == (5, 6, 32)
        if grad:
            out.sum().backward()
            assert [x.grad.shape for x in (q, k, v)] == [x.shape for x in (q, k, v)]


def test_49_all_sizes_different(target):
    """ROCm/flash-attention #163, pytorch #153371, #154556: worked only when two sizes were equal."""
    function = with_statistics(target, window=(7, 2))
    fast, counter = compiled(function)
    lengths = random_lengths(8, 1, top=23)
    q, k, v = target.seeds((5, 12, 16), (sum(lengths), 4, 16), (sum(lengths), 4, 24), grad=True)
    gradients_agree(target, function, fast, (q, k, v), target.offsets(lengths))
    assert counter.frame_count == 1


def test_nested_tensors_compile(target):
    """k and v as torch.nested jagged tensors, made inside the compiled region."""

    def function(q, k, v, offsets):
        return (target.attention(q, to_nested(k, offsets), to_nested(v, offsets)),)

    fast, counter = compiled(function)
    for lengths in ([4, 4, 1], [2, 9, 0], [1, 5, 6]):
        tensors = target.seeds((5, 6, 16), (sum(lengths), 3, 16), (sum(lengths), 3, 32), grad=True)
        gradients_agree(target, function, fast, tensors, target.offsets(lengths))
    assert counter.frame_count <= 2


def test_autocast_compiles(target):
    """Under autocast the compiled and the eager function cast alike."""

    def function(q, k, v, offsets):
        with torch.autocast(target.device, dtype=torch.bfloat16):
            return target.attention(q, k, v, offsets)

    fast, _ = compiled(function)
    q, k, v = target.seeds((5, 6, 16), (7, 3, 16), (7, 3, 32))
    out = fast(q, k, v, target.offsets([4, 0, 3]))
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, function(q, k, v, target.offsets([4, 0, 3])))


@pytest.mark.skipif(
    not any(map(shutil.which, ("g++", "clang++", "c++"))), reason="inductor needs a C++ compiler on a CPU"
)
def test_inductor(target):
    """The default compiler of torch.compile gives the same results and gradients."""
    function = with_statistics(target, causal=True)
    fast, counter = compiled(function, "inductor")
    for lengths in ([4, 0, 7], [5, 5, 5]):
        tensors = target.seeds((5, 6, 16), (sum(lengths), 3, 16), (sum(lengths), 3, 32), grad=True)
        gradients_agree(target, function, fast, tensors, target.offsets(lengths))
    assert counter.frame_count <= 2


def test_bad_values_are_refused_when_compiled(target):
    """The check of the offsets' values is inside the operator, so a compiled call makes it too."""
    fast, _ = compiled(lambda q, k, v, offsets: target.attention(q, k, v, offsets, check=True))
    q, k, v = target.seeds((5, 6, 16), (7, 3, 16), (7, 3, 32))
    with pytest.raises(ValueError, match="within the 7 packed rows"):
        fast(q, k, v, lengths_to_offsets([4, 4]).to(target.device))


@pytest.mark.parametrize("kind", ["name", "object", "schedule"])
def test_steps_and_schedules_compile(kind):
    """A step by name or as an object, or a schedule, crosses the operator inside one graph."""
    torch.compiler.reset()
    target = need(Target("hopper", "cpu"))
    from jfa import steps
    from jfa.schedule import make_schedule

    offsets = target.offsets([5, 70, 0])
    tensors = target.seeds((9, 2, 64), (75, 2, 64), (75, 2, 64), dtype=torch.bfloat16, grad=True)
    options = {
        "name": {"step": steps.FORWARD["hopper"][0].name},
        "object": {"step": dataclasses.replace(steps.FORWARD["hopper"][0], name="mine")},
        "schedule": {"schedule": make_schedule((9, 75), offsets)},
    }[kind]

    def function(q, k, v, offsets):
        return (target.attention(q, k, v, offsets, **options),)

    fast, counter = compiled(function)
    (out,) = fast(*tensors, offsets)
    same(out, oracle(*tensors, offsets)[0])
    right = exact_gradients(lambda out, lse: out.sum(), *tensors, offsets)
    for grad, exact in zip(torch.autograd.grad(out.sum(), tensors), right):
        same(grad, exact, 0.05)
    assert counter.frame_count == 1


def test_opcheck_with_a_schedule():
    """The operator that carries a schedule's tensors, differentiated."""
    from jfa.schedule import make_schedule

    target = need(Target("hopper", "cpu"))
    offsets = target.offsets([5, 0, 30])
    tensors = target.seeds((9, 2, 64), (35, 1, 64), (35, 1, 64), dtype=torch.bfloat16, grad=True)
    arguments = (*tensors, offsets, None, None, -1, -1, None, "hopper", None, False, None)
    lists = make_schedule((9, 35), offsets).tensors()
    torch.library.opcheck(torch.ops.jfa.forward_scheduled.default, (*arguments, lists))
