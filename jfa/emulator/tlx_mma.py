"""tlx: tensor-core operations - tcgen05 (tensor memory), wgmma (registers), scaled MMA, commits.

Operands are read and results written when the scheduler completes the operation; operations of one task
complete in order. Accumulation is float32 (numpy); float32 operands are cut to tf32 unless "ieee" is asked
for. Two-CTA MMAs concatenate both CTAs' halves of B; with 64 rows a CTA the accumulator has the split-lane
layout (left half of N in lanes 0-63, right half in lanes 64-127). Not modelled: e2m1 operands, block layouts
of scale factors in tensor memory.
"""

import numpy as np

from . import dtypes as D
from .barriers import barrier_on, one_barrier
from .context import CTX
from .dtypes_rounding import mma_operand
from .errors import UnknownConstruct
from .memory import Buffer
from .tile import Tensor
from .tile_typing import KernelTypeError
from .tlx_barriers import holds

FORMATS = {"e4m3": D.float8e4nv, "e5m2": D.float8e5}


class PendingTensor(Tensor):
    """The result registers of a wgmma in flight; reading them before async_dot_wait is a register hazard."""

    __slots__ = ("op", "result", "_shape")

    def __init__(self, shape, dtype):
        self.dtype = dtype
        self.ptr = None
        self.op = None
        self.result = None
        self._shape = tuple(shape)

    @property
    def shape(self):
        return self._shape

    @property
    def d(self):
        machine = CTX.machine
        op = self.op
        task = machine.cur
        if task is not None and not op.saw(task.clock):
            line = machine.line()
            machine.findings.add(
                "register hazard",
                f"{task.name} (line {line}) reads the result of the async_dot of line {op.line} before "
                f"async_dot_wait",
                task=task,
                line=line,
                key=("register hazard", line, op.line),
            )
            return np.full(self._shape, np.nan, np.float32)
        return self.result


def async_dot(
    A,
    B,
    acc=None,
    use_acc=None,
    pred=None,
    mBarriers=(),
    two_ctas=False,
    force_async=False,
    input_precision=None,
    out_dtype=D.float32,
):
    """D = A @ B + acc: tcgen05 with a tensor-memory accumulator, wgmma without one."""
    machine = CTX.machine
    machine.maybe_preempt()
    rows, k = A.shape
    columns = B.shape[1]
    if rows < 64 or k < 16 or columns < 8:
        raise KernelTypeError(f"async_dot: tile {rows} x {columns} x {k} is too small")
    if isinstance(acc, Buffer):
        load = _ieee if input_precision == "ieee" else _operand
        return _tcgen05(
            "mma", A, B, acc, use_acc, pred, mBarriers, two_ctas, force_async, 2 * rows * columns * k, load
        )
    if isinstance(A, Buffer) and A.storage.kind == "tmem":
        raise KernelTypeError("async_dot: an operand in tensor memory needs an accumulator in tensor memory")
    if k != B.shape[0]:
        raise KernelTypeError(f"async_dot: shapes {list(A.shape)} and {list(B.shape)} do not match")
    return _wgmma(machine, A, B, acc, use_acc, input_precision, out_dtype)


def _operand(buffer, side=None):
    return mma_operand(buffer.dtype, buffer.array())


def _ieee(buffer, side=None):
    return buffer.array().astype(np.float32)


