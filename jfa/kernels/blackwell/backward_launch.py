"""The backward pass on Blackwell: which kernel runs a call, and how it is launched."""

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from jfa.kernels import baseline
from jfa.kernels.blackwell import backward_stationary as stationary
from jfa.kernels.blackwell import launch
from jfa.kernels.blackwell.backward import kernel
from jfa.kernels.blackwell.backward_parts import ROWS
from jfa.kernels.gradients import finish_queries, prepare_rows
from jfa.kernels.hopper.backward_launch import cluster, fits_stationary, rows_of, tiles_for
from jfa.kernels.hopper.launch import packed_rows
from jfa.kernels.problem import Problem
from jfa.kernels.ragged import ragged_descriptor
from jfa.kernels.step import BlackwellStationary, Step
from jfa.kernels.tiles import Schedule


def find_step(problem: Problem, step: Step | str | None, deterministic: bool) -> Step | None:
    """The step of that name, or the one for these shapes; None where only the baseline is deterministic."""
    from jfa.kernels.blackwell import ladder

    named = {known.name: known for known in ladder.BACKWARD}
    general = [known for known in ladder.BACKWARD if not isinstance(known, BlackwellStationary)]
    if isinstance(step, str):
        if step not in named:
            raise ValueError(f"step: expected one of {', '.join(named)}, got {step!r}")
        step = named[step]
    on_chip = fits_stationary(problem) is None and "stationary" in named
    if deterministic and not isinstance(step, BlackwellStationary):
        return named["stationary"] if on_chip else None
    if step is None:
        # Reasoned, not measured: beyond 128 rows dQ on chip reads K and V again for each block of rows, and
        # a pair's tile of 256 keys is mostly padding where sequences are shorter than that.
        alone = [known for known in general if known.name != "two_cta"]
        longer = problem.total_kv > 2 * ROWS.value * problem.batch
        step = general[-1] if longer else alone[-1]
        if on_chip and problem.total_q <= ROWS.value:
            step = named["stationary"]
    return step


def backward(
    problem: Problem,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    kv_offsets: torch.Tensor,
    q_offsets: torch.Tensor | None,
    *,
    schedule: Schedule | None = None,
    step: Step | str | None = None,
    deterministic: bool = False,
    needs: tuple[bool, bool, bool] = (True, True, True),
) -> tuple[torch.Tensor | None, ...]:
    """dq, dk and dv, in the shapes and dtype of q, k and v; None where ``needs`` says so.

    ``deterministic``: the kernel with dQ on chip adds in a fixed order as it is; where it cannot run, the
    compiler-scheduled baseline does, whose dQ has a fixed order too.
    """
    step = find_step(problem, step, deterministic)
    if step is None:
        options = {"deterministic": True, "needs": needs}
        return baseline.backward(problem, dout, dlse, q, k, v, out, lse, kv_offsets, q_offsets, **options)
    if problem.total_kv == 0 or problem.total_q == 0 or problem.batch == 0:
        return tuple(
            torch.zeros(x.shape, dtype=x.dtype, device=x.device) if need else None
            for x, need in zip((q, k, v), needs, strict=True)
        )
    dout = dout.contiguous()
    dlse = None if dlse is None else dlse.contiguous()
    tensors = (dout, dlse, q, k, v, out, lse, kv_offsets, q_offsets)
    run = run_stationary if isinstance(step, BlackwellStationary) else run_keys
    return tuple(
        gradient if need else None
        for gradient, need in zip(run(problem, step, schedule, *tensors), needs, strict=True)
    )


