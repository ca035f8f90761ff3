"""jfa.reference against float64 NumPy row by row, its gradients against finite differences."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from probes import oracle, same

from jfa import reference
from jfa.jagged import lengths_to_offsets

INF = math.inf
LENGTHS, Q_LENGTHS = [5, 0, 3, 1, 0, 7], [2, 3, 0, 4, 0, 1]
RULES = [
    {},
    {"causal": True},
    {"window": (2, 1)},
    {"window": (0, 0)},
    {"window": (None, 2)},
    {"window": (3, None), "causal": True},
    {"window": (3, 9), "causal": True},
    {"scale": -0.7},
]


def inputs(packed, *, dtype=torch.float64, heads=(6, 2), dims=(4, 3), slack=2, rows=3, grad=False):
    generator = torch.Generator().manual_seed(0)
    shapes = [
        (sum(Q_LENGTHS) + slack if packed else rows, heads[0], dims[0]),
        (sum(LENGTHS) + slack, heads[1], dims[0]),
        (sum(LENGTHS) + slack, heads[1], dims[1]),
    ]
    q, k, v = (torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes)
    tensors = [x.requires_grad_(grad) for x in (q, k, v)]
    return (
        *tensors,
        lengths_to_offsets(LENGTHS),
        lengths_to_offsets(Q_LENGTHS, torch.int64) if packed else None,
    )


@pytest.mark.parametrize("packed", [False, True], ids=["broadcast", "packed"])
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_definition(packed, rule):
    arguments = inputs(packed)
    out, lse = reference.attention(*arguments, **rule)
    expected_out, expected_lse = oracle(*arguments, **rule)
    assert out.dtype == lse.dtype == torch.float64
    same(out, expected_out)
    same(lse, expected_lse)


lengths = st.lists(st.integers(0, 6), min_size=1, max_size=4)
side = st.none() | st.integers(0, 5)


@given(
    lengths=lengths, rows=st.integers(0, 5), left=side, right=side, causal=st.booleans(), packed=st.booleans()
)
@settings(max_examples=60, deadline=None)
def test_definition_on_any_lengths(lengths, rows, left, right, causal, packed):
    generator = torch.Generator().manual_seed(len(lengths))
    q_lengths = [(rows + 2 * b) % 5 for b in range(len(lengths))]
    q = torch.randn(sum(q_lengths) if packed else rows, 2, 3, generator=generator)
    k, v = (torch.randn(sum(lengths), 1, 3, generator=generator) for _ in range(2))
    offsets = lengths_to_offsets(lengths), lengths_to_offsets(q_lengths) if packed else None
    rule = {"window": (left, right), "causal": causal}
    out, lse = reference.attention(q, k, v, *offsets, dtype=torch.float64, **rule)
    expected = oracle(q, k, v, *offsets, window=(left, 0 if causal else right))
    same(out, expected[0])
    same(lse, expected[1])


@pytest.mark.parametrize("packed", [False, True], ids=["broadcast", "packed"])
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_gradients_by_finite_differences(packed, rule):
    """Through out and lse, blind rows included."""
    q, k, v, *offsets = inputs(packed, heads=(2, 1), dims=(2, 3), grad=True)

    def function(q, k, v):
        out, lse = reference.attention(q, k, v, *offsets, **rule)
        return out, lse.masked_fill(lse == -INF, 0)

    assert torch.autograd.gradcheck(function, (q, k, v), fast_mode=True)


@pytest.mark.parametrize("packed", [False, True], ids=["broadcast", "packed"])
@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("with_lse", [False, True], ids=["out", "out and lse"])
def test_written_out_gradients_are_those_of_autograd(packed, rule, with_lse):
    q, k, v, *offsets = inputs(packed, grad=True)
    out, lse = reference.attention(q, k, v, *offsets, **rule)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse) if with_lse else None
    loss = (out * dout).sum()
    if with_lse:
        loss = loss + (lse.masked_fill(lse == -INF, 0) * dlse).sum()
    expected = torch.autograd.grad(loss, (q, k, v))
    with torch.no_grad():
        actual = reference.attention_backward(dout, dlse, q, k, v, *offsets, **rule)
    for a, b in zip(actual, expected):
        same(a, b)


def loss_of_everything(out, lse):
    return out.sum() + lse.sum()


@pytest.mark.parametrize("packed", [False, True], ids=["broadcast", "packed"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_blind_rows_give_no_nan(packed, causal, dtype):
    """Not in the results and not in the gradients, although lse = -inf is part of the loss."""
    q, k, v, *offsets = inputs(packed, dtype=dtype, grad=True)
    out, lse = reference.attention(q, k, v, *offsets, causal=causal)
    assert (lse == -INF).any() and not lse.isnan().any() and out.isfinite().all()
    with torch.autograd.detect_anomaly(check_nan=True):  # nor anywhere on the way
        out, lse = reference.attention(q, k, v, *offsets, causal=causal)
        for grad in torch.autograd.grad(loss_of_everything(out, lse), (q, k, v)):
            assert grad.isfinite().all()


def test_nan_gradients_of_blind_rows_stay_there():
    """A loss like out / out.norm() hands NaN to a row of zeros, which takes part in nothing."""
    q, k, v, *offsets = inputs(False, grad=True)
    out, lse = reference.attention(q, k, v, *offsets, causal=True)
    blind = (lse == -INF).transpose(1, 2)
    dout = torch.ones_like(out).masked_fill(blind[..., None], math.nan)
    by_autograd = torch.autograd.grad(out, (q, k, v), dout)
    written_out = reference.attention_backward(dout, None, q, k, v, *offsets, causal=True)
    zeroed = reference.attention_backward(dout.nan_to_num(0), None, q, k, v, *offsets, causal=True)
    for a, b, c in zip(by_autograd, written_out, zeroed):
        same(a, c)
        same(b, c)


@pytest.mark.parametrize("packed", [False, True], ids=["broadcast", "packed"])
def test_slack_rows(packed):
    """Rows past the last offset: never read, gradients 0; with packed Q out 0 and lse -inf."""
    q, k, v, *offsets = inputs(packed)
    k[-2:], v[-2:] = math.nan, math.nan
    if packed:
        q[-2:] = math.nan
    for x in (q, k, v):
        x.requires_grad_()
    out, lse = reference.attention(q, k, v, *offsets)
    assert out.isfinite().all()
    if packed:
        assert torch.equal(out[-2:], torch.zeros_like(out[-2:])) and (lse[:, -2:] == -INF).all()
    for grad in torch.autograd.grad(out.sum(), (q, k, v))[0 if packed else 1 :]:
        assert torch.equal(grad[-2:], torch.zeros_like(grad[-2:])) and grad.isfinite().all()


@pytest.mark.parametrize("packed", [False, True], ids=["broadcast", "packed"])
@pytest.mark.parametrize("lengths", [[], [0, 0]], ids=["no sequences", "all empty"])
def test_nothing_to_attend_to(packed, lengths):
    """Shapes hold and every input still gets its zero gradient."""
    q, k, v = (torch.randn(s, requires_grad=True) for s in ((4, 2, 3), (5, 1, 3), (5, 1, 6)))
    q_offsets = lengths_to_offsets([2] * len(lengths)) if packed else None
    out, lse = reference.attention(q, k, v, lengths_to_offsets(lengths), q_offsets)
    assert out.shape == ((4, 2, 6) if packed else (len(lengths), 4, 2, 6))
    assert lse.shape == ((2, 4) if packed else (len(lengths), 2, 4))
    assert not out.any() and (lse == -INF).all()
    for x, grad in zip(
        (q, k, v), torch.autograd.grad(loss_of_everything(out, lse), (q, k, v), materialize_grads=True)
    ):
        assert grad.shape == x.shape and not grad.any()


def test_dense_is_equal_lengths():
    """Three sequences of four rows: PyTorch's own attention gives the same, forward and backward."""
    q, k, v = (torch.randn(12, 6 // n, 8, dtype=torch.float64, requires_grad=True) for n in (1, 3, 3))
    offsets = lengths_to_offsets([4, 4, 4])
    for causal in (False, True):
        out, _ = reference.attention(q, k, v, offsets, offsets, causal=causal)
        dense = [x.unflatten(0, (3, 4)).transpose(1, 2) for x in (q, k, v)]
        expected = torch.nn.functional.scaled_dot_product_attention(*dense, is_causal=causal, enable_gqa=True)
        same(out, expected.transpose(1, 2).flatten(0, 1))
        pairs = zip(*(torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (out, expected)))
        for a, b in pairs:
            same(a, b)


def test_shared_query_is_a_repeated_query():
    """Broadcast-Q is packed Q with q repeated for each sequence; its dq is the sum over the batch."""
    q, k, v, offsets, _ = inputs(False, grad=True)
    out, lse = reference.attention(q, k, v, offsets)
    repeated = q.repeat(len(LENGTHS), 1, 1)
    packed, packed_lse = reference.attention(repeated, k, v, offsets, lengths_to_offsets([3] * len(LENGTHS)))
    same(out.flatten(0, 1), packed)
    same(lse.transpose(0, 1).flatten(1), packed_lse)
    for a, b in zip(*(torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (out, packed))):
        same(a, b)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_arithmetic_and_result_types(dtype):
    """float32 arithmetic and the dtype of q by default; the asked dtype, unrounded, on demand."""
    q, k, v, *offsets = inputs(False, dtype=dtype)
    out, lse = reference.attention(q, k, v, *offsets)
    assert out.dtype == dtype and lse.dtype == torch.float32
    exact, exact_lse = reference.attention(q, k, v, *offsets, dtype=torch.float64)
    assert exact.dtype == exact_lse.dtype == torch.float64
    same(exact, oracle(q, k, v, *offsets)[0])
    same(out, exact)
    grads = reference.attention_backward(torch.ones_like(exact), None, q, k, v, *offsets, dtype=torch.float64)
    assert [grad.dtype for grad in grads] == [torch.float64] * 3


def test_window_table():
    """Windows written out as pictures: the last row is aligned with the last key, both sides are included."""
    pictures = {
        (3, 4, 1, 1): [[1, 1, 1, 0], [0, 1, 1, 1], [0, 0, 1, 1]],
        (3, 4, None, 0): [[1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]],
        (4, 2, None, 0): [[0, 0], [0, 0], [1, 0], [1, 1]],
        (4, 2, 0, None): [[1, 1], [1, 1], [1, 1], [0, 1]],
        (2, 3, None, None): [[1, 1, 1], [1, 1, 1]],
        (2, 3, 0, 0): [[0, 1, 0], [0, 0, 1]],
    }
    for case, picture in pictures.items():
        assert reference.visible_keys(*case).int().tolist() == picture, case


def test_every_kind_of_fault_is_seen_by_the_oracle():
    """The comparison used here tells wrong answers from right ones."""
    q, k, v, *offsets = inputs(False)
    right, lse = oracle(q, k, v, *offsets)
    wrong = [
        right * 0,
        right.roll(1, 0),
        right.roll(1, 1),
        right.roll(1, 2),
        oracle(q, k, v, *offsets, causal=True)[0],
    ]
    for answer in wrong:
        with pytest.raises(AssertionError):
            same(answer, right)
    with pytest.raises(AssertionError):
        same(lse / math.log(2), lse)
    with pytest.raises(AssertionError):
        same(right * math.nan, right)


def test_keys_that_no_row_sees_count_for_nothing():
    q, k, v, kv_offsets, _ = inputs(False, heads=(2, 2), grad=True)
    unseen = torch.arange(5) < 2  # of the first sequence, by rows 2 to 4 of the keys
    wanted, _ = reference.attention(q, k, v, kv_offsets, window=(0, 0))
    with torch.no_grad():
        k[:5][unseen], v[:5][unseen] = math.nan, math.nan
    out, _ = reference.attention(q, k, v, kv_offsets, window=(0, 0))
    assert torch.equal(out, wanted)
    mine = reference.attention_backward(torch.ones_like(out), None, q, k, v, kv_offsets, window=(0, 0))
    for grad, written in zip(torch.autograd.grad(out.sum(), (q, k, v)), mine, strict=True):
        assert grad.isfinite().all()
        torch.testing.assert_close(grad, written)


def test_results_own_their_storage_alone():
    q, k, v, kv_offsets, _ = inputs(False, grad=True)
    out, lse = reference.attention(q, k, v, kv_offsets)
    assert out.untyped_storage().nbytes() == out.numel() * out.element_size()
    assert lse.untyped_storage().nbytes() == lse.numel() * lse.element_size()
