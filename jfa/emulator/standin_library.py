"""Small device functions that Triton ships as source beside its language.

Written for the stand-in package.
"""

from . import tl_ops as tl
from .standin_runtime import jit


@jit
def get_bufidx_phase(accum_cnt, NUM_BUFFERS: tl.constexpr):
    return accum_cnt % NUM_BUFFERS, (accum_cnt // NUM_BUFFERS) & 1


@jit
def split_n_2d(x, SPLIT_FACTOR: tl.constexpr):
    if SPLIT_FACTOR == 1:
        return (x,)
    left, right = x.reshape([x.shape[0], 2, x.shape[1] // 2]).permute(0, 2, 1).split()
    return split_n_2d(left, SPLIT_FACTOR // 2) + split_n_2d(right, SPLIT_FACTOR // 2)


@jit
def join_n_2d(xs):
    if len(xs) == 1:
        return xs[0]
    left = join_n_2d(xs[: len(xs) // 2])
    right = join_n_2d(xs[len(xs) // 2 :])
    return tl.join(left, right).permute(0, 2, 1).reshape([left.shape[0], left.shape[1] * 2])


@jit
def add_f32x2(a, b):
    return a + b


@jit
def sub_f32x2(a, b):
    return a - b


@jit
def mul_f32x2(a, b):
    return a * b


@jit
def fma_f32x2(a, b, c):
    return tl.fma(a, b, c)


@jit
def reduce_fadd2(p0a, p0b, p1a, p1b):
    return p0a + p1a, p0b + p1b


@jit
def tanh_approx_fp32(x):
    return tl.extra.libdevice.tanh(x)


WARP_SPEC = {"get_bufidx_phase": get_bufidx_phase}
SUBTILE_OPS = {"_split_n_2D": split_n_2d, "_join_n_2D": join_n_2d}
INLINE_PTX = {
    "_add_f32x2": add_f32x2,
    "_sub_f32x2": sub_f32x2,
    "_mul_f32x2": mul_f32x2,
    "_fma_f32x2": fma_f32x2,
}
INLINE_PTX.update(_reduce_fadd2=reduce_fadd2, tanh_approx_fp32=tanh_approx_fp32)