def run_keys(problem, step, schedule, dout, dlse, q, k, v, out, lse, kv_offsets, q_offsets):
    """Launch the KV-stationary kernel: dQ is added up in global memory, in float32."""
    roles = {"DRAW": None, "RELAY": None} | step.constexprs(problem)
    dim, pair, slice_ = problem.head_dim, roles["PAIR"], roles["SLICE"]
    schedule = tiles_for(problem, schedule, kv_offsets, q_offsets, pair * ROWS.value)
    dk = torch.empty(k.shape, dtype=k.dtype, device=k.device)
    dv = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    rows = prepare_rows(problem, dout, dlse, out, lse, kv_offsets, q_offsets, dk, dv, ROWS.value)
    sums = torch.zeros((1, problem.total_q, problem.heads_q * dim), dtype=torch.float32, device=q.device)
    items = schedule.kv_tiles.shape[0] * problem.heads_kv
    programs = items if step.draw is not None else min(items, launch.processors(q.device) // pair)
    rows_q, rows_k, rows_v = (packed_rows(x) for x in (q, k, v))
    part_rows, part_dim = ROWS.value // pair, dim // pair
    kernel[(programs * pair,)](
        ragged_descriptor(rows_q, part_rows, dim),
        ragged_descriptor(rows_k, ROWS.value, dim),
        ragged_descriptor(rows_v, ROWS.value, dim),
        ragged_descriptor(rows_of(dout), part_rows, dim),
        ragged_descriptor(rows_q, ROWS.value, part_dim),
        ragged_descriptor(rows_k, ROWS.value * pair, part_dim),
        ragged_descriptor(rows_of(dout), ROWS.value, part_dim),
        ragged_descriptor(sums[0], part_rows, slice_),
        ragged_descriptor(rows_of(dk), ROWS.value, 2 * slice_),
        ragged_descriptor(rows_of(dv), ROWS.value, 2 * slice_),
        rows.log2_lse,
        rows.delta,
        schedule.kv_tiles,
        schedule.kv_counts,
        kv_offsets,
        schedule.q_offsets,
        problem.batch,
        problem.total_q,
        rows.padded,
        rows.count,
        problem.window_left,
        problem.window_right,
        problem.scale * launch.LOG2_E,
        problem.scale,
        HEADS=problem.heads_kv,
        GROUP=problem.group,
        BROADCAST=problem.broadcast_q,
        LEFT=problem.window_left >= 0,
        RIGHT=problem.window_right >= 0,
        HEAD_DIM=dim,
        **roles,
        **cluster(pair),
        num_warps=4,
        num_stages=1,
    )
    return finish_queries(problem, sums, q), dk, dv


def run_stationary(problem, step, schedule, dout, dlse, q, k, v, out, lse, kv_offsets, q_offsets):
    """Launch the kernel with dQ on chip, once for every 128 query rows."""
    reason = fits_stationary(problem)
    if reason is not None:
        raise ValueError(f"step {step.name}: {reason}")
    rows, dim, heads = ROWS.value, problem.head_dim, problem.heads_q
    padded = -(-problem.total_q // rows) * rows
    schedule = tiles_for(problem, schedule, kv_offsets, q_offsets, rows)
    dk = torch.empty(k.shape, dtype=k.dtype, device=k.device)
    dv = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    statistics = prepare_rows(problem, dout, dlse, out, lse, kv_offsets, q_offsets, dk, dv, rows, padded)
    shares = max(launch.processors(q.device) // heads, 1)
    sums = torch.empty((shares, padded, heads * dim), dtype=torch.float32, device=q.device)
    shape, strides, box = [shares * padded, heads * dim], [heads * dim, 1], [rows, stationary.RESULT.value]
    for first_row in range(0, problem.total_q, rows):
        stationary.kernel[(shares * heads,)](
            *[ragged_descriptor(packed_rows(x), rows, dim) for x in (q, k, v)],
            *[ragged_descriptor(rows_of(x), rows, dim) for x in (dout, dk, dv)],
            TensorDescriptor(sums, shape, strides, box),
            statistics.log2_lse,
            statistics.delta,
            schedule.kv_tiles,
            schedule.kv_counts,
            kv_offsets,
            problem.batch,
            problem.total_q,
            statistics.padded,
            statistics.count,
            first_row,
            heads,
            problem.scale * launch.LOG2_E,
            problem.scale,
            LEAVE=stationary.leave_by_store if first_row == 0 else stationary.leave_by_add,
            HEAD_DIM=dim,
            **step.constexprs(problem),
            num_warps=4,
            num_stages=1,
        )
    return finish_queries(problem, sums, q), dk, dv
