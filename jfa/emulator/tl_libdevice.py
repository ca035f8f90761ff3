"""triton.language.extra.libdevice: device functions by name, in float32 or float64 as their argument."""

import functools

import numpy as np

from . import dtypes as D
from . import tl_math
from .context import UnknownConstruct
from .tile import Tensor, as_tensor
from .tile_arith import operands

UNARY = dict(
    exp="exp",
    exp2="exp2",
    exp10=lambda v: np.power(v.dtype.type(10), v),
    expm1="expm1",
    log="log",
    log2="log2",
    log10="log10",
    log1p="log1p",
    sqrt="sqrt",
    cbrt="cbrt",
    sin="sin",
    cos="cos",
    tan="tan",
    asin="arcsin",
    acos="arccos",
    atan="arctan",
    sinh="sinh",
    cosh="cosh",
    tanh="tanh",
    asinh="arcsinh",
    acosh="arccosh",
    atanh="arctanh",
    floor="floor",
    ceil="ceil",
    trunc="trunc",
    rint="rint",
    nearbyint="rint",
    rsqrt=lambda v: 1 / np.sqrt(v),
    round=lambda v: np.copysign(np.floor(np.abs(v) + v.dtype.type(0.5)), v),
    rcp_rn=lambda v: 1 / v,
    saturatef=lambda v: np.clip(np.nan_to_num(v, nan=0.0), 0, 1),
    erf=lambda v: np.asarray(tl_math._erf(v), np.float64),
)
SAME = dict(
    fast_expf="exp",
    fast_exp2f="exp2",
    fast_exp10f="exp10",
    fast_logf="log",
    fast_log2f="log2",
    fast_log10f="log10",
    fast_sinf="sin",
    fast_cosf="cos",
    fast_tanf="tan",
    fast_tanhf="tanh",
    sqrt_rn="sqrt",
    rsqrt_rn="rsqrt",
    frcp_rn="rcp_rn",
    fast_fdividef="div_rn",
    fast_dividef="div_rn",
    fast_powf="pow",
    fma_rn="fma",
)
BINARY = dict(
    pow=np.power,
    fmod=np.fmod,
    copysign=np.copysign,
    atan2=np.arctan2,
    hypot=np.hypot,
    div_rn=np.true_divide,
    add_rn=np.add,
    sub_rn=np.subtract,
    mul_rn=np.multiply,
    fmax=np.fmax,
    fmin=np.fmin,
    max=np.maximum,
    min=np.minimum,
    fdim=lambda a, b: np.fmax(a - b, 0),
    nextafter=np.nextafter,
    remainder=lambda a, b: a - b * np.rint(a / b),
)
TESTS = dict(isnan=np.isnan, isinf=np.isinf, finitef=np.isfinite, isfinited=np.isfinite, signbit=np.signbit)


def _unary(name, fn, arg0):
    return tl_math.apply(name, getattr(np, fn) if isinstance(fn, str) else fn, arg0)


def _binary(fn, arg0, arg1):
    x, y, dtype = operands(as_tensor(arg0), arg1)
    return Tensor(np.asarray(fn(x, y)).astype(dtype.payload)[()], dtype)


def _test(fn, arg0):
    return Tensor(fn(as_tensor(arg0).d).astype(np.int32), D.int32)


def _bit_count(x, how):
    x = as_tensor(x)
    bits = x.dtype.bits
    values = np.atleast_1d(x.d).astype(np.int64).astype(np.uint64) & np.uint64(2**bits - 1)
    counted = np.array([how(int(v), bits) for v in values.ravel()], np.int32)
    return Tensor(counted.reshape(x.shape)[()], D.int32)


def popc(x):
    return _bit_count(x, lambda v, bits: v.bit_count())


def clz(x):
    return _bit_count(x, lambda v, bits: bits - v.bit_length())


def ffs(x):
    return _bit_count(x, lambda v, bits: (v & -v).bit_length())


def brev(x):
    x = as_tensor(x)
    r = _bit_count(x, lambda v, bits: np.int64(int(format(v, f"0{bits}b")[::-1], 2)).astype(np.int32))
    return r.to(x.dtype)


def float_as_int(x):
    return as_tensor(x).to(D.int32, bitcast=True)


def int_as_float(x):
    return as_tensor(x).to(D.float32, bitcast=True)


def float2int_rn(x):
    return Tensor(np.rint(as_tensor(x).d), D.float32).to(D.int32)


def float2int_rz(x):
    return as_tensor(x).to(D.int32)


def float2int_rd(x):
    return Tensor(np.floor(as_tensor(x).d), D.float32).to(D.int32)


def float2int_ru(x):
    return Tensor(np.ceil(as_tensor(x).d), D.float32).to(D.int32)


llrint = float2int_rn


class Libdevice:
    """Looks a libdevice function up by name; a name that is not known is a finding."""

    __name__ = "triton.language.extra.libdevice"
    _own = dict(
        popc=popc,
        clz=clz,
        ffs=ffs,
        brev=brev,
        float_as_int=float_as_int,
        int_as_float=int_as_float,
        float2int_rn=float2int_rn,
        float2int_rz=float2int_rz,
        float2int_rd=float2int_rd,
        float2int_ru=float2int_ru,
        llrint=llrint,
        abs=tl_math.abs,
        fabs=tl_math.abs,
        fma=tl_math.fma,
    )

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        name = SAME.get(name, name)
        if name in self._own:
            return self._own[name]
        if name in UNARY:
            return functools.partial(_unary, name, UNARY[name])
        if name in BINARY:
            return functools.partial(_binary, BINARY[name])
        if name in TESTS:
            return functools.partial(_test, TESTS[name])
        raise UnknownConstruct(f"libdevice.{name}")


libdevice = Libdevice()
