"""Host arguments of a launch as tl values: tensors become pointers into their storage."""

import gc
import sys

import numpy as np

from . import dtypes as D
from .context import CTX
from .descriptor import Descriptor, GlobalBuffer
from .errors import EmulationError
from .names import map_value
from .tile import Tensor, as_tensor

TORCH_DTYPES = {
    "torch.float16": "fp16",
    "torch.bfloat16": "bf16",
    "torch.float32": "fp32",
    "torch.float64": "fp64",
    "torch.float8_e4m3fn": "fp8e4nv",
    "torch.float8_e5m2": "fp8e5",
    "torch.int8": "int8",
    "torch.uint8": "uint8",
    "torch.int16": "int16",
    "torch.int32": "int32",
    "torch.int64": "int64",
    "torch.bool": "int1",
}


class Arguments:
    """Converts the arguments of one launch; tensors that share a storage share a buffer."""

    def __init__(self):
        self.buffers = {}

    def convert(self, v, name):
        """The tl value of a host argument."""
        if v is None or isinstance(v, (Tensor, str)):
            return v
        if isinstance(v, bool):
            return Tensor(np.bool_(v), D.int1)
        if isinstance(v, (int, np.integer)):
            return as_tensor(int(v))
        if isinstance(v, (float, np.floating)):
            return Tensor(np.float32(v), D.float32)
        if hasattr(v, "block_shape") and hasattr(v, "base"):
            padding = getattr(v, "padding", "zero") or "zero"
            return Descriptor(self.pointer(v.base, name), v.shape, v.strides, v.block_shape, padding, name)
        if hasattr(v, "data_ptr") or isinstance(v, np.ndarray):
            return self.pointer(v, name)
        if isinstance(v, (tuple, list)):
            items = [self.convert(x, f"{name}.{i}") for i, x in enumerate(v)]
            return type(v)(*items) if hasattr(v, "_fields") else tuple(items)
        return map_value(v)

    def pointer(self, t, name):
        """A pointer to the first element of a host tensor."""
        if isinstance(t, np.ndarray):
            dtype = D.by_name(str(t.dtype))
            if not t.flags.c_contiguous:
                raise EmulationError(f"argument {name}: a numpy array must be contiguous")
            key = (t.__array_interface__["data"][0], t.size, dtype.name)
            offset = 0
            if key not in self.buffers:
                self.buffers[key] = GlobalBuffer(t.reshape(-1), dtype, 0, name)
        else:
            if t.device.type != "cpu":
                raise EmulationError(f"argument {name} is on {t.device}; the emulator runs on CPU tensors")
            dtype = D.by_name(TORCH_DTYPES[str(t.dtype)])
            storage = t.untyped_storage()
            key = (storage.data_ptr(), storage.nbytes(), dtype.name)
            offset = t.storage_offset()
            if key not in self.buffers:
                self.buffers[key] = GlobalBuffer(_flat(storage, dtype), dtype, 0, name)
        return Tensor(np.int64(offset), D.PtrType(dtype), self.buffers[key])


def _flat(storage, dtype):
    """All of a torch storage as a flat numpy array of the element type (no copy)."""
    torch = sys.modules["torch"]
    raw = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
    return raw[: len(raw) // dtype.itemsize * dtype.itemsize].view(dtype.store)


def _live_storages():
    """Storages of all live CPU tensors."""
    torch = sys.modules["torch"]
    tensors = (o for o in gc.get_objects() if type(o) is torch.Tensor)
    return [t.untyped_storage() for t in tensors if t.device.type == "cpu" and t.layout == torch.strided]


def resolve_address(address, pointer_type):
    """Pointer arrays (grouped GEMM): the pointer tensor of the live CPU tensor that owns a raw address."""
    dtype = pointer_type.element_ty
    machine = CTX.machine
    for known in (True, False):
        if not known:
            machine.host_storages = _live_storages()
        for storage in machine.host_storages:
            if storage.data_ptr() <= address < storage.data_ptr() + storage.nbytes():
                buffer = GlobalBuffer(_flat(storage, dtype), dtype, 0, f"tensor@{address:#x}")
                return Tensor(
                    np.int64((address - storage.data_ptr()) // dtype.itemsize), pointer_type, buffer
                )
    raise EmulationError(f"address {address:#x} belongs to no live CPU tensor")
