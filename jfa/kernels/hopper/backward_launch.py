"""The backward pass on Hopper: which kernel runs a call, and how it is launched."""

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from jfa.kernels.gradients import Passes, finish_queries, fits_stationary, prepare_rows, tiles_for
from jfa.kernels.hopper import backward_stationary as stationary
from jfa.kernels.hopper import ladder
from jfa.kernels.hopper.backward import kernel
from jfa.kernels.hopper.backward_compute import ROWS
from jfa.kernels.launch import LOG2E, facts, launch, multiprocessors, options, packed_rows
from jfa.kernels.problem import Problem
from jfa.kernels.ragged import ragged_descriptor
from jfa.kernels.step import Step

STATIONARY_ROWS = 512  # up to here dQ on chip beat the reduction on every shape tried; more was not tried


def choose(problem: Problem) -> Step:
    """The step that is fastest for these shapes, by measurement on an H200; never looks at a value.

    Over `peeled`, whole calls: multicast of Q and dO (two_cta) lost 1 to 40 % on eight jagged shapes, 12 % on
    average; `ds_buffered` gained 1 % on average of eight dense and packed shapes (it lost 3 % at most,
    in short samples 4 %) and nothing on the jagged ones. More than 512 rows: not timed.
    """
    if fits_stationary(problem) is None and problem.total_q <= STATIONARY_ROWS:
        return ladder.BACKWARD_STATIONARY
    return ladder.DS_BUFFERED


def run_keys(problem, step, schedule, dout, dlse, q, k, v, out, lse, kv_offsets, q_offsets):
    """Launch the KV-stationary kernel: dQ is added up in global memory, in float32."""
    roles = step.constexprs(problem)
    block_m, block_n, pair, dim = roles["BLOCK_M"], roles["BLOCK_N"], roles["PAIR"], problem.head_dim
    schedule = tiles_for(problem, schedule, kv_offsets, q_offsets, block_n, step.order)
    rows, dk, dv = prepare_rows(problem, dout, dlse, k, v, out, lse, kv_offsets, q_offsets, block_m)
    sums = torch.zeros((1, problem.total_q, problem.heads_q * dim), dtype=torch.float32, device=q.device)
    items = schedule.kv_tiles.shape[0] * problem.heads_kv
    launch(kernel, (max(min(multiprocessors(q.device) // pair, items), 1) * pair,),
        ragged_descriptor(packed_rows(q), block_m // pair, dim),
        *(ragged_descriptor(packed_rows(x), block_n // pair, dim) for x in (k, v)),
        ragged_descriptor(packed_rows(dout), block_m // pair, dim),
        ragged_descriptor(sums[0], block_m, dim // 2),
        *(ragged_descriptor(packed_rows(x), ROWS.value, dim) for x in (dk, dv)),
        rows.log2_lse, rows.delta, schedule.kv_tiles, schedule.kv_counts, kv_offsets, schedule.q_offsets,
        torch.zeros(1, dtype=torch.int32, device=q.device),
        problem.batch, problem.total_q, rows.padded, rows.count, problem.window_left, problem.window_right,
        problem.scale * LOG2E, problem.scale,
        **facts(problem, problem.heads_kv), **roles, **options(pair),
    )  # fmt: skip
    return finish_queries(problem, sums, q), dk, dv


def run_stationary(problem, step, schedule, dout, dlse, q, k, v, out, lse, kv_offsets, q_offsets):
    """Launch the kernel with dQ on chip, once for all query rows whose CTAs the device holds together."""
    roles = step.constexprs(problem)
    block_m, block_n = stationary.BLOCK_M.value, roles["BLOCK_N"]
    dim, heads = problem.head_dim, problem.heads_q
    pair = 1 if problem.total_q <= block_m else 2
    pairs, resident = -(-problem.total_q // (pair * block_m)), multiprocessors(q.device) // pair
    links = max(min(pairs, resident // heads), 1)  # pairs that wait for each other must be there together
    launches = -(-pairs // links)
    links = -(-pairs // launches)
    shares = max(resident // (links * heads), 1)
    padded = launches * links * pair * block_m
    schedule = tiles_for(problem, schedule, kv_offsets, q_offsets, block_n)
    rows, dk, dv = prepare_rows(problem, dout, dlse, k, v, out, lse, kv_offsets, q_offsets, 64, padded)
    sums = torch.empty((shares, padded, heads * dim), dtype=torch.float32, device=q.device)
    counters = torch.zeros if links > 1 else torch.empty
    rows_of = (block_m, block_n // pair, block_n // pair, block_m, block_n, block_n)
    inputs = [ragged_descriptor(packed_rows(x), n, dim) for x, n in zip((q, k, v, dout, dk, dv), rows_of)]
    inputs += [TensorDescriptor.from_tensor(sums.view(-1, heads * dim), [64, dim])]
    # dS times the scale needs no other scaling of dK and dQ; float16 would lose its small numbers.
    ds_scale = 1.0 if q.dtype == torch.float16 else problem.scale
    rest = problem.scale / (ds_scale or 1.0)  # dS is zero where the scale is
    for i in range(launches):
        launch(stationary.kernel, (shares * heads * links * pair,),
            *inputs, rows.log2_lse, rows.delta, schedule.kv_tiles, schedule.kv_counts,
            counters(shares * heads * links, dtype=torch.int32, device=q.device),
            problem.total_q, padded, rows.count, i * links * pair * block_m, heads,
            problem.scale * LOG2E, ds_scale, rest,
            HEAD_DIM=dim, PAIR=pair, LINKS=links, ADD=i > 0, **roles, **options(pair),
        )  # fmt: skip
    return finish_queries(problem, sums, q, rest), dk, dv


PASSES = Passes(ladder.BACKWARD, choose, run_keys, run_stationary)
backward, backward_supports = PASSES.run, PASSES.supports
