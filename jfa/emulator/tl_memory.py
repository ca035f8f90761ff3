"""Global memory through pointers: load, store, atomics and block pointers.

A masked lane is not accessed; a lane outside of the tensor's storage is an OutOfBounds finding. An atomic
returns the value before it; lanes of one call that hit the same address take effect one after another in lane
order.
"""

import operator

import numpy as np

from . import dtypes as D
from . import dtypes_rounding as R
from .context import CTX
from .descriptor import Descriptor, OutOfBounds
from .tile import Tensor, as_tensor
from .tile_typing import KernelTypeError, shape_of

__all__ = [
    "BlockPointer",
    "advance",
    "atomic_add",
    "atomic_and",
    "atomic_cas",
    "atomic_max",
    "atomic_min",
    "atomic_or",
    "atomic_xchg",
    "atomic_xor",
    "load",
    "load_tensor_descriptor",
    "make_block_ptr",
    "make_tensor_descriptor",
    "store",
    "store_tensor_descriptor",
]

SEMANTICS = (None, "acquire", "release", "acq_rel", "relaxed")
SCOPES = (None, "cta", "gpu", "sys")


def resolve(pointer, mask=None):
    """(buffer, element offsets, mask or None) of a pointer tile.

    With bounds checked for the lanes that are on.
    """
    if not isinstance(pointer, Tensor) or pointer.ptr is None:
        kind = pointer.dtype if isinstance(pointer, Tensor) else type(pointer).__name__
        raise KernelTypeError(f"a pointer is needed, got {kind}")
    buffer, offsets = pointer.ptr, pointer.d
    on = None
    if mask is not None:
        on = as_tensor(mask).d
        if on.dtype != np.bool_:
            on = on != 0
        if on.shape != offsets.shape:
            if not offsets.shape and on.shape:
                raise KernelTypeError("the mask may not be a block when the pointer is a scalar")
            shape = np.broadcast_shapes(on.shape, offsets.shape)
            offsets, on = np.broadcast_to(offsets, shape), np.broadcast_to(on, shape)
    _check_bounds(buffer, offsets, on)
    return buffer, offsets, on


def _check_bounds(buffer, offsets, on):
    size = buffer.flat.size
    if not offsets.ndim:
        if (on is None or on) and not 0 <= offsets < size:
            raise OutOfBounds(f"access to {buffer.name}: element {int(offsets)} of {size}")
        return
    if offsets.min() >= 0 and offsets.max() < size:
        return
    bad = (offsets < 0) | (offsets >= size)
    if on is not None:
        bad &= on
    if bad.any():
        raise OutOfBounds(f"access to {buffer.name}: element {int(offsets[bad][0])} of {size}")


def load(
    pointer,
    mask=None,
    other=None,
    boundary_check=(),
    padding_option="",
    cache_modifier="",
    eviction_policy="",
    volatile=False,
    latency=None,
):
    if isinstance(pointer, BlockPointer):
        pointer, mask, other = pointer.lower(boundary_check, padding_option)
    elif isinstance(pointer, Descriptor):
        return pointer.load(mask)
    elif boundary_check or padding_option:
        raise KernelTypeError("boundary_check and padding_option are only for block pointers")
    if mask is None and other is not None:
        raise KernelTypeError("`other` cannot be given without `mask`")
    buffer, offsets, on = resolve(pointer, mask)
    dtype = pointer.dtype.element_ty
    CTX.global_read(buffer, offsets, on, **({"volatile": True} if volatile else {}))
    if offsets.size > 1:
        CTX.count("ld_global", offsets.size * dtype.itemsize)
    if on is None:
        return Tensor(R.from_store(dtype, buffer.flat[offsets]), dtype)
    fill = dtype.payload.type(0) if other is None else as_tensor(other, dtype).to(dtype).d
    if not offsets.ndim:
        return Tensor(R.from_store(dtype, buffer.flat[offsets]) if on else fill, dtype)
    out = np.broadcast_to(fill, offsets.shape).astype(dtype.payload)
    out[on] = R.from_store(dtype, buffer.flat[offsets[on]])
    return Tensor(out, dtype)


