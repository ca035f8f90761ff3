"""What one CTA of a backward kernel would do when: its trace, charged with the rates of an H200 or a B200.

As `jfa.lab.pipeline` does for the forward kernels, but every task has its own clock: whoever could act first
is served first. The recorded dependencies are kept, the durations are rates times sizes. So everything that
comes out is a prediction, in clocks; no GPU is asked.
"""

import dataclasses
import re

from jfa.lab import loops, pipeline, rates

MOVES = ("smem_ld", "smem_st", "tmem_ld", "tmem_st", "mma_flop", "tma_load_bytes", "tma_store_bytes")
SIGNAL = 50.0  # clocks from an arrive to the first instruction of who waited
FAR = 700.0  # clocks to memory and back, beside the bytes
SHARED = 128.0  # bytes a clock of shared memory
# What the products of a turn are called, by the operand that the trace names them after.
PRODUCTS = {
    "x.s": "S", "x.dp": "dP", "x.dv": "dV", "x.dk": "dK", "x.dq": "dQ",
    "q": "S", "dout": "dP", "k": "dQ",
}  # fmt: skip
DQ_FREE = "x.word[4]"  # the reduce group's word that dQ has left tensor memory
LANES = {
    "hopper": {"default": "group 0", "task1": "group 1", "task2": "loader", "task3": "writer"},
    "blackwell": {
        "default": "reduce", "task1.0": "group 0", "task1.1": "group 1", "task2": "mma", "task3": "loader",
        "task4": "deal",
    },
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Pace:
    """Rates of one SM when all of them work, per clock; ``operation`` is clocks for one element's operation.

    ``load`` and ``add``: bytes that memory gives and that a reduce-add takes; ``tensor_memory``: bytes.
    """

    operation: float
    tensor_flops: float
    load: float
    add: float
    tensor_memory: float = 256.0


# Loads mostly hit L2. Reduce-adds: an H200's as measured for the dQ of 128 shared rows (05_reduction). A
# B200's: about 4 TB/s, the payload of atomics that a B300 was seen to reach; nobody has published its own.
PACES = {
    "hopper": Pace(0.0, rates.RATES["sm_90"].tensor_flops, load=pipeline.LOAD_BYTES, add=13.7),
    "blackwell": Pace(0.0, rates.RATES["sm_100"].tensor_flops, load=64.0, add=15.0),
}


def arithmetic(info) -> int:
    """Element operations in an event's work: what is no product and moves no bytes."""
    return sum(count for name, count in info.get("work", {}).items() if name not in MOVES)


class Replay:
    """Charges the events of one CTA, each task by its own clock; ``spans`` is what was busy when.

    Tensor cores, the issue slots of the warps, shared and tensor memory, loads and reduce-adds each serve
    one request after another. ``ends`` is the last moment of every task.
    """

    def __init__(self, events, arch: str, pace: Pace, cta=(0, 0, 0)):
        self.arch, self.pace = arch, pace
        self.sources = {e[6]["key"]: e[6]["src"] for e in events if e[3] == "phase_done"}
        self.tasks: dict[str, list] = {}
        for event in events:
            if event[1] == cta and not event[3].startswith("done"):
                self.tasks.setdefault(event[2], []).append(event)
        self.at = dict.fromkeys(self.tasks, 0)
        self.ends = dict.fromkeys(self.tasks, 0.0)
        self.arrived: dict[int, float] = {}
        self.done: dict[int, float] = {}
        self.free: dict[str, float] = {}
        self.spans: list[dict] = []
        self.reads: dict[tuple[str, str], int] = {}
        self.tenant: tuple[str, float] | None = None  # of the columns that dP and dQ share
        while waiting := [task for task, events in self.tasks.items() if self.at[task] < len(events)]:
            ready = [(start, task) for task in waiting if (start := self._ready(task)) is not None]
            if not ready:
                raise RuntimeError("the trace's dependencies never resolve: it ends in the middle of a wait")
            self._charge(*min(ready))

    def lane(self, task: str) -> str:
        """What a figure calls a task."""
        name = task.split("@")[0]
        return LANES[self.arch].get(name, name)

    def _ready(self, task):
        """When the task's next event could begin, or None while what it waits for has not happened."""
        event = self.tasks[task][self.at[task]]
        needs = []
        if event[3] == "wait":
            needs = self.sources.get(event[6]["key"], ())
        elif event[3] == "wait_ops":
            needs = [("o", i) for i in event[6]["ids"]]
        times = [(self.arrived if kind == "t" else self.done).get(number) for kind, number in needs]
        if None in times:
            return None
        until = max(times, default=0.0)
        return until + SIGNAL if until > self.ends[task] else self.ends[task]

    def _serve(self, resource, ready, clocks):
        start = max(ready, self.free.get(resource, 0.0))
        self.free[resource] = start + clocks
        return start, start + clocks

    def _span(self, lane, start, end, label, kind):
        if end - start < 1:
            return
        last = next((s for s in reversed(self.spans) if s["lane"] == lane), None)
        alike = last and (last["kind"], last["label"]) == (kind, label) and lane != "adds to dQ"
        if alike and start - last["end"] < 60:
            last["end"] = end
        else:
            self.spans.append({"lane": lane, "start": start, "end": end, "label": label, "kind": kind})

    def _charge(self, start, task):
        sequence, _, _, op, what, _, info = self.tasks[task][self.at[task]]
        self.at[task] += 1
        lane, now = self.lane(task), self.ends[task]
        if op in ("wait", "wait_ops"):
            self._span(lane, now, start, "", "wait")
            now = start
        clocks = arithmetic(info) * self.pace.operation
        if clocks >= 4:
            begin, now = self._serve("issue", now, clocks)
            self._span(lane, begin, now, "", "softmax")
        if op == "issue":
            self._issue(lane, now, str(what), info)
        elif op in ("arrive", "expect", "named_arrive"):
            self.arrived[sequence] = now
            if what == DQ_FREE:
                self._move_in("", now)
        elif op in ("local_load", "local_store"):
            now = self._move(lane, now, info)
        self.ends[task] = now

    def _move(self, lane, now, info):
        tensor = info["mem"] == "tmem"
        rate = self.pace.tensor_memory if tensor else SHARED
        begin, end = self._serve("tensor memory" if tensor else "shared memory", now, info["bytes"] / rate)
        kind = {"reduce": "reduce", "writer": "reduce"}.get(lane, "softmax")
        self._span(lane, begin, end, "", kind)
        return end

    def _issue(self, lane, now, what, info):
        kind = info["kind"]
        end = now
        if kind in ("wgmma", "mma"):
            begin, end = self._serve("tensor", now, info["flop"] / self.pace.tensor_flops)
            label = self._product(lane, what, info)
            self._span("tensor cores", begin, end, label, "mma")
            if label in ("dP", "dQ") and self.arch == "blackwell":
                self._move_in(label, begin)
        elif kind == "commit":
            end = max(now, self.free.get("tensor", 0.0))
        elif kind == "tma_reduce":
            begin, end = self._serve("adds", now, info["bytes"] / self.pace.add)
            self._span("adds to dQ", begin, end, "dQ", "reduce")
        elif kind in ("tma_load", "tma_store"):
            begin, end = self._serve("loads", now, info["bytes"] / self.pace.load)
            if kind == "tma_load":
                end += FAR
            self._span("copies", begin, end, what.split("_")[0].split(".")[0], kind.removeprefix("tma_"))
        else:  # small copies, tickets, and the far half of a store
            end = max(now, self.free.get("loads" if "load" in kind else "adds", 0.0)) + FAR
        self.done[info["id"]] = end

    def _move_in(self, label, now):
        """Another tenant of the columns that dP and dQ share, "" for none."""
        if self.tenant is not None and self.tenant[0]:
            kind = {"dP": "softmax", "dQ": "reduce"}[self.tenant[0]]
            self._span("columns", self.tenant[1], now, self.tenant[0], kind)
        self.tenant = (label, now)

    def _product(self, lane, what, info):
        """S, dP, dV, dK or dQ. A Hopper group's products read Q for S and then dK, dO for dP and then dV."""
        name = what.split("[")[0].rpartition(".tiles")[0] or what.split("[")[0].removesuffix("_tiles")
        label = PRODUCTS.get(name.rpartition(".")[2] if self.arch == "hopper" else name, name)
        if self.arch == "hopper" and label in ("S", "dP"):
            turn = self.reads[lane, label] = self.reads.get((lane, label), 0) + 1
            if turn % 2 == 0:
                label = {"S": "dK", "dP": "dV"}[label]
        return label


def turn_clocks(step, report) -> float:
    """Clocks in which one compute group issues the arithmetic of one turn, from the compiled loop.

    The loop that is meant is the shortest with 16 exponentials or more.
    """
    code, labels = loops.parse(report.text("sass"))
    bodies = []
    for end, (opcode, operands) in enumerate(code):
        target = re.search(r"\.L_x_\d+", operands)
        if opcode.startswith("BRA") and target is not None and labels[target.group()] < end:
            body = [name for name, _ in code[labels[target.group()] : end + 1]]
            if sum(loops.kind_of(name) == "exponential" for name in body) >= 16:
                bodies.append(body)
    if not bodies:
        raise ValueError(f"{step.name}: no loop of the compiled kernel has exponentials")
    body = min(bodies, key=len)
    others = sum(loops.kind_of(name) != "tensor core" for name in body)
    exponentials = sum(loops.kind_of(name) == "exponential" for name in body)
    rate = rates.RATES[report.arch]
    return max(others * 4 / rate.issue, exponentials * 4 * 32 / rate.exponentials)


def static(step):
    """The step with a deal that needs no message, so that every CTA takes the same number of items."""
    from jfa.kernels import parts

    if step.arch == "hopper":
        return dataclasses.replace(
            step, draw=parts.round_robin, publish=parts.stay_silent, hear=parts.round_robin
        )
    return dataclasses.replace(step, draw=None, hear=parts.round_robin)


def recorded_run(step, queries: int, tiles: int = 2, head_dim: int = 128, lengths=None):
    """The emulator's trace of a backward step: every CTA takes ``tiles`` key tiles of 128 keys in turn."""
    import torch

    from jfa import emulator
    from jfa.kernels.hopper.launch import EMULATED_SMS
    from jfa.lab import ladder

    lengths = lengths or [128] * (tiles * EMULATED_SMS)
    problem = ladder.problem_of(lengths, queries, 1, head_dim)
    tensors = ladder.tensors_of(problem, lengths)
    dout = torch.randn(problem.out_shape, generator=torch.Generator().manual_seed(1)).to(problem.dtype)
    with emulator.emulate(policy="eager", trace=True) as machine:
        ladder.run_step(static(step), problem, *tensors, dout)
    return next(report for report in machine.reports if report.kernel == "kernel")


def operations_of_a_turn(events, arch: str, turns: int) -> float:
    """Element operations of one compute group in one turn, from a trace of CTA 0 that holds ``turns``."""
    group = "task1@" if arch == "hopper" else "task1.0@"
    mine = [e for e in events if e[1] == (0, 0, 0) and e[2].startswith(group) and not e[3].startswith("done")]
    return sum(arithmetic(event[6]) for event in mine) / turns


def replayed(step, queries: int, clocks: float, tiles: int = 2, pace: Pace | None = None) -> Replay:
    """Predict one CTA of a step that meets ``queries`` rows for each of its tiles.

    clocks: of a compute group's arithmetic in a turn, as `turn_clocks` reads it from the compiled kernel.
    """
    events = recorded_run(step, queries, tiles).events
    rows = 64 if step.arch == "hopper" else 128
    operations = operations_of_a_turn(events, step.arch, tiles * -(-queries // rows))
    pace = pace or PACES[step.arch]
    return Replay(events, step.arch, dataclasses.replace(pace, operation=clocks / operations))
