"""Arithmetic on register tiles: C semantics on numpy payloads, with a short path for scalars.

Integers wrap; // and % truncate toward zero as in C; a division by zero gives what the GPU gives (all ones;
the dividend for %) and leaves a warning; a shift by the width or more clears the value (or fills it with the
sign). Floats narrower than 32 bits are computed in float32 and rounded once, which equals the hardware
result.
"""

import operator

import numpy as np

from . import dtypes as D
from . import dtypes_rounding as R
from .context import CTX
from .tile_typing import KernelTypeError, check_range, number_dtype, promote, promote_integers, promote_number

Tensor = None
ndarray = np.ndarray
NUMBERS = (bool, int, float)


def _number(value, dtype):
    """A Python number as a payload scalar of dtype."""
    d = dtype.payload.type(value)
    return R.round_to(dtype, d) if dtype.narrow_float else d


def operands(a, b, division=False):
    """Payloads of both operands in the type they are computed in, and that type."""
    if isinstance(a, Tensor):
        if a.ptr is not None:
            raise KernelTypeError("a pointer takes part in arithmetic other than + and - with an integer")
        if isinstance(b, Tensor):
            if b.ptr is not None:
                raise KernelTypeError("a pointer takes part in arithmetic other than + and - with an integer")
            dtype = promote(a.dtype, b.dtype, division)
            x = a.d if a.dtype is dtype else a.to(dtype).d
            y = b.d if b.dtype is dtype else b.to(dtype).d
            return x, y, dtype
        b = plain(b)
        dtype = promote_number(a.dtype, b, division)
        return a.to(dtype).d, _number(b, dtype), dtype
    if isinstance(b, Tensor):
        y, x, dtype = operands(b, a, division)
        return x, y, dtype
    dtype = promote(number_dtype(a), number_dtype(b), division)
    return _number(a, dtype), _number(b, dtype), dtype


def plain(value):
    """A numpy scalar or constexpr-like wrapper -> Python number; anything else is refused."""
    if isinstance(value, NUMBERS):
        return value
    if isinstance(value, np.generic):
        return value.item()
    inner = getattr(value, "value", None)
    if isinstance(inner, NUMBERS):
        return inner
    raise KernelTypeError(f"{value!r} of type {type(value).__name__} is no operand of arithmetic")


def _finish(r, dtype, name):
    if r.__class__ is ndarray:
        CTX.count(name, r.size)
    if dtype.narrow_float:
        r = R.round_to(dtype, r)
    elif r.dtype != dtype.payload:
        r = r.astype(dtype.payload)
    return Tensor(r, dtype)


def _one_bit(fn, x, y):
    """+ - and * of single bits, modulo 2."""
    return x & y if fn is operator.mul else x ^ y


def _fits(value, dtype):
    """Whether a plain Python number is computed with in dtype (of 32 or 64 bits) as it is."""
    if value.__class__ is int:
        return dtype.kind == "f" or -0x80000000 <= value <= 0x7FFFFFFF and (value >= 0 or dtype.kind == "i")
    return value.__class__ is float and dtype.kind == "f"


def _small(a, b):
    """Whether a // b and a % b are those of a non-negative int32 scalar by a positive Python int."""
    if (
        a.__class__ is not Tensor
        or b.__class__ is not int
        or a.dtype is not D.int32
        or not 0 < b <= 0x7FFFFFFF
    ):
        return False
    return a.d.__class__ is np.int32 and a.d >= 0


def arith(a, b, fn, name):
    """a fn b for +, - and *, pointers included."""
    dtype = a.dtype if isinstance(a, Tensor) else None
    if dtype is not None and a.ptr is None and dtype.exact:
        kind = b.__class__
        if kind is Tensor and b.dtype is dtype and b.ptr is None:
            return _exact(fn(a.d, b.d), dtype, name)
        if kind is int and (
            dtype.kind == "f" or -0x80000000 <= b <= 0x7FFFFFFF and (b >= 0 or dtype.kind == "i")
        ):
            return _exact(fn(a.d, b), dtype, name)
        if kind is float and dtype.kind == "f":
            return _exact(fn(a.d, b), dtype, name)
    elif dtype is None and b.__class__ is Tensor and b.ptr is None and b.dtype.exact and _fits(a, b.dtype):
        return _exact(fn(a, b.d), b.dtype, name)
    if isinstance(a, Tensor) and a.ptr is not None or isinstance(b, Tensor) and b.ptr is not None:
        return pointer_add(a, b, name)
    x, y, dtype = operands(a, b)
    if dtype is D.int1:
        return Tensor(_one_bit(fn, x, y), dtype)
    return _finish(fn(x, y), dtype, name)


