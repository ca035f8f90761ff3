"""tlx: asynchronous copies - TMA loads, stores and reductions, bulk and cp.async copies, DSMEM.

Every copy is issued now and executed when the scheduler completes it. A TMA store has two stages: it first
reads its source in shared memory, then writes global memory. A bulk copy moves lines of 16 bytes between
aligned addresses; a tensor is taken to be aligned itself. Not modelled: the alignment of boxes in shared
memory, cache hints (accepted, ignored), the split of a large box into several copies.
"""

import numpy as np

from .barriers import barrier_on, one_barrier
from .context import CTX
from .descriptor import Descriptor
from .dtypes_rounding import to_store
from .memory import poison
from .ordering import commit_copies, wait_copies, wait_stores
from .tile import as_tensor
from .tile_typing import KernelTypeError
from .tl_memory import resolve
from .tlx_barriers import holds

LINE = 16  # bytes


def _core(shape):
    return [int(n) for n in shape if int(n) != 1]


def _check_block(what, desc, buffer):
    if _core(buffer.shape) != _core(desc.block_shape):
        raise KernelTypeError(
            f"{what}: block {list(desc.block_shape)} and {buffer.label} of shape {list(buffer.shape)} differ"
        )
    if buffer.dtype.itemsize != desc.dtype.itemsize:
        raise KernelTypeError(
            f"{what}: descriptor of {desc.dtype} and {buffer.label} of {buffer.dtype} differ"
        )


def _global_window(desc, offsets):
    window = desc.window(offsets)
    return None if window is None else (window[0], window[1], window[2])


# ---- TMA
def async_descriptor_load(
    desc,
    result,
    offsets,
    barrier,
    pred=None,
    cache_modifier="",
    eviction_policy="",
    multicast_targets=(),
    two_ctas=False,
):
    """TMA load into `result`; completes its bytes on `barrier` (of the leader CTA with two_ctas)."""
    if not holds(pred):
        return
    machine = CTX.machine
    cta = machine.cur.cta
    barrier = one_barrier(barrier)
    machine.maybe_preempt()
    offsets = [int(o) for o in offsets]
    _check_block("TMA load", desc, result)
    targets = [cta.cluster[int(r)] for r in multicast_targets] or [cta]
    if multicast_targets:
        cta.group.visits.barrier_at_start = True
    for peer in targets:
        bar = barrier_on(barrier, peer) if peer is not cta or multicast_targets else barrier
        if two_ctas:
            bar = barrier_on(bar, cta.cluster[peer.rank & ~1])
        op = _issue_load(machine, desc, result.on(peer), offsets, bar)
        _visit(peer, op)
        if peer is targets[0]:
            machine.globals.op_access("R", op, desc.ptr.ptr, _global_window(desc, offsets))
    CTX.count("tma_load_bytes", result.nbytes)


def _issue_load(machine, desc, buffer, offsets, bar):
    def run(op):
        buffer.array()[...] = desc.read(offsets).reshape(buffer.shape)
        bar.complete_bytes(buffer.nbytes, op.clock, op.site, ("o", op.id))

    info = dict(bytes=buffer.nbytes, bar=bar.label, desc=desc.name, phase=bar.phase)
    op = machine.issue("tma_load", buffer, run, writes=[buffer], info=info)
    if machine.policy != "eager":
        poison(buffer)  # the old contents are gone as soon as the copy may land
    return op


def async_descriptor_store(desc, source, offsets, eviction_policy="", store_reduce=""):
    """TMA store (or reduction) of `source`."""
    machine = CTX.machine
    machine.maybe_preempt()
    offsets = [int(o) for o in offsets]
    _check_block("TMA store", desc, source)
    staged = []

    window = desc.window(offsets)

    def read(op):
        staged.append(np.array(source.array()).reshape(desc.block_shape))
        if store_reduce and window is not None:
            part = staged[0][window[3]] if store_reduce == "add" else np.ones(window[1], bool)
            machine.globals.op_reduction(stages[1], desc.ptr.ptr, window[:3], part)

    def write(op):
        desc.write(offsets, staged.pop(), store_reduce)

    kind = "tma_reduce" if store_reduce else "tma_store"
    info = dict(bytes=source.nbytes, desc=desc.name)
    stages = _store_stages(machine, kind, source, read, write, info)
    if not store_reduce and window is not None:
        machine.globals.op_access("W", stages[1], desc.ptr.ptr, window[:3])
    CTX.count("tma_store_bytes", source.nbytes)


