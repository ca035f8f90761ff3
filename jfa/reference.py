"""The definition of jagged attention in plain PyTorch: one sequence at a time, every rule in the open.

Nothing here is fast. Every kernel of the course must agree with it.
"""

import torch


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kv_offsets: torch.Tensor,
    q_offsets: torch.Tensor | None = None,
    *,
    scale: float | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] = (None, None),
    dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of each sequence on its own rows alone, as (out, lse), differentiable by autograd.

    Broadcast-Q (no ``q_offsets``): q (M, Hq, D) meets every sequence, out (B, M, Hq, Dv), lse (B, Hq, M).
    Packed Q: q (Tq, Hq, D), out (Tq, Hq, Dv), lse (Hq, Tq). k (T, Hkv, D) and v (T, Hkv, Dv) are packed;
    offsets (B + 1,) are int32 or int64. ``scale`` defaults to D ** -0.5; lse is the natural logarithm.

    ``dtype``: compute in it and return out and lse in it, torch.float64 for the most exact answer. Without it
    the arithmetic is float32 (float64 for float64 inputs), out has the dtype of q, and lse that of the
    arithmetic.
    """
    call = _Call(q, k, kv_offsets, q_offsets, scale, causal, window, dtype)
    results = []
    for rows, keys in call.sequences:
        out, lse, _ = one_sequence(call.cast(q[rows]), call.cast(k[keys]), call.cast(v[keys]), *call.rule)
        results.append((out if dtype else out.to(q.dtype), lse))
    outs, lses = zip(*results, strict=True)
    if q_offsets is None:  # copied, because a slice would keep the last sequence's storage
        return torch.stack(outs)[: call.batch].clone(), torch.stack(lses)[: call.batch].clone()
    return torch.cat(outs), torch.cat(lses, dim=1)


def one_sequence(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, left: int | None, right: int | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Attention of q (M, Hq, D) on one sequence k (N, Hkv, D), v (N, Hkv, Dv): out, lse and the weights.

    out is (M, Hq, Dv), lse (Hq, M), the weights (Hq, M, N). A row that sees no key gives out 0, lse -inf and
    no gradient.
    """
    group = q.shape[1] // k.shape[1]  # consecutive query heads share one key/value head
    visible = visible_keys(q.shape[0], k.shape[0], left, right, q.device)
    k, v = (_seen(x, visible).repeat_interleave(group, dim=1) for x in (k, v))
    blind = ~visible.any(dim=1)  # rows that see no key at all

    scores = torch.einsum("mhd,nhd->hmn", q, k) * scale
    # Blind rows keep finite scores, or softmax would compute inf - inf; their results are replaced below.
    scores = scores.masked_fill(~visible & ~blind[:, None], -torch.inf)
    weights = torch.softmax(scores, dim=2).masked_fill(~visible, 0)
    lse = torch.logsumexp(scores, dim=2).masked_fill(blind, -torch.inf)
    out = torch.einsum("hmn,nhd->mhd", weights, v).masked_fill(blind[:, None, None], 0)
    return out, lse, weights