def _exact(r, dtype, name):
    if r.__class__ is ndarray:
        CTX.count(name, r.size)
    return Tensor(r, dtype)


def pointer_add(a, b, name):
    """Pointer plus or minus an integer number of elements."""
    if not (isinstance(a, Tensor) and a.ptr is not None):
        a, b = b, a
        if name != "add":
            raise KernelTypeError("a pointer may not be subtracted")
    if name not in ("add", "sub"):
        raise KernelTypeError(f"{name} of a pointer")
    if isinstance(b, Tensor):
        if b.ptr is not None or b.dtype.kind == "f":
            raise KernelTypeError(f"pointer {name} {b.dtype}")
        offset = b.d.astype(np.int64)
    else:
        offset = np.int64(plain(b))
    return Tensor(a.d + offset if name == "add" else a.d - offset, a.dtype, a.ptr)


def truediv(a, b):
    """a / b: in float32 for 16-bit floats and integers."""
    if isinstance(a, Tensor) and a.dtype is D.float32 and a.ptr is None:
        if b.__class__ is float or b.__class__ is Tensor and b.dtype is D.float32:
            return _exact(np.true_divide(a.d, b if b.__class__ is float else b.d), D.float32, "div")
    x, y, dtype = operands(a, b, True)
    if dtype.kind != "f":
        x, y, dtype = x.astype(np.float32), y.astype(np.float32), D.float32
    return _finish(np.true_divide(x, y), dtype, "div")


def _warn_zero(what):
    machine = CTX.machine
    if machine is not None:
        machine.violation(
            "division by zero", f"{what} by zero (the GPU does not trap; the result is no number)", "warning"
        )


def _c_floordiv(x, y, dtype):
    if dtype.kind != "i":
        return x // y
    q = x // y
    return q + ((q * y != x) & ((x < 0) != (y < 0))).astype(dtype.payload)


