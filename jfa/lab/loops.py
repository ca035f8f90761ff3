"""The main loop of a compiled kernel, read from its machine code: which unit each instruction uses."""

import re
from dataclasses import dataclass

# The first pattern that matches an opcode names its kind.
KINDS = {
    "tensor core": r"[HQI]GMMA|HMMA|UTC\w*MMA",
    "wait or barrier": r"WARPGROUP\.DEPBAR|SYNCS\S*TRYWAIT|DEPBAR|BAR|UTCBAR|WARPSYNC",
    "exponential": r"MUFU\.EX2",
    "load or store": r"LDGSTS|UTMALDG|UBLKCP|LDG|STG|LDS|STS|LDTM|STTM|LDL|STL|LDGDEPBAR",
}
OTHER = "other arithmetic"
INSTRUCTION = re.compile(r"\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)([^;]*)")
LABEL = re.compile(r"(\.L_x_\d+):")


@dataclass(frozen=True)
class Instruction:
    """One machine instruction of a loop: its place in the loop, its opcode and the kind of unit it uses."""

    index: int
    opcode: str
    kind: str


def kind_of(opcode: str) -> str:
    """Return the kind of unit that an opcode uses, one of KINDS or OTHER."""
    return next((kind for kind, pattern in KINDS.items() if re.match(pattern, opcode)), OTHER)


def parse(sass: str) -> tuple[list[tuple[str, str]], dict[str, int]]:
    """Return ((opcode, operands) in order, label -> index of the instruction behind it) of a disassembly."""
    code: list[tuple[str, str]] = []
    labels: dict[str, int] = {}
    for line in sass.splitlines():
        if label := LABEL.match(line):
            labels[label.group(1)] = len(code)
        elif found := INSTRUCTION.match(line):
            code.append((found.group(1), found.group(2)))
    return code, labels


def main_loop(sass: str) -> list[Instruction]:
    """Return the instructions of the loop that holds the most tensor-core ones; the shortest if several do.

    Waiting loops that the compiler puts behind the last EXIT are no loops of the program and are left out.
    Raises ValueError when no loop uses the tensor cores.
    """
    code, labels = parse(sass)
    last = max((index for index, (opcode, _) in enumerate(code) if opcode == "EXIT"), default=len(code))
    best, best_rank = None, (0, 0)
    for end, (opcode, operands) in enumerate(code[:last]):
        target = re.search(r"\.L_x_\d+", operands)
        if not opcode.startswith("BRA") or target is None or labels[target.group()] >= end:
            continue
        body = code[labels[target.group()] : end + 1]
        rank = (sum(kind_of(name) == "tensor core" for name, _ in body), -len(body))
        if rank[0] and rank > best_rank:
            best, best_rank = body, rank
    if best is None:
        raise ValueError("no loop of this kernel uses the tensor cores")
    return [Instruction(index, opcode, kind_of(opcode)) for index, (opcode, _) in enumerate(best)]


def runs(
    loop: list[Instruction], ignore: tuple[str, ...] = (OTHER, "load or store")
) -> list[tuple[str, int]]:
    """Return (kind, instructions) for neighbours of one kind, leaving the kinds in `ignore` out."""
    found: list[tuple[str, int]] = []
    for instruction in loop:
        if instruction.kind in ignore:
            continue
        if found and found[-1][0] == instruction.kind:
            found[-1] = (instruction.kind, found[-1][1] + 1)
        else:
            found.append((instruction.kind, 1))
    return found


def before_the_last_wait(loop: list[Instruction], kind: str = "exponential") -> tuple[int, int]:
    """Return how many instructions of a kind stand before the loop's last wait for products, and all."""
    last = max((one.index for one in loop if one.opcode.startswith("WARPGROUP.DEPBAR")), default=-1)
    found = [one.index for one in loop if one.kind == kind]
    return sum(index < last for index in found), len(found)
