"""The compiler-scheduled baseline: jagged flash attention in plain Triton, forward and backward.

One program a tile, one warp group that does everything, ``tl.dot`` and pointers: what a mature kernel looks
like when the compiler alone decides what overlaps. It has every feature of the public function, never asks
the device for a length, and is where the ladder of the course starts. Its kernels stand in
``baseline_forward.py`` and ``baseline_backward.py``, the small functions that they share in
``baseline_parts.py``, tuning and launching in ``baseline_launch.py``.
"""

import math

import torch
import triton

from jfa.kernels.baseline_backward import delta_kernel, dkdv_kernel, dq_kernel, sum_kernel
from jfa.kernels.baseline_forward import forward_kernel
from jfa.kernels.baseline_launch import (
    arch_of,
    configurations,
    facts,
    launch,
    padded,
    query_tiles,
    rows_contiguous,
)

MAX_HEAD_DIM = 256
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LOG2_E = math.log2(math.e)
SUM_BLOCK = 1024
DQ_PROGRAMS = (
    528  # programs that share the key tiles of a broadcast-Q dQ; fixed, so that sums keep their order
)

# (BLOCK_M, BLOCK_N, num_warps, num_stages) by the larger head dimension, padded. The first of a list is
# the known one, which runs without tuning; with fewer than 64 queries the one of "few" comes before it.
FORWARD = {
    "few": {64: (16, 64, 4, 3), 128: (16, 64, 4, 3), 256: (16, 32, 4, 2)},
    "hopper": {
        64: [(128, 128, 8, 3), (128, 64, 4, 3), (64, 64, 4, 3), (64, 128, 4, 3)],
        128: [(128, 128, 8, 2), (128, 64, 8, 3), (64, 64, 4, 3), (64, 128, 4, 2)],
        256: [(128, 64, 8, 2), (64, 64, 4, 2)],
    },
    "blackwell": {
        64: [(128, 128, 8, 3), (128, 64, 4, 3), (64, 64, 4, 3), (64, 128, 4, 3)],
        128: [(128, 64, 8, 3), (128, 128, 8, 1), (64, 64, 8, 2), (64, 64, 4, 3)],
        256: [(128, 32, 8, 3), (64, 64, 8, 2)],
    },
    "other": {
        64: [(64, 64, 4, 2), (128, 64, 4, 2)],
        128: [(64, 64, 4, 2), (128, 32, 8, 2)],
        256: [(64, 32, 8, 2)],
    },
    "float32": {
        64: [(64, 32, 8, 2), (16, 32, 4, 2)],
        128: [(32, 64, 8, 2), (32, 32, 8, 2)],
        256: [(32, 32, 8, 1)],
    },
}
DKDV = {
    "few": {64: (32, 64, 4, 2), 128: (32, 64, 4, 2), 256: (32, 32, 8, 1)},
    "hopper": {
        64: [(64, 128, 8, 2), (64, 128, 8, 3), (64, 64, 4, 2), (128, 128, 8, 2)],
        128: [(64, 128, 8, 2), (64, 128, 8, 3), (64, 64, 4, 2), (64, 64, 8, 2)],
        256: [(64, 32, 8, 1), (32, 64, 8, 1)],
    },
    "blackwell": {
        64: [(64, 128, 8, 2), (64, 64, 4, 2)],
        128: [(64, 64, 4, 2), (64, 64, 8, 2)],
        256: [(32, 64, 8, 1)],
    },
    "other": {
        64: [(32, 64, 4, 2), (64, 64, 8, 2)],
        128: [(32, 32, 4, 2), (32, 64, 8, 1)],
        256: [(32, 32, 8, 1)],
    },
    "float32": {
        64: [(16, 32, 4, 1), (32, 32, 8, 1)],
        128: [(32, 32, 8, 1), (16, 32, 4, 1)],
        256: [(16, 16, 4, 1)],
    },
}
DQ = {
    "few": {64: (16, 64, 4, 2), 128: (16, 64, 4, 2), 256: (16, 64, 8, 1)},
    "hopper": {
        64: [(128, 64, 8, 2), (128, 128, 8, 2), (64, 64, 4, 2)],
        128: [(128, 64, 8, 2), (64, 64, 4, 2), (128, 128, 8, 1)],
        256: [(64, 32, 8, 2), (128, 32, 8, 1), (32, 64, 8, 1)],
    },
    "blackwell": {
        64: [(128, 64, 8, 2), (64, 128, 8, 1), (64, 64, 4, 2)],
        128: [(128, 64, 8, 1), (64, 64, 8, 2), (64, 128, 8, 1)],
        256: [(32, 64, 8, 1)],
    },
    "other": {64: [(64, 64, 4, 2)], 128: [(64, 32, 8, 2)], 256: [(32, 32, 8, 1)]},
    "float32": {64: [(32, 32, 4, 1)], 128: [(16, 32, 4, 1), (32, 32, 8, 1)], 256: [(16, 16, 4, 1)]},
}