def floordiv(a, b):
    """a // b of integers, truncating toward zero."""
    if _small(a, b):
        return Tensor(a.d // b, D.int32)
    x, y, dtype = operands(a, b, True)
    if dtype.kind == "f":
        raise KernelTypeError("// on floats")
    if x.__class__ is not ndarray and y.__class__ is not ndarray:
        if y == 0:
            _warn_zero("division")
            return Tensor(dtype.payload.type(0) - dtype.payload.type(dtype.kind == "u" or 1), dtype)
        if x >= 0 and y > 0:
            return Tensor(x // y, dtype)
        return Tensor(_c_floordiv(x, y, dtype), dtype)
    zero = y == 0
    if np.any(zero):
        safe = np.where(zero, dtype.payload.type(1), y)
        q = _c_floordiv(x, safe, dtype)
        ones = dtype.payload.type(-1 if dtype.kind == "i" else dtype.get_int_max_value())
        return Tensor(np.where(zero, ones, q), dtype)
    CTX.count("idiv", np.size(x))
    return Tensor(_c_floordiv(x, y, dtype), dtype)


def mod(a, b):
    """a % b with the sign of a, for integers and floats."""
    if _small(a, b):
        return Tensor(a.d % b, D.int32)
    x, y, dtype = operands(a, b, True)
    if dtype.kind == "f":
        return _finish(np.fmod(x, y), dtype, "mod")
    if x.__class__ is not ndarray and y.__class__ is not ndarray:
        if y == 0:
            _warn_zero("remainder")
            return Tensor(x, dtype)
        if x >= 0 and y > 0:
            return Tensor(x % y, dtype)
    r = np.fmod(x, y)
    zero = y == 0
    if np.any(zero):
        r = np.where(zero, x, r)
    return Tensor(r, dtype)


def compare(a, b, fn):
    """a fn b as int1."""
    if isinstance(a, Tensor) and a.ptr is None:
        dtype = a.dtype
        kind = b.__class__
        if kind is Tensor and b.dtype is dtype and b.ptr is None:
            return _exact(fn(a.d, b.d), D.int1, "cmp")
        if kind is int and dtype.exact and (dtype.kind != "u" or b >= 0):
            return _exact(np.bool_(r) if (r := fn(a.d, b)).__class__ is bool else r, D.int1, "cmp")
    if b is None:
        return fn is operator.ne
    x, y, _ = operands(a, b)
    return _exact(fn(x, y), D.int1, "cmp")


def bitwise(a, b, fn):
    """& | ^ of integers."""
    if a.__class__ is Tensor and b.__class__ is int and a.dtype is D.int32 and -0x80000000 <= b <= 0x7FFFFFFF:
        return Tensor(fn(a.d, b), D.int32)
    x, y, dtype = operands(a, b)
    if dtype.kind == "f":
        raise KernelTypeError(f"bitwise operation on {dtype}")
    return Tensor(fn(x, y), dtype)


def shift(a, b, left):
    """<< and >>; >> is arithmetic when the left operand is signed."""
    x, y, dtype = operands(a, b)
    if dtype.kind not in "iu":
        raise KernelTypeError(f"shift of {dtype}")
    signed = (a.dtype if isinstance(a, Tensor) else number_dtype(a)).kind == "i"
    fn = operator.lshift if left else operator.rshift
    if not left and signed != (dtype.kind == "i"):
        x = x.view(D.int_of_width(dtype.bits, signed).payload)
    if y.__class__ is not ndarray:
        if 0 <= y < dtype.bits:
            return Tensor(fn(x, x.dtype.type(y)).astype(dtype.payload), dtype)
        if left or not signed:
            return Tensor(np.zeros_like(x).astype(dtype.payload)[()], dtype)
        return Tensor(fn(x, x.dtype.type(dtype.bits - 1)).astype(dtype.payload), dtype)
    inside = (y >= 0) & (y < dtype.bits)
    amount = np.where(inside, y, 0).astype(x.dtype)
    fill = 0 if left or not signed else np.where(x < 0, -1, 0)
    return Tensor(np.where(inside, fn(x, amount), fill).astype(dtype.payload), dtype)


def negate(a):
    """0 - a."""
    if a.ptr is not None:
        raise KernelTypeError("unary minus of a pointer")
    return a if a.dtype is D.int1 else Tensor(-a.d, a.dtype)


def invert(a):
    """~a of integers; logical not of int1."""
    if a.ptr is not None or a.dtype.kind == "f":
        raise KernelTypeError(f"~ of {a.dtype}")
    return Tensor(~a.d, a.dtype)


def logical(a, b, fn):
    """Elementwise logical_and and logical_or."""
    return Tensor(fn(a.d != 0, (b.d if isinstance(b, Tensor) else np.bool_(b)) != 0), D.int1)


def install(cls):
    """Give class Tensor its operators."""
    global Tensor
    Tensor = cls
    for name, fn in (("add", operator.add), ("sub", operator.sub), ("mul", operator.mul)):
        setattr(cls, f"__{name}__", lambda s, o, fn=fn, name=name: arith(s, o, fn, name))
        setattr(cls, f"__r{name}__", lambda s, o, fn=fn, name=name: arith(o, s, fn, name))
    for name, fn in (("truediv", truediv), ("floordiv", floordiv), ("mod", mod)):
        setattr(cls, f"__{name}__", lambda s, o, fn=fn: fn(s, o))
        setattr(cls, f"__r{name}__", lambda s, o, fn=fn: fn(o, s))
    comparisons = (operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne)
    for fn in comparisons:
        setattr(cls, f"__{fn.__name__}__", lambda s, o, fn=fn: compare(s, o, fn))
    for name, fn in (("and", operator.and_), ("or", operator.or_), ("xor", operator.xor)):
        setattr(cls, f"__{name}__", lambda s, o, fn=fn: bitwise(s, o, fn))
        setattr(cls, f"__r{name}__", lambda s, o, fn=fn: bitwise(o, s, fn))
    cls.__lshift__ = lambda s, o: shift(s, o, True)
    cls.__rlshift__ = lambda s, o: shift(o, s, True)
    cls.__rshift__ = lambda s, o: shift(s, o, False)
    cls.__rrshift__ = lambda s, o: shift(o, s, False)
    cls.__neg__ = negate
    cls.__pos__ = lambda s: s
    cls.__invert__ = invert
    cls.logical_and = lambda self, other: logical(self, other, operator.and_)
    cls.logical_or = lambda self, other: logical(self, other, operator.or_)
    cls.__hash__ = object.__hash__


__all__ = ["arith", "bitwise", "check_range", "compare", "floordiv", "install", "mod", "operands", "plain"]
__all__ += ["pointer_add", "promote_integers", "shift", "truediv"]
