"""Attention on Hopper: what the kernels can run, and how a call becomes a launch."""

import torch
import triton.language as tl

from jfa.kernels.hopper import ladder
from jfa.kernels.hopper.backward_launch import backward as backward
from jfa.kernels.hopper.backward_launch import backward_supports as backward_supports
from jfa.kernels.hopper.forward import ROWS, kernel
from jfa.kernels.launch import EMULATED_SMS as EMULATED_SMS
from jfa.kernels.launch import LOG2E, facts, find, launch, multiprocessors, options, packed_rows
from jfa.kernels.launch import supports as supports
from jfa.kernels.problem import Problem
from jfa.kernels.ragged import ragged_descriptor
from jfa.kernels.step import Step
from jfa.kernels.tiles import Schedule, make_schedule

DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def choose(problem: Problem, steps: list[Step]) -> Step:
    """The step that is fastest for these shapes, by measurement on an H200; never looks at a value.

    One answer for all: of 64 shapes, whole calls, `staged` beat `stationary` at 54 (by 4 % on average; it was
    at most 2 % behind, at 128 rows) and, in short samples, `peeled` at 60 (by 5 %).
    """
    return find(steps, "staged")


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
    step = find(ladder.FORWARD, step) or choose(problem, ladder.FORWARD)
    out = q.new_empty(problem.out_shape)
    lse = q.new_empty(problem.lse_shape, dtype=torch.float32)
    if out.numel() == 0 or problem.total_kv == 0:
        return out.zero_(), lse.fill_(-float("inf"))
    roles = step.constexprs(problem)
    block_m, block_n = roles["BLOCK_M"], roles["BLOCK_N"]
    if schedule is None:
        order = {"order": step.order, "pruned": step.pruned}
        schedule = make_schedule(problem, kv_offsets, q_offsets, block_m, block_n, **order)
    elif schedule.block_m != block_m:
        raise ValueError(f"schedule: expected query tiles of {block_m} rows, got {schedule.block_m}")
    if problem.scale <= 0:
        # The kernel takes the largest score times scale for the largest scaled score.
        q = torch.zeros_like(q) if problem.scale == 0 else -q
    scale = abs(problem.scale) or 1.0
    programs = min(multiprocessors(q.device), schedule.q_tiles.shape[0] * problem.heads_q)
    if programs < roles["CLASSES"]:
        roles["CLASSES"] = 1  # a class that no CTA begins with would be nobody's
    launch(
        kernel,
        (programs,),
        ragged_descriptor(packed_rows(q), ROWS.value, problem.head_dim),
        ragged_descriptor(packed_rows(k), block_n, problem.head_dim),
        ragged_descriptor(packed_rows(v), block_n, problem.head_dim),
        ragged_descriptor(packed_rows(out), ROWS.value, problem.head_dim),
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
        DTYPE=DTYPES[problem.dtype],
        **facts(problem, problem.heads_q),
        **roles,
        **options(),
    )
    return out, lse
