"""The backward pass on Blackwell: which kernel runs a call, and how it is launched."""

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from jfa.kernels.blackwell import backward_stationary as stationary
from jfa.kernels.blackwell import ladder
from jfa.kernels.blackwell.backward import kernel
from jfa.kernels.blackwell.backward_parts import ROWS
from jfa.kernels.gradients import Passes, finish_queries, fits_stationary, prepare_rows, tiles_for
from jfa.kernels.launch import LOG2E, facts, launch, multiprocessors, options, packed_rows
from jfa.kernels.problem import Problem
from jfa.kernels.ragged import ragged_descriptor
from jfa.kernels.step import Step


def choose(problem: Problem) -> Step:
    """The step for these shapes, reasoned and not measured; never looks at a value.

    Beyond 128 rows dQ on chip reads K and V again for each block of rows. A pair's tile of 256 keys is mostly
    padding where sequences are shorter than that.
    """
    if fits_stationary(problem) is None and problem.total_q <= ROWS.value:
        return ladder.BACKWARD_STATIONARY
    return ladder.TWO_CTA if problem.total_kv > 2 * ROWS.value * problem.batch else ladder.BACKWARD_PEELED


def run_keys(problem, step, schedule, dout, dlse, q, k, v, out, lse, kv_offsets, q_offsets):
    """Launch the KV-stationary kernel: dQ is added up in global memory, in float32."""
    roles = {"DRAW": None, "RELAY": None} | step.constexprs(problem)
    dim, pair, size, columns = problem.head_dim, roles["PAIR"], ROWS.value, roles["SLICE"]
    schedule = tiles_for(problem, schedule, kv_offsets, q_offsets, pair * size)
    rows, dk, dv = prepare_rows(problem, dout, dlse, k, v, out, lse, kv_offsets, q_offsets, size)
    sums = torch.zeros((1, problem.total_q, problem.heads_q * dim), dtype=torch.float32, device=q.device)
    items = schedule.kv_tiles.shape[0] * problem.heads_kv
    programs = items if step.draw is not None else min(items, multiprocessors(q.device) // pair)
    q_rows, k_rows, v_rows, dout_rows = (packed_rows(x) for x in (q, k, v, dout))
    boxes = (  # in a pair a CTA gives half of the rows to S and dP, half of the columns to the sums
        (q_rows, size // pair, dim), (k_rows, size, dim), (v_rows, size, dim), (dout_rows, size // pair, dim),
        (q_rows, size, dim // pair), (k_rows, size * pair, dim // pair), (dout_rows, size, dim // pair),
        (sums[0], size // pair, columns),
        (packed_rows(dk), size, 2 * columns), (packed_rows(dv), size, 2 * columns),
    )  # fmt: skip
    launch(kernel, (programs * pair,),
        *(ragged_descriptor(*box) for box in boxes),
        rows.log2_lse, rows.delta, schedule.kv_tiles, schedule.kv_counts, kv_offsets, schedule.q_offsets,
        problem.batch, problem.total_q, rows.padded, rows.count, problem.window_left, problem.window_right,
        problem.scale * LOG2E, problem.scale,
        **facts(problem, problem.heads_kv), **roles, **options(pair),
    )  # fmt: skip
    return finish_queries(problem, sums, q), dk, dv


def run_stationary(problem, step, schedule, dout, dlse, q, k, v, out, lse, kv_offsets, q_offsets):
    """Launch the kernel with dQ on chip, once for every 128 query rows."""
    size, dim, heads = ROWS.value, problem.head_dim, problem.heads_q
    padded = -(-problem.total_q // size) * size
    schedule = tiles_for(problem, schedule, kv_offsets, q_offsets, size)
    rows, dk, dv = prepare_rows(problem, dout, dlse, k, v, out, lse, kv_offsets, q_offsets, size, padded)
    shares = max(multiprocessors(q.device) // heads, 1)
    sums = torch.empty((shares, padded, heads * dim), dtype=torch.float32, device=q.device)
    inputs = [ragged_descriptor(packed_rows(x), size, dim) for x in (q, k, v, dout, dk, dv)]
    inputs += [TensorDescriptor.from_tensor(sums.view(-1, heads * dim), [size, stationary.RESULT.value])]
    for first_row in range(0, problem.total_q, size):
        launch(stationary.kernel, (shares * heads,),
            *inputs, rows.log2_lse, rows.delta, schedule.kv_tiles, schedule.kv_counts, kv_offsets,
            problem.batch, problem.total_q, padded, rows.count, first_row, heads,
            problem.scale * LOG2E, problem.scale,
            LEAVE="" if first_row == 0 else "add",
            HEAD_DIM=dim, **step.constexprs(problem), **options(1),
        )  # fmt: skip
    return finish_queries(problem, sums, q), dk, dv


PASSES = Passes(ladder.BACKWARD, choose, run_keys, run_stationary)
backward, backward_supports, find_step = PASSES.run, PASSES.supports, PASSES.find
