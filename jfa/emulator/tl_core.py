"""Program ids, block creation, selection and simple arithmetic of the emulated triton.language.

Parameter names are those of triton.language, so that keyword arguments work; hints for the compiler are
accepted and have no effect.
"""

import builtins
import enum

import numpy as np

from . import dtypes as D
from .context import CTX
from .tile import Tensor, as_tensor
from .tile_arith import operands
from .tile_typing import KernelTypeError, check_power_of_two, shape_of

__all__ = [  # fmt: skip
    "PropagateNan",
    "add",
    "arange",
    "cast",
    "cdiv",
    "clamp",
    "const",
    "constexpr",
    "full",
    "map_elementwise",
    "maximum",
    "minimum",
    "mul",
    "num_programs",
    "program_id",
    "sub",
    "swizzle2d",
    "to_tensor",
    "where",
    "zeros",
    "zeros_like",
]

SELECT_BITS_FROM = 1024


class PropagateNan(enum.Enum):
    """Whether minimum and maximum give NaN when one operand is NaN (ALL) or the other operand (NONE)."""

    NONE = 0
    ALL = 0xFFFF


class constexpr:
    """A compile-time constant is a plain Python value in the emulator; tl.constexpr(v) gives v back."""

    def __new__(cls, value=None):
        return value


class const:
    """Annotation of a pointer that is only read."""


# -- the grid
def program_id(axis):
    return Tensor(np.int32(CTX.machine.cur.cta.pid[_axis(axis)]), D.int32)


def num_programs(axis):
    return Tensor(np.int32(CTX.machine.grid[_axis(axis)]), D.int32)


def _axis(axis):
    axis = int(axis)
    if axis not in (0, 1, 2):
        raise KernelTypeError(f"axis of the grid must be 0, 1 or 2, got {axis}")
    return axis


# -- creation
def arange(start, end):
    if isinstance(start, Tensor) or isinstance(end, Tensor):
        raise KernelTypeError("arange's arguments must be tl.constexpr")
    if end <= start:
        raise KernelTypeError(f"arange({start}, {end}) is empty")
    check_power_of_two([end - start])
    return Tensor(np.arange(start, end, dtype=np.int32), D.int32)


def full(shape, value, dtype):
    shape = shape_of((shape,))
    check_power_of_two(shape)
    scalar = as_tensor(value, dtype).to(dtype).d
    return Tensor(np.full(shape, scalar, dtype.payload), dtype)


def zeros(shape, dtype):
    shape = shape_of((shape,))
    check_power_of_two(shape)
    return Tensor(np.zeros(shape, dtype.payload), dtype)


def zeros_like(input):
    return zeros(input.shape, input.dtype)


def to_tensor(x):
    return as_tensor(x)


def cast(input, dtype, fp_downcast_rounding=None, bitcast=False):
    return as_tensor(input).to(dtype, fp_downcast_rounding, bitcast)


# -- selection
def where(condition, x, y):
    c = as_tensor(condition).d
    if c.dtype != np.bool_:
        c = c != 0
    a, b = isinstance(x, Tensor) and x.ptr is not None, isinstance(y, Tensor) and y.ptr is not None
    if a or b:
        return _where_pointer(c, x, y)
    p, q, dtype = operands(x, y)
    r = _select(c, p, q, dtype)
    if r.size > 1:
        CTX.count("select", r.size)
    return Tensor(r, dtype)


def _where_pointer(c, x, y):
    if not (isinstance(x, Tensor) and isinstance(y, Tensor)) or x.dtype != y.dtype:
        raise KernelTypeError("where of a pointer and something else")
    if c.ndim == 0 and not (x.shape or y.shape):
        return x if c else y
    if x.ptr.root is not y.ptr.root:
        raise KernelTypeError("where over a block of pointers into two different tensors is not emulated")
    return x.like(np.where(c, x.d, y.d))


def _select(c, p, q, dtype):
    if c.size < SELECT_BITS_FROM or dtype.payload.itemsize != 4:
        return np.where(c, p, q).astype(dtype.payload, copy=False)[()]
    keep = c.view(np.int8).astype(np.int32)
    np.negative(keep, out=keep)
    r = p.view(np.int32) & keep
    r |= q.view(np.int32) & ~keep
    return r.view(dtype.payload)


def _extreme(x, y, propagate_nan, quiet, loud):
    p, q, dtype = operands(x, y)
    fn = loud if getattr(propagate_nan, "name", None) == "ALL" else quiet
    r = fn(p, q)
    if r.size > 1:
        CTX.count("max", r.size)
    return Tensor(r, dtype)


def maximum(x, y, propagate_nan=PropagateNan.NONE):
    return _extreme(x, y, propagate_nan, np.fmax, np.maximum)


def minimum(x, y, propagate_nan=PropagateNan.NONE):
    return _extreme(x, y, propagate_nan, np.fmin, np.minimum)


def clamp(x, min, max, propagate_nan=PropagateNan.NONE):
    if as_tensor(x).dtype.kind != "f":
        raise KernelTypeError("clamp is for floating point only")
    return minimum(maximum(x, min, propagate_nan), max, propagate_nan)


def add(x, y, sanitize_overflow=True):
    return as_tensor(x) + y


def sub(x, y, sanitize_overflow=True):
    return as_tensor(x) - y


def mul(x, y, sanitize_overflow=True):
    return as_tensor(x) * y


def cdiv(x, div):
    if isinstance(x, Tensor) or isinstance(div, Tensor):
        return (x + (div - 1)) // div
    return -(-x // div)


def swizzle2d(i, j, size_i, size_j, size_g):
    """Row-major position (i, j) -> position when groups of size_g rows are walked column by column."""
    linear = i * size_j + j
    per_group = size_g * size_j
    first = linear // per_group * size_g
    rows = minimum(size_i - first, size_g)
    rest = linear % per_group
    return first + rest % rows, rest // rows


def map_elementwise(scalar_fn, *args, pack=1):
    """scalar_fn for every element; it is run on whole blocks unless it branches on values."""
    blocks = [as_tensor(a) for a in args]
    arrays = np.broadcast_arrays(*[b.d for b in blocks])
    blocks = [b.like(a) for b, a in zip(blocks, arrays)]
    if pack == 1:
        try:
            return scalar_fn(*blocks)
        except KernelTypeError:
            if not blocks[0].shape:
                raise
    return _map_one_by_one(scalar_fn, blocks, pack)


def _map_one_by_one(scalar_fn, blocks, pack):
    shape = blocks[0].shape
    flat = [b.d.reshape(-1) for b in blocks]
    groups = []
    for first in builtins.range(0, flat[0].size, pack):
        lanes = [b.like(f[first + k]) for b, f in zip(blocks, flat) for k in builtins.range(pack)]
        result = scalar_fn(*lanes)
        groups.append(result if isinstance(result, tuple) else (result,))
    outputs = []
    for first in builtins.range(0, len(groups[0]), pack):
        values = [as_tensor(group[first + k]) for group in groups for k in builtins.range(pack)]
        outputs.append(
            values[0].like(np.array([v.d for v in values], values[0].dtype.payload).reshape(shape))
        )
    return tuple(outputs) if len(outputs) > 1 else outputs[0]
