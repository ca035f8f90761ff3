"""Inputs whose right answer is known without running a kernel, and where each test of a fault runs.

``oracle`` is attention in float64 NumPy, written apart from ``jfa.reference`` so that both can be wrong only
separately. The index probe (k = 0, v[t] = t + 1 within each sequence) makes every output the plain mean of
the visible rows' numbers and lse the logarithm of how many there are: a leak, an off-by-one or a wrong head
map becomes an exact wrong number.
"""

import contextlib
import math
import os
from dataclasses import dataclass

import numpy as np
import pytest
import torch

import jfa
from jfa import backends
from jfa.jagged import lengths_to_offsets

# cuBLAS refuses to work in torch's deterministic mode without it.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@dataclass(frozen=True)
class Target:
    """A backend on a device."""

    backend: str
    device: str

    def attention(self, *args, **options):
        return jfa.jagged_flash_attention(*args, backend=self.backend, **options)

    def offsets(self, lengths, dtype=torch.int32):
        return lengths_to_offsets(list(lengths), dtype).to(self.device)

    def randn(self, *shape, dtype=torch.float32, seed=0, grad=False):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).to(self.device)
        return x.requires_grad_(grad)

    def seeds(self, *shape, **options):
        return [self.randn(*s, seed=n, **options) for n, s in enumerate(shape)]


TARGETS = [
    pytest.param(Target("reference", "cpu"), id="reference"),
    pytest.param(Target("triton", "cpu"), id="triton"),
    pytest.param(Target("triton", "cuda"), id="triton-cuda", marks=pytest.mark.gpu),
]


def need(target: Target) -> Target:
    """The target, or a visible skip while its module is not part of the tree."""
    reason = backends.available(target.device)[target.backend]
    if reason is not None:
        pytest.skip(f"{target.backend} on {target.device}: {reason}")
    return target


def index_probe(
    target: Target, lengths, *, rows, heads=1, dim=16, dim_v=None, dtype=torch.float32, grad=True
):
    """(q, k, v, kv_offsets) with k = 0 and v[t] = t + 1 counted within each sequence."""
    dim_v = dim if dim_v is None else dim_v
    total = sum(lengths)
    q = torch.ones(rows, heads, dim, dtype=dtype, device=target.device)
    k = torch.zeros(total, heads, dim, dtype=dtype, device=target.device)
    numbers = torch.cat([torch.arange(1, n + 1) for n in lengths] or [torch.zeros(0)])
    v = numbers.to(dtype).to(target.device)[:, None, None].expand(total, heads, dim_v).contiguous()
    return (*(x.requires_grad_(grad) for x in (q, k, v)), target.offsets(lengths))


def oracle(q, k, v, kv_offsets, q_offsets=None, *, scale=None, causal=False, window=(None, None)):
    """(out, lse) as float64 tensors, row by row and head by head in NumPy."""
    q, k, v = (x.detach().cpu().double().numpy() for x in (q, k, v))
    ends = kv_offsets.tolist()
    scale = q.shape[2] ** -0.5 if scale is None else scale
    left, right = window
    if causal:
        right = 0
    group = q.shape[1] // k.shape[1]
    results = []
    for b in range(len(ends) - 1):
        rows = q if q_offsets is None else q[q_offsets[b] : q_offsets[b + 1]]
        out = np.zeros((rows.shape[0], q.shape[1], v.shape[2]))
        lse = np.full((q.shape[1], rows.shape[0]), -math.inf)
        length = ends[b + 1] - ends[b]
        for i in range(rows.shape[0]):
            place = i + length - rows.shape[0]
            first = 0 if left is None else max(0, place - left)
            last = length if right is None else min(length, place + right + 1)
            if first >= last:
                continue
            keys = slice(ends[b] + first, ends[b] + last)
            for head in range(q.shape[1]):
                scores = k[keys, head // group] @ rows[i, head] * scale
                weights = np.exp(scores - scores.max())
                out[i, head] = weights @ v[keys, head // group] / weights.sum()
                lse[head, i] = scores.max() + math.log(weights.sum())
        results.append((out, lse))
    if q_offsets is None:
        outs = np.zeros((0, q.shape[0], q.shape[1], v.shape[2]))
        lses = np.zeros((0, q.shape[1], q.shape[0]))
        if results:
            outs, lses = np.stack([r[0] for r in results]), np.stack([r[1] for r in results])
    else:
        slack = q.shape[0] - int(q_offsets[-1])
        outs = np.concatenate([r[0] for r in results] + [np.zeros((slack, q.shape[1], v.shape[2]))])
        lses = np.concatenate([r[1] for r in results] + [np.full((q.shape[1], slack), -math.inf)], axis=1)
    return torch.from_numpy(outs), torch.from_numpy(lses)


def exact_gradients(loss, q, k, v, *args, **options):
    """Gradients of ``loss(out, lse)`` by autograd through the definition in float64."""
    q, k, v = (x.detach().cpu().double().requires_grad_() for x in (q, k, v))
    args = [x if x is None else x.cpu() for x in args]
    return torch.autograd.grad(
        loss(*jfa.reference.attention(q, k, v, *args, **options)), (q, k, v), materialize_grads=True
    )


TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2, torch.float64: 1e-10}


def same(actual, expected, tolerance=None):
    """Assert equality within the dtype's rounding, NaN never, infinities at the same places."""
    if not isinstance(expected, torch.Tensor):
        expected = torch.tensor(expected, dtype=torch.float64)
    tolerance = TOLERANCE[actual.dtype] if tolerance is None else tolerance
    actual = actual.detach().cpu().double()
    torch.testing.assert_close(
        actual, expected.detach().cpu().double(), rtol=tolerance, atol=tolerance, equal_nan=False
    )


@contextlib.contextmanager
def poison():
    """Deterministic mode, in which torch fills fresh tensors with NaN: a row that nobody writes shows."""
    fill = torch.utils.deterministic.fill_uninitialized_memory
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        torch.utils.deterministic.fill_uninitialized_memory = fill
