"""PTX cvt: between scalar types, and packs of two narrow floats."""

import re

import numpy as np

from . import dtypes as D
from . import dtypes_rounding as R
from .context import UnknownConstruct
from .ptx_float import directed
from .ptx_registers import TYPES, as_unsigned, read, write

PAIRS = {"bf16x2": D.bfloat16, "f16x2": D.float16, "e4m3x2": D.float8e4nv, "e5m2x2": D.float8e5}
TO_INTEGER = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
DIRECTIONS = ("rm", "rp", "rz")


def convert(instruction, sources):
    """The result bits of a cvt instruction."""
    mods = instruction.mods
    types = [m for m in mods if m in TYPES or m in PAIRS or m == "ue8m0x2"]
    if len(types) < 2 or "rs" in mods:
        raise UnknownConstruct(f"PTX instruction cvt.{'.'.join(mods)}")
    target, source = types[-2:]
    if target == "ue8m0x2" and source == "f32":
        return _pair([_exponent(read(s, "f32"), mods) for s in sources], 8)
    if source == "ue8m0x2":
        return _from_exponents(sources[0])
    if target in PAIRS:
        return _narrow_pair(target, source, mods, sources)
    if source in PAIRS:
        raise UnknownConstruct(f"PTX instruction cvt.{'.'.join(mods)}")
    return _scalar(target, source, mods, sources[0])


def _pair(high_low, width):
    high, low = high_low
    return low | (high << np.uint32(width))


def _narrow_pair(target, source, mods, sources):
    dtype = PAIRS[target]
    if source == "f32":
        values = [read(s, "f32") for s in sources]
    else:
        bits = as_unsigned(sources[0])
        wide = PAIRS[source]
        word = np.dtype(f"u{wide.itemsize}")
        raw = [(bits >> bits.dtype.type(8 * wide.itemsize * i)).astype(word) for i in (1, 0)]
        values = [R.from_store(wide, r.view(wide.store)) for r in raw]
    if "relu" in mods:
        values = [np.fmax(v, np.float32(0)) for v in values]
    rounding = R.truncate_to if "rz" in mods else R.round_to
    halves = []
    for v in values:
        v = rounding(dtype, v)
        if "satfinite" in mods and dtype.bits == 16:
            limit = np.float32(65504.0) if dtype is D.float16 else np.float32(np.finfo(np.float32).max)
            v = R.truncate_to(dtype, np.clip(v, -limit, limit))
        halves.append(R.bits_of(dtype, v).astype(np.uint32))
    return _pair(halves, 8 * dtype.itemsize)


def _exponent(x, mods):
    """float32 -> e8m0: the biased exponent of the power of two above (rp) or below (rz)."""
    mantissa, exponent = np.frexp(np.abs(x))
    exponent = np.where((mantissa == 0.5) | ("rz" in mods), exponent - 1, exponent)
    biased = np.clip(np.where(x == 0, -127, exponent) + 127, 0, 254)
    return np.where(np.isnan(x), 255, biased).astype(np.uint32)


def _from_exponents(source):
    bits = as_unsigned(source).astype(np.uint32)
    values = [np.exp2(((bits >> np.uint32(8 * i)) & np.uint32(255)).astype(np.float32) - 127) for i in (1, 0)]
    return _pair([R.bits_of(D.bfloat16, v.astype(np.float32)).astype(np.uint32) for v in values], 16)


def _is_float(ptype):
    return re.fullmatch(r"b?f\d+", ptype) is not None


def _scalar(target, source, mods, value):
    x = read(value, source)
    if source in ("f16", "bf16"):
        x = x.astype(np.float32)
    if _is_float(source) and _is_float(target):
        to_integer = next((TO_INTEGER[m] for m in mods if m in TO_INTEGER), None)
        if to_integer is not None:
            x = to_integer(x)
        direction = next((m for m in mods if m in DIRECTIONS), None)
        if target == "f32" and source == "f64" and direction:
            x = directed(x, direction)
        if "sat" in mods:
            x = np.where(np.isnan(x), 0, np.clip(x, 0, 1))
        if target in ("f16", "bf16"):
            dtype = D.float16 if target == "f16" else D.bfloat16
            x = x.astype(np.float32)
            return R.bits_of(dtype, R.truncate_to(dtype, x) if direction == "rz" else R.round_to(dtype, x))
        return write(x, target)
    if _is_float(source):
        to_integer = next((TO_INTEGER[m] for m in mods if m in TO_INTEGER), np.trunc)
        dtype = D.by_name(("int" if target[0] == "s" else "uint") + target[1:])
        return R.float_to_int(dtype, to_integer(x)).view(TYPES[target][0])
    if _is_float(target):
        wide = x.astype(np.float64 if target == "f64" else np.float32)
        if target in ("f16", "bf16"):
            dtype = D.float16 if target == "f16" else D.bfloat16
            return R.bits_of(dtype, R.round_to(dtype, wide))
        return write(wide, target)
    if "sat" in mods:
        info = np.iinfo(TYPES[target][1])
        x = np.clip(x.astype(object), info.min, info.max)
    return np.asarray(x).astype(TYPES[target][1]).view(TYPES[target][0])
