"""tlx: buffers in shared and tensor memory, views of them, ordinary loads and stores, aliasing trees."""

import enum
import types

import numpy as np

from .barriers import BarrierArray
from .context import CTX
from .dtypes_rounding import from_store, to_store
from .errors import EmulationError
from .memory import Allocation, Buffer, Storage, row_major
from .tile import Tensor, as_tensor
from .tile_typing import KernelTypeError


class storage_kind(enum.Enum):
    smem = "smem"
    tmem = "tmem"
    smemCluster = "smemCluster"


class reuse_group_type(enum.Enum):
    shared = "shared"
    distinct = "distinct"


def buffer_type(buffer):
    """What `buffer.type` shows of a buffered tensor."""
    return types.SimpleNamespace(
        storage=storage_kind(buffer.storage.kind),
        shape=list(buffer.shape),
        num=buffer.num,
        element_ty=buffer.dtype,
        scalar=buffer.dtype,
    )


def allocation_name(kind):
    """(name, named): the assignment target of the calling line, or a made-up name."""
    machine = CTX.machine
    name = machine.next_name
    machine.next_name = None
    if name is not None:
        return name, True
    return f"{kind}{len(machine.cur.cta.storages) + len(machine.cur.cta.barrier_arrays)}", False


# ---- aliasing
class storage_alias_spec:
    """Storage that several allocations (reuse=spec) share, laid out by set_buffer_overlap."""

    def __init__(self, storage=storage_kind.smem, buffer_size_bytes=None):
        name, _ = allocation_name("alias")
        self.storage = Storage(CTX.machine.cur.cta, storage.value, name)
        self.size = buffer_size_bytes

    def set_buffer_overlap(self, overlap_def):
        place(overlap_def, self.storage)
        check_capacity(self.storage)


class reuse_group:
    """A node of an aliasing tree: children that share bytes, or lie one after the other (distinct)."""

    def __init__(self, *args, group_type=reuse_group_type.shared, group_size=1):
        self.args = args
        self.group_type = group_type
        self.group_size = int(group_size)


