"""Attention on Hopper: what the kernels can run, and how a call becomes a launch."""

import torch
import triton.language as tl

from jfa.kernels.hopper import ladder
from jfa.kernels.hopper.forward import ROWS, kernel
from jfa.kernels.problem import Problem
from jfa.kernels.ragged import ragged_descriptor
from jfa.kernels.step import Step
from jfa.kernels.tiles import Schedule, make_schedule

LOG2E = 1.4426950408889634
DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
HEAD_DIMS = (64, 128)
EMULATED_SMS = 3  # CTAs in the emulator: several tiles for each, even in a small test


def supports(problem: Problem) -> str | None:
    """None if the Hopper kernels can run this call, else a sentence that names the argument and the limit."""
    if problem.dtype not in DTYPES:
        return f"q: expected bfloat16 or float16, got {problem.dtype}"
    if problem.head_dim not in HEAD_DIMS:
        return f"q: expected a head dimension of 64 or 128, got {problem.head_dim}"
    if problem.head_dim_v != problem.head_dim:
        return f"v: expected the head dimension of q, {problem.head_dim}, got {problem.head_dim_v}"
    rows = max(problem.total_kv, problem.total_q * (problem.batch if problem.broadcast_q else 1))
    if rows > 1 << 30:
        return f"q and k: expected at most 2**30 rows of out, k and v, got {rows}"
    return None


def forward(
    problem: Problem,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kv_offsets: torch.Tensor,
    q_offsets: torch.Tensor | None,
    *,
    schedule: Schedule | None = None,
    step: Step | str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse (shapes of the Problem); without a ``schedule`` the step's tile list is made here.

    ``step``: one of the ladder, by name or as an object; None picks the fastest for the problem.
    """
    step = find(ladder.FORWARD, step) or ladder.FORWARD[-1]
    out = q.new_empty(problem.out_shape)
    lse = q.new_empty(problem.lse_shape, dtype=torch.float32)
    if out.numel() == 0 or problem.total_kv == 0:
        return out.zero_(), lse.fill_(-float("inf"))
    roles = step.constexprs(problem)
    block_m, block_n = roles["BLOCK_M"], roles["BLOCK_N"]
    if schedule is None:
        options = {"order": step.order, "pruned": step.pruned}
        schedule = make_schedule(problem, kv_offsets, q_offsets, block_m, block_n, **options)
    elif schedule.block_m != block_m:
        raise ValueError(f"schedule: expected query tiles of {block_m} rows, got {schedule.block_m}")
    if problem.scale <= 0:
        # The kernel takes the largest score times scale for the largest scaled score.
        q = torch.zeros_like(q) if problem.scale == 0 else -q
    scale = abs(problem.scale) or 1.0
    programs = min(multiprocessors(q.device), schedule.q_tiles.shape[0] * problem.heads_q)
    if programs < roles["CLASSES"]:
        roles["CLASSES"] = 1  # a class that no CTA begins with would be nobody's
    kernel[(programs,)](
        ragged_descriptor(packed_rows(q), ROWS.value, problem.head_dim),
        ragged_descriptor(packed_rows(k), block_n, problem.head_dim),
        ragged_descriptor(packed_rows(v), block_n, problem.head_dim),
        ragged_descriptor(out.view(-1, problem.heads_q * problem.head_dim), ROWS.value, problem.head_dim),
        out,
        lse,
        schedule.q_tiles,
        schedule.q_counts,
        schedule.q_offsets,
        torch.zeros(roles["CLASSES"] + 1, dtype=torch.int32, device=q.device),
        problem.total_q,
        problem.window_left,
        problem.window_right,
        scale * LOG2E,
        HEADS=problem.heads_q,
        GROUP=problem.group,
        BROADCAST=problem.broadcast_q,
        LEFT=problem.window_left >= 0,
        RIGHT=problem.window_right >= 0,
        HEAD_DIM=problem.head_dim,
        DTYPE=DTYPES[problem.dtype],
        **roles,
        num_warps=4,
        num_stages=1,
    )
    return out, lse


def backward(problem: Problem, *tensors, **options):
    """Gradients; see jfa.kernels.hopper.backward."""
    try:
        from jfa.kernels.hopper import backward_launch as passes
    except ImportError as error:
        raise NotImplementedError("the backward pass on Hopper is not part of this version") from error
    return passes.backward(problem, *tensors, **options)


def find(steps: list[Step], step: Step | str | None) -> Step | None:
    """The step of that name; a Step or None comes back as it is. Raises ValueError for an unknown name."""
    if not isinstance(step, str):
        return step
    for known in steps:
        if known.name == step:
            return known
    raise ValueError(f"step: expected one of {', '.join(known.name for known in steps)}, got {step!r}")


def packed_rows(x: torch.Tensor) -> torch.Tensor:
    """(rows, heads, D) as rows (rows, heads * D) that TMA can address, copied only if it cannot."""
    rows, heads, dim = x.shape
    width = heads * dim
    row_stride = x.stride(0) if rows > 1 else width
    joined = x.stride(2) == 1 and (heads == 1 or x.stride(1) == dim) and row_stride >= width
    if joined and row_stride * x.element_size() % 16 == 0 and x.data_ptr() % 16 == 0:
        return x.as_strided((rows, width), (row_stride, 1))
    return x.clone(memory_format=torch.contiguous_format).view(rows, width)


def multiprocessors(device: torch.device) -> int:
    """SMs of a device: the number of CTAs of a persistent kernel."""
    if device.type != "cuda":
        return EMULATED_SMS
    return torch.cuda.get_device_properties(device).multi_processor_count