def supports(problem):
    """Return None when the kernels can run a problem, else one sentence naming the argument and the limit."""
    if problem.dtype not in DTYPES:
        return f"q, k and v must be bfloat16, float16 or float32, got {problem.dtype}"
    for name, size in (("q and k", problem.head_dim), ("v", problem.head_dim_v)):
        if not 1 <= size <= MAX_HEAD_DIM:
            return f"the head dimension of {name} must be between 1 and {MAX_HEAD_DIM}, got {size}"
    if problem.heads_q % problem.heads_kv:
        return (
            f"the heads of q must be a multiple of those of k, got {problem.heads_q} and {problem.heads_kv}"
        )
    return None


def forward(problem, q, k, v, kv_offsets, q_offsets, *, schedule=None, step=None):
    """Return (out, lse) of one call; shapes as in ``Problem``, out in the type of q, lse float32."""
    q, k, v = rows_contiguous(q), rows_contiguous(k), rows_contiguous(v)
    out = torch.empty(problem.out_shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(problem.lse_shape, dtype=torch.float32, device=q.device)
    if lse.numel():
        launch(
            forward_kernel,
            configurations(FORWARD, problem, arch_of(q)),
            lambda block_m, block_n: query_tiles(problem, block_m) * problem.heads_q,
            dict(out=out, lse=lse) | _common(problem, q, k, v, kv_offsets, q_offsets),
            facts=facts(problem, q),
        )
    return out, lse


def backward(
    problem,
    dout,
    dlse,
    q,
    k,
    v,
    out,
    lse,
    kv_offsets,
    q_offsets,
    *,
    schedule=None,
    step=None,
    deterministic=False,
    needs=(True, True, True),
):
    """Return (dq, dk, dv) in the types and shapes of q, k and v, None where not needed.

    dout is shaped like out, dlse like lse (None counts as zero). With ``deterministic`` nothing is tuned and
    dq is summed in a fixed order, so that every run gives the same bits; otherwise float32 atomics add up the
    dq of broadcast-Q.
    """
    need_q, need_k, need_v = needs
    q, k, v = rows_contiguous(q), rows_contiguous(k), rows_contiguous(v)
    dout, out, lse = rows_contiguous(dout), rows_contiguous(out), lse.contiguous()
    empty = [
        torch.empty(x.shape, dtype=x.dtype, device=x.device) if n else None for x, n in zip((q, k, v), needs)
    ]
    dq, dk, dv = empty
    common = _common(problem, q, k, v, kv_offsets, q_offsets) | _layout(problem, dout, "do")
    common |= dict(dout=dout, lse=lse, delta=None)
    if need_q or need_k:
        common["delta"] = _launch_delta(problem, dout, dlse, out)

    need_kv = (need_k or need_v) and problem.total_kv > 0
    add_dq = need_q and need_kv and problem.broadcast_q and not deterministic
    dq_sum = dq
    if need_q and problem.broadcast_q:
        shares = 1 if add_dq else _dq_shares(problem)
        dq_sum = torch.zeros((shares, *q.shape), dtype=torch.float32, device=q.device)
    if need_kv:
        outputs = dict(dk=dk, dv=dv, dq=dq_sum if add_dq else None)
        _launch_dkdv(problem, common | outputs, tune=not deterministic)
    if need_q and not add_dq and q.numel():
        _launch_dq(problem, common | dict(dq=dq_sum), tune=not deterministic)
    if need_q and problem.broadcast_q and q.numel():
        blocks = triton.cdiv(dq.numel(), SUM_BLOCK)
        sum_kernel[(blocks,)](dq_sum, dq, shares, dq.numel(), float(problem.scale), BLOCK=SUM_BLOCK)
    return dq, dk, dv


def _launch_delta(problem, dout, dlse, out):
    delta = torch.empty(problem.lse_shape, dtype=torch.float32, device=out.device)
    if delta.numel():
        slabs = problem.batch if problem.broadcast_q else 1
        block_m = min(padded(problem.total_q), 64)
        launch(
            delta_kernel,
            [(block_m, 16, 4, 1)],
            lambda block_m, block_n: slabs * triton.cdiv(problem.total_q, block_m) * problem.heads_q,
            dict(
                out=out,
                dout=dout,
                dlse=None if dlse is None else dlse.contiguous(),
                delta=delta,
                total_q=problem.total_q,
                HEADS_Q=problem.heads_q,
                DV=problem.head_dim_v,
                BLOCK_DV=padded(problem.head_dim_v),
                HAS_DLSE=dlse is not None,
                **_layout(problem, out, "o"),
                **_layout(problem, dout, "do"),
            ),
        )
    return delta


def _launch_dkdv(problem, arguments, tune):
    flags = dict(WITH_DK=arguments["dk"] is not None, WITH_DV=arguments["dv"] is not None)
    flags["ADD_DQ"] = arguments["dq"] is not None
    launch(
        dkdv_kernel,
        configurations(DKDV, problem, arch_of(arguments["q"])),
        lambda block_m, block_n: (problem.total_kv // block_n + problem.batch + 1) * problem.heads_kv,
        arguments | flags,
        tune=tune,
        facts=(*facts(problem, arguments["q"]), *flags.values()),
        zero=("dq",) if flags["ADD_DQ"] else (),
    )


def _launch_dq(problem, arguments, tune):
    shares = len(arguments["dq"]) if problem.broadcast_q else 1
    launch(
        dq_kernel,
        configurations(DQ, problem, arch_of(arguments["q"])),
        lambda block_m, block_n: query_tiles(problem, block_m, slabs=shares) * problem.heads_q,
        arguments | dict(shares=shares),
        tune=tune,
        facts=facts(problem, arguments["q"]),
    )


def _dq_shares(problem):
    """Return into how many parts a broadcast-Q dQ cuts the batch: by shapes alone, sums keep their order."""
    programs = max(triton.cdiv(problem.total_q, 64) * problem.heads_q, 1)
    return max(1, min(DQ_PROGRAMS // programs, problem.total_kv // 64 + problem.batch))


def _common(problem, q, k, v, kv_offsets, q_offsets):
    """Return the arguments that forward, dK/dV and dQ share."""
    left, right, scale = problem.window_left, problem.window_right, float(problem.scale)
    return dict(
        q=q,
        k=k,
        v=v,
        kv_offsets=kv_offsets.contiguous(),
        q_offsets=None if q_offsets is None else q_offsets.contiguous(),
        batch=problem.batch,
        total_q=problem.total_q,
        total_kv=problem.total_kv,
        stride_qh=q.stride(1),
        stride_kh=k.stride(1),
        stride_vh=v.stride(1),
        scale=scale,
        # p = exp2(unit * s - ..): one multiplication scales scores and makes powers of two, where scale > 0
        unit=(scale if scale > 0 else 1.0) * (1.0 if problem.dtype == torch.float32 else LOG2_E),
        PRESCALE=not scale > 0,
        left=left,
        right=right,
        HAS_LEFT=left >= 0,
        HAS_RIGHT=right >= 0,
        ROW_Q=q.stride(0),
        ROW_K=k.stride(0),
        ROW_V=v.stride(0),
        HEADS_Q=problem.heads_q,
        GROUP=problem.group,
        D=problem.head_dim,
        DV=problem.head_dim_v,
        BLOCK_D=padded(problem.head_dim),
        BLOCK_DV=padded(problem.head_dim_v),
        PACKED_Q=not problem.broadcast_q,
        PRECISION="ieee" if problem.dtype == torch.float32 else "tf32",
    )


def _layout(problem, tensor, name):
    """Return the strides of out ("o") or dout ("do") over slabs, heads, rows; a packed batch is one slab."""
    slab = tensor.stride(0) if problem.broadcast_q else 0
    strides = {f"stride_{name}b": slab, f"stride_{name}h": tensor.stride(-2)}
    return strides | {f"ROW_{name.upper()}": tensor.stride(-3)}
