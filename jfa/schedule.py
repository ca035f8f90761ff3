"""Which tiles a batch has and in what order CTAs take them: made once a batch, used by every pass and layer.

The lists live in ``jfa.kernels.tiles``, because launches make them when the caller brought none; who takes
which item of a list is a role of each step (``jfa.kernels.parts``: round robin, boustrophedon, counter).
"""

import numbers

import torch

from jfa import jagged
from jfa.kernels import tiles
from jfa.kernels.problem import Problem
from jfa.kernels.tiles import ORDERS, Schedule, capacities

__all__ = ["ORDERS", "Schedule", "capacities", "make_schedule"]

LARGEST_BLOCK = 1 << 16  # rows of a tile; no step has one of more than 256
LARGEST_ROWS = (1 << 31) - 1  # a record counts rows in int32


def make_schedule(
    shapes: Problem | tuple[int, int],
    kv_offsets: torch.Tensor,
    q_offsets: torch.Tensor | None = None,
    block_m: int = 128,
    block_n: int = 128,
    *,
    order: str = "sorted",
    pruned: bool = True,
    where: str = "device",
    check: bool | None = None,
) -> Schedule:
    """List the tiles of a batch.

    ``shapes``: a Problem, or (rows of q, rows of k). ``kv_offsets`` and ``q_offsets`` (B + 1,): int32 or
    int64, on one device; no ``q_offsets`` means broadcast-Q. ``block_m`` and ``block_n``: rows of a query and
    of a key tile. ``order`` "sorted": most work first, equal work in natural order. ``pruned``: tiles without
    work stand behind the others. ``where`` "device" never waits for the device (one small kernel on a GPU, so
    a CUDA graph can hold it); "host" copies the offsets to the CPU, as a data loader would, and the lists
    back. ``check``: read the offsets' values and refuse bad ones; None does so where nothing has to be waited
    for, on a CPU and with ``where`` "host". Raises TypeError and ValueError that name the argument, what was
    expected and what came. Paper: section on load balance; notebook 04.
    """
    if order not in ORDERS:
        raise ValueError(f"order: expected one of {', '.join(ORDERS)}, got {order!r}")
    if where not in ("device", "host"):
        raise ValueError(f"where: expected device or host, got {where!r}")
    if not isinstance(pruned, bool):
        raise TypeError(f"pruned: expected True or False, got {pruned!r}")
    if not (check is None or isinstance(check, bool)):
        raise TypeError(f"check: expected True, False or None, got {check!r}")
    rows = _rows(shapes)
    block_m = _count("block_m", block_m, 1, LARGEST_BLOCK)
    block_n = _count("block_n", block_n, 1, LARGEST_BLOCK)
    if check is None and where == "host":
        check = True
    jagged.check_offsets(kv_offsets, rows[1], name="kv_offsets", check=check)
    batch = kv_offsets.shape[0] - 1
    if q_offsets is not None:
        jagged.check_offsets(q_offsets, rows[0], name="q_offsets", device=kv_offsets.device, check=check)
        if q_offsets.shape[0] != batch + 1:
            raise ValueError(
                f"q_offsets: expected as many sequences as kv_offsets has, {batch}, "
                f"got {q_offsets.shape[0] - 1}"
            )
    if isinstance(shapes, Problem):
        if shapes.batch != batch:
            raise ValueError(f"kv_offsets: expected {shapes.batch} sequences like shapes, got {batch}")
        if shapes.broadcast_q != (q_offsets is None):
            raise ValueError(
                f"q_offsets: expected {'none' if shapes.broadcast_q else 'some'}, because shapes has "
                f"{'a shared query block' if shapes.broadcast_q else 'packed queries'}"
            )
    options = {"order": order, "pruned": pruned, "where": where}
    return tiles.make_schedule(rows, kv_offsets, q_offsets, block_m, block_n, **options)


def _rows(shapes) -> tuple[int, int]:
    if isinstance(shapes, Problem):
        return shapes.total_q, shapes.total_kv
    if not isinstance(shapes, (tuple, list)) or len(shapes) != 2:
        raise TypeError(f"shapes: expected a Problem or (rows of q, rows of k), got {shapes!r}")
    names = ("rows of q in shapes", "rows of k in shapes")
    q_rows, k_rows = (_count(name, rows, 0, LARGEST_ROWS) for name, rows in zip(names, shapes))
    return q_rows, k_rows


def _count(name: str, value, low: int, high: int) -> int:
    if isinstance(value, torch.SymInt):
        return value
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name}: expected an int, got {type(value).__name__}")
    if not low <= value <= high:
        raise ValueError(f"{name}: expected {low} to {high}, got {value}")
    return int(value)
