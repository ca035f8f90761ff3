"""tlx: element types, layouts (accepted, without effect) and other helpers."""

from .barriers import MBarrier
from .memory import Buffer
from .tile import Tensor

buffered_tensor = Buffer
mbarrier = MBarrier


def dtype_of(v):
    """Element type of a tensor, buffer, pointer or descriptor."""
    if isinstance(v, Tensor) and v.ptr is not None:
        return v.dtype.element_ty
    return v.dtype


def size_of(dtype):
    return dtype.primitive_bitwidth // 8


def get_fp8_format_name(dtype):
    return {"fp8e5": "e5m2", "fp8e4nv": "e4m3"}[dtype.name]


def stoch_round(src, dst_ty, rand_bits):
    """Rounds to nearest instead of stochastically."""
    return src.to(dst_ty)


def require_layout(x, layout):
    return x


def dump_layout(x):
    """No layouts here."""


def assert_same_layout(lhs, rhs):
    """No layouts here."""


def layout(spec=None, shape=None, stride=None):
    """A register layout: there are no layouts here."""


def swizzled_layout(bits=None, base=None, shift=None, order=None):
    """A shared memory layout: there are no layouts here."""
