"""Jagged batches: sequences of different lengths packed one after another, and the offsets between them.

A batch of B sequences with T rows in total is one tensor (T, ...) and offsets (B + 1,), int32 or int64:
sequence b is rows ``offsets[b]`` to ``offsets[b + 1]``. Rows past ``offsets[-1]`` are slack and belong to
nobody.
"""

import csv
import math
import numbers
from pathlib import Path

import torch

OFFSET_DTYPES = (torch.int32, torch.int64)
HISTORY_FILE = Path("notebooks") / "data" / "ml100k_history_lengths.csv"


def lengths_to_offsets(lengths, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """Offsets (B + 1,) of sequences with these lengths.

    ``lengths``: a list or an integer tensor (B,), on any device; the offsets stay there. A tensor on a GPU is
    converted without a synchronization, so its values go unchecked. Raises TypeError for a dtype that is
    not an integer, and ValueError for a wrong rank, a negative length, or a sum that ``dtype`` cannot
    hold.
    """
    if dtype not in OFFSET_DTYPES:
        raise TypeError(f"dtype: expected torch.int32 or torch.int64, got {dtype}")
    lengths = _integers("lengths", lengths)
    sums = lengths.to(torch.int64).cumsum(0)
    if lengths.device.type == "cpu" and not torch.compiler.is_compiling() and lengths.numel():
        if int(lengths.min()) < 0:
            raise ValueError(f"lengths: expected no negative length, got {int(lengths.min())}")
        if (
            int(sums.min()) < 0 or int(sums[-1]) > torch.iinfo(dtype).max
        ):  # a sum that wraps around is negative
            raise ValueError(
                f"lengths: their sum {sum(lengths.tolist())} does not fit {dtype}; use torch.int64"
            )
    return torch.cat([sums.new_zeros(1), sums]).to(dtype)


def offsets_to_lengths(offsets: torch.Tensor) -> torch.Tensor:
    """Lengths (B,) of the sequences between these offsets (B + 1,), same dtype and device.

    Raises TypeError for a dtype other than int32 and int64, ValueError for a wrong rank or no element.
    """
    check_offsets_form(offsets, name="offsets")
    return offsets.diff()


def check_offsets(
    offsets: torch.Tensor,
    total: int,
    *,
    name: str = "kv_offsets",
    device: torch.device | str | None = None,
    check: bool | None = None,
    max_len: int | None = None,
) -> None:
    """Raise unless ``offsets`` (B + 1,) separate sequences inside ``total`` rows.

    What the shape tells (type, dtype int32 or int64, rank, one element at least, ``device`` if given) is
    looked at always and costs nothing. The values (first is 0, none decreases, last within ``total``, no
    length above ``max_len`` if given) are read when ``check`` is true; None means on a CPU only, because
    reading them on a GPU waits for it, and not while torch.compile traces. Errors are TypeError and
    ValueError; they name ``name``, what was expected and what came.
    """
    check_offsets_form(offsets, name=name, device=device)
    if check is None:
        check = offsets.device.type == "cpu" and not torch.compiler.is_compiling()
    if check:
        check_offsets_values(offsets, total, name=name, max_len=max_len)


def check_offsets_form(offsets, *, name: str, device: torch.device | str | None = None) -> None:
    """The part of ``check_offsets`` that needs no value, and so never waits for a device."""
    if not isinstance(offsets, torch.Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor of int32 or int64, got {type(offsets).__name__}")
    if offsets.layout != torch.strided:
        raise TypeError(f"{name}: expected a dense tensor (torch.strided), got layout {offsets.layout}")
    if offsets.dtype not in OFFSET_DTYPES:
        raise TypeError(f"{name}: expected dtype torch.int32 or torch.int64, got {offsets.dtype}")
    if offsets.dim() != 1:
        raise ValueError(f"{name}: expected one dimension (B + 1,), got shape {tuple(offsets.shape)}")
    if offsets.shape[0] == 0:
        raise ValueError(f"{name}: expected B + 1 elements, at least the 0 that it starts with, got none")
    if device is not None and offsets.device != torch.device(device):
        raise ValueError(f"{name}: expected to be on {device} like the tensors it cuts, got {offsets.device}")


def check_offsets_values(offsets: torch.Tensor, total: int, *, name: str, max_len: int | None = None) -> None:
    """The part of ``check_offsets`` that reads the values; on a GPU it waits for them."""
    values = offsets.detach().cpu().to(torch.int64)
    first, last = int(values[0]), int(values[-1])
    if first != 0:
        raise ValueError(f"{name}: expected to start at 0, got {name}[0] = {first}")
    falls = (values[1:] < values[:-1]).nonzero()  # a difference could wrap around
    if falls.numel():
        b = int(falls[0])
        raise ValueError(
            f"{name}: expected never to decrease, got {name}[{b}] = {int(values[b])} "
            f"before {name}[{b + 1}] = {int(values[b + 1])}"
        )
    if last > total:
        raise ValueError(f"{name}: expected to end within the {total} packed rows, got {name}[-1] = {last}")
    lengths = values.diff()
    if max_len is not None and lengths.numel() and int(lengths.max()) > max_len:
        b = int(lengths.argmax())
        raise ValueError(
            f"max_kv_len: expected an upper bound of all lengths, got {max_len} while sequence {b} of {name} "
            f"has {int(lengths[b])} rows"
        )


def density_lengths(batch: int, max_len: int, density: float, seed: int = 0) -> torch.Tensor:
    """Random lengths (batch,), int64 on the CPU, whose mean is about ``density * max_len`` rows.

    density 1: all ``max_len``. From 0.5 up to 1: uniform integers in [(2 density - 1) max_len, max_len].
    Above 0 and below 0.5: uniform integers in [0, 2 density max_len]. The same seed gives the same
    lengths. Raises ValueError for a density outside (0, 1]. Source: the length generator of the Jagged
    Flash Attention paper, which calls the density sparsity.
    """
    _count("batch", batch)
    _count("max_len", max_len)
    if not 0.0 < density <= 1.0:
        raise ValueError(f"density: expected a number above 0 and at most 1, got {density}")
    if density == 1.0:
        return equal_lengths(batch, max_len)
    low, high = (2.0 * density - 1.0) * max_len, float(max_len)
    if density < 0.5:
        low, high = 0.0, 2.0 * density * max_len
    # 2 * 0.55 - 1 is a hair above 0.1 in binary: rounding first keeps an end that is meant to be whole.
    return _uniform(batch, math.ceil(round(low, 6)), math.floor(round(high, 6)), seed)


def giant_lengths(batch: int, short: int, giant: int, seed: int = 0) -> torch.Tensor:
    """Lengths (batch,), int64 on the CPU: one giant at a random place among short ones.

    The giant has ``giant`` rows, the others uniformly 1 to ``short``. Raises ValueError for no sequence at
    all, or a giant that is not longer than ``short``.
    """
    if batch < 1 or short < 1 or giant <= short:
        raise ValueError(f"expected batch >= 1 and 1 <= short < giant, got {batch=}, {short=}, {giant=}")
    lengths = _uniform(batch, 1, short, seed)
    lengths[int(_uniform(1, 0, batch - 1, seed + 1))] = giant
    return lengths


def empty_lengths(batch: int) -> torch.Tensor:
    """Lengths (batch,), int64 on the CPU, that are all 0."""
    return equal_lengths(batch, 0)


def equal_lengths(batch: int, length: int) -> torch.Tensor:
    """Lengths (batch,), int64 on the CPU, that are all ``length``: a dense batch."""
    _count("batch", batch)
    _count("length", length)
    return torch.full((batch,), length, dtype=torch.int64, device="cpu")


def history_lengths() -> torch.Tensor:
    """Lengths (943,), int64 on the CPU, of real user histories: events per user of MovieLens 100K, 20 to 737.

    The file is ``notebooks/data/ml100k_history_lengths.csv`` of the repository, looked for beside the
    package and from the working directory upwards. Raises FileNotFoundError that says where it looked.
    Source: ``notebooks/data/README.md``.
    """
    here = Path.cwd()
    roots = [Path(__file__).resolve().parent.parent, here, *here.parents]
    path = next((root / HISTORY_FILE for root in roots if (root / HISTORY_FILE).is_file()), None)
    if path is None:
        raise FileNotFoundError(
            f"{HISTORY_FILE} is part of the repository, not of the installed package. Looked in {roots[0]}, "
            f"in {here} and in the folders above it; run from inside a checkout."
        )
    with path.open(newline="") as file:
        events = [int(row["events"]) for row in csv.DictReader(file)]
    return torch.tensor(events, dtype=torch.int64, device="cpu")


def from_nested(nested: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed values (T, ...) and offsets (B + 1,) of a ``torch.nested`` tensor with the jagged layout.

    The ragged dimension comes first in the values, wherever it stands in the nested tensor, without a copy.
    Gradients flow through. Raises TypeError for another layout, ValueError for one with holes
    (``lengths()``).
    """
    if not isinstance(nested, torch.Tensor) or not nested.is_nested or nested.layout != torch.jagged:
        got = getattr(nested, "layout", type(nested).__name__)
        raise TypeError(f"nested: expected a torch.nested tensor with layout torch.jagged, got {got}")
    if nested.lengths() is not None:
        raise ValueError("nested: expected no holes between the sequences; call .contiguous() on it first")
    return nested.values().movedim(nested._ragged_idx - 1, 0), nested.offsets()


def to_nested(values: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """A ``torch.nested`` jagged tensor (B, length, ...) over packed values (T, ...) and offsets (B + 1,).

    Nothing is copied; gradients flow through. Raises like ``check_offsets``.
    """
    if not isinstance(values, torch.Tensor):
        raise TypeError(f"values: expected a torch.Tensor, got {type(values).__name__}")
    check_offsets(offsets, values.shape[0], name="offsets", device=values.device)
    return torch.nested.nested_tensor_from_jagged(values, offsets)


def _uniform(count: int, low: int, high: int, seed: int) -> torch.Tensor:
    generator = torch.Generator(device="cpu").manual_seed(seed)
    return torch.randint(low, high + 1, (count,), generator=generator, device="cpu")


def _count(name: str, value: int) -> None:
    if not isinstance(value, numbers.Integral) or isinstance(value, bool):
        raise TypeError(f"{name}: expected an int, got {value!r}")
    if value < 0:
        raise ValueError(f"{name}: expected 0 or more, got {value}")


def _integers(name: str, values) -> torch.Tensor:
    if not isinstance(values, torch.Tensor):
        try:
            values = torch.as_tensor(values)
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(f"{name}: expected a list or a tensor of integers, got {values!r}") from error
        if values.numel() == 0:
            values = values.to(torch.int64)
    if values.dtype.is_floating_point or values.dtype.is_complex or values.dtype == torch.bool:
        raise TypeError(f"{name}: expected integers, got dtype {values.dtype}")
    if values.dim() != 1:
        raise ValueError(f"{name}: expected one dimension (B,), got shape {tuple(values.shape)}")
    return values