# ---- wgmma
def _wgmma(machine, A, B, acc, use_acc, input_precision, out_dtype):
    task = machine.cur
    if machine.arch == "sm_100":
        raise KernelTypeError("async_dot: on Blackwell the accumulator must be in tensor memory")
    if use_acc is not None and acc is not None and not bool(use_acc):
        line = machine.line()
        machine.findings.add(
            "ignored argument",
            f"async_dot (line {line}) ignores use_acc on Hopper: the accumulator is added all the same",
            "warning",
            task=task,
            line=line,
        )
    load = _ieee if input_precision == "ieee" else _operand
    result = PendingTensor((A.shape[0], B.shape[1]), out_dtype)
    registers = None if isinstance(A, Buffer) else mma_operand(A.dtype, A.d)

    def run(op):
        value = (registers if registers is not None else load(A)) @ load(B)
        if isinstance(acc, PendingTensor):
            value = value + acc.result
        elif acc is not None:
            value = value + (acc.d if isinstance(acc, Tensor) else acc)
        result.result = value

    flop = 2 * A.shape[0] * A.shape[1] * B.shape[1]
    info = dict(flop=flop, dtype=str(B.dtype), shape=(A.shape[0], B.shape[1], A.shape[1]))
    reads = [v for v in (A, B) if isinstance(v, Buffer)]
    op = machine.issue("wgmma", B, run, reads=reads, queue=("wgmma", task.slot), info=info)
    CTX.count("mma_flop", flop)
    result.op = op
    task.dots.append(op)
    return result


def async_dot_wait(pendings, inp):
    """wgmma.wait_group: at most `pendings` wgmmas may be in flight; returns the input's registers."""
    machine = CTX.machine
    task = machine.cur
    n = len(task.dots) - int(pendings)
    if n > 0:
        machine.wait_ops(task.dots[:n], f"async_dot_wait({int(pendings)})")
        task.dots = task.dots[n:]
    if isinstance(inp, PendingTensor) and inp.op.done and inp.op not in task.dots:
        return Tensor(inp.result, inp.dtype)
    return inp


