"""How many registers hold a value at each instruction of a compiled kernel, as NVIDIA's disassembler counts.

The kernel's PTX is assembled by the newest assembler at hand, for both targets, because the disassembler
follows the flow of no older one's code. Nothing runs; the registers that a launch asks for, and spills, are
in `jfa.lab.report`.
"""

import gzip
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from jfa.lab import loops, report, toolchain

INSTRUCTION = re.compile(r"\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)([^;]*);.*// \|(.*)\|")
LABEL = re.compile(r"(\.L_x_\d+):")
ASSEMBLER = "ptxas-blackwell"


@dataclass(frozen=True)
class Instruction:
    """One machine instruction with the registers that are alive there: a thread's, predicates, a warp's."""

    opcode: str
    operands: str
    general: int
    predicates: int
    uniform: int

    @property
    def kind(self) -> str:
        """The kind of unit it uses, as in `jfa.lab.loops`."""
        return loops.kind_of(self.opcode)


def missing() -> str | None:
    """Why live registers cannot be counted here, or None."""
    absent = [name for name in (ASSEMBLER, "nvdisasm") if toolchain.locate(name) is None]
    return f"live registers are not counted here: {' and '.join(absent)} not found" if absent else None


def disassembly(made: "report.Report") -> str:
    """The disassembly of a compile report's kernel with its live ranges; kept beside the report."""
    kept = Path(f"{made.files}.live.gz")
    if kept.exists():
        return gzip.decompress(kept.read_bytes()).decode()
    assembler, disassembler = (
        toolchain.require(name, "counting registers") for name in (ASSEMBLER, "nvdisasm")
    )
    with tempfile.TemporaryDirectory() as folder:
        source, binary = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(made.text("ptx"))
        options = ["--regAllocOptLevel=2", f"--gpu-name={made.arch}a", str(source), "-o", str(binary)]
        _run([assembler, *options])
        text = _run([disassembler, "-c", "-plr", "-lrm", "count", str(binary)])
    text = "\n".join(line.rstrip() for line in text.splitlines())
    kept.write_bytes(gzip.compress(text.encode(), 5, mtime=0))
    return text


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{Path(command[0]).name} failed: {(done.stderr + done.stdout)[-2000:]}")
    return done.stdout


def parse(text: str) -> tuple[list[Instruction], dict[str, int]]:
    """(instructions in order, label -> index of the instruction behind it) of such a disassembly."""
    code: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        if label := LABEL.match(line):
            labels[label.group(1)] = len(code)
        elif found := INSTRUCTION.match(line):
            counts = [int(count) if count.strip() else 0 for count in found.group(4).split("|")[:3]]
            code.append(Instruction(found.group(2), found.group(3), *counts))
    return code, labels


def _loops(code, labels) -> list[tuple[int, int]]:
    """(first, last) index of every loop; waits that the compiler puts behind the last EXIT are none."""
    last = max((i for i, one in enumerate(code) if one.opcode == "EXIT"), default=len(code))
    found = []
    for end, one in enumerate(code[:last]):
        target = re.search(r"\.L_x_\d+", one.operands)
        if one.opcode.startswith("BRA") and target is not None and labels[target.group()] <= end:
            found.append((labels[target.group()], end))
    return found


def _inside(a, b) -> bool:
    return a != b and b[0] <= a[0] and a[1] <= b[1]


def block_loops(made: "report.Report") -> list[list[Instruction]]:
    """The innermost loops that turn scores into weights (16 exponentials or more), longest first."""
    code, labels = parse(disassembly(made))
    found = [
        (start, end)
        for start, end in _loops(code, labels)
        if sum(one.kind == "exponential" for one in code[start : end + 1]) >= 16
    ]
    inner = [span for span in found if not any(_inside(other, span) for other in found)]
    return sorted((code[start : end + 1] for start, end in inner), key=len, reverse=True)


def drain_loop(made: "report.Report") -> list[Instruction]:
    """The loop in which Blackwell's reduce group moves dQ out of tensor memory; ValueError if none does."""
    code, labels = parse(disassembly(made))
    found = [code[start : end + 1] for start, end in _loops(code, labels)]
    found = [body for body in found if {"UTMAREDG", "LDTM"} <= {one.opcode.split(".")[0] for one in body}]
    if not found:
        raise ValueError(f"no loop of {made.kernel} for {made.arch} moves dQ out of tensor memory")
    return min(found, key=len)


def at_release(drain: list[Instruction]) -> int:
    """Live registers of a thread where the drain loop says that tensor memory is free (its only arrive)."""
    (arrive,) = (one for one in drain if one.opcode.startswith("SYNCS.ARRIVE"))
    return arrive.general


def peak(body: list[Instruction], what: str = "general") -> int:
    """Most live registers of a kind ("general", "predicates", "uniform") at any instruction."""
    return max(getattr(instruction, what) for instruction in body)