def _store_stages(machine, kind, source, read, write, info):
    first = machine.issue(kind, source, read, reads=[source], info=info)
    second = machine.issue(kind + "_write", source.label, write, after=first)
    machine.cur.stores.append((first, second))
    return first, second


def async_descriptor_store_wait(pendings):
    """cp.async.bulk.wait_group.read: at most `pendings` stores may still read shared memory.

    What the others write to global memory may still be due.
    """
    wait_stores(CTX.machine, int(pendings), read_only=True)


def async_descriptor_prefetch_tensor(desc, offsets, pred=None, eviction_policy=""):
    """A prefetch into L2 has no effect on what the kernel computes."""


def prefetch(pointer, level="L2", mask=None, tensormap=False):
    """See async_descriptor_prefetch_tensor."""


class DescriptorPointer:
    """tlx.allocate_tensor_descriptor: slots for descriptors made in the kernel."""

    def __init__(self, slots, index):
        self.slots = slots
        self.index = index

    def __getitem__(self, i):
        return DescriptorPointer(self.slots, self.index + int(i))


def allocate_tensor_descriptor(num):
    return DescriptorPointer([None] * int(num), 0)


def make_tensor_descriptor(desc_ptr, base, shape, strides, block_shape, padding_option="zero"):
    desc = Descriptor(base, shape, strides, block_shape, padding_option, base.ptr.name)
    if desc_ptr is not None:
        desc_ptr.slots[desc_ptr.index] = desc
    return desc


def reinterpret_tensor_descriptor(desc_ptr, block_shape, dtype):
    desc = desc_ptr.slots[desc_ptr.index]
    if desc is None:
        raise KernelTypeError("reinterpret_tensor_descriptor: no descriptor was made in this slot")
    return desc


# ---- bulk copies and cp.async
def async_load(
    src,
    result,
    mask=None,
    other=None,
    cache_modifier="",
    eviction_policy="",
    is_volatile=False,
    bulk=False,
    bulk_size=None,
    barrier=None,
):
    """cp.async of a pointer tile, or with bulk=True a one-dimensional copy that completes on `barrier`."""
    machine = CTX.machine
    if bulk:
        return _bulk_load(machine, src, result, bulk_size, one_barrier(barrier))
    buf, offsets, on = resolve(src, mask)

    def run(op):
        value = buf.flat[offsets if on is None else np.where(on, offsets, 0)]
        if on is not None:
            fill = np.zeros((), value.dtype) if other is None else to_store(result.dtype, as_tensor(other).d)
            value = np.where(on, value, fill)
        result.array()[...] = value

    op = machine.issue("cp_async", result, run, writes=[result], info=dict(bytes=result.nbytes))
    machine.globals.op_pointer_access("R", op, buf, offsets, on)
    machine.cur.copies.append(op)
    return op


def _bulk_load(machine, src, result, bulk_size, bar):
    nbytes = int(bulk_size) if bulk_size is not None else result.nbytes
    _check_lines("load", nbytes, src, result)
    count = nbytes // result.dtype.itemsize
    start = int(src.d)
    flat = src.ptr.flat

    def run(op):
        result.array().reshape(-1)[:count] = flat[start : start + count]
        bar.complete_bytes(nbytes, op.clock, op.site, ("o", op.id))

    if start < 0 or start + count > flat.size:
        raise IndexError(
            f"bulk copy outside of {src.ptr.name}: elements {start} to {start + count} of {flat.size}"
        )
    info = dict(bytes=nbytes, bar=bar.label, phase=bar.phase)
    op = machine.issue("bulk_load", result, run, writes=[result], info=info)
    _visit(machine.cur.cta, op)
    machine.globals.op_access("R", op, src.ptr, (start, (count,), (1,)))


