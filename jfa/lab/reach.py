"""What a GPU reaches, rested and after a while: products, memory, and our kernels beside them.

    python -m jfa.lab.reach --output figures/09_reach.csv        (on a GPU)

The roofline of `jfa.lab.flops` divides by two rates. Here they are measured, each in three ways: in short
samples on a rested GPU, after 50 ms of itself as the benchmark times kernels, and after a second, when the
power limit has set the clock. Zeros switch few transistors, so their product needs less power.
"""

import sys
from dataclasses import dataclass
from functools import partial

import torch

from jfa.lab import measure
from jfa.lab.rounds import SHAPE, record
from jfa.lab.targets import Target, prepare

SIDE = 8192  # of the square bf16 matrices
COUNT = 1 << 30  # float32 numbers of the vector that is copied, read or filled


@dataclass(frozen=True)
class Way:
    """How a sample is taken: milliseconds untimed before it and timed, seconds of rest before both."""

    name: str
    settle_ms: float
    sample_ms: float
    rest_s: float


RESTED = Way("rested", 0, 8, 0.7)
SETTLED = Way("settled", measure.SETTLE_MS, 8, 0)
LONG = Way("after a second", 1000, 100, 0)
WAYS = (RESTED, SETTLED, LONG)
OURS = {
    "forward": Target("forward", "staged", **SHAPE),
    "backward": Target("backward", "stationary", **SHAPE),
}
PRODUCT = "product"
OURS_BEGIN = "our "


def works(side: int = SIDE, count: int = COUNT, device: str = "cuda", ours=OURS):
    """Yield (name, function to time, its amount, unit of the rate): FLOPs of products, bytes of memory."""
    for name, make in ((PRODUCT, torch.randn), ("product of zeros", torch.zeros)):
        one, other = (make(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
        out = torch.empty_like(one)
        yield name, partial(torch.matmul, one, other, out=out), 2 * side**3, "TFLOPS"
    source = torch.randn(count, device=device)
    target = torch.empty_like(source)
    yield "copy", partial(torch.neg, source, out=target), 8 * count, "TB/s"
    yield "read", partial(torch.sum, source), 4 * count, "TB/s"
    yield "write", partial(target.fill_, 1.0), 4 * count, "TB/s"
    for direction, step in ours.items():
        yield f"{OURS_BEGIN}{direction} pass", prepare(step), step.case.work(direction).flops, "TFLOPS"


def recorded(rounds: int = 5, ways=WAYS, sizes=(), **options):
    """Yield a row a work and way: milliseconds, ``rate`` in ``unit``, clock and power of this row alone.

    ``sizes``: what `works` takes; ``options``: what `jfa.lab.measure.interleave` takes.
    """
    options = {"graph": True} | options
    for name, function, amount, unit in works(**dict(sizes)):
        for way in ways:
            times = {"sample_ms": way.sample_ms, "settle_ms": way.settle_ms, "pause_s": way.rest_s}
            (row,) = measure.interleave({name: function}, rounds, **times, warmup_ms=20, **options)
            rate = amount / row["ms_p50"] / 1e9
            facts = {"way": way.name, "sample_ms": way.sample_ms, "rest_s": way.rest_s, "amount": amount}
            yield row | facts | {"rate": round(rate, 2), "unit": unit}


def table(rows):
    """The rates as a DataFrame, a line a work and a column a way, both as they come in rows (a DataFrame)."""
    return rows.pivot_table(index="name", columns="way", values="rate", sort=False)


def ours(found):
    """Of a `table`, the lines of our passes."""
    return found[found.index.str.startswith(OURS_BEGIN)]


def shares(rows):
    """Our passes' rates over the product's in the same way: a DataFrame, a line a pass, a column a way."""
    found = table(rows)
    return ours(found) / found.loc[PRODUCT]


def text(rows) -> str:
    """A line a work: its rate in every way, our passes also over the product's; from rows (a DataFrame)."""
    found, over = table(rows), shares(rows)
    last = rows[rows["way"] == LONG.name].set_index("name")
    units = rows.drop_duplicates("name").set_index("name")["unit"]
    titles = " ".join(f"{way:>14}" for way in found)
    lines = [f"{'':<18} {'':<6} {titles}  clock and power {LONG.name}"]
    for name, speeds in found.iterrows():
        digits = 0 if units[name] == "TFLOPS" else 2
        cells = " ".join(f"{speed:>14.{digits}f}" for speed in speeds)
        clock = f"{last['sm_clock_mhz'][name] / 1e3:.2f} GHz, {last['power_w'][name]:.0f} W"
        lines.append(f"{name:<18} {units[name]:<6} {cells}  {clock}")
        if name in over.index:
            cells = " ".join(f"{share:>14.2f}" for share in over.loc[name])
            lines.append(f"{'... over product':<18} {'':<6} {cells}")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Record every work in every way."""
    print(text(record(arguments, "reach", __doc__, "rounds", 5, recorded)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
