"""Floating point PTX: f32, f64, f16, bf16 and the packed f32x2, f16x2, bf16x2.

Approximate instructions give the correctly rounded value of numpy; .ftz is not modelled.
"""

import numpy as np

from .ptx_registers import TYPES, Packed, as_unsigned, read, write
from .tl_math import fma_float32

COMPARE = dict(lt=np.less, le=np.less_equal, gt=np.greater, ge=np.greater_equal, eq=np.equal)
UNORDERED = dict(ltu=np.less, leu=np.less_equal, gtu=np.greater, geu=np.greater_equal, equ=np.equal)
UNARY = dict(
    ex2=np.exp2, lg2=np.log2, sqrt=np.sqrt, sin=np.sin, cos=np.cos, tanh=np.tanh, neg=np.negative, abs=np.abs,
    rcp=lambda v: 1 / v, rsqrt=lambda v: 1 / np.sqrt(v),
)  # fmt: skip
BINARY = dict(add=np.add, sub=np.subtract, mul=np.multiply, div=np.true_divide)
PACKED = {"f32x2": "f32", "f16x2": "f16", "bf16x2": "bf16"}
ROUNDINGS = ("rm", "rp", "rz")


def compute(name, mods, sources, count):
    """The result bits, or None when this is no floating point instruction."""
    ptype = mods[-1] if mods else ""
    if ptype in PACKED:
        return _packed(name, mods, sources, PACKED[ptype])
    if ptype not in ("f32", "f64", "f16", "bf16"):
        return None
    if name == "setp":
        return _compare(mods, sources, ptype)
    if name == "selp":
        return np.where(np.asarray(sources[2]).astype(bool), as_unsigned(sources[0]), as_unsigned(sources[1]))
    if name == "redux":
        return _redux(mods, sources[0], count)
    if name == "testp":
        tests = dict(
            finite=np.isfinite, infinite=np.isinf, number=lambda v: ~np.isnan(v), notanumber=np.isnan
        )
        return tests[mods[0]](read(sources[0], ptype)) if mods[0] in tests else None
    if name == "copysign":
        values = [read(s, ptype) for s in sources]
        return write(np.copysign(values[1], values[0]), ptype)
    values = [read(s, ptype) for s in sources]
    narrow = ptype in ("f16", "bf16")
    if narrow:
        values = [v.astype(np.float32) for v in values]
    result = operate(name, mods, values)
    return None if result is None else write(result, ptype)


def _packed(name, mods, sources, ptype):
    halves = [_halves(s, ptype) for s in sources]
    parts = []
    for i in (0, 1):
        values = [h[i].astype(np.float32) if ptype != "f32" else h[i] for h in halves]
        result = operate(name, mods, values)
        if result is None:
            return None
        parts.append(write(result, ptype))
    return Packed(parts, 2 * parts[0].dtype.itemsize * 8)


def _halves(value, ptype):
    if isinstance(value, Packed) and len(value.parts) == 2:
        return [read(p, ptype) for p in value.parts]
    unsigned = TYPES[ptype][0]
    bits = as_unsigned(value)
    width = unsigned.itemsize * 8
    return [read((bits >> bits.dtype.type(width * i)).astype(unsigned), ptype) for i in (0, 1)]


def operate(name, mods, values):
    """The instruction on float values, or None when its name is not known."""
    rounding = next((m for m in mods if m in ROUNDINGS), "rn")
    if name in ("fma", "mad"):
        if values[0].dtype != np.float32:
            result = values[0] * values[1] + values[2]
        elif rounding == "rn":
            result = fma_float32(*values)
        else:
            result = directed(values[0].astype(np.float64) * values[1] + values[2], rounding)
    elif name in BINARY:
        if rounding != "rn" and values[0].dtype == np.float32:
            result = directed(BINARY[name](*[v.astype(np.float64) for v in values]), rounding)
        else:
            result = BINARY[name](*values)
    elif name in ("min", "max"):
        result = _extreme(name, mods, values)
    elif name in UNARY:
        result = UNARY[name](values[0])
    else:
        return None
    if "sat" in mods:
        result = np.where(np.isnan(result), 0, np.clip(result, 0, 1)).astype(result.dtype)
    return np.maximum(result, 0) if "relu" in mods else result


def _extreme(name, mods, values):
    quiet, loud = (np.fmax, np.maximum) if name == "max" else (np.fmin, np.minimum)
    fn = loud if "NaN" in mods else quiet
    if "abs" in mods and "xorsign" in mods:
        sign = np.copysign(1, values[0]) * np.copysign(1, values[1])
        return np.copysign(fn(np.abs(values[0]), np.abs(values[1])), sign)
    result = values[0]
    for v in values[1:]:
        result = fn(result, v)
    return result


def directed(wide, rounding):
    """float64 -> float32, rounded down (rm), up (rp) or toward zero (rz)."""
    r = wide.astype(np.float32)
    back = r.astype(np.float64)
    if rounding == "rm":
        return np.where(back > wide, np.nextafter(r, np.float32(-np.inf)), r)
    if rounding == "rp":
        return np.where(back < wide, np.nextafter(r, np.float32(np.inf)), r)
    return np.where(np.abs(back) > np.abs(wide), np.nextafter(r, np.float32(0)), r)


def _compare(mods, sources, ptype):
    a, b = (read(s, ptype) for s in sources[:2])
    how = mods[0]
    unordered = np.isnan(a) | np.isnan(b)
    if how in COMPARE:
        return COMPARE[how](a, b)
    if how in UNORDERED:
        return UNORDERED[how](a, b) | unordered
    if how == "ne":
        return (a != b) & ~unordered
    if how == "neu":
        return a != b
    if how in ("num", "nan"):
        return unordered if how == "nan" else ~unordered
    return None


def _redux(mods, source, count):
    fn = {"max": np.fmax, "min": np.fmin}.get(next((m for m in mods if m in ("max", "min")), ""))
    if fn is None:
        return None
    values = read(source, "f32")
    if "abs" in mods:
        values = np.abs(values)
    values = np.broadcast_to(values, (count,))
    lanes = values.reshape(-1, 32) if count % 32 == 0 else values.reshape(1, -1)
    return write(np.repeat(fn.reduce(lanes, axis=1), lanes.shape[1]), "f32")
