"""What an SM can do in a clock, from published figures, and what a loop that takes turns would make of it.

Everything computed here is a prediction: a bound from rates and instruction counts, never a measurement.
"""

from dataclasses import dataclass

from jfa.lab import loops


@dataclass(frozen=True)
class Rates:
    """Rates of one SM, per clock: bf16 tensor-core FLOPs, exponentials, warp instructions issued."""

    gpu: str
    sms: int
    tensor_flops: float
    exponentials: float
    issue: float


# Tensor core: NVIDIA's dense bf16 peaks (989 TFLOPS at 1.83 GHz, 2.25 PFLOPS at 1.85 GHz) over the SMs, which
# instruction benchmarks reproduce. Exponentials and issue slots are the same on both.
RATES = {
    "sm_90": Rates("H200", 132, 4096, 16, 4),
    "sm_100": Rates("B200", 148, 8192, 16, 4),
}


@dataclass(frozen=True)
class Turns:
    """Clocks of one pass through a loop in which tensor cores and everything else take turns."""

    arch: str
    tensor: float
    rest: float

    @property
    def busy(self) -> float:
        """Share of the time, 0 to 1, that the tensor cores work."""
        return self.tensor / (self.tensor + self.rest)


def take_turns(arch: str, loop: list[loops.Instruction], flops: int, warps: int) -> Turns:
    """Predict one pass of a loop in which nothing overlaps.

    flops: of the two matrix products of one pass in one CTA; warps: of the CTA, each of which runs the loop.
    What is no matrix product costs the larger of its issue slots and its exponentials (32 lanes each).
    """
    rates = RATES[arch]
    others = sum(instruction.kind != "tensor core" for instruction in loop)
    exponentials = sum(instruction.kind == "exponential" for instruction in loop)
    rest = max(others * warps / rates.issue, exponentials * warps * 32 / rates.exponentials)
    return Turns(arch, flops / rates.tensor_flops, rest)


REGISTERS = 65536  # 32-bit registers of an SM, handed out in units of 8 for each thread
SHARED_BYTES = 228 * 1024  # shared memory of an SM; 1 KiB of it is taken for each CTA
TMEM_COLUMNS = 512  # tensor memory of an SM (sm_100), in 32-bit columns
WARPS = 64


def resident_ctas(report) -> dict[str, int]:
    """Return how many CTAs of a compiled kernel fit on an SM, by the resource that is asked: least wins.

    report: a `jfa.lab.report.Report`. Tensor memory is listed only for kernels that use it.
    """
    registers = -(-report.registers // 8) * 8
    fits = {
        "registers": REGISTERS // (registers * report.warps * 32),
        "shared memory": SHARED_BYTES // (report.shared_bytes + 1024),
        "warps": WARPS // report.warps,
    }
    if report.tmem_columns:
        fits["tensor memory"] = TMEM_COLUMNS // report.tmem_columns
    return fits
