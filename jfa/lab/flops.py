"""How much work a call is: FLOPs of real lengths, the least bytes it moves, and the time a machine needs.

Padding and masked work never count. Lengths are plain integers: a list, a numpy array or a CPU tensor.
"""

from dataclasses import dataclass

import numpy as np

DIRECTIONS = ("forward", "backward", "both")


@dataclass(frozen=True)
class Rate:
    """A rate of a machine in units a second; ``kind`` is "measured" or "spec", ``source`` says by whom."""

    value: float
    kind: str
    source: str


@dataclass(frozen=True)
class Machine:
    """A GPU's limits: dense bf16 tensor cores in FLOP/s and HBM in byte/s, as printed and as reached."""

    name: str
    sms: int
    flops_spec: Rate
    flops_measured: Rate
    bytes_spec: Rate
    bytes_measured: Rate

    def rates(self, kind):
        """(FLOP/s, byte/s) of a kind, "measured" or "spec"."""
        if kind not in ("measured", "spec"):
            raise ValueError(f"kind: expected measured or spec, got {kind!r}")
        return getattr(self, f"flops_{kind}").value, getattr(self, f"bytes_{kind}").value


MACHINES = {
    "H200": Machine(
        name="H200",
        sms=132,
        flops_spec=Rate(989e12, "spec", "NVIDIA H200 SXM data sheet, dense bf16"),
        flops_measured=Rate(
            790e12, "measured", "cuBLAS bf16, normal data, on a rested GPU (figures/09_reach.csv, rounded)"
        ),
        bytes_spec=Rate(4.8e12, "spec", "NVIDIA H200 data sheet"),
        bytes_measured=Rate(4.3e12, "measured", "a copy by a kernel (figures/09_reach.csv, rounded)"),
    ),
    "B200": Machine(
        name="B200",
        sms=148,
        flops_spec=Rate(2250e12, "spec", "NVIDIA B200 data sheet, dense bf16"),
        flops_measured=Rate(
            1613e12,
            "measured",
            "best published attention forward, 1000 W (arXiv 2603.05451, FlashAttention-4)",
        ),
        bytes_spec=Rate(8.0e12, "spec", "NVIDIA B200 data sheet"),
        bytes_measured=Rate(7.2e12, "measured", "TMA loads, SemiAnalysisAI/microbench-blackwell"),
    ),
}


@dataclass(frozen=True)
class Roofline:
    """The least time of a call: the larger of its arithmetic and its traffic.

    ``flops`` and ``bytes`` are counts, times are seconds, ``tflops`` is the rate at that time, ``bound`` is
    "compute" or "memory".
    """

    flops: int
    bytes: int
    compute_seconds: float
    memory_seconds: float
    machine: str
    kind: str

    @property
    def seconds(self):
        """The least time in seconds."""
        return max(self.compute_seconds, self.memory_seconds)

    @property
    def tflops(self):
        """TFLOPS at the least time; 0 for a call without work."""
        return self.flops / self.seconds / 1e12 if self.seconds else 0.0

    @property
    def bound(self):
        """Which of the two limits."""
        return "compute" if self.compute_seconds >= self.memory_seconds else "memory"


def _lengths(kv_lengths, query):
    """KV lengths, query lengths (both int64 arrays) and whether queries are packed."""
    kv = np.asarray(kv_lengths, dtype=np.int64)
    packed = np.ndim(query) > 0
    queries = np.asarray(query, dtype=np.int64) if packed else np.full(kv.shape, int(query), dtype=np.int64)
    if kv.ndim != 1 or queries.shape != kv.shape:
        raise ValueError(f"lengths: expected one per sequence, got shapes {kv.shape} and {queries.shape}")
    if (kv < 0).any() or (queries < 0).any():
        raise ValueError("lengths: expected no negative length")
    return kv, queries, packed


def _window(causal, window):
    left, right = (None if side is None or side < 0 else int(side) for side in window)
    return left, 0 if causal else right


def _range_seen(queries, keys, left, right):
    """First and last key (inclusive) that each of ``queries`` rows sees of ``keys`` keys."""
    aligned = np.arange(queries) + keys - queries
    first = np.zeros(queries, np.int64) if left is None else np.maximum(aligned - left, 0)
    last = np.full(queries, keys - 1) if right is None else np.minimum(aligned + right, keys - 1)
    return first, last


