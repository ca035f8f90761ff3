"""Typing rules of the front end: which type two operands are computed in.

Python numbers are weak: they take the tile's type unless they are of a higher kind (bool < int < float). Two
tiles, scalar or block, promote each other: the wider float wins, fp16 with bf16 gives float32, integers
follow C.
"""

import numpy as np

from . import dtypes as D
from .errors import EmulationError

FLOAT32_MIN = 2.0**-126
FLOAT32_MAX = (2 - 2.0**-23) * 2.0**127


class KernelTypeError(EmulationError, TypeError):
    """A kernel does what the front end of the GPU compiler rejects."""


def number_dtype(value):
    """The type a Python number has of its own."""
    if isinstance(value, (bool, np.bool_)):
        return D.int1
    if isinstance(value, (int, np.integer)):
        if -(2**31) <= value < 2**31:
            return D.int32
        if 0 <= value < 2**32:
            return D.uint32
        if -(2**63) <= value < 2**63:
            return D.int64
        if 0 <= value < 2**64:
            return D.uint64
        raise KernelTypeError(f"integer {value} fits no 64-bit type")
    if not isinstance(value, (float, np.floating)):
        raise KernelTypeError(f"{value!r} of type {type(value).__name__} is no tensor and no number")
    size = abs(float(value))
    if size == 0 or size == float("inf") or size != size or FLOAT32_MIN <= size <= FLOAT32_MAX:
        return D.float32
    return D.float64


def _promote_integers(a, b):
    unsigned_a = a.kind != "i"
    unsigned_b = b.kind != "i"
    if unsigned_a == unsigned_b:
        return a if a.bits > b.bits else b
    if unsigned_a:
        return a if a.bits >= b.bits else b
    return b if b.bits >= a.bits else a


def _promote(a, b, division):
    for wide in (D.float64, D.float32):
        if a is wide or b is wide:
            return wide
    if a is D.float16 or b is D.float16:
        return D.float32 if division else D.float16
    if a is D.bfloat16 and b is D.bfloat16:
        return D.float32 if division else D.bfloat16
    if a is D.bfloat16 or b is D.bfloat16:
        return D.float32
    if a.is_fp8() and b.is_fp8():
        return a if a is b else D.float16
    if a.kind == "f" or b.kind == "f":
        return None
    if division and (a.kind == "i") != (b.kind == "i"):
        return None
    return _promote_integers(a, b)


_TABLES = [[[_promote(a, b, division) for b in D.ORDERED] for a in D.ORDERED] for division in (False, True)]


def promote(a, b, division=False):
    """The type two tiles of types a and b are computed in; KernelTypeError where the compiler refuses."""
    result = _TABLES[division][a.index][b.index]
    if result is None:
        raise KernelTypeError(f"no common type for {a} and {b}" + (" in / // %" if division else ""))
    return result


def promote_integers(a, b):
    """C's usual arithmetic conversions, without the check of signs in divisions."""
    return _promote_integers(a, b)


def promote_number(dtype, value, division=False):
    """The type a tile of dtype and a Python number are computed in."""
    weak = number_dtype(value)
    if weak.level <= dtype.level:
        if division and dtype.narrow_float and dtype.bits == 16:
            return D.float32
        if dtype.level == 1:
            check_range(dtype, value)
        return dtype
    return promote(dtype, weak, division)


def check_range(dtype, value):
    """Refuse a Python integer that the integer type cannot hold."""
    if value < 0 and dtype.kind != "i":
        raise KernelTypeError(f"negative scalar {value} with an operand of type {dtype}")
    if not dtype.get_int_min_value() <= value <= dtype.get_int_max_value():
        raise KernelTypeError(f"scalar {value} is out of range for {dtype}")


def check_power_of_two(shape):
    """Refuse a block shape that has a dimension which is no power of two."""
    for n in shape:
        if n < 1 or n & (n - 1):
            raise KernelTypeError(f"block shape {list(shape)}: {n} is not a power of two")


def shape_of(args):
    """A shape given as one sequence or as single integers -> tuple of ints."""
    if len(args) == 1 and hasattr(args[0], "__len__"):
        args = args[0]
    return tuple(int(n) for n in args)
