"""Matrix products: tl.dot and tl.dot_scaled.

Products accumulate in float32 in numpy's order (the tensor core's order and its guard bits are not modelled).
float32 operands: "tf32" (the default) drops the 13 low bits of both, "tf32x3" adds the two mixed products
with remainders. "ieee" keeps all bits and does what CUDA cores do: from the accumulator on, one fma for each
k in turn. So a product and its transpose agree to the last bit, as on a GPU; numpy's order depends on shapes
and strides, and a backward pass that recomputes exp(s) would meet another s than the forward pass. fp8 on
sm_90 accumulates with fewer bits on the hardware; not modelled.
"""

import numpy as np

from . import dtypes as D
from . import dtypes_rounding as R
from .context import CTX, UnknownConstruct
from .tile import Tensor
from .tile_typing import KernelTypeError

PRECISIONS = ("tf32", "tf32x3", "ieee", "bf16x3", "bf16x6")
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
FORMATS = {"e4m3": D.float8e4nv, "e5m2": D.float8e5, "bf16": D.bfloat16, "fp16": D.float16}


def _precision(input_precision, allow_tf32):
    if input_precision is not None and allow_tf32 is not None:
        raise KernelTypeError("only one of input_precision and allow_tf32 can be given")
    if input_precision is None:
        return "ieee" if allow_tf32 is False else "tf32"
    if input_precision.lower() not in PRECISIONS:
        raise KernelTypeError(f"input_precision must be one of {PRECISIONS}, got {input_precision!r}")
    return input_precision.lower()


def _check(input, other):
    if not isinstance(input, Tensor) or not isinstance(other, Tensor):
        raise KernelTypeError("dot needs two blocks")
    a, b = input.dtype, other.dtype
    if a != b and not (a.is_fp8() and b.is_fp8()):
        raise KernelTypeError(f"dot of {a} and {b}: both operands must have one type")
    if len(input.shape) not in (2, 3) or len(input.shape) != len(other.shape):
        raise KernelTypeError(f"dot of shapes {list(input.shape)} and {list(other.shape)}")
    if input.shape[-1] != other.shape[-2]:
        raise KernelTypeError(
            f"dot of shapes {list(input.shape)} and {list(other.shape)}: inner sizes differ"
        )
    least = 32 if a.bits == 8 else 16
    if input.shape[-1] < least:
        raise KernelTypeError(f"dot with K = {input.shape[-1]}: at least {least} is needed for {a}")


def multiply(x, y, precision):
    """float32 x @ y on tensor cores, with the operand precision asked for."""
    if precision == "ieee":
        return np.matmul(x, y)
    if precision == "tf32":
        return np.matmul(R.truncate_tf32(x), R.truncate_tf32(y))
    return _split_product(
        x, y, R.round_tf32 if precision == "tf32x3" else R.round_bf16, 3 if precision == "bf16x6" else 2
    )


def multiply_by_fma(x, y, acc):
    """float32 acc + x @ y on CUDA cores: the sum over k in its order, rounded to float32 after every step."""
    x, y = x.astype(np.float64), y.astype(np.float64)
    total = np.zeros((*x.shape[:-1], y.shape[-1])) if acc is None else acc.astype(np.float64)
    with np.errstate(all="ignore"):
        for k in range(x.shape[-1]):  # the product of two float32 is exact in float64, so this is an fma
            total = total + x[..., k, None] * y[..., k, None, :]
            total = total.astype(np.float32).astype(np.float64)
    return total.astype(np.float32)


def _split_product(x, y, rounding, parts):
    xs, ys = [], []
    for value, out in ((x, xs), (y, ys)):
        for _ in range(parts):
            high = rounding(np.ascontiguousarray(value))
            out.append(high)
            value = value - high
    total = None
    for order in range(parts - 1, -1, -1):
        for i in range(order + 1):
            product = np.matmul(xs[i], ys[order - i])
            total = product if total is None else total + product
    return total


