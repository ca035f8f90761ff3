"""The backward pass on Hopper: which kernel runs a call, and how it is launched."""

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from jfa.kernels import baseline
from jfa.kernels.gradients import finish_queries, prepare_rows
from jfa.kernels.hopper import backward_stationary as stationary
from jfa.kernels.hopper import launch
from jfa.kernels.hopper.backward import kernel
from jfa.kernels.hopper.backward_compute import ROWS
from jfa.kernels.problem import Problem
from jfa.kernels.ragged import ragged_descriptor
from jfa.kernels.step import HopperStationary, Step
from jfa.kernels.tiles import Schedule, make_schedule

STATIONARY_ROWS = 256  # up to here dQ on chip beat the reduction on an H200


def fits_stationary(problem: Problem) -> str | None:
    """None if dQ can stay on chip, else the reason: it takes one shared query block and plain heads."""
    if not problem.broadcast_q:
        return "q_offsets: expected none, because only a shared query block has one dQ"
    if problem.group != 1:
        return f"q: expected as many heads as k, got {problem.heads_q} and {problem.heads_kv}"
    if problem.masked:
        return "window: expected none"
    return None


def choose(problem: Problem, steps: list[Step]) -> Step:
    """The step that is fastest for these shapes, by measurement on an H200; never looks at a value."""
    last = steps[-1]
    if isinstance(last, HopperStationary) and (
        fits_stationary(problem) is not None or problem.total_q > STATIONARY_ROWS
    ):
        return next(step for step in reversed(steps) if not isinstance(step, HopperStationary))
    return last


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
    from jfa.kernels.hopper import ladder

    step = launch.find(ladder.BACKWARD, step)
    if deterministic and not isinstance(step, HopperStationary):
        if fits_stationary(problem) is not None:
            options = {"deterministic": True, "needs": needs}
            return baseline.backward(problem, dout, dlse, q, k, v, out, lse, kv_offsets, q_offsets, **options)
        step = ladder.BACKWARD[-1]
    step = step or choose(problem, ladder.BACKWARD)
    if problem.total_kv == 0 or problem.total_q == 0 or problem.batch == 0:
        return tuple(
            torch.zeros(x.shape, dtype=x.dtype, device=x.device) if need else None
            for x, need in zip((q, k, v), needs, strict=True)
        )
    dout = dout.contiguous()
    dlse = None if dlse is None else dlse.contiguous()
    tensors = (dout, dlse, q, k, v, out, lse, kv_offsets, q_offsets)
    run = run_stationary if isinstance(step, HopperStationary) else run_keys
    return tuple(
        gradient if need else None
        for gradient, need in zip(run(problem, step, schedule, *tensors), needs, strict=True)
    )


def rows_of(x: torch.Tensor) -> torch.Tensor:
    """A contiguous (..., heads, D) tensor as rows of all heads."""
    return x.view(-1, x.shape[-2] * x.shape[-1])


def tiles_for(problem, schedule, kv_offsets, q_offsets, block_n: int) -> Schedule:
    """The caller's schedule if its key tiles are those of this kernel, else one made here."""
    wanted = (block_n, "natural", True)
    if schedule is not None and (schedule.block_n, schedule.order, schedule.pruned) == wanted:
        return schedule
    return make_schedule(problem, kv_offsets, q_offsets, 128, block_n, order="natural", pruned=True)


