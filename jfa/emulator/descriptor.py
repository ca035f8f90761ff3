"""Global memory: host tensors as flat buffers, tensor descriptors (TMA) and their in-bounds windows.

A descriptor reads zeros (or NaN) beyond its shape, also at negative offsets, and writes nothing there.
Checked as the hardware does: last stride 1, other strides and the base multiples of 16 bytes, at least 16
bytes in the last block dimension. Not modelled: the split of blocks wider than 256 into several boxes,
swizzling, L2.
"""

import numpy as np

from . import dtypes as D
from . import dtypes_rounding as R
from .context import CTX
from .errors import EmulationError
from .tile import Tensor, as_tensor
from .tile_typing import KernelTypeError

REDUCIBLE = {"add": "uint32 int32 uint64 fp32 fp16 bf16", "min": "uint32 int32 uint64 int64 fp16 bf16"}
REDUCIBLE["max"] = REDUCIBLE["min"]
REDUCIBLE.update(dict.fromkeys(("and", "or", "xor"), "uint32 int32 uint64 int64"))


class OutOfBounds(EmulationError, IndexError):
    """An access to global memory outside of the tensor that owns it."""


class GlobalBuffer:
    """One host tensor's whole storage as a flat numpy array of true bit patterns.

    address is the host address of its first byte; root is the buffer that all differently typed views share.
    """

    def __init__(self, flat, dtype, offset=0, name="", root=None):
        self.flat = flat
        self.dtype = dtype
        self.name = name
        self.root = self if root is None else root
        self.shadow = None

    @property
    def address(self):
        return self.flat.__array_interface__["data"][0]

    def view(self, dtype, old=None):
        """The same bytes as elements of another type."""
        raw = self.flat.view(np.uint8)
        whole = raw[: raw.size // dtype.itemsize * dtype.itemsize]
        return GlobalBuffer(whole.view(dtype.store), dtype, 0, self.name, self.root)


def pointer_from_address(address, ptype):
    """A raw address (loaded from an array of pointers) -> pointer into the live tensor that owns it."""
    from .arguments import resolve_address

    return resolve_address(address, ptype)


class Descriptor:
    """tl.tensor_descriptor, made on the host or in the kernel: a strided tensor and the block moved at a
    time.
    """

    def __init__(self, ptr, shape, strides, block_shape, padding="zero", name="desc"):
        self.ptr = ptr
        self.name = name
        self.padding = padding
        self.dtype = ptr.dtype.element_ty
        self.block_shape = [int(b) for b in block_shape]
        self.shape_ = [int(s) for s in shape]
        self.strides_ = [int(s) for s in strides]
        self._base = int(ptr.d)
        self._check()

    def _check(self):
        size = self.dtype.itemsize
        if (
            not len(self.shape_) == len(self.strides_) == len(self.block_shape)
            or not 1 <= len(self.shape_) <= 5
        ):
            raise KernelTypeError(
                f"descriptor {self.name}: shape, strides and block_shape must have the same 1 to 5 dimensions"
            )
        if self.strides_[-1] != 1:
            raise KernelTypeError(
                f"descriptor {self.name}: the last stride must be 1, got {self.strides_[-1]}"
            )
        if self.block_shape[-1] * size < 16:
            raise KernelTypeError(f"descriptor {self.name}: the last block dimension has fewer than 16 bytes")
        for stride in self.strides_[:-1]:
            if stride * size % 16:
                raise KernelTypeError(f"descriptor {self.name}: stride {stride} is no multiple of 16 bytes")
        if self._base * size % 16:
            raise KernelTypeError(
                f"descriptor {self.name}: base {self._base * size} bytes into the tensor, not aligned to 16"
            )

    @property
    def shape(self):
        return [Tensor(np.int32(n), D.int32) for n in self.shape_]

    @property
    def strides(self):
        return [Tensor(np.int64(n), D.int64) for n in self.strides_]

    @property
    def type(self):
        return self

    @property
    def block_type(self):
        return D.BlockType(self.dtype, self.block_shape)

    # -- windows and pure data movement
    def window(self, offsets, block_shape=None):
        """(first element, counts, strides.

        Destination slices) of the in-bounds part; None when it is empty.
        """
        block_shape = block_shape or self.block_shape
        if len(offsets) != len(block_shape):
            raise KernelTypeError(
                f"descriptor {self.name}: {len(offsets)} offsets for {len(block_shape)} dimensions"
            )
        start = self._base
        counts = []
        inside = []
        for offset, block, extent, stride in zip(offsets, block_shape, self.shape_, self.strides_):
            offset = int(offset)
            low = -offset if offset < 0 else 0
            high = min(block, extent - offset)
            if high <= low:
                return None
            start += (offset + low) * stride
            counts.append(high - low)
            inside.append(slice(low, high))
        start = self._wrapped(start)
        last = start + sum((n - 1) * s for n, s in zip(counts, self.strides_))
        if start < 0 or last >= self.ptr.ptr.flat.size:
            raise OutOfBounds(f"TMA access through {self.name} outside the allocation of {self.ptr.ptr.name}")
        return start, counts, self.strides_, tuple(inside)

    def _wrapped(self, element):
        """Element offset after the 64-bit wrap of its byte address (ragged descriptors count on the wrap)."""
        size = self.dtype.itemsize
        address = element * size % 2**64
        return (address - 2**64 if address >= 2**63 else address) // size

    def _strided(self, window):
        start, counts, strides, inside = window
        flat = self.ptr.ptr.flat
        size = flat.itemsize
        return np.ndarray(counts, flat.dtype, flat, start * size, [s * size for s in strides]), inside

    def read(self, offsets, block_shape=None):
        """The block's bit patterns, padded beyond the shape."""
        block_shape = block_shape or self.block_shape
        window = self.window(offsets, block_shape)
        if window is None:
            return self._padding_block(block_shape)
        part, inside = self._strided(window)
        if window[1] == block_shape:
            return part.copy()
        out = self._padding_block(block_shape)
        out[inside] = part
        return out

    def _padding_block(self, block_shape):
        fill = np.nan if self.padding == "nan" else 0
        return np.full(block_shape, fill, self.dtype.store)

    def write(self, offsets, raw, reduce=""):
        """Store (or reduce into memory) a block of bit patterns; what lies beyond the shape is dropped."""
        window = self.window(offsets)
        if window is None:
            return
        part, inside = self._strided(window)
        value = raw[inside]
        if not reduce:
            part[...] = value
            return
        self._check_reduce(reduce)
        if reduce in ("and", "or", "xor"):
            part[...] = getattr(np, f"bitwise_{reduce}")(part, value)
            return
        x, y = R.from_store(self.dtype, part), R.from_store(self.dtype, value)
        r = x + y if reduce == "add" else (np.fmin if reduce == "min" else np.fmax)(x, y)
        if self.dtype.kind == "f":
            r = R.round_to(self.dtype, r)
        part[...] = R.to_store(self.dtype, r)

    def _check_reduce(self, reduce):
        if reduce not in REDUCIBLE:
            raise KernelTypeError(f"unknown reduction {reduce!r} of a TMA store")
        if self.dtype.name not in REDUCIBLE[reduce].split():
            raise KernelTypeError(f"a TMA reduction {reduce!r} does not exist for {self.dtype}")

    # -- what kernels call
    def _hook(self, kind, offsets, block_shape=None):
        window = self.window(offsets, block_shape)
        if window is not None:
            CTX.global_window(kind, self.ptr.ptr, *window[:3])

    @property
    def _nbytes(self):
        return int(np.prod(self.block_shape)) * self.dtype.itemsize

    def load(self, offsets, latency=None):
        CTX.trace("tma_load_sync", self.name, bytes=self._nbytes)
        self._hook("R", offsets)
        return Tensor(R.from_store(self.dtype, self.read(offsets)), self.dtype)

    def store(self, offsets, value, store_reduce=""):
        value = as_tensor(value)
        if list(value.shape) != self.block_shape:
            raise KernelTypeError(
                f"descriptor {self.name}: store of shape {list(value.shape)} as block {self.block_shape}"
            )
        CTX.trace("tma_reduce_sync" if store_reduce else "tma_store_sync", self.name, bytes=self._nbytes)
        self._hook("A" if store_reduce else "W", offsets)
        self.write(
            offsets, R.to_store(self.dtype, np.ascontiguousarray(value.to(self.dtype).d)), store_reduce
        )

    def atomic_add(self, offsets, value):
        self.store(offsets, value, "add")

    def atomic_min(self, offsets, value):
        self.store(offsets, value, "min")

    def atomic_max(self, offsets, value):
        self.store(offsets, value, "max")

    def atomic_and(self, offsets, value):
        self.store(offsets, value, "and")

    def atomic_or(self, offsets, value):
        self.store(offsets, value, "or")

    def atomic_xor(self, offsets, value):
        self.store(offsets, value, "xor")

    def _row_blocks(self, rows):
        if len(self.block_shape) != 2 or self.block_shape[0] != 1:
            raise KernelTypeError(f"descriptor {self.name}: gather and scatter need a block of one row")
        if rows.d.ndim != 1 or rows.d.size < 8:
            raise KernelTypeError("gather and scatter need at least 8 row offsets in one dimension")
        return [int(r) for r in rows.d]

    def gather(self, x_offsets, y_offset):
        """Rows x_offsets of the tensor, columns from y_offset on."""
        rows = self._row_blocks(x_offsets)
        for row in rows:
            self._hook("R", [row, y_offset])
        raw = np.concatenate([self.read([row, y_offset]) for row in rows])
        return Tensor(R.from_store(self.dtype, raw), self.dtype)

    def scatter(self, value, x_offsets, y_offset):
        """Store row i of value to row x_offsets[i], columns from y_offset on."""
        raw = R.to_store(self.dtype, np.ascontiguousarray(value.to(self.dtype).d))
        for i, row in enumerate(self._row_blocks(x_offsets)):
            self._hook("W", [row, y_offset])
            self.write([row, y_offset], raw[i : i + 1])
