"""What the launches of both architectures share: limits, steps by name, rows for the TMA unit, grids."""

import torch

from jfa.kernels.cached_launch import launch as launch
from jfa.kernels.problem import Problem
from jfa.kernels.step import Step

LOG2E = 1.4426950408889634
EMULATED_SMS = 3  # CTAs in the emulator: several tiles for each, even in a small test


def supports(problem: Problem) -> str | None:
    """None if the kernels can run this call, else a sentence that names the argument and the limit."""
    if problem.dtype not in (torch.bfloat16, torch.float16):
        return f"q: expected bfloat16 or float16, got {problem.dtype}"
    if problem.head_dim not in (64, 128):
        return f"q: expected a head dimension of 64 or 128, got {problem.head_dim}"
    if problem.head_dim_v != problem.head_dim:
        return f"v: expected the head dimension of q, {problem.head_dim}, got {problem.head_dim_v}"
    rows = max(problem.total_kv, problem.total_q * (problem.batch if problem.broadcast_q else 1))
    if rows > 1 << 30:
        return f"q and k: expected at most 2**30 rows of out, k and v, got {rows}"
    if problem.batch > 1 << 23:  # row statistics are kept in blocks of 128 rows, addressed by 32 bits
        return f"kv_offsets: expected at most 2**23 sequences, got {problem.batch}"
    return None


def find(steps: list[Step], step: Step | str | None) -> Step | None:
    """The step of that name; a Step or None comes back as it is. Raises ValueError for an unknown name."""
    if not isinstance(step, str):
        return step
    for known in steps:
        if known.name == step:
            return known
    raise ValueError(f"step: expected one of {', '.join(known.name for known in steps)}, got {step!r}")


def packed_rows(x: torch.Tensor) -> torch.Tensor:
    """(..., heads, D) as rows (rows, heads * D) that TMA can address, copied only if it cannot."""
    heads, dim = x.shape[-2:]
    width = heads * dim
    rows = x.numel() // width
    if x.is_contiguous() and width * x.element_size() % 16 == 0 and x.data_ptr() % 16 == 0:
        return x.view(rows, width)
    x = x.flatten(0, -3)
    row_stride = x.stride(0) if rows > 1 else width
    joined = x.stride(2) == 1 and (heads == 1 or x.stride(1) == dim) and row_stride >= width
    if joined and row_stride * x.element_size() % 16 == 0 and x.data_ptr() % 16 == 0:
        return x.as_strided((rows, width), (row_stride, 1))
    return x.clone(memory_format=torch.contiguous_format).view(rows, width)


def drop_unseen(problem: Problem, dout, lse, kv_offsets, q_offsets) -> torch.Tensor:
    """dout with zeros in the rows that see no key: what comes in there counts for nothing, NaN neither.

    Only a window with a right end hides every key of a row, and not in self-attention, whose row sees itself.
    """
    if problem.window_right < 0 or (q_offsets is not None and q_offsets.data_ptr() == kv_offsets.data_ptr()):
        return dout
    return dout.masked_fill((lse == -float("inf")).mT.unsqueeze(-1), 0)


def multiprocessors(device: torch.device) -> int:
    """SMs of a device: the number of CTAs of a persistent kernel; a few in the emulator."""
    if device.type != "cuda":
        return EMULATED_SMS
    return torch.cuda.get_device_properties(device).multi_processor_count


def facts(problem: Problem, heads: int) -> dict:
    """What every kernel but those with dQ on chip is compiled with; ``heads``: of an item of its list."""
    return {
        "HEADS": heads,
        "GROUP": problem.group,
        "BROADCAST": problem.broadcast_q,
        "LEFT": problem.window_left >= 0,
        "RIGHT": problem.window_right >= 0,
        "HEAD_DIM": problem.head_dim,
    }


def options(pair: int = 1) -> dict:
    """The compile options of every kernel, which runs in clusters of ``pair`` CTAs."""
    return {"num_warps": 4, "num_stages": 1} | ({"ctas_per_cga": (pair, 1, 1)} if pair > 1 else {})
