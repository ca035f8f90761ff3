"""Launches the Blackwell kernels: checks, descriptors, schedule, outputs."""

import math

import torch

from jfa.kernels.blackwell import forward as forward_kernel
from jfa.kernels.blackwell import ladder
from jfa.kernels.blackwell.backward_launch import backward as backward
from jfa.kernels.blackwell.backward_launch import backward_supports as backward_supports
from jfa.kernels.launch import LOG2E, facts, find, launch, multiprocessors, options, packed_rows
from jfa.kernels.launch import supports as supports
from jfa.kernels.problem import Problem
from jfa.kernels.ragged import ragged_descriptor
from jfa.kernels.step import Step
from jfa.kernels.tiles import Schedule, make_schedule


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
    """Attention of every sequence; shapes and meaning as in ``jfa.jagged_flash_attention``.

    Returns out in q's dtype and lse float32, both contiguous. Never waits for the device.
    """
    out = q.new_empty(problem.out_shape)
    lse = q.new_empty(problem.lse_shape, dtype=torch.float32)
    step = find(ladder.FORWARD, step) or ladder.FORWARD[-1]
    if out.numel() == 0 or problem.total_kv == 0:
        return out.zero_(), lse.fill_(-math.inf)
    grid, args, constants = arguments(problem, q, k, v, out, lse, kv_offsets, q_offsets, schedule, step)
    launch(forward_kernel.kernel, grid, *args, **constants)
    return out, lse


def arguments(problem, q, k, v, out, lse, kv_offsets, q_offsets, schedule, step):
    """Grid, positional and named arguments of the forward kernel for one call."""
    constants = constexprs(problem, step, None if schedule is None else schedule.block_m)
    if schedule is None:
        blocks = (constants["BLOCK_M"], constants["BLOCK_N"])
        schedule = make_schedule(
            problem, kv_offsets, q_offsets, *blocks, order=step.order, pruned=step.pruned
        )
    scale = problem.scale
    if scale <= 0:  # the kernel scales the maximum, which needs a positive factor
        q, scale = (-q, -scale) if scale < 0 else (q * 0, 1.0)
    block_n, columns = constants["BLOCK_N"], problem.head_dim
    rows = [packed_rows(x) for x in (q, k, v, out)]
    args = [ragged_descriptor(x, n, columns) for x, n in zip(rows, (128, block_n, block_n, 128), strict=True)]
    args += [out, lse, schedule.q_tiles, schedule.q_counts]
    args += [schedule.q_counts if problem.broadcast_q else schedule.q_offsets]  # not read with broadcast-Q
    args += [problem.total_q, max(problem.window_left, 0), max(problem.window_right, 0), scale * LOG2E]
    items = schedule.q_tiles.shape[0] * (problem.heads_q // constants["PACK"])
    grid = items if step.draw is not None else min(items, multiprocessors(q.device))
    return (grid,), args, constants


def constexprs(problem: Problem, step: Step, block_m: int | None = None) -> dict:
    """What the forward kernel is compiled with; ``block_m`` is that of a schedule that was given."""
    if block_m not in (None, 128, 256):
        raise ValueError(f"schedule: expected one for 128 or 256 query rows a tile, got {block_m}")
    return step.constexprs(problem, block_m) | facts(problem, problem.heads_q) | options()
