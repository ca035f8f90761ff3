"""The answers of one call: in any precision, one sequence at a time, and wrong on purpose."""

import functools
import math
from dataclasses import dataclass

import torch

from jfa import reference


@dataclass(frozen=True)
class Inputs:
    """One call and the gradients that come back to it; shapes as in ``jfa.jagged_flash_attention``."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    kv_offsets: torch.Tensor
    q_offsets: torch.Tensor | None
    scale: float | None
    causal: bool
    window: tuple[int | None, int | None]
    dout: torch.Tensor | None
    dlse: torch.Tensor | None

    @functools.cached_property
    def keys(self):
        """Key rows of every sequence, as slices."""
        ends = self.kv_offsets.tolist()
        return [slice(start, stop) for start, stop in zip(ends, ends[1:])]

    @functools.cached_property
    def rows(self):
        """Query rows of every sequence, as slices."""
        if self.q_offsets is None:
            return [slice(0, self.q.shape[0])] * len(self.keys)
        ends = self.q_offsets.tolist()
        return [slice(start, stop) for start, stop in zip(ends, ends[1:])]

    @property
    def rule(self):
        """Keyword arguments that the reference takes for scale and mask."""
        return {"scale": self.scale, "causal": self.causal, "window": self.window}

    def visible(self, b, keys):
        """Boolean (rows, keys) mask of sequence b over ``keys`` key rows."""
        left, right = (None if side is None or side < 0 else side for side in self.window)
        count = self.rows[b].stop - self.rows[b].start
        return reference.visible_keys(count, keys, left, 0 if self.causal else right, self.q.device)

    def part(self, quantity, b):
        """Index of sequence b in a result, or None where the sequences share it."""
        if quantity in ("dk", "dv"):
            return self.keys[b]
        if self.q_offsets is None:
            return None if quantity == "dq" else b
        return (slice(None), self.rows[b]) if quantity == "lse" else self.rows[b]


def _wide(x):
    return x if x.dtype == torch.float64 else x.float()


def _forward(q, k, v, visible, scale):
    """The definition with any mask in the dtype of its inputs: scores, out, and lse in float32 or better."""
    group = q.shape[1] // k.shape[1]
    blind = ~visible.any(dim=1)
    scores = torch.einsum("mhd,nhd->hmn", q, k.repeat_interleave(group, dim=1)) * scale
    scores = scores.masked_fill(~visible & ~blind[:, None], -math.inf)
    weights = torch.softmax(scores, dim=2).masked_fill(~visible, 0)
    lse = torch.logsumexp(_wide(scores), dim=2).masked_fill(blind, -math.inf)
    out = torch.einsum("hmn,nhd->mhd", weights, v.repeat_interleave(group, dim=1))
    return scores, out.masked_fill(blind[:, None, None], 0), lse


def _backward(q, k, v, visible, scale, scores, out, lse, dout, dlse):
    """dq, dk, dv as every flash kernel forms them: weights from scores and lse, delta from out.

    Products are in the dtype of the inputs, statistics and sums over a group of heads in float32 or better.
    """
    heads, group = k.shape[1], q.shape[1] // k.shape[1]
    weights = torch.exp(_wide(scores) - lse.masked_fill(torch.isinf(lse), 0)[:, :, None])
    weights = weights.masked_fill(~visible, 0)
    delta = (_wide(dout) * _wide(out)).sum(dim=2).T
    if dlse is not None:
        delta = delta - dlse
    dweights = torch.einsum("mhd,nhd->hmn", dout, v.repeat_interleave(group, dim=1))
    dscores = (weights * (_wide(dweights) - delta[:, :, None])).masked_fill(~visible, 0).to(q.dtype)
    dq = torch.einsum("hmn,nhd->mhd", dscores, k.repeat_interleave(group, dim=1))
    dk = torch.einsum("hmn,mhd->nhd", dscores, q)
    dv = torch.einsum("hmn,mhd->nhd", weights.to(q.dtype), dout)
    dk, dv = (_wide(x).unflatten(1, (heads, group)).sum(dim=2) for x in (dk, dv))
    return _wide(dq) * scale, dk * scale, dv


def compute(inputs, dtype, change=None, order=None):
    """Results of every quantity in ``dtype``, one sequence at a time, summed over sequences in float32.

    ``change(visible, v)`` alters the mask and values of a sequence, ``order`` says whose keys sequence b
    uses: with either the answer is wrong on purpose. float64 is summed in float64.
    """
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    q, k, v = inputs.q, inputs.k, inputs.v
    scale = q.shape[2] ** -0.5 if inputs.scale is None else inputs.scale
    out_shape, lse_shape = (q.shape[0], q.shape[1], v.shape[2]), (q.shape[1], q.shape[0])
    if inputs.q_offsets is None:
        out_shape, lse_shape = (len(inputs.keys), *out_shape), (len(inputs.keys), *lse_shape)
    found = {"out": q.new_zeros(out_shape, dtype=dtype), "lse": q.new_full(lse_shape, -math.inf, dtype=wide)}
    if inputs.dout is not None:
        found |= {name: torch.zeros_like(x, dtype=wide) for name, x in (("dq", q), ("dk", k), ("dv", v))}
    for b, rows in enumerate(inputs.rows):
        keys = inputs.keys[b if order is None else order[b]]
        if keys.stop == keys.start or rows.stop == rows.start:
            continue
        q_b, k_b, v_b = (x.to(dtype) for x in (q[rows], k[keys], v[keys]))
        visible = inputs.visible(b, keys.stop - keys.start)
        if change is not None:
            visible, v_b = change(visible, v_b)
        scores, out, lse = _forward(q_b, k_b, v_b, visible, scale)
        at, lse_at = inputs.part("out", b), inputs.part("lse", b)
        found["out"][at], found["lse"][lse_at] = out, lse
        if inputs.dout is not None:
            dout = inputs.dout[at].to(dtype)
            dlse = None if inputs.dlse is None else inputs.dlse[lse_at].to(wide)
            grads = _backward(q_b, k_b, v_b, visible, scale, scores, out, lse, dout, dlse)
            for name, where, grad in zip(("dq", "dk", "dv"), (rows, keys, keys), grads):
                found[name][where] += grad
    return {name: x if name == "lse" else x.to(dtype) for name, x in found.items()}


def wrong_answers(inputs, exact, low):
    """Answers that no check may accept, by name, as results in the dtypes of ``low``.

    zeros; shifted diagonal (the mask one key late, or without a mask every value one row late); dropped tail
    (the last key of every sequence unseen); swapped sequences (each uses its neighbour's keys). One that is
    no different from the right answer for these inputs is left out.
    """
    masked = inputs.causal or any(side is not None and side >= 0 for side in inputs.window)

    def shifted(visible, values):
        if masked:
            late = torch.zeros_like(visible)
            late[:, 1:] = visible[:, :-1]
            return late, values
        return visible, values.roll(1, dims=0)

    def dropped(visible, values):
        visible = visible.clone()
        visible[:, -1] = False
        return visible, values

    count = len(inputs.keys)
    answers = {
        "zeros": {name: torch.zeros_like(x) for name, x in exact.items()},
        "shifted diagonal": compute(inputs, torch.float64, shifted),
        "dropped tail": compute(inputs, torch.float64, dropped),
        "swapped sequences": compute(inputs, torch.float64, order=[(b + 1) % count for b in range(count)]),
    }
    differs = {
        name: found
        for name, found in answers.items()
        if any(not torch.allclose(found[x], exact[x], rtol=0, atol=1e-9) for x in exact)
    }
    kinds = {name: x.dtype for name, x in low.items()}
    return {name: {x: found[x].to(kinds[x]) for x in found} for name, found in differs.items()}
