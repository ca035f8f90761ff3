"""Counter-based random numbers: the Philox 4x32 generator as triton.language.random defines it."""

import numpy as np

from . import dtypes as D
from .context import UnknownConstruct
from .tile import Tensor, as_tensor

KEY_A, KEY_B = np.uint32(0x9E3779B9), np.uint32(0xBB67AE85)
ROUND_A, ROUND_B = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
LOW = np.uint64(0xFFFFFFFF)
WIDE = np.uint64(32)


def _u32(x):
    x = as_tensor(x)
    if x.dtype.bits == 64:
        raise UnknownConstruct("the 64-bit Philox generator")
    return np.asarray(x.d).astype(np.uint32)


def _rounds(c0, c1, c2, c3, k0, k1, n_rounds):
    for _ in range(int(n_rounds)):
        product_a, product_b = ROUND_A * c0.astype(np.uint64), ROUND_B * c2.astype(np.uint64)
        c0, c2 = (
            (product_b >> WIDE).astype(np.uint32) ^ c1 ^ k0,
            (product_a >> WIDE).astype(np.uint32) ^ c3 ^ k1,
        )
        c1, c3 = (product_b & LOW).astype(np.uint32), (product_a & LOW).astype(np.uint32)
        k0, k1 = k0 + KEY_A, k1 + KEY_B
    return c0, c1, c2, c3


def philox_impl(c0, c1, c2, c3, k0, k1, n_rounds=10):
    words = _rounds(*[_u32(v) for v in (c0, c1, c2, c3, k0, k1)], n_rounds)
    return tuple(Tensor(np.asarray(w)[()], D.uint32) for w in words)


def philox(seed, c0, c1, c2, c3, n_rounds=10):
    seed = np.asarray(as_tensor(seed).d).astype(np.int64).astype(np.uint64)
    keys = (seed & LOW).astype(np.uint32), (seed >> WIDE).astype(np.uint32)
    words = _rounds(*[_u32(v) for v in (c0, c1, c2, c3)], *keys, n_rounds)
    return tuple(Tensor(np.asarray(w)[()], D.uint32) for w in words)


def randint4x(seed, offset, n_rounds=10):
    offset = np.asarray(as_tensor(offset).d)
    low = Tensor(offset.astype(np.uint32)[()], D.uint32)
    zero = Tensor(np.zeros_like(low.d)[()], D.uint32)
    high = zero
    if offset.dtype.itemsize > 4:
        high = Tensor((offset >> offset.dtype.type(32)).astype(np.uint32)[()], D.uint32)
    return philox(seed, low, high, zero, zero, n_rounds)


def randint(seed, offset, n_rounds=10):
    return randint4x(seed, offset, n_rounds)[0]


def uint_to_uniform_float(x):
    """Unsigned (or signed) 32-bit integers -> floats in [0, 1)."""
    bits = np.asarray(as_tensor(x).d).astype(np.uint32).view(np.int32)
    positive = np.where(bits < 0, -bits - np.int32(1), bits)
    return Tensor((positive.astype(np.float32) * np.float32(4.6566127342e-10))[()], D.float32)


def rand(seed, offset, n_rounds=10):
    return uint_to_uniform_float(randint(seed, offset, n_rounds))


def rand4x(seed, offsets, n_rounds=10):
    return tuple(uint_to_uniform_float(w) for w in randint4x(seed, offsets, n_rounds))


def pair_uniform_to_normal(u1, u2):
    """Box-Muller."""
    radius = np.sqrt(np.float32(-2.0) * np.log(np.maximum(np.float32(1.0e-7), u1.d)))
    angle = np.float32(6.283185307179586) * u2.d
    return Tensor(radius * np.cos(angle), D.float32), Tensor(radius * np.sin(angle), D.float32)


def randn(seed, offset, n_rounds=10):
    words = randint4x(seed, offset, n_rounds)
    return pair_uniform_to_normal(uint_to_uniform_float(words[0]), uint_to_uniform_float(words[1]))[0]


def randn4x(seed, offset, n_rounds=10):
    u = rand4x(seed, offset, n_rounds)
    return pair_uniform_to_normal(u[0], u[1]) + pair_uniform_to_normal(u[2], u[3])
