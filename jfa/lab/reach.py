"""What a GPU reaches: a matrix product's FLOPs and a copy's bytes, for as long as its power limit lets it.

    python -m jfa.lab.reach --output figures/09_reach.csv        (on a GPU)

The roofline of `jfa.lab.flops` divides by two rates. Here they are measured, each in three ways: in short
samples on a rested GPU, after 50 ms of itself as the benchmark times kernels, and after a second. Zeros switch
few transistors: the product of zeros says what the tensor cores reach where power does not limit them.
"""

import sys
from dataclasses import dataclass

import torch

from jfa.lab import measure
from jfa.lab.rounds import record

SIDE = 8192  # of the square bf16 matrices
BYTES = 4 << 30  # read by the copy, and written


@dataclass(frozen=True)
class Way:
    """How a sample is taken: milliseconds untimed before it and timed, seconds of rest before both."""

    settle_ms: float
    sample_ms: float
    rest_s: float


WAYS = (Way(0, 8, 1), Way(measure.SETTLE_MS, 8, 0), Way(1000, 100, 0))
UNITS = {"product": "TFLOPS", "copy": "TB/s", "fill": "TB/s"}


def works(side: int = SIDE, count: int = BYTES, device: str = "cuda") -> dict:
    """(work, values) -> a function to time and its FLOPs or bytes: products of two kinds, a copy, a fill."""
    makes = {"normal": torch.randn, "zeros": torch.zeros}
    found = {}
    for values, make in makes.items():
        one, other = (make(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
        out = torch.empty_like(one)
        found["product", values] = (
            lambda one=one, other=other, out=out: torch.matmul(one, other, out=out),
            2 * side**3,
        )
    source = torch.randint(256, (count,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    found["copy", "uniform"] = (lambda: target.copy_(source), 2 * count)
    found["fill", "zeros"] = (target.zero_, count)
    return found


def recorded(rounds: int = 5, ways=WAYS, **options):
    """Yield a row a work and way: milliseconds, ``rate`` in TFLOPS or TB/s, with its own clock and power.

    ``options``: "side", "count" and "device" of `works`, and those of `jfa.lab.measure.interleave`.
    """
    sizes = {name: options.pop(name) for name in ("side", "count", "device") if name in options}
    options = {"graph": True} | options
    for (work, values), (function, amount) in works(**sizes).items():
        for way in ways:
            times = {"sample_ms": way.sample_ms, "settle_ms": way.settle_ms, "pause_s": way.rest_s}
            (row,) = measure.interleave({work: function}, rounds, **times, warmup_ms=20, **options)
            rate = amount / row["ms_p50"] / 1e9
            facts = {"work": work, "values": values, "amount": amount, "rate": round(rate, 2)}
            yield facts | {"unit": UNITS[work], "rest_s": way.rest_s, "sample_ms": way.sample_ms} | row


def text(rows) -> str:
    """The rates as a table, a line a work, a column a way of sampling; from rows (a DataFrame)."""
    lines = []
    for (work, values, unit), same in rows.groupby(["work", "values", "unit"], sort=False):
        told = []
        for row in same.itertuples():
            rate = f"{row.rate:.{0 if unit == 'TFLOPS' else 2}f}"
            if row.rest_s:  # most of the time that its clock and power are of is rest
                told.append(f"rested {rate}")
            else:
                clock = f"{row.sm_clock_mhz / 1e3:.2f} GHz, {row.power_w:.0f} W"
                told.append(f"after {row.settle_ms:g} ms of itself {rate} ({clock})")
        lines.append(f"{f'{work} of {values}, {unit}':<27} {', '.join(told)}")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Record every work in every way."""
    print(text(record(arguments, "reach", __doc__, "rounds", 5, recorded)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
