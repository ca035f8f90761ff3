"""How the baseline chooses a configuration and launches: what is tuned, by which key, and when nothing is."""

import functools
import os

import torch
import triton

MAX_PROGRAMS = 2**31 - 1  # of a grid's first dimension
FAR_APART = 2**22  # rows with a larger stride are copied: offsets inside a tile are 32-bit
ARCHES = {9: "hopper", 10: "blackwell"}


def arch_of(tensor):
    """Return the row of the configuration tables for a tensor's device; the emulator runs Hopper's."""
    if not tensor.is_cuda:
        return "hopper"
    return ARCHES.get(torch.cuda.get_device_capability(tensor.device)[0], "other")


def padded(size):
    """Return the power of two, at least 16, that tiles use for a dimension."""
    return max(16, triton.next_power_of_2(size))


def query_bucket(problem):
    """Return what tuning knows of the number of queries: M as a power of two, 16 to 512; 512 if packed."""
    return min(padded(problem.total_q), 512) if problem.broadcast_q else 512


def configurations(table, problem, arch):
    """Return the (BLOCK_M, BLOCK_N, num_warps, num_stages) for a problem; the first is the known one."""
    size = max(padded(problem.head_dim), padded(problem.head_dim_v), 64)
    if problem.dtype == torch.float32:
        return tuple(table["float32"][size])
    bucket = query_bucket(problem)
    fitting = [config for config in table[arch][size] if config[0] <= max(bucket, 64)]
    return (table["few"][size], *fitting) if bucket < 64 else tuple(fitting)


def facts(problem, q):
    """Return what a tuning result may depend on: no shape that changes from batch to batch is in it."""
    capability = torch.cuda.get_device_capability(q.device) if q.is_cuda else None
    sizes = (padded(problem.head_dim), padded(problem.head_dim_v), query_bucket(problem))
    features = (problem.broadcast_q, problem.window_left >= 0, problem.window_right >= 0)
    return (capability, problem.dtype, *sizes, *features)


def query_tiles(problem, block_m, slabs=None):
    """Return how many query tiles there are: exact with broadcast-Q, a bound from shapes with packed Q."""
    if problem.broadcast_q:
        return (problem.batch if slabs is None else slabs) * triton.cdiv(problem.total_q, block_m)
    return problem.total_q // block_m + problem.batch + 1


def launch(kernel, configs, programs, arguments, *, tune=True, facts=(), zero=()):
    """Run a kernel on a one-dimensional grid of ``programs(BLOCK_M, BLOCK_N)`` programs.

    Each set of ``facts`` is tuned once, on the first data that comes. ``zero`` names arguments that the
    kernel adds to: they are zeroed before every run of a tuning and after the last. Nothing is tuned with a
    single configuration, with JFA_DISABLE_AUTOTUNE=1, on the emulator and inside a CUDA graph capture; then
    the first configuration runs, in a capture the one that an earlier call found. Raises ValueError when the
    grid would be too large.
    """

    def grid(meta):
        count = programs(meta["BLOCK_M"], meta["BLOCK_N"])
        if count > MAX_PROGRAMS:
            name = kernel.__name__
            raise ValueError(
                f"{name} would need {count} programs for these shapes, a grid holds {MAX_PROGRAMS}"
            )
        return (count,)

    best = None
    if tune and len(configs) > 1 and _may_tune(arguments):
        tuner = tuned(kernel, configs, tuple(facts), tuple(zero))
        if not torch.cuda.is_current_stream_capturing():
            tuner[grid](**arguments)
            return
        best = getattr(tuner, "best_config", None)
    block_m, block_n, warps, stages = configs[0] if best is None else numbers(best)
    meta = {"BLOCK_M": block_m, "BLOCK_N": block_n}
    kernel[grid(meta)](**arguments, **meta, num_warps=warps, num_stages=stages)


def numbers(config):
    """Return a triton.Config as the (BLOCK_M, BLOCK_N, num_warps, num_stages) of the tables."""
    return config.kwargs["BLOCK_M"], config.kwargs["BLOCK_N"], config.num_warps, config.num_stages


@functools.cache
def tuned(kernel, configs, facts, zero):
    """Return the autotuner of a kernel for one set of facts."""
    choices = [
        triton.Config({"BLOCK_M": block_m, "BLOCK_N": block_n}, num_warps=warps, num_stages=stages)
        for block_m, block_n, warps, stages in configs
    ]
    return triton.autotune(choices, key=[], reset_to_zero=list(zero) or None)(kernel)


def _may_tune(arguments):
    if os.environ.get("JFA_DISABLE_AUTOTUNE", "0") not in ("", "0"):
        return False
    return arguments["q"].is_cuda


def rows_contiguous(tensor):
    """Return a tensor that kernels can read by rows: last dimension contiguous, rows not too far apart."""
    if tensor.stride(-1) == 1 and (tensor.dim() < 3 or tensor.stride(-3) < FAR_APART):
        return tensor
    return tensor.contiguous()
