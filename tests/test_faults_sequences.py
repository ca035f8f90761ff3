"""Faults of kinds K1 (empty sequences), K2 (slots nobody writes) and K3 (masks); index in tests/faults.md."""

import math

import pytest
import torch
from probes import TARGETS, exact_gradients, index_probe, need, oracle, poison, same

INF = math.inf
LN2, LN3 = math.log(2), math.log(3)


@pytest.fixture(params=TARGETS)
def target(request):
    return need(request.param)


# ------------------------------------------------------------------------------------------------------- K1


@pytest.mark.parametrize("dim", [4, 64, 128, 256])
def test_01_empty_sequences_between_others(target, dim):
    """flash-attention #2562: illegal access or a hang when some sequences have no key."""
    q, k, v, offsets = index_probe(target, [0, 3, 0, 2, 0], rows=1, dim=dim)
    out, lse = target.attention(q, k, v, offsets, return_lse=True)
    same(out[:, 0, 0, 0], [0, 2, 0, 1.5, 0])
    same(lse[:, 0, 0], [-INF, LN3, -INF, LN2, -INF])
    out.sum().backward()
    same(v.grad[:, 0, 0], [1 / 3, 1 / 3, 1 / 3, 0.5, 0.5])
    same(q.grad, torch.zeros(1, 1, dim))
    assert k.grad.isfinite().all()


def test_02_one_row_queries(target):
    """flash-attention #1537: the fast path for one-row queries died on an empty sequence."""
    q, k, v = target.seeds((2, 9, 64), (8, 3, 64), (8, 3, 64), grad=True)
    kv_offsets, q_offsets = target.offsets([3, 0, 5]), target.offsets([1, 0, 1])
    out, lse = target.attention(q, k, v, kv_offsets, q_offsets, return_lse=True)
    expected = oracle(q, k, v, kv_offsets, q_offsets)
    same(out, expected[0])
    same(lse, expected[1])
    shared, lse = target.attention(q[:1], k, v, kv_offsets, return_lse=True)
    expected = oracle(q[:1], k, v, kv_offsets)
    same(shared, expected[0])
    same(lse, expected[1])
    assert torch.equal(shared[1], torch.zeros_like(shared[1]))


def test_03_fewer_rows_than_sequences(target):
    """flash-attention #1619: fewer rows in total than sequences, with grouped heads and D = 120."""
    q, k, v = target.seeds((1, 21, 120), (1, 7, 120), (1, 7, 120))
    out, lse = target.attention(q, k, v, target.offsets([0, 0, 0, 1]), return_lse=True)
    same(out[3, 0], v[0].repeat_interleave(3, dim=0))
    scores = (q[0].double() * k[0].double().repeat_interleave(3, dim=0)).sum(1) * 120**-0.5
    same(lse[3, :, 0], scores)
    assert torch.equal(out[:3], torch.zeros_like(out[:3]))
    assert (lse[:3] == -INF).all()


def test_04_keys_that_no_query_sees(target):
    """flash-attention #1713: a sequence with keys and no query gets dk and dv of exactly 0."""
    q, k, v = target.seeds((6, 2, 16), (8, 2, 16), (8, 2, 16), grad=True)
    offsets = target.offsets([2, 4, 2]), target.offsets([3, 0, 3])
    out = target.attention(q, k, v, *offsets)
    (out * out).sum().backward()
    assert torch.equal(k.grad[2:6], torch.zeros_like(k[2:6]))
    assert torch.equal(v.grad[2:6], torch.zeros_like(v[2:6]))
    dq, dk, dv = exact_gradients(lambda out, lse: (out * out).sum(), q, k, v, *offsets)
    for actual, expected in zip((q.grad, k.grad, v.grad), (dq, dk, dv), strict=True):
        same(actual, expected)


@pytest.mark.parametrize(
    "rows, lengths, q_lengths",
    [
        (3, [0, 0, 0], None),
        (3, [], None),
        (0, [2, 1], None),
        (0, [2, 1], [0, 0]),
        (5, [0, 0], [3, 2]),
        (4, [], []),
    ],
    ids=[
        "no keys",
        "no sequences",
        "no rows",
        "no packed rows",
        "packed without keys",
        "packed no sequences",
    ],
)
def test_05_nothing_to_do(target, rows, lengths, q_lengths):
    """FBGEMM #1187, #998, #6281: all lengths 0, B = 0 or no rows: right shapes, zeros, and no empty grid."""
    q, k, v = target.seeds((rows, 4, 16), (sum(lengths), 2, 16), (sum(lengths), 2, 32), grad=True)
    q_offsets = None if q_lengths is None else target.offsets(q_lengths)
    out, lse = target.attention(q, k, v, target.offsets(lengths), q_offsets, return_lse=True)
    packed = q_lengths is not None
    assert out.shape == ((rows, 4, 32) if packed else (len(lengths), rows, 4, 32))
    assert lse.shape == ((4, rows) if packed else (len(lengths), 4, rows))
    assert torch.equal(out, torch.zeros_like(out))
    assert (lse == -INF).all()
    out.sum().backward()
    for x in (q, k, v):
        assert torch.equal(x.grad, torch.zeros_like(x))


