"""Shapes of blocks: views, joins and gathers of the emulated triton.language.

Layouts are not modelled, so each of these is free here; on the GPU some move data between threads.
"""

import numpy as np

from .tile import as_tensor
from .tile_typing import KernelTypeError

__all__ = [  # fmt: skip
    "broadcast",
    "broadcast_to",
    "cat",
    "expand_dims",
    "flip",
    "gather",
    "interleave",
    "join",
    "permute",
    "ravel",
    "reshape",
    "split",
    "squeeze",
    "trans",
    "unsqueeze",
    "view",
]


def reshape(input, *shape, can_reorder=False):
    return as_tensor(input).reshape(*shape)


def view(input, *shape):
    return as_tensor(input).reshape(*shape)


def ravel(x, can_reorder=False):
    return x.reshape(x.numel)


def trans(input, *dims):
    return input.trans(*dims)


def permute(input, *dims):
    return input.trans(*dims)


def expand_dims(input, axis):
    return as_tensor(input).expand_dims(axis)


def unsqueeze(x, dim):
    return x.expand_dims(dim)


def squeeze(x, dim):
    dim = dim % len(x.shape)
    if x.shape[dim] != 1:
        raise KernelTypeError(f"squeeze of dimension {dim} of {list(x.shape)}")
    return x.like(x.d.reshape(x.shape[:dim] + x.shape[dim + 1 :]))


def broadcast_to(input, *shape):
    return as_tensor(input).broadcast_to(*shape)


def broadcast(input, other):
    a, b = as_tensor(input), as_tensor(other)
    x, y = np.broadcast_arrays(a.d, b.d)
    return a.like(x), b.like(y)


def _same_type(a, b, what):
    a, b = as_tensor(a), as_tensor(b)
    if a.dtype != b.dtype:
        raise KernelTypeError(f"{what} of {a.dtype} and {b.dtype}")
    return a, b


def join(a, b):
    a, b = _same_type(a, b, "join")
    return a.like(np.stack(np.broadcast_arrays(a.d, b.d), -1))


def split(a):
    return a.split()


def interleave(a, b):
    c = join(a, b)
    return c if len(c.shape) == 1 else c.reshape(c.shape[:-2] + (2 * c.shape[-2],))


def cat(input, other, can_reorder=False, dim=0):
    a, b = _same_type(input, other, "cat")
    return a.like(np.concatenate([a.d, b.d], axis=0 if can_reorder else dim))


def flip(x, dim=None):
    return x.like(np.flip(x.d, len(x.shape) - 1 if dim is None else dim))


def gather(src, index, axis):
    if index.dtype.kind == "f" or len(index.shape) != len(src.shape):
        raise KernelTypeError("gather needs an integer index of the same rank")
    return src.like(np.take_along_axis(src.d, index.d.astype(np.int64), axis))
