"""Elementwise mathematics of triton.language and tl.math.

Results are those of numpy in the tile's precision; the approximations of the special function unit
(ex2.approx and so on, about 2 units in the last place) and flushing of subnormals are not modelled.
"""

import math as _math

import numpy as np

from . import dtypes as D
from .context import CTX
from .tile import Tensor, as_tensor
from .tile_arith import truediv
from .tile_typing import KernelTypeError


def _wide(x, name):
    x = as_tensor(x)
    if x.dtype.kind != "f" or x.dtype.narrow_float:
        raise KernelTypeError(f"tl.{name} needs fp32 or fp64, got {x.dtype}")
    return x


def apply(name, fn, x):
    """fn on a float32 or float64 tile, counted as work of that name."""
    x = _wide(x, name)
    with np.errstate(all="ignore"):  # a GPU has no warnings: log2(0) is -inf and that is that
        r = fn(x.d)
    if r.size > 1:
        CTX.count(name, r.size)
    if r.dtype != x.dtype.payload:
        r = r.astype(x.dtype.payload)
    return Tensor(r, x.dtype)


def exp(x):
    return apply("exp", np.exp, x)


def exp2(x):
    return apply("exp2", np.exp2, x)


def log(x):
    return apply("log", np.log, x)


def log2(x):
    return apply("log2", np.log2, x)


def sqrt(x):
    return apply("sqrt", np.sqrt, x)


def sqrt_rn(x):
    return apply("sqrt", np.sqrt, x)


def rsqrt(x):
    return apply("rsqrt", lambda v: 1 / np.sqrt(v), x)


def sin(x):
    return apply("sin", np.sin, x)


def cos(x):
    return apply("cos", np.cos, x)


def floor(x):
    return apply("floor", np.floor, x)


def ceil(x):
    return apply("ceil", np.ceil, x)


_erf = np.frompyfunc(_math.erf, 1, 1)


def erf(x):
    return apply("erf", lambda v: np.asarray(_erf(v), np.float64), x)


def abs(x):
    x = as_tensor(x)
    if x.dtype.kind in "ub":
        return x
    if x.d.size > 1:
        CTX.count("abs", x.d.size)
    return Tensor(np.abs(x.d), x.dtype)


def sigmoid(x):
    return 1 / (1 + exp(-as_tensor(x)))


def fma(x, y, z):
    """x * y + z rounded once."""
    x, y, z = (as_tensor(v) for v in (x, y, z))
    dtype = next((t.dtype for t in (x, y, z) if t.shape), x.dtype)
    a, b, c = (v.to(dtype).d for v in (x, y, z))
    if dtype.kind != "f":
        return x * y + z
    if dtype is D.float64:
        return Tensor(a * b + c, dtype)
    r = fma_float32(a, b, c)
    if r.size > 1:
        CTX.count("fma", r.size)
    return Tensor(r, D.float32).to(dtype)


def fma_float32(a, b, c):
    """float32 a * b + c rounded once.

    The product is exact in float64; only where the float64 sum was rounded onto a midpoint of two float32
    values does the second rounding need the error of the first.
    """
    product = a.astype(np.float64) * b
    total = product + c
    middle = (np.atleast_1d(total).view(np.int64) & 0x1FFFFFFF) == 0x10000000
    if middle.any():
        total = _to_odd(product, c, total)
    return total.astype(np.float32)


def _to_odd(product, c, total):
    """The sum with its last bit set wherever it was inexact, so that one more rounding is right."""
    back = total - product
    error = (product - (total - back)) + (c - back)
    raw = np.atleast_1d(total).view(np.int64)
    inexact = np.atleast_1d((error != 0) & np.isfinite(total))
    away = np.atleast_1d((error > 0) == (total > 0))
    step = np.where(inexact & (raw & 1 == 0), np.where(away, 1, -1), 0)
    return (raw + step).view(np.float64).reshape(np.shape(total))[()]


def fdiv(x, y, ieee_rounding=False):
    for v in (x, y):
        if as_tensor(v).dtype.kind != "f":
            raise KernelTypeError("fdiv needs floating point operands")
    return truediv(x, y)


def div_rn(x, y):
    return truediv(as_tensor(x), y)


def umulhi(x, y):
    """Upper half of the product of unsigned 32 or 64 bit integers."""
    x = as_tensor(x)
    y = as_tensor(y, x.dtype)
    if x.dtype.bits == 64:
        product = np.asarray(x.d, object) * np.asarray(y.d, object)
        return Tensor(
            np.asarray((product % 2**128) // 2**64).astype(np.uint64).astype(x.dtype.payload), x.dtype
        )
    wide = x.d.astype(np.uint32).astype(np.uint64) * y.d.astype(np.uint32).astype(np.uint64)
    return Tensor((wide >> np.uint64(32)).astype(np.uint32).astype(x.dtype.payload), x.dtype)


def softmax(x, dim=None, keep_dims=False, ieee_rounding=False):
    """exp(x - max) / sum along dim (0 if not given)."""
    from .tl_reduce import max as _max
    from .tl_reduce import sum as _sum

    dim = 0 if dim is None else dim
    z = x - _max(x, dim, keep_dims=True)
    e = exp(z)
    return e / _sum(e, dim, keep_dims=True)


NAMES = "exp exp2 log log2 sqrt sqrt_rn rsqrt sin cos floor ceil erf abs fma fdiv div_rn umulhi".split()