def _tree_size(node, group, align, least=False):
    """(bytes, buffer count) of a subtree, an element of which covers `group` buffers."""
    if isinstance(node, Buffer):
        unit = node.alloc.least if least else node.alloc.unit
        return -(-unit * group // align) * align, node.alloc.num // group
    group *= node.group_size
    sizes = [_tree_size(child, group, align, least) for child in node.args]
    counts = {n for _, n in sizes}
    if len(counts) != 1:
        raise EmulationError(f"reuse_group: unequal buffer counts {sorted(counts)}")
    combine = max if node.group_type == reuse_group_type.shared else sum
    return combine(size for size, _ in sizes), counts.pop()


def place(tree, storage):
    """Gives every allocation in the tree its place in the storage."""
    align = 4 if storage.kind == "tmem" else 128
    total, count = _tree_size(tree, 1, align)

    def put(node, offset, group):
        if isinstance(node, Buffer):
            alloc = node.alloc
            alloc.base, alloc.stride, alloc.group = offset, total, group
            alloc.views.clear()
            return
        group *= node.group_size
        for child in node.args:
            put(child, offset, group)
            if node.group_type == reuse_group_type.distinct:
                offset += _tree_size(child, group, align)[0]

    put(tree, 0, 1)
    storage.grow(total * count, _tree_size(tree, 1, align, least=True)[0] * count)


def check_capacity(storage):
    CTX.machine.check_capacity(storage.cta, storage.kind)
    storage.cta.allocated()


def local_alloc(shape, dtype, num, storage=storage_kind.smem, reuse=None, layout=None):
    cta = CTX.machine.cur.cta
    name, named = allocation_name("buffer")
    kind = storage.value
    if kind == "tmem" and CTX.machine.arch == "sm_90":
        raise EmulationError(f"{name}: tensor memory is only available on Blackwell")
    shape = tuple(int(s) for s in shape)
    num = int(num)
    if reuse is None:
        store = Storage(cta, kind, name)
    elif isinstance(reuse, (list, tuple)):
        store = reuse[0].storage
    else:
        store = reuse.storage
    if store.kind != kind:
        raise EmulationError(f"{name}: reuse across storage kinds")
    alloc = Allocation(name, named, store, shape, dtype, num)
    store.grow(alloc.unit * num, alloc.least * num)
    check_capacity(store)
    return Buffer(alloc, store, 0, shape, row_major(shape, dtype.itemsize, kind), dtype, "*", num)


# ---- views
def local_view(local_allocated_buffers, buffer_idx):
    if isinstance(local_allocated_buffers, (BarrierArray, Buffer)):
        return local_allocated_buffers[buffer_idx]
    return local_allocated_buffers.slots[int(buffer_idx)]


def subslice(local_allocated_buffer, offset, size):
    b = local_allocated_buffer
    offset = int(offset)
    index = f"{b.index}:{offset}+{int(size)}"
    return b.derive(offset * b.strides[-1], b.shape[:-1] + (int(size),), index=index)


def local_slice(buffer, offset, shape):
    offsets = [int(o) for o in offset]
    shift = sum(o * s for o, s in zip(offsets, buffer.strides))
    return buffer.derive(shift, [int(s) for s in shape], index=f"{buffer.index}:{offsets}", num=0)


def local_trans(input, dims=(1, 0)):
    b = input
    return b.derive(shape=[b.shape[int(d)] for d in dims], strides=[b.strides[int(d)] for d in dims])


def local_reinterpret(src, dtype, shape=None):
    shape = tuple(int(s) for s in (src.shape if shape is None else shape))
    return src.derive(shape=shape, strides=row_major(shape, dtype.itemsize, src.storage.kind), dtype=dtype)


def local_reshape(src, shape):
    shape = tuple(int(s) for s in shape)
    return src.derive(shape=shape, strides=row_major(shape, src.dtype.itemsize, "smem"))


def remote_view(local_allocated_buffer, remote_cta_rank):
    from .barriers import barrier_on, one_barrier

    cta = CTX.machine.cur.cta.cluster[int(remote_cta_rank)]
    if isinstance(local_allocated_buffer, Buffer):
        return local_allocated_buffer.on(cta)
    return barrier_on(one_barrier(local_allocated_buffer), cta)


# ---- ordinary loads and stores
def local_load(src, token=None, layout=None, relaxed=False):
    machine = CTX.machine
    machine.maybe_preempt()
    machine.task_access(src, False)
    if machine.tracing:
        machine.trace("local_load", src.label, mem=src.storage.kind, bytes=src.nbytes)
    CTX.count(src.storage.kind + "_ld", src.nbytes)
    return Tensor(from_store(src.dtype, src.array()), src.dtype)


def local_store(dst, src):
    machine = CTX.machine
    machine.maybe_preempt()
    value = as_tensor(src)
    if value.dtype != dst.dtype:
        raise KernelTypeError(f"local_store of {value.dtype} into {dst.label} of {dst.dtype}")
    if tuple(value.shape) != dst.shape:
        raise KernelTypeError(f"local_store of shape {list(value.shape)} into {dst.label} {list(dst.shape)}")
    machine.task_access(dst, True)
    if machine.tracing:
        machine.trace("local_store", dst.label, mem=dst.storage.kind, bytes=dst.nbytes)
    CTX.count(dst.storage.kind + "_st", dst.nbytes)
    dst.array()[...] = to_store(dst.dtype, value.d)


def _indices(indices):
    return (indices.array() if isinstance(indices, Buffer) else indices.d).astype(np.int64)


def local_gather(src, indices, axis, token=None):
    CTX.machine.task_access(src, False)
    picked = np.take_along_axis(src.array(), _indices(indices), int(axis))
    return Tensor(from_store(src.dtype, picked), src.dtype)


def local_scatter(dst, src, indices, axis, token=None):
    CTX.machine.task_access(dst, True)
    np.put_along_axis(dst.array(), _indices(indices), to_store(dst.dtype, src.d), int(axis))
