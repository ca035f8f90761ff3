"""Who owns which part of an SM's memories: allocations read from what the compiler made of a kernel."""

import math
import re
from dataclasses import dataclass

from jfa.lab import rates

ALLOCATION = re.compile(r"%(\w+) = tt\w+\.(local|tmem)_alloc : \(\) -> !ttg\.memdesc<([\dx]+)x([a-z]+\d+)")
BITS = {"bf16": 16, "f16": 16, "f32": 32, "i32": 32, "i64": 64, "ui128": 128}
KIB = 1024
LANES = 128  # rows of tensor memory; a column is 128 words of 32 bits


@dataclass(frozen=True)
class Allocation:
    """``count`` buffers of one name in "shared" or "tensor" memory; ``bytes`` of one buffer."""

    name: str
    memory: str
    count: int
    shape: tuple[int, ...]
    dtype: str

    @property
    def bytes(self) -> int:
        """Bytes of one buffer."""
        return math.prod(self.shape) * BITS[self.dtype] // 8

    @property
    def columns(self) -> int:
        """Columns of tensor memory that one buffer takes."""
        return self.bytes // (4 * LANES)


def allocations(ttgir: str) -> list[Allocation]:
    """What a kernel allocates, in the order of its source, from its TTGIR."""
    found = []
    for name, kind, shape, dtype in ALLOCATION.findall(ttgir):
        sizes = [int(size) for size in shape.split("x")]
        if kind == "tmem" and len(sizes) == 2:  # the storage that aliases share, not an array of buffers
            sizes = [1, *sizes]
        memory = "tensor" if kind == "tmem" else "shared"
        found.append(Allocation(re.sub(r"_\d+$", "", name), memory, sizes[0], tuple(sizes[1:]), dtype))
    return found


# What the roles call the allocations, in the order of each kernel's source, and which role fills them.
HOPPER = (("Q", "load"), ("K", "load"), ("V", "load"), ("O", "store"))
WHEN = {"Q": "a head", "K": "one block", "V": "one block", "KV": "one block", "O": "one tile"}
BLACKWELL = (("Q", "load"), ("KV", "load"), ("O", "correction"))


def shared_regions(made: list[Allocation], names) -> list[dict]:
    """Regions of shared memory in KiB: every tile of the rings, then all barriers and tickets together."""
    regions, at, small = [], 0.0, 0
    big = [a for a in made if a.memory == "shared" and a.bytes >= KIB]
    for allocation, (name, kind) in zip(big, names, strict=True):
        for slot in range(allocation.count):
            size = allocation.bytes / KIB
            regions.append(
                {"name": f"{name}{slot}", "start": at, "size": size, "kind": kind, "when": WHEN[name]}
            )
            at += size
    small = sum(a.count * a.bytes for a in made if a.memory == "shared" and a.bytes < KIB)
    regions.append({"name": "barriers", "start": at, "size": small / KIB, "kind": "schedule", "when": ""})
    return regions