def visible_pairs(kv_lengths, query, causal=False, window=(None, None)):
    """Number of (query row, key) pairs that attention looks at, exactly.

    ``query`` is M, the rows of a broadcast block, or one query length per sequence. ``window`` (left, right)
    is inclusive around the aligned key, None (or -1) unbounded; causal is right = 0.
    """
    kv, queries, _ = _lengths(kv_lengths, query)
    left, right = _window(causal, window)
    if left is None and right is None:
        return int((kv * queries).sum())
    shapes, counts = np.unique(np.stack([queries, kv]), axis=1, return_counts=True)
    total = 0
    for rows, keys, count in zip(*shapes.tolist(), counts.tolist()):
        first, last = _range_seen(rows, keys, left, right)
        total += count * int(np.maximum(last - first + 1, 0).sum())
    return total


def visible_keys(kv_lengths, query, causal=False, window=(None, None)):
    """Number of key rows, over all sequences, that at least one query row looks at."""
    kv, queries, _ = _lengths(kv_lengths, query)
    left, right = _window(causal, window)
    if left is None and right is None:
        return int(kv[queries > 0].sum())
    shapes, counts = np.unique(np.stack([queries, kv]), axis=1, return_counts=True)
    total = 0
    for rows, keys, count in zip(*shapes.tolist(), counts.tolist()):
        first, last = _range_seen(rows, keys, left, right)
        seen = last >= first
        if seen.any():  # consecutive rows see consecutive ranges, so the union has no hole
            total += count * int(last[seen].max() - first[seen].min() + 1)
    return total


def attention_flops(lengths, M, Hq, D, direction="forward", *, Dv=None, causal=False, window=(None, None)):
    """FLOPs of attention over real lengths: forward 4 * M * sum(lengths) * Hq * D, backward 2.5 times that.

    ``lengths`` are KV lengths; ``M`` is the rows of a broadcast query block or one query length per sequence.
    Masks count the visible pairs exactly. With Dv other than D the forward has one product of each width, the
    backward three of D and two of Dv. ``direction`` is "forward", "backward" or "both".
    """
    if direction not in DIRECTIONS:
        raise ValueError(f"direction: expected one of {', '.join(DIRECTIONS)}, got {direction!r}")
    wide = D if Dv is None else Dv
    pairs = visible_pairs(lengths, M, causal, window)
    forward = 2 * pairs * Hq * (D + wide)
    backward = 2 * pairs * Hq * (3 * D + 2 * wide)
    return {"forward": forward, "backward": backward, "both": forward + backward}[direction]


def least_bytes(
    lengths,
    M,
    Hq,
    D,
    direction="forward",
    *,
    Hkv=None,
    Dv=None,
    itemsize=2,
    causal=False,
    window=(None, None),
    separate_delta=False,
):
    """Bytes of HBM traffic that no kernel can avoid: every tensor of the call moves once.

    Forward reads q, k, v and writes out and lse; backward reads q, k, v, out, dout and lse and writes dq, dk
    and dv. ``itemsize`` is that of the inputs in bytes; lse has 4. Keys outside every window are not read,
    but their gradients are written. ``separate_delta`` counts dout twice in the backward, as a kernel that
    computes delta beforehand must.
    """
    if direction not in DIRECTIONS:
        raise ValueError(f"direction: expected one of {', '.join(DIRECTIONS)}, got {direction!r}")
    kv, queries, packed = _lengths(lengths, M)
    heads, wide = Hq if Hkv is None else Hkv, D if Dv is None else Dv
    rows = int(queries.sum())
    q = (rows if packed else int(M)) * Hq * D * itemsize
    out = rows * Hq * wide * itemsize
    lse = rows * Hq * 4
    read = visible_keys(lengths, M, causal, window) * heads * (D + wide) * itemsize
    written = int(kv.sum()) * heads * (D + wide) * itemsize
    forward = q + read + out + lse
    backward = 2 * q + read + written + (3 if separate_delta else 2) * out + lse
    return {"forward": forward, "backward": backward, "both": forward + backward}[direction]


def roofline(lengths, M, Hq, D, direction="forward", *, machine="H200", kind="measured", **options):
    """The least time of a call on a machine of ``MACHINES``, by its "measured" or "spec" rates.

    ``options`` are those of ``attention_flops`` and ``least_bytes``.
    """
    if machine not in MACHINES:
        raise ValueError(f"machine: expected one of {', '.join(MACHINES)}, got {machine!r}")
    masks = {name: options[name] for name in ("Dv", "causal", "window") if name in options}
    flops = attention_flops(lengths, M, Hq, D, direction, **masks)
    moved = least_bytes(lengths, M, Hq, D, direction, **options)
    flop_rate, byte_rate = MACHINES[machine].rates(kind)
    return Roofline(flops, moved, flops / flop_rate, moved / byte_rate, machine, kind)