def _check_lines(what, nbytes, pointer, buffer):
    """Size and both addresses of a bulk copy are multiples of 16 bytes."""
    start = int(pointer.d) * pointer.ptr.flat.itemsize
    for value, part in (
        (nbytes, f"its size, {nbytes} bytes,"),
        (start, f"its global address, {start} bytes into {pointer.ptr.name},"),
        (buffer.offset, f"its shared address, {buffer.offset} bytes into {buffer.alloc.name},"),
    ):
        if value % LINE:
            raise KernelTypeError(f"bulk {what} of {buffer.label}: {part} is no multiple of {LINE} bytes")


def async_load_commit_group(tokens=()):
    return commit_copies(CTX.machine.cur)


def async_load_wait_group(pendings, tokens=()):
    wait_copies(CTX.machine, int(pendings))


def async_store(dst_global_ptr, src_smem, size):
    """Bulk copy of `size` bytes from shared to global memory."""
    machine = CTX.machine
    _check_lines("store", int(size), dst_global_ptr, src_smem)
    count = int(size) // src_smem.dtype.itemsize
    start = int(dst_global_ptr.d)
    target = dst_global_ptr.ptr
    staged = []

    def read(op):
        staged.append(np.array(src_smem.array().reshape(-1)[:count]))

    def write(op):
        target.flat[start : start + count] = staged.pop()

    if start < 0 or start + count > target.flat.size:
        raise IndexError(
            f"bulk store outside of {target.name}: elements {start} to {start + count} of {target.flat.size}"
        )
    stages = _store_stages(machine, "bulk_store", src_smem, read, write, dict(bytes=int(size)))
    machine.globals.op_access("W", stages[1], target, (start, (count,), (1,)))


# ---- distributed shared memory
def _visit(peer, op):
    op.task.cta.group.visits.note_copy(peer, op, f"writes {op.label}")


def _peer(rank):
    return CTX.machine.cur.cta.cluster[int(rank)]


def _must_be_ready(peer, born, what):
    """See visits.py: what reaches into a neighbour comes after its start, or its barrier's initialization."""
    machine = CTX.machine
    task = machine.cur
    task.cta.group.visits.note_early(peer, task, born, what, machine.line())


def remote_shmem_store(dst, src, remote_cta_rank):
    """An ordinary store to another CTA's shared memory."""
    machine = CTX.machine
    task = machine.cur
    peer = _peer(remote_cta_rank)
    buffer = dst.on(peer)
    _must_be_ready(peer, peer.born, f"stores to {buffer.label}")
    machine.task_access(buffer, True)
    visits = task.cta.group.visits
    visits.note(buffer.storage.cta, task, task.slot, task.epoch, f"stores to {buffer.label}", machine.line())
    buffer.array()[...] = to_store(buffer.dtype, as_tensor(src).d)


def async_remote_shmem_store(dst, src, remote_cta_rank, barrier):
    """st.async: registers to another CTA's shared memory, completing bytes on its barrier."""
    machine = CTX.machine
    peer = _peer(remote_cta_rank)
    buffer = dst.on(peer)
    bar = barrier_on(one_barrier(barrier), peer)
    _must_be_ready(peer, bar.array.born, f"stores to {buffer.label} and signals {bar.label}")
    raw = to_store(buffer.dtype, as_tensor(src).d)

    def run(op):
        buffer.array()[...] = raw
        bar.complete_bytes(buffer.nbytes, op.clock, op.site, ("o", op.id))

    op = machine.issue("dsmem_store", buffer, run, writes=[buffer], info=dict(bytes=buffer.nbytes))
    _visit(peer, op)


def async_remote_shmem_copy(dst, src, remote_cta_rank, barrier):
    """Bulk copy from own shared memory to another CTA's, completing bytes on its barrier."""
    machine = CTX.machine
    peer = _peer(remote_cta_rank)
    buffer = dst.on(peer)
    bar = barrier_on(one_barrier(barrier), peer)
    _must_be_ready(peer, bar.array.born, f"copies to {buffer.label} and signals {bar.label}")

    def run(op):
        buffer.array()[...] = src.array()
        bar.complete_bytes(buffer.nbytes, op.clock, op.site, ("o", op.id))

    op = machine.issue(
        "dsmem_copy", buffer, run, reads=[src], writes=[buffer], info=dict(bytes=buffer.nbytes)
    )
    _visit(peer, op)