def tensor_regions(made: list[Allocation]) -> list[dict]:
    """Columns of tensor memory of the Blackwell forward kernel, its aliases on top of each other.

    The shared storage of a group holds scores, and once they are read weights with three statistics.
    """
    alias, acc = (a for a in made if a.memory == "tensor")
    half = alias.columns // 2
    regions = []
    for group in range(2):
        at = group * half
        when = "until softmax has read it"
        regions.append({"name": f"S{group}", "start": at, "size": half, "kind": "mma", "when": when})
    for group in range(acc.count):
        at = alias.columns + group * acc.columns
        when = "a tile long, rescaled in place"
        regions.append(
            {"name": f"O{group}", "start": at, "size": acc.columns, "kind": "correction", "when": when}
        )
    for group in range(2):
        at = group * half
        when = "until PV is done"
        regions.append({"name": f"P{group}", "start": at, "size": half // 2, "kind": "softmax", "when": when})
        statistics = {"name": f"factor, sum, max of {group}", "start": at + half // 2, "size": 3}
        regions.append({**statistics, "kind": "softmax", "when": ""})
    return regions


def map_rows(hopper, blackwell, names=HOPPER, lives=()) -> list[dict]:
    """Rows of a memory map from compile reports (`jfa.lab.report.Report`) of two forward steps.

    names: what Hopper's allocations are called, and which role fills them. lives: pairs of (GPU, first letter
    of a region's name) and how long its content lives, where that is not what the region says.
    """
    made = [allocations(report.text("ttgir")) for report in (hopper, blackwell)]
    limit = rates.SHARED_BYTES // KIB - 1
    memories = (
        ("H200 shared memory, KiB", limit, shared_regions(made[0], names)),
        ("B200 shared memory, KiB", limit, shared_regions(made[1], BLACKWELL)),
        ("B200 tensor memory, columns", rates.TMEM_COLUMNS, tensor_regions(made[1])),
    )
    rows = []
    for memory, size, regions in memories:
        for region in regions:
            place = {key: round(region[key], 2) for key in ("start", "size")}
            when = dict(lives).get((memory[:4], region["name"][0]), region["when"])
            rows.append({"memory": memory, "of": size, **region, **place, "when": when})
    return rows


def first_map(hopper=None, blackwell=None) -> list[dict]:
    """The map of the first forward steps (03_memory); reports are compiled if not given.

    O leaves Hopper's first step through a tile of Q, and every tile of queries loads its own.
    """
    lives = {("H200", "Q"): "then O", ("B200", "Q"): "one tile"}
    return map_rows(*_reports(0, hopper, blackwell), HOPPER[:3], lives)


def last_map() -> list[dict]:
    """The map of the last forward steps, compiled anew (03_final)."""
    return map_rows(*_reports(-1))


def _reports(place: int, *given):
    from jfa import steps
    from jfa.lab import ladder

    given = given or (None, None)
    return [
        report or ladder.compiled(steps.FORWARD[arch][place])
        for arch, report in zip(("hopper", "blackwell"), given, strict=True)
    ]


# ------------------------------------------------------------------------- who works on tensor memory when

REGIONS = {
    "columns 0-127": ("scores[0]", "weights[0]", "factor[0]", "row_sum[0]", "row_max[0]"),
    "columns 128-255": ("scores[1]", "weights[1]", "factor[1]", "row_sum[1]", "row_max[1]"),
    "columns 256-383": ("acc[0]",),
    "columns 384-511": ("acc[1]",),
}
ROLES = {"task2": ("mma", "mma"), "task1": ("softmax", "softmax"), "default": ("correction", "correction")}


def touches(events) -> list[dict]:
    """Spans in which a role works on a region of tensor memory, from an emulator's trace of one CTA.

    start, end: places in the emulator's order of operations, which is no time. Touches of one role that
    follow each other on a region are one span.
    """
    issued, spans = {}, []
    place = {event[0]: index for index, event in enumerate(events)}
    for event in events:
        sequence, _, task, op, what, _, info = event
        if op == "issue" and info["kind"] == "mma":
            issued[info["id"]] = (place[sequence], [what, info.get("A")])
        elif op == "done:mma":
            start, buffers = issued[info["id"]]
            for buffer in buffers:
                _touch(spans, buffer, "task2", start, place[sequence])
        elif op in ("local_load", "local_store"):
            _touch(spans, what, task, place[sequence], place[sequence] + 1)
    return spans


def _touch(spans, buffer, task, start, end):
    name = re.sub(r":.*", "]", str(buffer)).rpartition(".")[2]  # whatever the kernel calls the aggregate
    lane = next((lane for lane, buffers in REGIONS.items() if name in buffers), None)
    if lane is None:
        return
    _, kind = ROLES[re.split(r"[.@]", task)[0]]
    what = {"scores": "S", "weights": "P", "acc": "O"}.get(name.split("[")[0], "stat")
    last = next((span for span in reversed(spans) if span["lane"] == lane), None)
    if last and last["kind"] == kind and (kind != "mma" or last["label"] == what):
        last["end"] = max(last["end"], end)
        if what != "stat":
            last["label"] = what
    else:
        spans.append({"lane": lane, "start": start, "end": end, "label": what, "kind": kind})


def owners(blocks: int = 6) -> list[dict]:
    """Who works on which columns of tensor memory in one tile of the Blackwell kernel (03_owners)."""
    from jfa import emulator, steps
    from jfa.lab import ladder

    lengths = [128 * blocks]
    problem = ladder.problem_of(lengths, 128, 1, 128)
    with emulator.emulate(policy="eager", trace=True) as machine:
        ladder.run_step(steps.FORWARD["blackwell"][0], problem, *ladder.tensors_of(problem, lengths))
    return touches(machine.reports[-1].events)
