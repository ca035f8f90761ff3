"""The emulated triton.language: one namespace of every name that kernels may use as tl.NAME."""

import types

from . import tl_math as _math
from .descriptor import Descriptor
from .dtypes import (  # noqa: F401
    BlockType,
    DType,
    PtrType,
    bfloat16,
    float8e4nv,
    float8e5,
    float16,
    float32,
    float64,
    int1,
    int8,
    int16,
    int32,
    int64,
    uint8,
    uint16,
    uint32,
    uint64,
)
from .tile import Tensor
from .tl_asm import inline_asm_elementwise  # noqa: F401
from .tl_control import *  # noqa: F401,F403
from .tl_core import *  # noqa: F401,F403
from .tl_core import maximum, minimum
from .tl_dot import dot, dot_scaled  # noqa: F401
from .tl_libdevice import libdevice
from .tl_math import (  # noqa: F401
    abs,
    ceil,
    cos,
    div_rn,
    erf,
    exp,
    exp2,
    fdiv,
    floor,
    fma,
    log,
    log2,
    rsqrt,
    sigmoid,
    sin,
    softmax,
    sqrt,
    sqrt_rn,
    umulhi,
)
from .tl_memory import *  # noqa: F401,F403
from .tl_random import (  # noqa: F401
    pair_uniform_to_normal,
    philox,
    philox_impl,
    rand,
    rand4x,
    randint,
    randint4x,
    randn,
    randn4x,
    uint_to_uniform_float,
)
from .tl_reduce import *  # noqa: F401,F403
from .tl_reduce import ReductionOrdering  # noqa: F401
from .tl_shape import *  # noqa: F401,F403

tensor = Tensor
dtype = DType
pointer_type = PtrType
block_type = BlockType
tensor_descriptor = Descriptor
tensor_descriptor_base = Descriptor
pi32_t = PtrType(int32)
TRITON_MAX_TENSOR_NUMEL = 1048576
_experimental_make_tensor_descriptor = make_tensor_descriptor  # noqa: F405
tuple = tuple
slice = slice

math = types.SimpleNamespace(**{name: getattr(_math, name) for name in _math.NAMES})
math.clamp, math.max, math.min, math.sigmoid = clamp, maximum, minimum, sigmoid  # noqa: F405
random = types.SimpleNamespace(rand=rand, randn=randn, randint=randint, philox=philox, randint4x=randint4x)


class _Extra:
    """tl.extra: the libraries beside the language."""

    libdevice = libdevice
    cuda = types.SimpleNamespace(libdevice=libdevice)

    @property
    def tlx(self):
        from . import tlx_ops

        return tlx_ops


extra = _Extra()

# What kernels call as methods of a tile; views and conversions are methods of Tensor itself.
MEMBERS = """
abs advance argmax argmin associative_scan atomic_add atomic_and atomic_cas atomic_max atomic_min
atomic_or atomic_xchg atomic_xor cdiv ceil cos cumprod cumsum erf exp exp2 flip floor gather histogram
log log2 max min ravel reduce reduce_or rsqrt sigmoid sin softmax sort sqrt sqrt_rn store sum xor_sum
""".split()
for _name in MEMBERS:
    setattr(Tensor, _name, globals()[_name])


def __getattr__(name):
    raise AttributeError(f"module 'jfa.emulator.tl' has no attribute {name!r}")