def dot(
    input,
    other,
    acc=None,
    input_precision=None,
    allow_tf32=None,
    max_num_imprecise_acc=None,
    out_dtype=D.float32,
    attrs=None,
    two_ctas=False,
):
    precision = _precision(input_precision, allow_tf32)
    _check(input, other)
    if input.dtype.kind == "i":
        out_dtype = D.int32
        r = np.matmul(input.d.astype(np.int32), other.d.astype(np.int32))
    elif input.dtype is D.float64:
        out_dtype = D.float64
        r = np.matmul(input.d, other.d)
    else:
        if input.dtype in (D.float32, D.bfloat16):
            out_dtype = D.float32
        if input.dtype is D.float32 and precision == "ieee":
            _check_accumulator(acc, (*input.shape[:-1], other.shape[-1]), out_dtype)
            r, acc = multiply_by_fma(input.d, other.d, None if acc is None else acc.d), None
        else:
            r = multiply(input.d, other.d, precision if input.dtype is D.float32 else "ieee")
    CTX.count("dot_flop", 2 * input.d.size * other.shape[-1])
    return _accumulate(r, acc, out_dtype)


def _check_accumulator(acc, shape, dtype):
    if acc is None:
        return
    if tuple(acc.shape) != tuple(shape):
        raise KernelTypeError(f"accumulator of shape {list(acc.shape)} for a product of shape {list(shape)}")
    if acc.dtype is not dtype:
        raise KernelTypeError(f"accumulator of type {acc.dtype} for a product of type {dtype}")


def _accumulate(r, acc, dtype):
    _check_accumulator(acc, r.shape, dtype)
    if acc is not None:
        r = r + acc.d
    if dtype.narrow_float:
        r = R.round_to(dtype, r)
    return Tensor(r, dtype)


def unpack_e2m1(raw, axis):
    """Packed fp4 bytes -> float32 values, twice as many along axis, the low half byte first."""
    low, high = E2M1[raw & 15], E2M1[raw >> 4]
    both = np.stack([low, high], axis=axis % raw.ndim + 1)
    shape = list(raw.shape)
    shape[axis] *= 2
    return both.reshape(shape)


def scale_values(scale):
    """e8m0 bytes -> float32 powers of two (255 is NaN)."""
    raw = scale.d.astype(np.uint8)
    values = np.exp2(raw.astype(np.float32) - np.float32(127))
    return np.where(raw == 255, np.float32(np.nan), values)


def _scaled_operand(x, scale, fmt, k_pack, k_axis):
    if fmt == "e2m1":
        values = unpack_e2m1(x.d.astype(np.uint8), k_axis if k_pack else -1 - k_axis % 2)
    elif fmt in FORMATS:
        values = (x if x.dtype == FORMATS[fmt] else x.to(FORMATS[fmt], bitcast=True)).d
    else:
        raise UnknownConstruct(f"dot_scaled format {fmt!r}")
    if scale is None or not isinstance(scale, Tensor):
        return values
    factors = scale_values(scale)
    k = values.shape[k_axis]
    block = k // factors.shape[-1]
    factors = np.repeat(factors, block, axis=-1)
    return values * (factors if k_axis == -1 else factors.swapaxes(-1, -2))


def dot_scaled(
    lhs,
    lhs_scale,
    lhs_format,
    rhs,
    rhs_scale,
    rhs_format,
    acc=None,
    fast_math=False,
    lhs_k_pack=True,
    rhs_k_pack=True,
    out_dtype=D.float32,
):
    """Product of microscaled operands: a group of 16 or 32 values along K shares one power of two."""
    x = _scaled_operand(lhs, lhs_scale, lhs_format, lhs_k_pack, -1)
    y = _scaled_operand(rhs, rhs_scale, rhs_format, rhs_k_pack, -2)
    if x.shape[-1] != y.shape[-2]:
        raise KernelTypeError(f"dot_scaled of shapes {list(x.shape)} and {list(y.shape)}: inner sizes differ")
    CTX.count("dot_flop", 2 * x.size * y.shape[-1])
    return _accumulate(np.matmul(x, y), acc, out_dtype)
