"""Reductions, scans, sorting and histograms.

Promotion follows Triton's standard library: bf16 is reduced in float32; max and min also widen other narrow
types, sum widens narrow integers. The order of a floating point sum on the GPU depends on the layout; here it
is numpy's.
"""

import numpy as np

from . import dtypes as D
from .context import CTX
from .tile import Tensor, as_tensor
from .tile_typing import KernelTypeError

__all__ = [  # fmt: skip
    "ReductionOrdering",
    "argmax",
    "argmin",
    "associative_scan",
    "bitonic_merge",
    "cumprod",
    "cumsum",
    "histogram",
    "max",
    "min",
    "reduce",
    "reduce_or",
    "sort",
    "sum",
    "topk",
    "xor_sum",
]


class ReductionOrdering:
    """A name for the order of a reduction; results here do not depend on it."""

    def __init__(self, name):
        self.name = name


def _widened(x, all_narrow):
    x = as_tensor(x)
    dtype = x.dtype
    if dtype is D.bfloat16:
        return x.to(D.float32)
    if all_narrow and dtype.bits < 32:
        return x.to(D.float32 if dtype.kind == "f" else D.int32)
    return x


def _sum_type(dtype, wanted):
    if wanted is not None:
        return wanted
    if dtype.kind in "iub" and dtype.bits < 32:
        return D.int32 if dtype.kind == "i" else D.uint32
    return dtype


def _check_axis(x, axis):
    if axis is not None and not -len(x.shape) <= axis < len(x.shape):
        raise KernelTypeError(f"axis {axis} of a block of shape {list(x.shape)}")


def _extreme(x, axis, keep_dims, fn):
    _check_axis(x, axis)
    CTX.count("reduce", x.d.size)
    return Tensor(fn(x.d, axis=axis, keepdims=keep_dims), x.dtype)


def _extreme_index(x, axis, keep_dims, largest):
    """The first position of the extreme; a NaN never wins against a number."""
    _check_axis(x, axis)
    d = x.d
    if x.dtype.kind == "f":
        d = np.where(np.isnan(d), -np.inf if largest else np.inf, d)
    index = (np.argmax if largest else np.argmin)(d, axis=axis, keepdims=keep_dims)
    return Tensor(np.asarray(index).astype(np.int32)[()], D.int32)


def max(
    input,
    axis=None,
    return_indices=False,
    return_indices_tie_break_left=True,
    keep_dims=False,
    reduction_ordering=None,
):
    if return_indices:
        x = _widened(input, False)
        return _extreme(x, axis, keep_dims, np.fmax.reduce), _extreme_index(x, axis, keep_dims, True)
    return _extreme(_widened(input, True), axis, keep_dims, np.fmax.reduce)


def min(
    input,
    axis=None,
    return_indices=False,
    return_indices_tie_break_left=True,
    keep_dims=False,
    reduction_ordering=None,
):
    if return_indices:
        x = _widened(input, False)
        return _extreme(x, axis, keep_dims, np.fmin.reduce), _extreme_index(x, axis, keep_dims, False)
    return _extreme(_widened(input, True), axis, keep_dims, np.fmin.reduce)


def argmax(input, axis, tie_break_left=True, keep_dims=False, reduction_ordering=None):
    return _extreme_index(_widened(input, False), axis, keep_dims, True)


def argmin(input, axis, tie_break_left=True, keep_dims=False, reduction_ordering=None):
    return _extreme_index(_widened(input, False), axis, keep_dims, False)


def sum(input, axis=None, keep_dims=False, dtype=None, reduction_ordering=None):
    x = as_tensor(input)
    x = _widened(x.to(_sum_type(x.dtype, dtype)), False)
    _check_axis(x, axis)
    if x.dtype.narrow_float:
        return reduce(x, axis, _plus, keep_dims)
    CTX.count("reduce", x.d.size)
    return Tensor(np.add.reduce(x.d, axis=axis, dtype=x.dtype.payload, keepdims=keep_dims), x.dtype)


def _integer_reduction(fn, what):
    def run(input, axis=None, keep_dims=False):
        x = as_tensor(input)
        if x.dtype.kind == "f":
            raise KernelTypeError(f"{what} is only for integers")
        CTX.count("reduce", x.d.size)
        return Tensor(fn(x.d, axis=axis, keepdims=keep_dims), x.dtype)

    run.__name__ = what
    return run


xor_sum = _integer_reduction(np.bitwise_xor.reduce, "xor_sum")
reduce_or = _integer_reduction(np.bitwise_or.reduce, "reduce_or")


def _plus(a, b):
    return a + b


def _times(a, b):
    return a * b


def _as_tuple(x):
    return (tuple(x), True) if isinstance(x, (tuple, list)) else ((as_tensor(x),), False)


def _combine(combine_fn, left, right):
    """combine_fn on whole blocks, or element by element when it branches on values."""
    try:
        result = combine_fn(*left, *right)
    except KernelTypeError:
        if not left[0].shape:
            raise
        return _combine_one_by_one(combine_fn, left, right)
    return result if isinstance(result, tuple) else (result,)


