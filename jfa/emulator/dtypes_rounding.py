"""Rounding and bit patterns: what a value becomes when the hardware stores or converts it.

float32 -> bf16, fp16: round to nearest even, overflow to infinity, NaN to the canonical NaN (cvt.rn). float32
-> fp8: round to nearest even, saturating to the largest finite value, also for infinity (cvt.rn.satfinite).
float -> int: truncation, saturating at the bounds of the 32 or 64 bit conversion, NaN gives 0 (cvt.rzi).
tf32: an MMA reads a float32 operand without its 13 low bits (the compiler adds no rounding for
input_precision "tf32" on sm_90 and sm_100); "tf32x3" rounds with cvt.rna and adds the products of the
remainders.
"""

import numpy as np

from . import dtypes as D

U16 = np.uint32(16)
ONE = np.uint32(1)
HALF_BF16 = np.uint32(0x7FFF)
HIGH_HALF = np.uint32(0xFFFF0000)
QUIET_BF16 = np.uint32(0x7FFF0000).view(np.float32)
EXPONENT = np.uint32(0x7F800000)
FP8_LIMIT = {"fp8e4nv": 448.0, "fp8e5": 57344.0}
FP8_MIN_NORMAL = {"fp8e4nv": 2.0**-6, "fp8e5": 2.0**-14}
_ALL_BYTES = np.arange(256, dtype=np.uint8)
FP8_VALUES = {d.name: _ALL_BYTES.view(d.store).astype(np.float32) for d in (D.float8e4nv, D.float8e5)}


def round_bf16(x):
    """float32 -> the nearest bf16 value, as float32."""
    u = x.view(np.uint32)
    r = u >> U16
    r &= ONE
    r += HALF_BF16
    r += u
    r &= HIGH_HALF
    r = r.view(np.float32)
    nan = x != x
    if nan.any():
        r = np.where(nan, QUIET_BF16, r)
    return r


def round_fp16(x):
    """float32 -> the nearest fp16 value, as float32."""
    with np.errstate(over="ignore", under="ignore"):
        r = x.astype(np.float16).astype(np.float32)
    return r


def round_fp8(dtype, x):
    """float32 -> the nearest fp8 value, as float32; saturates.

    Adding and subtracting a number whose last place is the spacing of the fp8 value rounds to nearest even.
    """
    limit = np.float32(FP8_LIMIT[dtype.name])
    x = np.clip(x, -limit, limit)
    power = (x.view(np.uint32) & EXPONENT).view(np.float32)
    power = np.maximum(power, np.float32(FP8_MIN_NORMAL[dtype.name]))
    magic = power * np.float32(1.5 * 2.0 ** (23 - dtype.mantissa))
    with np.errstate(invalid="ignore"):  # NaN + NaN
        r = np.copysign((x + magic) - magic, x)
    return np.clip(r, -limit, limit)


def round_to(dtype, x):
    """Round float values x (float32 or float64) to what dtype represents; returns dtype's payload type."""
    if dtype.bits >= 32:
        return x if x.dtype == dtype.payload else x.astype(dtype.payload)
    if x.dtype != np.float32:
        x = x.astype(np.float32)
    name = dtype.name
    if name == "bf16":
        return round_bf16(x) if x.ndim else round_bf16(x.reshape(1))[0]
    if name == "fp16":
        return round_fp16(x)
    return round_fp8(dtype, x) if x.ndim else round_fp8(dtype, x.reshape(1))[0]


def truncate_to(dtype, x):
    """Round float values toward zero to what dtype represents (fp_downcast_rounding='rtz')."""
    r = round_to(dtype, x)
    wide = x.astype(np.float64)
    over = np.abs(r.astype(np.float64)) > np.abs(wide)
    if not np.any(over):
        return r
    raw = np.atleast_1d(to_store(dtype, r))
    bits = raw.view(np.uint16 if dtype.bits == 16 else np.uint8) - np.atleast_1d(over).astype(np.uint8)
    return from_store(dtype, bits.astype(raw.view(bits.dtype).dtype).view(dtype.store)).reshape(np.shape(x))[
        ()
    ]


def to_store(dtype, x):
    """Payload -> the bit patterns that memory holds (an array of dtype.store); x must be representable."""
    name = dtype.name
    if name == "bf16":
        return (x.view(np.uint32) >> U16).astype(np.uint16).view(dtype.store)
    if name == "fp8e5":
        return (x.astype(np.float16).view(np.uint16) >> np.uint16(8)).astype(np.uint8).view(dtype.store)
    return x.astype(dtype.store)


def from_store(dtype, raw):
    """Bit patterns -> payload; always a copy, for a register tile never aliases memory."""
    table = FP8_VALUES.get(dtype.name)
    if table is not None:
        return table[raw.view(np.uint8)]
    return raw.astype(dtype.payload)


def bits_of(dtype, x):
    """Payload -> unsigned integers with the same bits as memory would hold."""
    raw = to_store(dtype, x)
    return raw.view(np.dtype(f"u{dtype.itemsize}"))


def float_to_int(dtype, x):
    """Truncate floats to the integer type as cvt.rzi does: saturate.

    NaN gives 0; narrow results wrap from 16 bits.
    """
    if np.size(x) == 0:
        return x.astype(dtype.payload)
    bits = max(dtype.bits, 16)
    lo, hi = (0, 2**bits - 1) if dtype.kind == "u" else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    inside = (x > lo - 1) & (x < float(hi) + (1 if bits < 53 else 0))
    wide = np.dtype(f"{'u' if dtype.kind == 'u' else 'i'}{bits // 8}")
    if np.all(inside):
        return x.astype(wide).astype(dtype.payload)
    r = np.where(inside, x, 0).astype(wide)
    r = np.where(inside | (x != x), r, np.where(x > 0, wide.type(hi), wide.type(lo)))
    return r.astype(dtype.payload)


def convert(x, src, dst, rounding=None):
    """Payload of type src -> payload of type dst (tl.cast without bitcast)."""
    if dst.kind == "f":
        if dst.narrow_float:
            if rounding == "rtz":
                return truncate_to(dst, x)
            wide = x if x.dtype == np.float32 else x.astype(np.float32)
            return round_to(dst, wide)
        return x.astype(dst.payload)
    if dst.kind == "b":
        return x != 0
    if src.kind == "f":
        return float_to_int(dst, x)
    return x.astype(dst.payload)


def truncate_tf32(x):
    """What a tensor core sees of a float32 operand that was not rounded before: 10 significand bits."""
    u = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return (u & np.uint32(0xFFFFE000)).view(np.float32)


def round_tf32(x):
    """float32 -> tf32, ties away from zero (cvt.rna.tf32.f32)."""
    u = np.ascontiguousarray(x, np.float32).view(np.uint32)
    r = ((u + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(np.float32)
    bad = ~np.isfinite(x)
    return np.where(bad, x, r) if bad.any() else r


def mma_operand(dtype, x):
    """An MMA operand as the tensor core reads it, as float32; x is payload or stored values of dtype."""
    if dtype.name != "fp32":
        return from_store(dtype, x) if x.dtype == dtype.store else x.astype(np.float32)
    return truncate_tf32(x)
