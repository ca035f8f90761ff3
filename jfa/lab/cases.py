"""The shapes that are measured: suites of cases, and the tensors of a case."""

from dataclasses import dataclass, replace

import torch

from jfa import jagged
from jfa.lab import flops


@dataclass(frozen=True)
class Case:
    """One benchmark shape; lengths are drawn by the named generator, so a case is reproducible from its row.

    ``M`` query rows a sequence (0 for packed Q, whose query lengths equal the key lengths), ``N`` the longest
    allowed sequence in rows, ``density`` as in the length generator, ``B`` sequences, ``Hq``/``Hkv`` heads,
    ``D`` head dimension, ``window`` (left, right) in keys or None.
    """

    suite: str
    M: int
    N: int
    density: float
    B: int
    Hq: int = 4
    Hkv: int = 4
    D: int = 128
    causal: bool = False
    window: tuple[int, int] | None = None
    dtype: str = "bfloat16"

    @classmethod
    def of(cls, columns: dict) -> "Case":
        """The case whose `columns` these are, among others or read from a file."""
        names = ("suite", "M", "N", "density", "B", "Hq", "Hkv", "D", "dtype")
        window = str(columns["window"] or "")
        sides = tuple(int(side) for side in window.split(",")) if window else None
        facts = {name: columns[name] for name in names}
        return cls(**facts, causal=bool(columns["causal"]), window=sides)

    @property
    def packed(self) -> bool:
        """Whether queries are packed (self-attention) instead of broadcast."""
        return self.M == 0

    @property
    def self_attention(self) -> bool:
        """Whether a sequence has a query row for each key, packed or of equal lengths."""
        return self.packed or self.suite == "dense"

    def lengths(self) -> torch.Tensor:
        """KV length of every sequence, int64 on the CPU."""
        if self.suite == "histories":
            return jagged.history_lengths()[: self.B]
        return jagged.density_lengths(self.B, self.N, self.density, seed=1)

    def work(self, direction: str) -> flops.Roofline:
        """FLOPs, least bytes and least time of one pass over the real lengths, of an H200."""
        lengths = self.lengths()
        query = lengths if self.self_attention else self.M
        masks = {"causal": self.causal, "window": self.window or (None, None)}
        return flops.roofline(lengths, query, self.Hq, self.D, direction, Hkv=self.Hkv, **masks)

    def columns(self) -> dict:
        """The columns of a result row that describe the case."""
        window = "" if self.window is None else f"{self.window[0]},{self.window[1]}"
        return {
            "suite": self.suite,
            "M": self.M,
            "N": self.N,
            "density": self.density,
            "B": self.B,
            "Hq": self.Hq,
            "Hkv": self.Hkv,
            "D": self.D,
            "causal": int(self.causal),
            "window": window,
            "dtype": self.dtype,
        }


def shape_text(row: dict) -> str:
    """The shape of a recorded row in a few words: "M=128 N=512", or the suite where no query is shared."""
    return f"{'M=' + str(row['M']) if row['suite'] == 'jagged' else row['suite']} N={row['N']}"


def jagged_case(M: int, N: int, density: float) -> Case:
    """A case of the production kind; half as many sequences where they are longest."""
    return Case("jagged", M, N, density, B=384 if N >= 4096 else 768)


def jagged_cases(
    queries=(128, 256, 512), limits=(512, 1024, 2048, 4096), densities=(0.1, 0.5, 0.9, 1.0)
) -> list[Case]:
    """Broadcast-Q over jagged histories: the production case and the paper's main figure."""
    return [jagged_case(M, N, density) for M in queries for N in limits for density in densities]


def history_cases() -> list[Case]:
    """Broadcast-Q over the lengths of 943 real user histories."""
    longest = int(jagged.history_lengths().max())
    return [Case("histories", M, longest, 0.0, B=943) for M in (128, 256)]