def _combine_one_by_one(combine_fn, left, right):
    shape = left[0].shape
    both = [t.like(v) for t, v in zip(left + right, np.broadcast_arrays(*[t.d for t in left + right]))]
    columns = [b.d.reshape(-1) for b in both]
    outputs = [np.empty(columns[0].size, t.dtype.payload) for t in left]
    for i in range(columns[0].size):
        result = combine_fn(*[b.like(c[i]) for b, c in zip(both, columns)])
        result = result if isinstance(result, tuple) else (result,)
        for out, value in zip(outputs, result):
            out[i] = as_tensor(value).d
    return tuple(t.like(out.reshape(shape)) for t, out in zip(left, outputs))


def reduce(input, axis, combine_fn, keep_dims=False, reduction_ordering=None):
    """Fold by halves with combine_fn; input may be a tuple of blocks."""
    blocks, is_tuple = _as_tuple(input)
    CTX.count("reduce", blocks[0].d.size)
    rank = len(blocks[0].shape)
    if axis is None:
        blocks = tuple(b.reshape(b.numel) for b in blocks)
    where = 0 if axis is None else axis
    _check_axis(blocks[0], where)
    current = tuple(b.like(np.moveaxis(b.d, where, 0)) for b in blocks)
    while current[0].shape[0] > 1:
        half = current[0].shape[0] // 2
        left = tuple(c.like(c.d[:half]) for c in current)
        right = tuple(c.like(c.d[half:]) for c in current)
        current = tuple(t.to(c.dtype) for t, c in zip(_combine(combine_fn, left, right), current))
    out = []
    for c in current:
        value = c.d[0]
        if keep_dims:
            value = np.expand_dims(value, tuple(range(rank)) if axis is None else axis)
        out.append(c.like(value))
    return tuple(out) if is_tuple else out[0]


def associative_scan(input, axis, combine_fn, reverse=False):
    """Inclusive prefix combination along axis, from the left (from the right with reverse)."""
    blocks, is_tuple = _as_tuple(input)
    _check_axis(blocks[0], axis)
    columns = [np.moveaxis(b.d, axis, 0) for b in blocks]
    if reverse:
        columns = [c[::-1] for c in columns]
    steps = [[c[0]] for c in columns]
    for i in range(1, columns[0].shape[0]):
        left = tuple(b.like(s[-1]) for b, s in zip(blocks, steps))
        right = tuple(b.like(c[i]) for b, c in zip(blocks, columns))
        for step, value, b in zip(steps, _combine(combine_fn, left, right), blocks):
            step.append(value.to(b.dtype).d)
    out = []
    for b, step in zip(blocks, steps):
        stacked = np.stack(step[::-1] if reverse else step)
        out.append(b.like(np.moveaxis(stacked, 0, axis)))
    return tuple(out) if is_tuple else out[0]


def _scan(x, axis, reverse, ufunc, combine_fn):
    _check_axis(x, axis)
    CTX.count("scan", x.d.size)
    if x.dtype.narrow_float:
        return associative_scan(x, axis, combine_fn, reverse)
    d = np.flip(x.d, axis) if reverse else x.d
    r = ufunc.accumulate(d, axis=axis, dtype=x.dtype.payload)
    return Tensor(np.flip(r, axis) if reverse else r, x.dtype)


def cumsum(input, axis=0, reverse=False, dtype=None):
    x = _widened(input, False)
    return _scan(x.to(_sum_type(x.dtype, dtype)), axis, reverse, np.add, _plus)


def cumprod(input, axis=0, reverse=False):
    return _scan(_widened(input, False), axis, reverse, np.multiply, _times)


def _last_dim(x, dim):
    if dim is not None and dim not in (len(x.shape) - 1, -1):
        raise KernelTypeError("only the last dimension can be sorted")


def sort(x, dim=None, descending=False):
    _last_dim(x, dim)
    CTX.count("sort", x.d.size)
    r = np.sort(x.d, axis=-1)
    return x.like(np.ascontiguousarray(r[..., ::-1]) if descending else r)


def topk(x, k, dim=None, descending=True):
    return x.like(sort(x, dim, descending).d[..., : int(k)])


def bitonic_merge(x, dim=None, descending=False):
    """Sort a bitonic sequence."""
    return sort(x, dim, descending)


def histogram(input, num_bins, mask=None):
    """How often each of 0 .. num_bins-1 occurs; other values fall into no bin."""
    if len(input.shape) != 1 or input.dtype.kind == "f":
        raise KernelTypeError("histogram needs a one-dimensional integer block")
    values = input.d.astype(np.int64)
    if mask is not None:
        values = values[np.broadcast_to(as_tensor(mask).d != 0, values.shape)]
    values = values[(values >= 0) & (values < int(num_bins))]
    return Tensor(np.bincount(values, minlength=int(num_bins)).astype(np.int32), D.int32)
