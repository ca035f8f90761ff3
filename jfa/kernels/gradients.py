"""What both backward passes do around the main kernel: row statistics before it, dQ's last step after it.

The main kernels want, for every query row, lse in log2 units and delta = rowsum(O * dO) - dlse, in whole
tiles. ``Rows`` says where a sequence's rows lie in those two arrays, (Hq, rows) float32 each: at multiples
of BLOCK, with the slots behind a sequence's last row set to lse = +inf and delta = 0, so that P and dS come
out as 0 there.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from jfa.kernels.baseline_parts import find_rows, find_tile
from jfa.kernels.problem import Problem

LOG2_E = tl.constexpr(1.4426950408889634)


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


@triton.jit(do_not_specialize=["batch", "query_len", "total_kv", "count", "padded", "heads", "kv_columns"])
def prepare_kernel(
    out,
    dout,
    lse,
    dlse,
    log2_lse,
    delta,
    dk,
    dv,
    q_offsets,
    kv_offsets,
    batch,
    query_len,
    total_kv,
    count,
    padded,
    heads,
    kv_columns,
    BROADCAST: tl.constexpr,
    HAS_DLSE: tl.constexpr,
    CLEAR: tl.constexpr,
    BLOCK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
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
    seen = row_lse > -float("inf")
    stat = head.to(tl.int64) * count + tile.to(tl.int64) * BLOCK + row
    tl.store(log2_lse + stat, tl.where(seen, row_lse * LOG2_E, float("inf")))
    tl.store(delta + stat, tl.where(seen, row_delta, 0.0))
    if CLEAR:
        program = tile.to(tl.int64) * heads + head
        slack = tl.load(kv_offsets + batch).to(tl.int64) * kv_columns + program * 1024
        step = tl.num_programs(0).to(tl.int64) * heads * 1024
        zeros = tl.zeros([1024], dk.dtype.element_ty)
        for offset in range(slack, total_kv.to(tl.int64) * kv_columns, step):
            column = offset + tl.arange(0, 1024)
            tl.store(dk + column, zeros, mask=column < total_kv.to(tl.int64) * kv_columns)
            tl.store(dv + column, zeros, mask=column < total_kv.to(tl.int64) * kv_columns)


@triton.jit(do_not_specialize=["terms", "stride", "size"])
def finish_kernel(sums, dq, terms, stride, size, scale, BLOCK: tl.constexpr):
    """dq = scale * (sum of ``terms`` float32 arrays, always in the same order), in the dtype of dq."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for term in range(terms):
        total += tl.load(sums + term.to(tl.int64) * stride + at, mask=at < size, other=0.0)
    tl.store(dq + at, total * scale, mask=at < size)


def prepare_rows(
    problem: Problem, dout, dlse, out, lse, kv_offsets, q_offsets, dk, dv, block: int, padded: int = 0
) -> Rows:
    """Run the preprocess: statistics in blocks of ``block`` rows; also zeros dk and dv past the last offset.

    ``padded`` rows are kept for every sequence of broadcast-Q (default: M rounded up to whole blocks).
    """
    heads = problem.heads_q
    if problem.broadcast_q:
        padded = padded or triton.cdiv(problem.total_q, block) * block
        tiles = problem.batch * (padded // block)
    else:
        padded = 0
        tiles = problem.total_q // block + problem.batch
    count = tiles * block
    log2_lse = out.new_empty((heads, count), dtype=torch.float32)
    delta = out.new_empty((heads, count), dtype=torch.float32)
    prepare_kernel[(tiles, heads)](
        out,
        dout,
        lse,
        dlse if dlse is not None else lse,
        log2_lse,
        delta,
        dk,
        dv,
        q_offsets if q_offsets is not None else kv_offsets,
        kv_offsets,
        problem.batch,
        problem.total_q,
        problem.total_kv,
        count,
        padded,
        heads,
        problem.heads_kv * problem.head_dim,
        BROADCAST=problem.broadcast_q,
        HAS_DLSE=dlse is not None,
        CLEAR=True,
        BLOCK=block,
        HEAD_DIM=problem.head_dim,
        num_warps=4,
    )
    return Rows(log2_lse, delta, padded, count)


def finish_queries(problem: Problem, sums: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """dq (rows, Hq, D) in the dtype of q from float32 ``sums`` (terms, at least rows, Hq * D), scaled."""
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    size = dq.numel()
    finish_kernel[(triton.cdiv(size, 1024),)](
        sums, dq, sums.shape[0], sums.stride(0), size, problem.scale, BLOCK=1024, num_warps=4
    )
    return dq