def test_06_padding_samples(target):
    """pytorch #81077: seven empty samples beside a real one change neither its loss nor its gradients."""
    lengths = [0, 0, 0, 5, 0, 0, 0, 0]
    q, k, v = target.seeds((3, 2, 16), (5, 1, 16), (5, 1, 16), grad=True)
    grads = []
    for offsets in (target.offsets(lengths), target.offsets([5])):
        loss = target.attention(q, k, v, offsets).square().sum()
        grads.append((loss, *torch.autograd.grad(loss, (q, k, v))))
    for padded, alone in zip(*grads, strict=True):
        same(padded, alone, 1e-6)


def test_07_long_queries_one_key_causal(target):
    """flash-attention #443: NaN in dq for long queries over one key each, causal."""
    q_lengths = [76, 34, 146]
    q, k, v = target.seeds((256, 1, 32), (3, 1, 32), (3, 1, 32), dtype=torch.float16, grad=True)
    offsets = target.offsets([1, 1, 1]), target.offsets(q_lengths)
    out, lse = target.attention(q, k, v, *offsets, causal=True, return_lse=True)
    sees = torch.zeros(256, dtype=torch.bool)
    sees[offsets[1][1:].long().cpu() - 1] = True
    same(out[sees], v)
    assert torch.equal(out[~sees], torch.zeros_like(out[~sees]))
    assert (lse[:, ~sees] == -INF).all() and lse[:, sees].isfinite().all()
    (out * torch.arange(32, device=out.device)).sum().backward()
    assert torch.equal(q.grad[~sees], torch.zeros_like(q[~sees]))
    assert all(x.grad.isfinite().all() for x in (q, k, v))


# ------------------------------------------------------------------------------------------------------- K2


@pytest.mark.parametrize("packed", [False, True], ids=["broadcast", "packed"])
def test_08_rows_past_the_last_offset(target, packed):
    """pytorch #176793: rows past the last offset are never read; out 0, lse -inf, gradients exactly 0."""
    q, k, v = target.seeds((7, 2, 16), (7, 2, 16), (7, 2, 16))
    k[5:], v[5:] = torch.nan, torch.nan
    for x in (q, k, v):
        x.requires_grad_()
    offsets = target.offsets([3, 2]), target.offsets([1, 4]) if packed else None
    out, lse = target.attention(q, k, v, *offsets, return_lse=True)
    expected = oracle(q, k, v, *offsets)
    same(out, expected[0])
    same(lse, expected[1])
    if packed:
        assert torch.equal(out[5:], torch.zeros_like(out[5:]))
        assert (lse[:, 5:] == -INF).all()
    out.square().sum().backward()
    assert torch.equal(k.grad[5:], torch.zeros_like(k[5:]))
    assert torch.equal(v.grad[5:], torch.zeros_like(v[5:]))
    if packed:
        assert torch.equal(q.grad[5:], torch.zeros_like(q[5:]))
    assert all(x.grad.isfinite().all() for x in (q, k, v))


def test_09_slack_rows_reach_no_weight(target):
    """flash-attention #1228: with T padded to a static size, the gradient of a layer under k stays right."""
    offsets = target.offsets([3, 2])
    weight = target.randn(32, 16, seed=9, grad=True)
    grads = []
    for total in (8, 5):
        q, x, v = target.seeds((3, 2, 16), (8, 16), (8, 2, 16))
        with poison():
            k = (x[:total] @ weight.T).unflatten(1, (2, 16))
            out = target.attention(q, k, v[:total], offsets)
            (grad,) = torch.autograd.grad(out.square().sum(), weight)
        assert grad.isfinite().all()
        grads.append(grad)
    same(*grads, 1e-6)


def test_10_padding_of_lse_and_delta(target):
    """tilelang #2461: unwritten lse and delta of padded tile rows reached dk as 0 * NaN."""
    q, k, v = target.seeds((3, 2, 16), (34, 2, 16), (34, 2, 16), grad=True)
    offsets = target.offsets([33, 1])
    with poison():
        target.attention(q, k, v, offsets).square().sum().backward()
    expected = exact_gradients(lambda out, lse: out.square().sum(), q, k, v, offsets)
    for actual, right in zip((q.grad, k.grad, v.grad), expected, strict=True):
        same(actual, right)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_11_poisoned_memory(target, dtype):
    """xformers #1025: NaN gradients in deterministic mode, which fills fresh memory with NaN."""
    q, k, v = target.seeds((124, 12, 64), (124, 12, 64), (124, 12, 64), dtype=dtype, grad=True)
    offsets = target.offsets([64, 60])
    with poison():
        out, lse = target.attention(q, k, v, offsets, offsets, return_lse=True)
        out.sum().backward()
    assert all(x.isfinite().all() for x in (out, lse, q.grad, k.grad, v.grad))


