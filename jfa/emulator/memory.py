"""On-chip memory: storages (bytes), allocations (which bytes) and buffers (typed, strided views of them).

Modelled: shared memory as bytes, tensor memory as 128 lanes of 512 columns x 4 bytes, aliasing of several
allocations over one storage, poisoned (NaN) initial contents, views outside their allocation. Not modelled:
swizzling and bank conflicts (a buffer's bytes lie in plain row-major order), padding between allocations, and
the shared memory that the compiler takes for itself.
"""

import functools
import math

import numpy as np

from .errors import CapacityError, EmulationError
from .tile import Tensor

TMEM_COLUMNS = 512
TMEM_PITCH = 4 * TMEM_COLUMNS  # bytes a lane
TMEM_LANES = 128
SMEM_BYTES = 232_448  # what one CTA can have on sm_90 and sm_100
SMEM_GRAIN = 16  # bytes of a shadow granule; small storages use 4
UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
POISON = 0xFF  # all bits set is NaN in every float type used here


class Storage:
    """A block of shared or tensor memory of one CTA, which one or several allocations share.

    The shadow state for race detection lives here: `records` (see order.py) and `written`, a bit mask of
    granules.
    """

    __slots__ = (
        "cta",
        "kind",
        "name",
        "size",
        "bytes",
        "used",
        "least",
        "written",
        "records",
        "grain",
        "index",
    )

    def __init__(self, cta, kind, name):
        self.cta = cta
        self.kind = kind
        self.name = name
        self.size = TMEM_PITCH * TMEM_LANES if kind == "tmem" else 0
        self.bytes = np.full(self.size, POISON, np.uint8)
        self.used = 0  # bytes (shared memory) or bytes a lane (tensor memory)
        self.least = 0  # what the hardware's layouts can do with
        self.written = 0
        self.records = []
        self.grain = None
        self.index = len(cta.storages)
        cta.storages.append(self)

    def grow(self, n, least=None):
        """Makes the storage at least n bytes (bytes a lane) large, of which the hardware needs `least`."""
        self.used = max(self.used, n)
        self.least = max(self.least, n if least is None else least)
        if self.kind == "tmem":
            if n > TMEM_PITCH:
                raise CapacityError(
                    f"{self.name} needs {n // 4} tensor-memory columns, a CTA has {TMEM_COLUMNS}"
                )
        elif n > self.size:
            grown = np.full(n, POISON, np.uint8)
            grown[: self.size] = self.bytes
            self.bytes = grown
            self.size = n

    def mask(self, offset, shape, strides):
        """Bit mask of the granules that a strided view touches; overlap of two views is one `&`."""
        if self.grain is None:
            self.grain = SMEM_GRAIN if self.size > 8192 else 4
        grain = 0 if self.kind == "tmem" else self.grain
        return granules(grain, offset, shape, strides)