def extra_cases() -> list[Case]:
    """Broadcast-Q away from the main line: odd M, grouped heads, a window, D = 64."""
    base = Case("jagged", 128, 1024, 0.5, B=768)
    return [
        replace(base, M=192),
        replace(base, M=64),
        replace(base, M=1),
        replace(base, Hq=8, Hkv=2),
        replace(base, window=(256, 0)),
        replace(base, D=64),
    ]


def dense_cases() -> list[Case]:
    """Equal lengths, as many queries as keys: the paper's dense figure."""
    return [Case("dense", N, N, 1.0, B=48 if N >= 4096 else 768) for N in (256, 512, 1024, 4096)]


def packed_cases() -> list[Case]:
    """Self-attention over jagged sequences, with and without a causal mask."""
    return [
        Case("packed", 0, N, 0.5, B=B, causal=causal)
        for N, B in ((1024, 256), (4096, 64))
        for causal in (False, True)
    ]


def host_cases() -> list[Case]:
    """So little work for a GPU that it waits for the host: what an eager call costs there."""
    return [Case("host", 128, 128, 0.5, B=8)]


# Shapes (M, N, density) for what is too slow to measure everywhere: most peers, and FlexAttention.
FEW = (
    (128, 512, 0.1),
    (128, 1024, 0.5),
    (128, 2048, 0.9),
    (256, 1024, 0.5),
    (256, 2048, 0.9),
    (512, 1024, 0.1),
    (512, 2048, 0.5),
    (512, 4096, 0.9),
)
FEWER = ((128, 1024, 0.5), (256, 1024, 0.5), (512, 2048, 0.5))


def representative(case: Case, shapes=FEW) -> bool:
    """Whether a case stands for others: the jagged ones of ``shapes``, and every other suite."""
    if case.suite != "jagged":
        return shapes is FEW or case.M in (0, 128, 1024) and case.N <= 1024
    plain = case == Case("jagged", case.M, case.N, case.density, case.B)
    return plain and (case.M, case.N, case.density) in shapes


SUITES = {
    "jagged": jagged_cases,
    "histories": history_cases,
    "extra": extra_cases,
    "dense": dense_cases,
    "packed": packed_cases,
    "host": host_cases,
}


@dataclass
class Inputs:
    """Tensors of one case on one device; q is (M, Hq, D) or (T, Hq, D), k and v are (T, Hkv, D)."""

    case: Case
    lengths: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    kv_offsets: torch.Tensor
    q_offsets: torch.Tensor | None
    dout: torch.Tensor

    @property
    def max_kv_len(self) -> int:
        """Longest sequence of the batch, in rows."""
        return int(self.lengths.max())

    @property
    def query_lengths(self) -> torch.Tensor:
        """Query rows of every sequence, int64 on the CPU."""
        return self.lengths if self.q_offsets is not None else torch.full_like(self.lengths, self.case.M)


def make_inputs(case: Case, device: str = "cuda", seed: int = 0) -> Inputs:
    """Draw the tensors of a case: standard normal q, k, v and dout in the case's dtype.

    Dense cases are packed-Q problems of equal lengths, so that every implementation sees the same data.
    """
    dtype = getattr(torch, case.dtype)
    lengths = case.lengths()
    total = int(lengths.sum())
    generator = torch.Generator(device=device).manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, device=device, dtype=torch.float32, generator=generator).to(dtype)

    kv_offsets = jagged.lengths_to_offsets(lengths).to(device)
    rows = total if case.self_attention else case.M
    q = draw(rows, case.Hq, case.D)
    k = draw(total, case.Hkv, case.D)
    v = draw(total, case.Hkv, case.D)
    out_shape = (total, case.Hq, case.D) if case.self_attention else (case.B, case.M, case.Hq, case.D)
    return Inputs(
        case=case,
        lengths=lengths,
        q=q,
        k=k,
        v=v,
        kv_offsets=kv_offsets,
        q_offsets=kv_offsets if case.self_attention else None,
        dout=draw(*out_shape),
    )
