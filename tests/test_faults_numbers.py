"""Faults of kinds K4 (softmax), K5 (strides), K6 (overflow) and K7 (heads); index in tests/faults.md."""

import itertools
import math

import pytest
import torch
from probes import TARGETS, exact_gradients, index_probe, need, oracle, poison, same

from jfa import backends
from jfa.kernels.problem import Problem

INF = math.inf
LN3 = math.log(3)


@pytest.fixture(params=TARGETS)
def target(request):
    return need(request.param)


def small(target, q, k, v, lengths):
    """One head, columns padded with zeros to 16: (q, k, v, offsets) from nested lists."""
    tensors = []
    for rows in (q, k, v):
        x = torch.zeros(len(rows), 1, 16, device=target.device)
        x[:, 0, : len(rows[0])] = torch.tensor(rows, dtype=torch.float32)
        tensors.append(x.requires_grad_())
    return *tensors, target.offsets(lengths)


# ------------------------------------------------------------------------------------------------------- K4


def test_23_very_negative_logits(target):
    """flashinfer #4267: a finite stand-in for minus infinity swallowed rows whose logits are lower still."""
    q, k, v, offsets = small(target, [[1, 0]], [[-100000, 0], [-100001, 0]], [[1], [3]], [2])
    out, lse = target.attention(q, k, v, offsets, scale=1.0, return_lse=True)
    # Logits of 1e5 have a spacing of 0.008 in float32, of 0.016 when counted in base 2: no answer is closer.
    same(out[0, 0, 0, 0], 1.5378828, 0.008)
    assert abs(lse[0, 0, 0].item() + 99999.6867) < 0.016


@pytest.mark.parametrize("scale", [0.0, -1.0])
def test_25_scale_zero_and_negative(target, scale):
    """flash-attention #1461: scaled after masking, 0 gives NaN and a negative scale +inf."""
    q, k, v = target.seeds((4, 2, 16), (5, 2, 16), (5, 2, 16), grad=True)
    offsets = target.offsets([3, 0, 2])
    out, lse = target.attention(q, k, v, offsets, scale=scale, causal=True, return_lse=True)
    expected = oracle(q, k, v, offsets, scale=scale, causal=True)
    same(out, expected[0])
    same(lse, expected[1])
    out.square().sum().backward()
    right = exact_gradients(lambda out, lse: out.square().sum(), q, k, v, offsets, scale=scale, causal=True)
    for actual, grad in zip((q.grad, k.grad, v.grad), right):
        same(actual, grad)


def test_26_gradient_through_lse(target):
    """flash-attention #889, #1137: the gradient of lse was dropped."""
    q, k, v, offsets = small(target, [[1, 0]], [[0, 1], [LN3, 2]], [[1], [1]], [2])
    _, lse = target.attention(q, k, v, offsets, scale=1.0, return_lse=True)
    same(lse[0, 0, 0], math.log(4))
    dq, dk, dv = torch.autograd.grad(lse.sum(), (q, k, v), materialize_grads=True)
    same(dq[0, 0, :2], [0.75 * LN3, 1.75])
    same(dk[:, 0, :2], [[0.25, 0], [0.75, 0]])
    assert torch.equal(dv, torch.zeros_like(dv))


@pytest.mark.parametrize("rows", [1, 3], ids=["no row is blind", "causal blinds two"])
def test_26_gradient_through_lse_of_empty_rows(target, rows):
    """pytorch #136232: lse of rows without keys in the loss gives gradients of 0, not NaN."""
    q, k, v = target.seeds((rows, 1, 16), (6, 1, 16), (6, 1, 16), grad=True)
    offsets = target.offsets([1, 0, 5])
    out, lse = target.attention(q, k, v, offsets, causal=True, return_lse=True)
    assert (lse == -INF).any()
    actual = torch.autograd.grad((out.sum(), lse.sum()), (q, k, v))
    right = exact_gradients(lambda out, lse: out.sum() + lse.sum(), q, k, v, offsets, causal=True)
    for grad, exact in zip(actual, right):
        same(grad, exact)