# ---- tcgen05
def _tcgen05(kind, A, B, acc, use_acc, pred, bars, two_ctas, force_async, flop, load, scales=()):
    machine = CTX.machine
    task = machine.cur
    cta = task.cta
    if not holds(pred):
        return
    if machine.arch == "sm_90":
        raise KernelTypeError("async_dot: tensor memory is only available on Blackwell")
    if two_ctas and cta.rank % 2:  # only the leader CTA of the pair issues
        return
    accumulate = holds(use_acc)
    _check_shapes(A, B, acc, two_ctas)
    if two_ctas:
        cta.group.visits.barrier_at_start = cta.group.visits.barrier_at_end = True
    bars = [one_barrier(b) for b in bars]
    ctas = [cta, cta.cluster[cta.rank + 1]] if two_ctas else [cta]
    left = [A.on(c) for c in ctas]
    right = [B.on(c) for c in ctas]
    out = [acc.on(c) for c in ctas]
    targets = [barrier_on(b, c) for b in bars for c in ctas]
    split = two_ctas and acc.shape[0] == 64
    if split:
        out = [c.derive(shape=(128, c.shape[1] // 2)) for c in out]

    def run(op):
        b = np.concatenate([load(x, "B") for x in right], axis=1) if two_ctas else load(right[0], "B")
        for a, c in zip(left, out):
            value = load(a, "A") @ b
            if split:
                value = np.concatenate(np.split(value, 2, axis=1), axis=0)
            target = c.array()
            if accumulate:
                np.add(target, value, out=target, casting="same_kind")
            else:
                target[...] = value
        for bar in targets:
            bar.arrive(1, op.clock, op.site, ("o", op.id))

    flop *= len(ctas) * (acc.shape[1] // B.shape[1] if two_ctas else 1)
    info = dict(flop=flop, dtype=str(B.dtype), shape=(A.shape[0] * len(ctas), acc.shape[1], A.shape[1]))
    info.update(A=A.label, B=B.label, use_acc=accumulate, bars=[b.label for b in bars])
    reads = left + right + list(scales) + (out if accumulate else [])
    op = machine.issue(kind, acc, run, reads=reads, writes=out, queue=("mma", task.slot), info=info)
    cta.group.visits.note_mma(op, ctas)
    CTX.count("mma_flop", flop)
    if machine.policy != "eager" and not accumulate and op.previous is None:
        for c in out:
            c.array()[...] = np.nan  # the old contents are gone; not before older MMAs that read them
    if not bars and not force_async:
        machine.wait_ops([op], f"the synchronous async_dot into {acc.label}")


def _check_shapes(A, B, acc, two_ctas):
    if acc.dtype not in (D.float32, D.float16):
        raise KernelTypeError(f"async_dot: the accumulator must be float32 or float16, got {acc.dtype}")
    if A.shape[1] != B.shape[0]:
        raise KernelTypeError(f"async_dot: shapes {list(A.shape)} and {list(B.shape)} do not match")
    if tuple(acc.shape) != (A.shape[0], B.shape[1] * (2 if two_ctas else 1)):
        raise KernelTypeError(
            f"async_dot: {list(A.shape)} x {list(B.shape)} does not fit the accumulator {list(acc.shape)}"
        )


def tcgen05_commit(mBarrier, two_ctas=False):
    """Arrives on the barrier when all MMAs that the task has issued until now are complete."""
    machine = CTX.machine
    task = machine.cur
    cta = task.cta
    bar = one_barrier(mBarrier)
    if two_ctas and cta.rank % 2:
        return
    ctas = [cta, cta.cluster[cta.rank + 1]] if two_ctas else [cta]
    targets = [barrier_on(bar, c) for c in ctas]

    def run(op):
        for b in targets:
            b.arrive(1, op.clock, op.site, ("o", op.id))

    machine.issue("commit", bar.label, run, queue=("mma", task.slot))


# ---- block-scaled MMA
def _unpack_scales(raw, rows, blocks):
    """(rows, blocks) e8m0 bytes from the packed 32 x 4 x 4 layout, or as they are."""
    if raw.shape == (rows, blocks):
        return raw
    packed = raw.reshape(rows // 128, blocks // 4, 32, 4, 4)  # (row tile, block tile, row, row group, block)
    return packed.transpose(0, 3, 2, 1, 4).reshape(rows, blocks)


def _scales(buffer, rows, blocks):
    raw = np.array(buffer.array()).view(np.uint8)
    return np.exp2(_unpack_scales(raw, rows, blocks).astype(np.float32) - 127)


def async_dot_scaled(
    A,
    B,
    acc,
    A_scale,
    A_format,
    B_scale,
    B_format,
    use_acc=None,
    pred=None,
    mBarriers=(),
    two_ctas=False,
    force_async=False,
    out_dtype=D.float32,
):
    """MXFP8: like async_dot with one e8m0 scale for 32 elements along K."""
    for fmt in (A_format, B_format):
        if fmt not in FORMATS:
            raise UnknownConstruct(f"async_dot_scaled operands of format {fmt}")
    CTX.machine.maybe_preempt()
    k = A.shape[1]
    columns = B.shape[1]

    def load(buffer, side):
        fmt = FORMATS[A_format if side == "A" else B_format]
        value = np.array(buffer.array()).view(fmt.store).astype(np.float32)
        if side == "A":
            return value * np.repeat(_scales(A_scale, value.shape[0], k // 32), 32, 1)
        return value * np.repeat(_scales(B_scale, columns, k // 32), 32, 1).T

    flop = 2 * A.shape[0] * columns * k
    scales = [A_scale, B_scale]
    _tcgen05("mma_scaled", A, B, acc, use_acc, pred, mBarriers, two_ctas, force_async, flop, load, scales)


def tmem_copy(src, dst):
    """tcgen05.cp: shared to tensor memory, in order with the task's MMAs; unpacks scale factors."""
    machine = CTX.machine

    def run(op):
        raw = np.array(src.array())
        target = dst.array()
        target[...] = raw if raw.shape == target.shape else _unpack_scales(raw, *target.shape)

    info = dict(bytes=dst.nbytes)
    cta = machine.cur.cta
    queue = ("mma", machine.cur.slot)
    op = machine.issue("tmem_copy", dst, run, reads=[src], writes=[dst], queue=queue, info=info)
    cta.group.visits.note_mma(op, [cta])