def store(pointer, value, mask=None, boundary_check=(), cache_modifier="", eviction_policy=""):
    if isinstance(pointer, BlockPointer):
        pointer, mask, _ = pointer.lower(boundary_check, "")
    elif isinstance(pointer, Descriptor):
        return pointer.store(value, mask)
    elif boundary_check:
        raise KernelTypeError("boundary_check is only for block pointers")
    buffer, offsets, on = resolve(pointer, mask)
    dtype = pointer.dtype.element_ty
    raw = _raw(value, dtype, offsets)
    CTX.global_write(buffer, offsets, on, raw)
    if offsets.size > 1:
        CTX.count("st_global", offsets.size * dtype.itemsize)
    if on is None:
        buffer.flat[offsets] = raw
    elif not offsets.ndim:
        if on:
            buffer.flat[offsets] = raw
    else:
        buffer.flat[offsets[on]] = raw[on]


def _raw(value, dtype, offsets):
    value = as_tensor(value, dtype).to(dtype)
    if value.shape and not offsets.shape:
        raise KernelTypeError("a block cannot be stored through a scalar pointer")
    d = value.d if value.d.flags.c_contiguous else np.ascontiguousarray(value.d)
    return np.broadcast_to(R.to_store(dtype, d), offsets.shape)


def load_tensor_descriptor(desc, offsets):
    return desc.load(offsets)


def store_tensor_descriptor(desc, offsets, value):
    return desc.store(offsets, value)


def make_tensor_descriptor(base, shape, strides, block_shape, padding_option="zero"):
    return Descriptor(base, shape, strides, block_shape, padding_option, base.ptr.name)


# -- atomics
def _check_atomic(pointer, sem, scope, what, float_only_add=True):
    if sem not in SEMANTICS:
        raise KernelTypeError(f"memory semantic {sem!r} not supported")
    if scope not in SCOPES:
        raise KernelTypeError(f"memory scope {scope!r} not supported")
    dtype = pointer.dtype.element_ty
    if (
        dtype.bits == 16
        and dtype.kind == "f"
        and what != "add"
        or dtype.bits == 16
        and dtype.kind != "f"
        or dtype.bits < 16
    ):
        raise KernelTypeError(f"atomic_{what} does not support {dtype}")
    return dtype


def _atomic(pointer, val, mask, sem, scope, what, fn):
    dtype = _check_atomic(pointer, sem, scope, what)
    if dtype.kind == "f" and what in ("and", "or", "xor"):
        raise KernelTypeError(f"atomic_{what} does not support {dtype}")
    buffer, offsets, on = resolve(pointer, mask)
    raw = _raw(val, dtype, offsets)
    CTX.global_atomic(buffer, offsets, on, sem, scope)
    flat = buffer.flat
    if not offsets.ndim:
        if on is not None and not on:
            return Tensor(dtype.payload.type(0), dtype)
        old = flat[offsets]
        flat[offsets] = _applied(fn, dtype, old, raw[()])
        return Tensor(R.from_store(dtype, old), dtype)
    before = np.zeros(offsets.shape, dtype.store)
    lanes = np.ones(offsets.shape, bool) if on is None else on
    where, values = offsets[lanes], raw[lanes]
    CTX.count("atomic", where.size)
    if np.unique(where).size == where.size:
        old = flat[where]
        flat[where] = _applied(fn, dtype, old, values)
    else:
        old = np.empty(where.size, dtype.store)
        for i in range(where.size):
            old[i] = flat[where[i]]
            flat[where[i]] = _applied(fn, dtype, old[i], values[i])
    before[lanes] = old
    return Tensor(R.from_store(dtype, before), dtype)


def _applied(fn, dtype, old, value):
    if dtype.kind != "f":
        return fn(old, value)
    r = fn(R.from_store(dtype, old), R.from_store(dtype, value))
    return R.to_store(dtype, R.round_to(dtype, r))


def atomic_add(pointer, val, mask=None, sem=None, scope=None):
    return _atomic(pointer, val, mask, sem, scope, "add", operator.add)