@pytest.mark.parametrize("parts", [(3, 2), (5, 0), (0, 5)], ids=str)
def test_27_lse_is_natural_and_merges(target, parts):
    """Model-Optimizer #1034, attention-gym #200, ring-flash-attention #47: base 2 and base e were mixed."""
    q, k, v, offsets = index_probe(target, [3, 0], rows=1)
    _, lse = target.attention(q, k, v, offsets, return_lse=True)
    same(lse[:, 0, 0], [1.0986123, -INF])

    q, k, v = target.seeds((4, 2, 16), (5, 2, 16), (5, 2, 16))
    outs, lses = target.attention(q, k, v, target.offsets(parts), return_lse=True)
    whole, whole_lse = target.attention(q, k, v, target.offsets([5]), return_lse=True)
    merged_lse = torch.logsumexp(lses, dim=0)
    shares = torch.exp(lses - merged_lse).transpose(1, 2)[..., None]
    same((shares * outs).sum(0), whole[0])
    same(merged_lse, whole_lse[0])


# ------------------------------------------------------------------------------------------------------- K5


def gradients(target, out, q, k, v, dout):
    return torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)


def test_29_expanded_gradients(target):
    """pytorch #132857: out.sum().backward() hands down a gradient of stride 0."""
    q, k, v = target.seeds((3, 4, 16), (7, 2, 16), (7, 2, 32), grad=True)
    out = target.attention(q, k, v, target.offsets([4, 0, 3]))
    materialised = gradients(target, out, q, k, v, torch.ones_like(out))
    expanded = gradients(target, out, q, k, v, torch.ones((), device=out.device).expand_as(out))
    summed = torch.autograd.grad(out.sum(), (q, k, v))
    for a, b, c in zip(materialised, expanded, summed):
        assert a.isfinite().all()
        same(b, a, 1e-6)
        same(c, a, 1e-6)


@pytest.mark.parametrize("packed", [False, True], ids=["broadcast", "packed"])
def test_30_transposed_gradients(target, packed):
    """flash-attention #355, #1149: a gradient that is not contiguous gave wrong results."""
    q, k, v = target.seeds((5, 4, 16), (7, 2, 16), (7, 2, 32), grad=True)
    q_offsets = target.offsets([2, 1, 2]) if packed else None
    out, lse = target.attention(q, k, v, target.offsets([4, 0, 3]), q_offsets, return_lse=True)
    dout, dlse = target.randn(*out.shape, seed=7), target.randn(*lse.shape, seed=8)
    right = torch.autograd.grad((out, lse), (q, k, v), (dout, dlse), retain_graph=True)
    strided = dout.transpose(-3, -2).contiguous().transpose(-3, -2), dlse.mT.contiguous().mT
    assert not strided[0].is_contiguous() and not strided[1].is_contiguous()
    for actual, exact in zip(torch.autograd.grad((out, lse), (q, k, v), strided), right):
        same(actual, exact, 1e-6)


def test_31_gradient_with_huge_strides(target):
    """flash-attention #2611: row index times row stride of a gradient passed 2^31."""
    stride = 2**29 + 16
    q, k, v = target.seeds((6, 1, 16), (6, 1, 16), (6, 1, 16), dtype=torch.bfloat16, grad=True)
    offsets = target.offsets([4, 2])
    out = target.attention(q, k, v, offsets, offsets)
    # Virtual memory that is hardly touched: six rows of a storage of more than 2^31 elements.
    storage = torch.empty(5 * stride + 16, dtype=torch.bfloat16, device=target.device)
    dout = storage.as_strided((6, 1, 16), (stride, 16, 1))
    dout.copy_(target.randn(6, 1, 16, seed=5))
    assert 5 * dout.stride(0) > 2**31
    actual = gradients(target, out, q, k, v, dout)
    for grad, exact in zip(actual, gradients(target, out, q, k, v, dout.contiguous())):
        same(grad, exact, 1e-6)


def layouts(x):
    """The same values contiguous, transposed from (H, T, D), and sliced from a packed qkv."""
    wide = torch.cat([torch.full_like(x, torch.nan), x, torch.full_like(x, torch.nan)], dim=1)
    transposed = x.transpose(0, 1).contiguous().transpose(0, 1)
    return {"contiguous": x, "transposed": transposed, "sliced": wide[:, x.shape[1] : 2 * x.shape[1]]}