def _seen(keys: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """Keys or values with 0 where no row sees them: they count for nothing, even NaN."""
    return keys.masked_fill(~visible.any(dim=0)[:, None, None], 0)


def visible_keys(
    query_len: int, kv_len: int, left: int | None, right: int | None, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """Which key each query row may see, as a boolean (query_len, kv_len).

    The last row is aligned with the last key (bottom right). A row aligned with key i sees keys i - left to
    i + right, both included; None is no limit on that side. Causal is right = 0.
    """
    aligned = torch.arange(query_len, device=device)[:, None] + (kv_len - query_len)
    keys = torch.arange(kv_len, device=device)[None, :]
    visible = torch.ones(query_len, kv_len, dtype=torch.bool, device=device)
    if left is not None:
        visible &= keys >= aligned - left
    if right is not None:
        visible &= keys <= aligned + right
    return visible


def attention_backward(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kv_offsets: torch.Tensor,
    q_offsets: torch.Tensor | None = None,
    *,
    scale: float | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] = (None, None),
    dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients (dq, dk, dv) of ``attention``, written out, as a kernel computes them.

    ``dout`` and ``dlse`` have the shapes of out and lse; ``dlse`` may be None. With broadcast-Q dq is the
    sum over the batch, taken in the dtype of the arithmetic. The results have the shapes of q, k and v;
    dtypes are as in ``attention``. Rows of k and v that belong to no sequence get 0.
    """
    call = _Call(q, k, kv_offsets, q_offsets, scale, causal, window, dtype)
    dq, dk, dv = (torch.zeros(x.shape, dtype=call.dtype, device=x.device) for x in (q, k, v))
    for b, (rows, keys) in enumerate(call.sequences[: call.batch]):
        dout_b = call.cast(dout[b] if q_offsets is None else dout[rows])
        dlse_b = None if dlse is None else call.cast(dlse[b] if q_offsets is None else dlse[:, rows])
        inputs = call.cast(q[rows]), call.cast(k[keys]), call.cast(v[keys])
        dq_b, dk_b, dv_b = one_sequence_backward(dout_b, dlse_b, *inputs, *call.rule)
        dq[rows] += dq_b
        dk[keys] += dk_b
        dv[keys] += dv_b
    return (dq, dk, dv) if dtype else (dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype))


def one_sequence_backward(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    left: int | None,
    right: int | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients (dq, dk, dv) of ``one_sequence``: P from the scores, dV, dP, dS, then dQ and dK."""
    heads_kv = k.shape[1]
    group = q.shape[1] // heads_kv
    visible = visible_keys(q.shape[0], k.shape[0], left, right, q.device)
    dout = dout.masked_fill(~visible.any(dim=1)[:, None, None], 0)  # blind rows take part in nothing
    out, _, weights = one_sequence(q, k, v, scale, left, right)

    delta = (dout * out).sum(dim=2).T  # (Hq, M)
    if dlse is not None:
        delta = delta - dlse
    k, v = (_seen(x, visible).repeat_interleave(group, dim=1) for x in (k, v))
    dweights = torch.einsum("mhd,nhd->hmn", dout, v)
    dscores = (weights * (dweights - delta[:, :, None])).masked_fill(~visible, 0) * scale
    dq = torch.einsum("hmn,nhd->mhd", dscores, k)
    dk = torch.einsum("hmn,mhd->nhd", dscores, q)
    dv = torch.einsum("hmn,mhd->nhd", weights, dout)
    dk, dv = (x.unflatten(1, (heads_kv, group)).sum(dim=2) for x in (dk, dv))  # a group shares its head
    return dq, dk, dv


class _Call:
    """What both directions need of one call: which rows meet which keys, the mask, and the arithmetic."""

    def __init__(self, q, k, kv_offsets, q_offsets, scale, causal, window, dtype):
        self.dtype = dtype or (torch.float64 if q.dtype == torch.float64 else torch.float32)
        left, right = (None if side is not None and side < 0 else side for side in window)
        if causal:
            right = 0 if right is None else min(right, 0)
        self.rule = (q.shape[2] ** -0.5 if scale is None else scale, left, right)
        kv_ends = kv_offsets.tolist()
        keys = [slice(start, stop) for start, stop in zip(kv_ends, kv_ends[1:], strict=False)]
        self.batch = len(keys)
        rows = [slice(0, q.shape[0])] * self.batch
        slack = slice(0, q.shape[0])
        if q_offsets is not None:
            q_ends = q_offsets.tolist()
            rows = [slice(start, stop) for start, stop in zip(q_ends, q_ends[1:], strict=False)]
            slack = slice(q_ends[-1], q.shape[0])
        # One more sequence without keys: with packed Q it gives the rows past q_offsets[-1] their 0 and
        # -inf, and with broadcast-Q it is cut off again, so that even a batch of none stays connected to
        # its inputs.
        self.sequences = [*zip(rows, keys, strict=True), (slack, slice(0, 0))]

    def cast(self, tensor):
        return tensor.to(self.dtype)
