"""Register values: a Tensor is a scalar or a block with an element type.

What is modelled: values and types, the views that kernels take, C arithmetic (tile_arith.py). What is not:
the layout of a block over threads and its registers.
"""

import numpy as np

from . import dtypes as D
from . import dtypes_rounding as R
from .context import CTX
from .tile_typing import KernelTypeError, check_power_of_two, number_dtype, shape_of


class Tensor:
    """A register value: payload d (numpy array or scalar), element type dtype, and for pointers the buffer
    ptr.

    A pointer tile holds element offsets (int64) into ptr, the global buffer.
    """

    __slots__ = ("d", "dtype", "ptr")
    __array_priority__ = 1000
    __hash__ = object.__hash__

    def __init__(self, d, dtype, ptr=None):
        self.d = d if isinstance(d, (np.ndarray, np.generic)) else np.asarray(d, dtype.payload)[()]
        self.dtype = dtype
        self.ptr = ptr

    @property
    def shape(self):
        return self.d.shape

    @property
    def type(self):
        return D.BlockType(self.dtype, self.shape) if self.shape else self.dtype

    @property
    def numel(self):
        return self.d.size

    @property
    def T(self):
        return self.trans()

    def __repr__(self):
        return f"Tensor({self.dtype}{list(self.shape)})"

    # -- values of scalars
    def _scalar(self):
        d = self.d
        if d.ndim and d.size != 1:
            raise KernelTypeError(
                f"block {self!r} is used where one scalar is needed (condition, index or loop bound)"
            )
        return d.item()

    def __bool__(self):
        return bool(self._scalar())

    def __int__(self):
        return int(self._scalar())

    __index__ = __int__

    def __float__(self):
        return float(self._scalar())

    def item(self):
        return Tensor(self.d.reshape(())[()], self.dtype, self.ptr)

    # -- views
    def like(self, d):
        """A tile of the same type with another payload."""
        return Tensor(d, self.dtype, self.ptr)

    def __getitem__(self, index):
        if not isinstance(index, tuple):
            index = (index,)
        for i in index:
            if not (i is None or (isinstance(i, slice) and i == slice(None))):
                raise KernelTypeError("only None and : may index a register tile")
        return Tensor(self.d[index], self.dtype, self.ptr)

    def trans(self, *dims):
        dims = shape_of(dims) if dims else ()
        if not dims:
            if self.d.ndim < 2:
                raise KernelTypeError("trans of a tile with fewer than two dimensions")
            return self.like(self.d.swapaxes(-1, -2))
        if sorted(dims) != list(range(self.d.ndim)):
            raise KernelTypeError(f"permute dims {dims} are no permutation of the {self.d.ndim} dimensions")
        return self.like(self.d.transpose(dims))

    def permute(self, *dims):
        return self.trans(*dims)

    def reshape(self, *shape, can_reorder=False):
        shape = shape_of(shape)
        check_power_of_two(shape)
        if int(np.prod(shape)) != self.d.size:
            raise KernelTypeError(
                f"reshape of {list(self.shape)} to {list(shape)} changes the number of elements"
            )
        return self.like(np.reshape(self.d, shape))

    def view(self, *shape):
        return self.reshape(*shape)

    def broadcast_to(self, *shape):
        shape = shape_of(shape)
        if self.shape and len(self.shape) != len(shape):
            raise KernelTypeError(f"broadcast of {list(self.shape)} to {list(shape)}: ranks differ")
        if any(n not in (1, m) for n, m in zip(self.shape, shape)):
            raise KernelTypeError(f"broadcast of {list(self.shape)} to {list(shape)}")
        return self.like(np.broadcast_to(self.d, shape))

    def expand_dims(self, axis):
        axes = (axis,) if isinstance(axis, (int, np.integer)) or isinstance(axis, Tensor) else axis
        return self.like(np.expand_dims(self.d, tuple(int(a) for a in axes)))

    def split(self):
        if not self.shape or self.shape[-1] != 2:
            raise KernelTypeError(f"split needs a last dimension of 2, got {list(self.shape)}")
        return self.like(self.d[..., 0]), self.like(self.d[..., 1])

    # -- conversions
    def to(self, dtype, fp_downcast_rounding=None, bitcast=False):
        if dtype is self.dtype:
            return self
        if self.ptr is not None:
            return self._pointer_to(dtype)
        if dtype.is_ptr():
            from .descriptor import pointer_from_address

            return pointer_from_address(int(self), dtype)
        if bitcast:
            return self._bitcast(dtype)
        d = self.d
        if d.size > 1:
            CTX.count("cvt", d.size)
        return Tensor(R.convert(d, self.dtype, dtype, fp_downcast_rounding), dtype)

    def cast(self, dtype, fp_downcast_rounding=None, bitcast=False):
        return self.to(dtype, fp_downcast_rounding, bitcast)

    def _bitcast(self, dtype):
        if dtype.primitive_bitwidth != self.dtype.primitive_bitwidth:
            raise KernelTypeError(f"bitcast of {self.dtype} to {dtype}: widths differ")
        raw = R.to_store(self.dtype, np.ascontiguousarray(self.d) if self.d.ndim else self.d)
        return Tensor(R.from_store(dtype, raw.view(dtype.store)), dtype)

    def _pointer_to(self, dtype):
        old = self.dtype.element_ty
        if dtype.is_ptr():
            new = dtype.element_ty
            if new == old:
                return Tensor(self.d, dtype, self.ptr)
            offsets = self.d * old.itemsize // new.itemsize
            return Tensor(offsets, dtype, self.ptr.view(new))
        address = self.d * np.int64(old.itemsize) + np.int64(self.ptr.address)
        return Tensor(R.convert(address, D.int64, dtype), dtype)


def as_tensor(value, like=None):
    """A Tensor as it is; a Python number as a scalar tile, of type `like` where the weak rules allow it."""
    if isinstance(value, Tensor):
        return value
    dtype = number_dtype(value)
    if like is not None and like.level >= dtype.level:
        dtype = like
    d = dtype.payload.type(value)
    if dtype.narrow_float:
        d = R.round_to(dtype, d)
    return Tensor(d, dtype)


from . import tile_arith  # noqa: E402

tile_arith.install(Tensor)