@pytest.mark.parametrize(
    "names", list(itertools.product(["contiguous", "transposed", "sliced"], repeat=3)), ids="-".join
)
def test_32_layouts_of_inputs(target, names):
    """pytorch #119500, #178499, #170813, diffusers #14341: k contiguous, v transposed, and the like."""
    q, k, v = target.seeds((5, 6, 16), (7, 2, 16), (7, 2, 32))
    offsets = target.offsets([4, 0, 3])
    right = target.attention(q, k, v, offsets)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    tensors = [layouts(x)[name] for x, name in zip(leaves, names)]
    out = target.attention(*tensors, offsets)
    same(out, right, 1e-6)
    assert out.is_contiguous()
    dense = [x.clone().requires_grad_() for x in (q, k, v)]
    exact = torch.autograd.grad(target.attention(*dense, offsets).square().sum(), dense)
    for x, actual, grad in zip(leaves, torch.autograd.grad(out.square().sum(), leaves), exact):
        assert actual.shape == x.shape
        same(actual, grad, 1e-6)


def test_33_unaligned_rows_and_base(target):
    """triton #10927, #11583, FlagGems #2489: rows of 61 elements, a base off by one element."""
    offsets = target.offsets([5, 6])
    base = target.randn(12, 2, 61, dtype=torch.bfloat16, seed=3)
    base[:, :, 60] = 7  # canaries between the rows
    flat = target.randn(11 * 2 * 60 + 9, dtype=torch.bfloat16, seed=4)
    q = target.randn(3, 2, 60, dtype=torch.bfloat16, seed=5)
    k, v = base[:11, :, :60], flat[1 : 1 + 11 * 2 * 60].view(11, 2, 60)
    leaves = [x.clone(memory_format=torch.preserve_format) for x in (base, flat)]
    for x in (q, k, v):
        x.requires_grad_()
    out, lse = target.attention(q, k, v, offsets, return_lse=True)
    expected = oracle(q, k, v, offsets)
    same(out, expected[0])
    same(lse, expected[1])
    grads = torch.autograd.grad(out.square().sum(), (q, k, v))
    for actual, exact in zip(grads, exact_gradients(lambda out, lse: out.square().sum(), q, k, v, offsets)):
        same(actual, exact, 0.05)
    assert torch.equal(base, leaves[0]) and torch.equal(flat, leaves[1])


# ------------------------------------------------------------------------------------------------------- K6


def test_35_grid_beyond_the_limit():
    """triton #7260: a grid too large did nothing, silently; here it is an error before any launch."""
    problem = Problem(
        batch=2**20, heads_q=2**11, heads_kv=1, head_dim=16, head_dim_v=16, total_q=16, total_kv=0,
        broadcast_q=True, scale=1.0,
    )  # fmt: skip
    target = need(TARGETS[1].values[0])
    shapes = (16, 2**11, 16), (0, 1, 16), (0, 1, 16)
    q, k, v = (torch.empty(shape, device="meta", dtype=torch.bfloat16) for shape in shapes)
    offsets = torch.empty(2**20 + 1, device="meta", dtype=torch.int32)
    with pytest.raises(ValueError, match="2147483648"):
        with backends.running(target.backend, torch.device("cpu")):
            backends.module(target.backend).forward(problem, q, k, v, offsets, None)


def test_37_a_padded_view_would_not_fit(target):
    """FBGEMM #5755, #5891, #5544: padding [1] * 1000 + [100000] overflows; packed rows never get padded."""
    lengths = [1] * 1000 + [100_000]
    k = torch.zeros(101_000, 1, 16, device=target.device)
    v = torch.cat([torch.full((1000, 1, 16), 5.0), torch.full((100_000, 1, 16), 3.0)]).to(target.device)
    q = torch.ones(1, 1, 16, device=target.device)
    out, lse = target.attention(q, k, v, target.offsets(lengths), return_lse=True)
    same(out[:, 0, 0, 0], [5.0] * 1000 + [3.0], 1e-3)  # a float32 sum of 1e5 terms may be off by 6e-3
    same(lse[:, 0, 0], [0.0] * 1000 + [math.log(100_000)], 1e-4)


def test_38_longer_than_int16(target):
    """xformers #719: NaN above a length of 32768."""
    q = torch.ones(1, 1, 8, device=target.device)
    k, v = torch.zeros(32769, 1, 8, device=target.device), torch.ones(32769, 1, 8, device=target.device)
    out, lse = target.attention(q, k, v, target.offsets([32769]), return_lse=True)
    same(out, torch.ones(1, 1, 1, 8), 1e-4)
    same(lse, [[[math.log(32769)]]])


# ------------------------------------------------------------------------------------------------------- K7


