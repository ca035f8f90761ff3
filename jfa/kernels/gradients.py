"""What both architectures do around a backward kernel: its choice, row statistics before, dQ's end after it.

The main kernels want, for every query row, lse in log2 units and delta = rowsum(O * dO) - dlse, in whole
tiles. ``Rows`` says where a sequence's rows lie in those two arrays, (Hq, rows) float32 each: at multiples
of BLOCK, with the slots behind a sequence's last row set to lse = +inf and delta = 0, so that P and dS come
out as 0 there.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from jfa.kernels import baseline
from jfa.kernels.baseline_parts import find_rows, find_tile
from jfa.kernels.launch import drop_unseen, find, launch
from jfa.kernels.problem import Problem
from jfa.kernels.step import BlackwellStationary, HopperStationary, Step
from jfa.kernels.tiles import Schedule, make_schedule

LOG2_E = tl.constexpr(1.4426950408889634)
TERMS = 64  # arrays that a program of `finish_kernel` loads at once
STATIONARY = (HopperStationary, BlackwellStationary)  # steps whose dQ stays on chip


@dataclass(frozen=True)
class Rows:
    """The statistics of all query rows of a call: two float32 tensors (Hq, ``count``).

    Sequence b starts at ``b * padded`` with broadcast-Q, and at ``(q_offsets[b] // block + b) * block`` with
    packed Q, which leaves every sequence room for whole blocks without a prefix sum.
    """

    log2_lse: torch.Tensor
    delta: torch.Tensor
    padded: int
    count: int


@dataclass(frozen=True)
class Passes:
    """The backward passes of one architecture: its steps, dQ on chip last, and how either kind is launched.

    ``choose(problem)``: the fastest step. ``run_keys`` and ``run_stationary``: the arguments of `run`, with
    the step and the schedule behind the problem -> dq, dk, dv; dout and dlse contiguous, nothing empty.
    """

    steps: list[Step]
    choose: Callable[[Problem], Step]
    run_keys: Callable
    run_stationary: Callable

    def supports(self, problem: Problem, step: Step | None, *, deterministic: bool = False) -> str | None:
        """None if that step can run the backward pass of this call, else a sentence that says why not.

        ``deterministic``: with the same bits for dq in every run. Step None is a free choice.
        """
        if isinstance(step, STATIONARY):
            reason = fits_stationary(problem)
            return reason and f"step {step.name}: {reason}"
        if step is not None and deterministic:
            return f"deterministic: expected a step that adds dq in a fixed order, got {step.name}"
        return None

    def find(self, problem: Problem, step: Step | str | None, deterministic: bool = False) -> Step | None:
        """The step that runs the call; None where only the baseline is deterministic. Raises ValueError."""
        step = find(self.steps, step)
        reason = self.supports(problem, step, deterministic=deterministic)
        if reason is not None:
            raise ValueError(reason)
        if step is not None or not deterministic:
            return step or self.choose(problem)
        return self.steps[-1] if fits_stationary(problem) is None else None

    def run(
        self, problem: Problem, dout, dlse, q, k, v, out, lse, kv_offsets, q_offsets, *,
        schedule: Schedule | None = None, step: Step | str | None = None, deterministic: bool = False,
        needs: tuple[bool, bool, bool] = (True, True, True),
    ) -> tuple[torch.Tensor | None, ...]:  # fmt: skip
        """dq, dk and dv, in the shapes and dtype of q, k and v; None where ``needs`` says so.

        ``deterministic``: the kernel with dQ on chip adds in a fixed order as it is; where it cannot run, the
        compiler-scheduled baseline does, whose dQ has a fixed order too. Raises ValueError for a step that
        cannot run the call so.
        """
        step = self.find(problem, step, deterministic)
        tensors = (q, k, v, out, lse, kv_offsets, q_offsets)
        if step is None:
            return baseline.backward(problem, dout, dlse, *tensors, deterministic=True, needs=needs)
        if 0 in (problem.total_kv, problem.total_q, problem.batch):
            found = [torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q, k, v)]
        else:
            dout = drop_unseen(problem, dout, lse, kv_offsets, q_offsets)
            incoming = (dout.contiguous(), None if dlse is None else dlse.contiguous())
            run = self.run_stationary if isinstance(step, STATIONARY) else self.run_keys
            found = run(problem, step, schedule, *incoming, *tensors)
        return tuple(x if need else None for x, need in zip(found, needs, strict=True))


def fits_stationary(problem: Problem) -> str | None:
    """None if dQ can stay on chip, else the reason: it takes one shared query block and plain heads."""
    if not problem.broadcast_q:
        return "q_offsets: expected none, because only a shared query block has one dQ"
    if problem.group != 1:
        return f"q: expected as many heads as k, got {problem.heads_q} and {problem.heads_kv}"
    return "window: expected none, and not causal" if problem.masked else None


def tiles_for(problem, schedule, kv_offsets, q_offsets, block_n: int, order: str = "natural") -> Schedule:
    """The caller's schedule if its key tiles are those of the kernel, else one made here.

    Key tiles that meet one shared query block have equal work: then both orders are the same.
    """
    if schedule is not None and (schedule.block_n, schedule.pruned) == (block_n, True):
        if problem.broadcast_q or schedule.order == order:
            return schedule
    return make_schedule(problem, kv_offsets, q_offsets, 128, block_n, order=order, pruned=True)


@triton.jit(do_not_specialize=["batch", "query_len", "total_kv", "count", "padded", "heads", "kv_columns"])
def prepare_kernel(
    out, dout, lse, dlse, log2_lse, delta, dk, dv, q_offsets, kv_offsets,
    batch, query_len, total_kv, count, padded, heads, kv_columns,
    BROADCAST: tl.constexpr, HAS_DLSE: tl.constexpr, BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """Statistics of BLOCK rows of one head, and zeros into the gradients of key rows past the last offset."""
    tile = tl.program_id(0)
    head = tl.program_id(1)
    if BROADCAST:
        per_sequence = padded // BLOCK
        sequence = tile // per_sequence
        first = (tile % per_sequence) * BLOCK
        start = sequence.to(tl.int64) * query_len
        length = query_len
        lse_row = (sequence.to(tl.int64) * heads + head) * query_len + first
    else:
        sequence, first = find_tile(q_offsets, tile, batch, BLOCK)
        start, length = find_rows(q_offsets, sequence, batch, query_len)
        length = tl.where(sequence < batch, length, 0)
        lse_row = head.to(tl.int64) * query_len + start + first
    row = tl.arange(0, BLOCK)
    real = first + row < length
    at = ((start + first + row) * heads + head)[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
    o = tl.load(out + at, mask=real[:, None], other=0.0).to(tl.float32)
    do = tl.load(dout + at, mask=real[:, None], other=0.0).to(tl.float32)
    row_delta = tl.sum(o * do, 1)
    if HAS_DLSE:
        row_delta -= tl.load(dlse + lse_row + row, mask=real, other=0.0)
    row_lse = tl.load(lse + lse_row + row, mask=real, other=-float("inf"))
    seen = row_lse != -float("inf")  # NaN is seen: it must reach the gradients
    stat = head.to(tl.int64) * count + tile.to(tl.int64) * BLOCK + row
    tl.store(log2_lse + stat, tl.where(seen, row_lse * LOG2_E, float("inf")))
    tl.store(delta + stat, tl.where(seen, row_delta, 0.0))
    slack = tl.load(kv_offsets + batch).to(tl.int64) * kv_columns + (tile.to(tl.int64) * heads + head) * 1024
    end = total_kv.to(tl.int64) * kv_columns
    zeros = tl.zeros([1024], dk.dtype.element_ty)
    for offset in range(slack, end, tl.num_programs(0).to(tl.int64) * heads * 1024):
        column = offset + tl.arange(0, 1024)
        tl.store(dk + column, zeros, mask=column < end)
        tl.store(dv + column, zeros, mask=column < end)


@triton.jit(do_not_specialize=["terms"])
def finish_kernel(sums, dq, terms, stride, size, scale, TERMS: tl.constexpr, BLOCK: tl.constexpr):
    """dq = scale * (sum of ``terms`` float32 arrays, always in the same order), in the dtype of dq.

    A program loads BLOCK numbers of TERMS arrays before it adds: all in flight at once. ``size`` is
    specialized: a multiple of 16 lets 16 bytes travel together.
    """
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    if TERMS == 1:
        total = tl.load(sums + at, mask=at < size)
    else:
        term = tl.arange(0, TERMS)
        total = tl.zeros([BLOCK], tl.float32)
        for first in range(0, terms, TERMS):
            place = sums + (first + term).to(tl.int64)[:, None] * stride + at[None, :]
            real = (first + term < terms)[:, None] & (at < size)[None, :]
            total += tl.sum(tl.load(place, mask=real, other=0.0), 0)
    tl.store(dq + at, total * scale, mask=at < size)


def prepare_rows(
    problem: Problem, dout, dlse, k, v, out, lse, kv_offsets, q_offsets, block: int, padded: int = 0
) -> tuple[Rows, torch.Tensor, torch.Tensor]:
    """Run the preprocess: statistics in blocks of ``block`` rows; dk and dv, zero past the last offset.

    ``padded`` rows are kept for every sequence of broadcast-Q (default: M rounded up to whole blocks).
    """
    heads, dim = problem.heads_q, problem.head_dim
    if problem.broadcast_q:
        padded = padded or -(-problem.total_q // block) * block
        tiles = problem.batch * (padded // block)
    else:
        padded = 0
        tiles = problem.total_q // block + problem.batch
    count = tiles * block
    dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (k, v))
    log2_lse, delta = (out.new_empty((heads, count), dtype=torch.float32) for _ in range(2))
    launch(prepare_kernel, (tiles, heads),
        out, dout, lse, lse if dlse is None else dlse, log2_lse, delta, dk, dv,
        kv_offsets if q_offsets is None else q_offsets, kv_offsets,
        problem.batch, problem.total_q, problem.total_kv, count, padded, heads, problem.heads_kv * dim,
        BROADCAST=problem.broadcast_q, HAS_DLSE=dlse is not None, BLOCK=block, HEAD_DIM=dim, num_warps=4,
    )  # fmt: skip
    return Rows(log2_lse, delta, padded, count), dk, dv


def finish_queries(problem: Problem, sums: torch.Tensor, q: torch.Tensor, scale: float | None = None):
    """dq (rows, Hq, D) in the dtype of q from float32 ``sums`` (terms, at least rows, Hq * D), scaled.

    ``scale``: what the sums still lack (default: the scale of the scores).
    """
    dq = torch.empty_like(q, memory_format=torch.contiguous_format)
    size, terms = dq.numel(), sums.shape[0]
    block, at_once = 128 if terms > 1 else 512, min(1 << (terms - 1).bit_length(), TERMS)
    launch(finish_kernel, (-(-size // block),),
        sums, dq, terms, sums.stride(0), size, problem.scale if scale is None else scale,
        TERMS=at_once, BLOCK=block, num_warps=4,
    )  # fmt: skip
    return dq