def atomic_max(pointer, val, mask=None, sem=None, scope=None):
    return _atomic(pointer, val, mask, sem, scope, "max", np.fmax)


def atomic_min(pointer, val, mask=None, sem=None, scope=None):
    return _atomic(pointer, val, mask, sem, scope, "min", np.fmin)


def atomic_and(pointer, val, mask=None, sem=None, scope=None):
    return _atomic(pointer, val, mask, sem, scope, "and", operator.and_)


def atomic_or(pointer, val, mask=None, sem=None, scope=None):
    return _atomic(pointer, val, mask, sem, scope, "or", operator.or_)


def atomic_xor(pointer, val, mask=None, sem=None, scope=None):
    return _atomic(pointer, val, mask, sem, scope, "xor", operator.xor)


def _exchange(old, value):
    return value


def atomic_xchg(pointer, val, mask=None, sem=None, scope=None):
    return _atomic(pointer, val, mask, sem, scope, "xchg", _exchange)


def atomic_cas(pointer, cmp, val, sem=None, scope=None):
    """Store val where the bits in memory equal cmp; returns the value before."""
    _check_atomic(pointer, sem, scope, "cas")
    buffer, offsets, _ = resolve(pointer)
    dtype = pointer.dtype.element_ty
    expected, raw = _raw(cmp, dtype, offsets), _raw(val, dtype, offsets)
    CTX.global_atomic(buffer, offsets, None, sem, scope)
    word = np.dtype(f"u{dtype.itemsize}")
    flat = buffer.flat
    if not offsets.ndim:
        old = flat[offsets]
        if old.view(word) == expected[()].view(word):
            flat[offsets] = raw[()]
        return Tensor(R.from_store(dtype, old), dtype)
    before = np.empty(offsets.shape, dtype.store)
    for i in np.ndindex(offsets.shape):
        before[i] = flat[offsets[i]]
        if before[i].view(word) == expected[i].view(word):
            flat[offsets[i]] = raw[i]
    return Tensor(R.from_store(dtype, before), dtype)


# -- block pointers
class BlockPointer:
    """tl.make_block_ptr: a base, a shape with strides, and the offsets of one block in it."""

    def __init__(self, base, shape, strides, offsets, block_shape, order):
        self.base = base
        self.shape = [int(n) for n in shape]
        self.strides = [int(n) for n in strides]
        self.offsets = [int(n) for n in offsets]
        self.block_shape = shape_of((block_shape,))
        self.order = tuple(order)
        if (
            not len(self.shape)
            == len(self.strides)
            == len(self.offsets)
            == len(self.block_shape)
            == len(self.order)
        ):
            raise KernelTypeError(
                "make_block_ptr: shape, strides, offsets, block_shape and order differ in length"
            )

    def advance(self, offsets):
        moved = [o + int(d) for o, d in zip(self.offsets, offsets)]
        return BlockPointer(self.base, self.shape, self.strides, moved, self.block_shape, self.order)

    def lower(self, boundary_check, padding_option):
        """The block of pointers, its mask over the checked dimensions, and the padding value."""
        offsets = np.zeros(self.block_shape, np.int64)
        mask = None
        for dim, (first, size) in enumerate(zip(self.offsets, self.block_shape)):
            index = (first + np.arange(size, dtype=np.int64)).reshape(
                [-1 if d == dim else 1 for d in range(len(self.shape))]
            )
            offsets = offsets + index * self.strides[dim]
            if dim in tuple(boundary_check):
                inside = (index >= 0) & (index < self.shape[dim])
                mask = inside if mask is None else mask & inside
        block = Tensor(self.base.d + offsets, self.base.dtype, self.base.ptr)
        if mask is None:
            return block, None, None
        padding = {"": None, "zero": None, "nan": float("nan")}[padding_option]
        return block, Tensor(np.broadcast_to(mask, self.block_shape), D.int1), padding


def make_block_ptr(base, shape, strides, offsets, block_shape, order):
    return BlockPointer(base, shape, strides, offsets, block_shape, order)


def advance(base, offsets):
    return base.advance(offsets)