@pytest.mark.parametrize("heads_q, heads_kv", [(3, 2), (33, 2)])
@pytest.mark.parametrize("way", ["eager", "compiled"])
def test_39_heads_that_do_not_divide(target, heads_q, heads_kv, way):
    """fla #1029: floor division left heads unwritten; here it is an error that names both numbers."""
    q, k, v = target.seeds((2, heads_q, 16), (4, heads_kv, 16), (4, heads_kv, 16))
    call = target.attention
    if way == "compiled":
        torch.compiler.reset()
        call = torch.compile(call, backend="eager")
    with pytest.raises(Exception, match=f"(?s)multiple of the {heads_kv} heads.*got {heads_q}") as caught:
        call(q, k, v, target.offsets([4]))
    assert way == "compiled" or caught.type is ValueError


@pytest.mark.parametrize("heads_q, heads_kv", [(4, 2), (6, 2), (6, 3), (48, 32 // 2)])
def test_40_head_map(target, heads_q, heads_kv):
    """native-sparse-attention-triton #27, HipKittens #22: a head map that is right for square groups only."""
    group = heads_q // heads_kv
    q = torch.ones(2, heads_q, 16, device=target.device, requires_grad=True)
    k = torch.zeros(3, heads_kv, 16, device=target.device, requires_grad=True)
    v = (10.0 * torch.arange(1, heads_kv + 1, device=target.device))[None, :, None].expand(3, heads_kv, 16)
    v = v.contiguous().requires_grad_()
    out = target.attention(q, k, v, target.offsets([3]))
    same(out[0, 0, :, 0], [10.0 * (head // group + 1) for head in range(heads_q)])
    weights = torch.arange(1.0, heads_q + 1, device=target.device)  # each query head's gradient is its own
    (out[0, 0, :, 0] * weights).sum().backward()
    same(v.grad[0, :, 0], weights.view(heads_kv, group).sum(1) / 3)


def test_41_grouped_heads_and_jagged(target):
    """flash-attention #2086, #2438, #2553: grouped heads broke together with jagged sequences."""
    q, k, v = target.seeds((9, 8, 16), (66, 2, 16), (66, 2, 16), grad=True)
    for q_offsets in (None, target.offsets([2, 3, 4])):
        offsets = target.offsets([1, 0, 65]), q_offsets
        out, lse = target.attention(q, k, v, *offsets, return_lse=True)
        expected = oracle(q, k, v, *offsets)
        same(out, expected[0])
        same(lse, expected[1])
        actual = torch.autograd.grad(out.square().sum(), (q, k, v))
        right = exact_gradients(lambda out, lse: out.square().sum(), q, k, v, *offsets)
        for grad, exact in zip(actual, right):
            same(grad, exact)


@pytest.mark.parametrize("dim", [8, 24, 40, 72, 80, 96, 120])
def test_42_head_dimension_not_a_power_of_two(target, dim):
    """triton #621, sglang #1281, flash-attention #1347: only 64 columns, or stale lanes."""
    offsets = target.offsets([5, 0, 17])
    runs = []
    for _ in range(2):
        q, k, v = target.seeds((3, 2, dim), (22, 1, dim), (22, 1, dim), grad=True)
        with poison():
            out, lse = target.attention(q, k, v, offsets, return_lse=True)
            out.square().sum().backward()
        runs.append((out, lse, q.grad, k.grad, v.grad))
    for first, second in zip(*runs):
        assert torch.equal(first, second)
    expected = oracle(q, k, v, offsets)
    grads = exact_gradients(lambda out, lse: out.square().sum(), q, k, v, offsets)
    for actual, exact in zip(runs[0], (*expected, *grads)):
        same(actual, exact)


@pytest.mark.parametrize("dim, dim_v", [(16, 32), (32, 16), (64, 40)])
def test_43_other_value_dimension(target, dim, dim_v):
    """native-sparse-attention-triton #27, flash-attention #753, #1541: tiles sized with the wrong D."""
    q, k, v = target.seeds((3, 2, dim), (9, 1, dim), (9, 1, dim_v), grad=True)
    offsets = target.offsets([4, 5])
    out, lse = target.attention(q, k, v, offsets, causal=True, return_lse=True)
    expected = oracle(q, k, v, offsets, causal=True)
    same(out, expected[0])
    same(lse, expected[1])
    actual = torch.autograd.grad(out.square().sum(), (q, k, v))
    right = exact_gradients(lambda out, lse: out.square().sum(), q, k, v, offsets, causal=True)
    for grad, exact in zip(actual, right):
        same(grad, exact)