@functools.lru_cache(maxsize=8192)
def granules(grain, offset, shape, strides):
    """Bit mask of a strided window of bytes; grain 0 is tensor memory (granule: 32 lanes x one column)."""
    address = np.array([offset], np.int64)
    for n, stride in zip(shape, strides):
        address = (address[:, None] + np.arange(n, dtype=np.int64) * stride).ravel()
    if grain:
        granule = address // grain
    else:
        granule = (address // TMEM_PITCH // 32) * TMEM_COLUMNS + (address % TMEM_PITCH) // 4
    bits = np.zeros(int(granule.max()) + 1, np.uint8)
    bits[granule] = 1
    return int.from_bytes(np.packbits(bits, bitorder="little").tobytes(), "little")


class Allocation:
    """One `local_alloc`: `num` buffers of one shape; `offset` says where buffer i lies."""

    __slots__ = (
        "name",
        "named",
        "storage",
        "shape",
        "dtype",
        "num",
        "unit",
        "least",
        "base",
        "stride",
        "group",
        "views",
        "written",
        "index",
    )

    def __init__(self, name, named, storage, shape, dtype, num):
        self.name = name
        self.named = named  # False: the name is made up, an aggregate that takes the buffer may rename it
        self.storage = storage
        self.shape = tuple(shape)
        self.dtype = dtype
        self.num = num
        self.unit = math.prod(shape) * dtype.itemsize
        if storage.kind == "tmem":
            if len(shape) != 2:
                raise EmulationError(
                    f"tensor-memory buffer {name} must have two dimensions, got {list(shape)}"
                )
            self.unit = shape[1] * dtype.itemsize * max(1, -(-shape[0] // TMEM_LANES))
        self.least = self.unit
        if storage.kind == "tmem" and shape[0] == 64 and len(storage.cta.cluster) > 1:
            self.least //= (
                2  # the accumulator of a two-CTA MMA: both halves of its columns lie side by side in lanes
            )
        self.base = 0
        self.stride = self.unit
        self.group = 1
        self.views = {}
        self.index = len(storage.cta.allocations)
        storage.cta.allocations.append(self)
        self.written = 0  # granules that were written under this name

    def offset(self, i):
        return self.base + (i // self.group) * self.stride + (i % self.group) * self.unit


class Buffer:
    """tlx.buffered_tensor: an array of buffers (num > 0) or one typed, strided view (num == 0)."""

    __slots__ = ("alloc", "storage", "offset", "shape", "strides", "dtype", "index", "num", "_array", "_mask")

    def __init__(self, alloc, storage, offset, shape, strides, dtype, index, num=0):
        self.alloc = alloc
        self.storage = storage
        self.offset = offset
        self.shape = tuple(shape)
        self.strides = tuple(strides)
        self.dtype = dtype
        self.index = index
        self.num = num
        self._array = None
        self._mask = None

    @property
    def label(self):
        return f"{self.alloc.name}[{self.index}]"

    @property
    def nbytes(self):
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def type(self):
        from .tlx_buffers import buffer_type

        return buffer_type(self)

    def __getitem__(self, i):
        return self.at(i.d.item() if type(i) is Tensor else int(i))

    def at(self, i):
        """Buffer i of an array of buffers, or row i of a view."""
        if self.num == 0:
            shape = self.shape[1:] if len(self.shape) > 1 else (1,)
            strides = self.strides[1:] if len(self.shape) > 1 else self.strides
            index = f"{self.index},{i}"
            return Buffer(
                self.alloc, self.storage, self.offset + i * self.strides[0], shape, strides, self.dtype, index
            )
        key = (i, self.offset, self.shape, self.strides, self.dtype.name)
        view = self.alloc.views.get(key)
        if view is None:
            if not 0 <= i < self.num:
                raise EmulationError(f"buffer index {i} is outside {self.alloc.name} (num={self.num})")
            offset = self.offset + self.alloc.offset(i)
            view = Buffer(self.alloc, self.storage, offset, self.shape, self.strides, self.dtype, i)
            self.alloc.views[key] = view
        return view

    def derive(self, offset=0, shape=None, strides=None, dtype=None, index=None, num=None):
        """A view of the same bytes with other offset (relative), shape, strides (bytes) or type."""
        return Buffer(
            self.alloc,
            self.storage,
            self.offset + offset,
            self.shape if shape is None else shape,
            self.strides if strides is None else strides,
            self.dtype if dtype is None else dtype,
            self.index if index is None else index,
            self.num if num is None else num,
        )

    def array(self):
        """The bytes as a writable numpy array of the storage type."""
        storage = self.storage
        if self._array is not None and self._array[0] is storage.bytes:
            return self._array[1]
        last = self.offset + sum((n - 1) * t for n, t in zip(self.shape, self.strides)) + self.dtype.itemsize
        if self.offset < 0 or last > storage.size:
            raise EmulationError(f"{self.label}: the view lies outside its allocation")
        array = np.ndarray(self.shape, self.dtype.store, storage.bytes, self.offset, self.strides)
        self._array = (storage.bytes, array)
        return array

    def mask(self):
        """Granules of the storage that this view touches."""
        if self._mask is None:
            self._mask = self.storage.mask(self.offset, self.shape, self.strides)
        return self._mask

    def on(self, cta):
        """The same view in another CTA of the cluster (CTAs allocate in the same order).

        Waits until the peer has allocated: the compiler synchronizes the cluster after its set-up.
        """
        storage = self.storage
        if storage.cta is cta:
            return self
        k = storage.index
        cta.machine.wait_for_setup(
            cta, lambda: len(cta.allocations) > self.alloc.index and cta.storages[k].used >= storage.used
        )
        peer = cta.storages[k]
        alloc = cta.allocations[self.alloc.index]
        return Buffer(alloc, peer, self.offset, self.shape, self.strides, self.dtype, self.index, self.num)


def row_major(shape, itemsize, kind):
    """Strides in bytes of a row-major tile; a tensor-memory row is a lane."""
    if kind == "tmem":
        return (TMEM_PITCH, itemsize)
    strides = []
    step = itemsize
    for n in reversed(shape):
        strides.append(step)
        step *= n
    return tuple(reversed(strides))


def poison(buffer):
    """What an asynchronous write in flight leaves behind: NaN (all bits set) in floats, zero in integers."""
    array = buffer.array()
    if buffer.dtype.kind != "f":
        array[...] = 0
        return
    bits = UNSIGNED[array.itemsize]
    np.ndarray(array.shape, bits, buffer.storage.bytes, buffer.offset, array.strides).fill(np.iinfo(bits).max)