def run_keys(problem, step, schedule, dout, dlse, q, k, v, out, lse, kv_offsets, q_offsets):
    """Launch the KV-stationary kernel: dQ is added up in global memory, in float32."""
    roles = step.constexprs(problem)
    block_m, block_n, dim = roles["BLOCK_M"], roles["BLOCK_N"], problem.head_dim
    schedule = tiles_for(problem, schedule, kv_offsets, q_offsets, block_n)
    dk = torch.empty(k.shape, dtype=k.dtype, device=k.device)
    dv = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    rows = prepare_rows(problem, dout, dlse, out, lse, kv_offsets, q_offsets, dk, dv, block_m)
    sums = torch.zeros((1, problem.total_q, problem.heads_q * dim), dtype=torch.float32, device=q.device)
    pair = roles["PAIR"]
    items = schedule.kv_tiles.shape[0] * problem.heads_kv
    programs = min(launch.multiprocessors(q.device) // pair, items) * pair
    kernel[(programs,)](
        ragged_descriptor(launch.packed_rows(q), block_m // pair, dim),
        ragged_descriptor(launch.packed_rows(k), block_n // pair, dim),
        ragged_descriptor(launch.packed_rows(v), block_n // pair, dim),
        ragged_descriptor(rows_of(dout), block_m // pair, dim),
        ragged_descriptor(sums[0], block_m, dim // 2),
        ragged_descriptor(rows_of(dk), ROWS.value, dim),
        ragged_descriptor(rows_of(dv), ROWS.value, dim),
        rows.log2_lse,
        rows.delta,
        schedule.kv_tiles,
        schedule.kv_counts,
        kv_offsets,
        schedule.q_offsets,
        torch.zeros(1, dtype=torch.int32, device=q.device),
        problem.batch,
        problem.total_q,
        rows.padded,
        rows.count,
        problem.window_left,
        problem.window_right,
        problem.scale * launch.LOG2E,
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


def cluster(pair: int) -> dict:
    """The launch option of a cluster of ``pair`` CTAs."""
    return {"ctas_per_cga": (pair, 1, 1)} if pair > 1 else {}


def run_stationary(problem, step, schedule, dout, dlse, q, k, v, out, lse, kv_offsets, q_offsets):
    """Launch the kernel with dQ on chip, once for every 256 query rows."""
    reason = fits_stationary(problem)
    if reason is not None:
        raise ValueError(f"step {step.name}: {reason}")
    roles = step.constexprs(problem)
    block_n, dim = roles["BLOCK_N"], problem.head_dim
    pair = 1 if problem.total_q <= stationary.BLOCK_M.value else 2
    launch_rows = pair * stationary.BLOCK_M.value
    padded = triton.cdiv(problem.total_q, launch_rows) * launch_rows
    schedule = tiles_for(problem, schedule, kv_offsets, q_offsets, block_n)
    dk = torch.empty(k.shape, dtype=k.dtype, device=k.device)
    dv = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    rows = prepare_rows(problem, dout, dlse, out, lse, kv_offsets, q_offsets, dk, dv, 64, padded)
    shares = max(launch.multiprocessors(q.device) // pair // problem.heads_q, 1)
    sums = torch.empty((shares, padded, problem.heads_q * dim), dtype=torch.float32, device=q.device)
    columns = problem.heads_q * dim
    for first_row in range(0, problem.total_q, launch_rows):
        stationary.kernel[(shares * problem.heads_q * pair,)](
            ragged_descriptor(launch.packed_rows(q), stationary.BLOCK_M.value, dim),
            ragged_descriptor(launch.packed_rows(k), block_n, dim),
            ragged_descriptor(launch.packed_rows(v), block_n, dim),
            ragged_descriptor(rows_of(dout), stationary.BLOCK_M.value, dim),
            ragged_descriptor(rows_of(dk), block_n, dim),
            ragged_descriptor(rows_of(dv), block_n, dim),
            TensorDescriptor(sums.view(-1, columns), [shares * padded, columns], [columns, 1], [64, dim]),
            rows.log2_lse,
            rows.delta,
            schedule.kv_tiles,
            schedule.kv_counts,
            problem.total_q,
            padded,
            rows.count,
            first_row,
            problem.heads_q,
            problem.scale * launch.LOG2E,
            problem.scale,
            ADD=first_row > 0,
            HEAD_DIM=dim,
            PAIR=pair,
            **roles,
            **cluster(pair),
            num_warps=4,
            num_stages=1,
        )
    return finish_queries(problem, sums, q), dk, dv