def test_12_longer_than_the_promised_maximum(target):
    """FBGEMM #5754: a length above max_kv_len is an error, never a truncation."""
    q, k, v = target.seeds((2, 1, 16), (7, 1, 16), (7, 1, 16))
    with pytest.raises(ValueError, match="max_kv_len.*got 4 while sequence 0 of kv_offsets has 5 rows"):
        target.attention(q, k, v, target.offsets([5, 2]), max_kv_len=4, check=True)


# ------------------------------------------------------------------------------------------------------- K3


@pytest.mark.parametrize("rule", [dict(window=(2, 0)), dict(window=(2, None), causal=True)], ids=str)
def test_14_alignment_bottom_right(target, rule):
    """flash-attention #282, #466, #1778, #20: which keys a row sees when their numbers differ."""
    q, k, v, offsets = index_probe(target, [5, 2, 0, 1], rows=3)
    out, lse = target.attention(q, k, v, offsets, return_lse=True, **rule)
    same(out[:, :, 0, 0], [[2, 3, 4], [0, 1, 1.5], [0, 0, 0], [0, 0, 1]])
    same(lse[:, 0], [[LN3, LN3, LN3], [-INF, 0, LN2], [-INF, -INF, -INF], [-INF, -INF, 0]])


def test_15_window_counts_the_own_token_besides(target):
    """transformers #39408: left = 1 is the own token and one before it."""
    q, k, v, offsets = index_probe(target, [4, 1], rows=5)
    out, lse = target.attention(q, k, v, offsets, offsets, window=(1, 0), causal=True, return_lse=True)
    same(out[:, 0, 0], [1, 1.5, 2.5, 3.5, 1])
    same(lse[0], [0, LN2, LN2, LN2, 0])


@pytest.mark.parametrize("window", [(-1, 2**31 - 1), (2**31 - 1, None), (2**62, 2**62)], ids=str)
def test_17_huge_window_is_no_window(target, window):
    """flash-attention #895: a huge right side was clamped before the alignment and dropped keys."""
    q, k, v, offsets = index_probe(target, [4], rows=9)
    out, lse = target.attention(q, k, v, offsets, window=window, return_lse=True)
    same(out[0, :, 0, 0], [2.5] * 9)
    same(lse[0, 0], [math.log(4)] * 9)


def test_19_window_with_more_queries_than_keys(target):
    """flash-attention #2199: rows with no key are 0 and -inf, all others match a dense mask."""
    q, k, v = target.seeds((129, 1, 16), (64, 1, 16), (64, 1, 16), grad=True)
    offsets = target.offsets([64])
    out, lse = target.attention(q, k, v, offsets, window=(32, 64), return_lse=True)
    expected = oracle(q, k, v, offsets, window=(32, 64))
    assert (expected[1] == -INF).any() and expected[1].isfinite().any()
    same(out, expected[0])
    same(lse, expected[1])
    out.square().sum().backward()
    grads = exact_gradients(lambda out, lse: out.square().sum(), q, k, v, offsets, window=(32, 64))
    for actual, right in zip((q.grad, k.grad, v.grad), grads, strict=True):
        same(actual, right)


def test_20_not_causal(target):
    """generative-recommenders #173: without causal every row sees its whole sequence."""
    lengths = [70, 3, 128]
    q, k, v, offsets = index_probe(target, lengths, rows=201)
    out, lse = target.attention(q, k, v, offsets, offsets, return_lse=True)
    same(out[:, 0, 0], [(n + 1) / 2 for n in lengths for _ in range(n)])
    same(lse[0], [math.log(n) for n in lengths for _ in range(n)])


@pytest.mark.parametrize("value", [3.0, math.nan, math.inf])
def test_20_sequences_do_not_mix(target, value):
    """pytorch #177378: whatever sequence 1 holds, the bits of sequence 0 stay, NaN and Inf included."""
    offsets = target.offsets([5, 4, 3])
    results = []
    for fill in (1.0, value):
        q, k, v = target.seeds((12, 2, 16), (12, 2, 16), (12, 2, 16))
        for x in (q, k, v):
            x[5:9] *= fill
            x.requires_grad_()
        out, lse = target.attention(q, k, v, offsets, offsets, return_lse=True)
        grads = torch.autograd.grad(out.sum() + lse.sum(), (q, k, v))
        results.append([*(torch.cat([x[:5], x[9:]]) for x in (out, lse.T, *grads))])
    for before, after in zip(*results, strict=True):
        assert torch.equal(before, after)
