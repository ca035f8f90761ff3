"""What one CTA would do when: a trace of the emulator, charged with the rates of an H200.

The emulator says in which order things may happen and who waits for whom; its order is no time. Here every
recorded operation is given a duration and the recorded dependencies are kept: a replay. Everything that comes
out is a prediction, in clocks.
"""

import statistics
from dataclasses import dataclass

from jfa.lab import loops, rates

ARCH = "sm_90"
BLOCKS = 4  # key tiles of a sequence in the recorded run
LOAD_BYTES = 32.0  # bytes a clock that L2 gives one of 132 SMs that all load: about 7 TB/s
HBM_BYTES = 20.0  # the same from HBM: about 4.3 TB/s
LOAD_CLOCKS = 700.0  # from the request to the last byte of an idle memory system
# Counters of a task's work that are no arithmetic of its warps.
ELSEWHERE = ("mma_flop", "dot_flop", "tma_load_bytes", "tma_store_bytes", "ld_global", "st_global")


@dataclass(frozen=True)
class Pace:
    """Clocks of the H200 for what a trace holds; ``operation`` is for one element of arithmetic."""

    operation: float
    tensor_flops: float = rates.RATES[ARCH].tensor_flops
    load_bytes: float = LOAD_BYTES
    load_clocks: float = LOAD_CLOCKS


def arithmetic(event) -> int:
    """Element operations that a task has done since its event before this one."""
    work = event[6].get("work", {})
    return sum(count for name, count in work.items() if name not in ELSEWHERE)


def inner_loop(sass: str) -> list[loops.Instruction]:
    """The shortest loop with tensor-core instructions and exponentials: one block of keys.

    Raises ValueError if there is none.
    """
    code, labels = loops.parse(sass)
    bodies = []
    for end, (opcode, operands) in enumerate(code):
        target = next((name for name in labels if f"({name})" in operands), None)
        if opcode.startswith("BRA") and target is not None and labels[target] < end:
            body = [name for name, _ in code[labels[target] : end + 1]]
            if {"tensor core", "exponential"} <= {loops.kind_of(name) for name in body}:
                bodies.append(body)
    if not bodies:
        raise ValueError("no loop of this kernel uses the tensor cores and exponentials")
    return [loops.Instruction(i, name, loops.kind_of(name)) for i, name in enumerate(min(bodies, key=len))]


def block_clocks(sass: str) -> float:
    """Clocks that one warp group issues instructions for one block of keys (4 warps, 4 schedulers)."""
    loop = inner_loop(sass)
    others = sum(instruction.kind != "tensor core" for instruction in loop)
    exponentials = sum(instruction.kind == "exponential" for instruction in loop)
    rate = rates.RATES[ARCH]
    return max(others * 4 / rate.issue, exponentials * 4 * 32 / rate.exponentials)


def pace_of(events, clocks: float, load_bytes: float = LOAD_BYTES) -> Pace:
    """The pace at which a block of a warp group takes ``clocks``: the median between two matrix products."""
    blocks, so_far = [], {}
    for event in events:
        if event[3] in ("phase_done",) or event[3].startswith("done"):
            continue
        task = event[2]
        so_far[task] = so_far.get(task, 0) + arithmetic(event)
        if event[3] == "issue" and event[6]["kind"] == "wgmma" and event[4].startswith("k."):
            blocks.append(so_far[task])
            so_far[task] = 0
    operation = clocks / statistics.median(count for count in blocks if count > 1000)
    return Pace(operation, load_bytes=load_bytes)


class Replay:
    """Charges the events of one CTA in the order of the trace; ``spans`` is what was busy when, in clocks.

    Tensor cores, the issue slots of the warps and the memory system each serve one request after another.
    """

    def __init__(self, events, cta, pace: Pace, names: dict[str, str]):
        self.pace, self.names = pace, names
        self.now, self.phases, self.arrived, self.done = {}, {}, {}, {}
        self.free = dict.fromkeys(("tensor", "issue", "memory"), 0.0)
        self.spans: list[dict] = []
        self.block: dict[str, int] = {}
        for event in events:
            if event[3] == "phase_done" and event[6]["key"][0] == cta:
                times = [
                    self.arrived.get(x, 0.0) if kind == "t" else self.done[x] for kind, x in event[6]["src"]
                ]
                self.phases[event[6]["key"]] = max(times, default=0.0)
            elif event[1] == cta and not event[3].startswith("done"):
                self._charge(event)

    def _span(self, lane, start, end, label, kind):
        last = next((s for s in reversed(self.spans) if s["lane"] == lane), None)
        if last and last["kind"] == kind == "softmax" and start - last["end"] < 1:
            last["end"] = end
        elif end - start >= 1:
            self.spans.append({"lane": lane, "start": start, "end": end, "label": label, "kind": kind})

    def _serve(self, resource, ready, clocks):
        start = max(ready, self.free[resource])
        self.free[resource] = start + clocks
        return start, start + clocks

    def _charge(self, event):
        sequence, _, task, op, what, _, info = event
        lane, now = self.names.get(task, task), self.now.get(task, 0.0)
        clocks = arithmetic(event) * self.pace.operation
        if clocks >= 20:
            start, now = self._serve("issue", now, clocks)
            finish = "log2" in info["work"]
            self._span(lane, start, now, "finish" if finish else "softmax", "store" if finish else "softmax")
        if op == "issue":
            self._issue(lane, now, what, info)
        elif op in ("arrive", "expect", "named_arrive"):
            self.arrived[sequence] = now
        elif op in ("wait", "wait_ops"):
            until = self.phases.get(info.get("key"), 0.0)
            until = max([until, *(self.done.get(i, 0.0) for i in info.get("ids", ()))])
            self._span(lane, now, max(now, until), "", "wait")
            now = max(now, until)
        self.now[task] = now

    def _issue(self, lane, now, what, info):
        if info["kind"] == "wgmma":
            start, end = self._serve("tensor", now, info["flop"] / self.pace.tensor_flops)
            name = "S" if what.startswith("k.") else "PV"
            self._span("tensor cores", start, end, f"{name} {lane[-1]}", "mma")
        elif info["kind"] in ("tma_load", "tma_store"):
            start, end = self._serve("memory", now, info["bytes"] / self.pace.load_bytes)
            if info["kind"] == "tma_load":
                end += self.pace.load_clocks
            name = what[0].upper() if info["kind"] == "tma_load" else "O"
            self._span("copies", start, end, name, "load" if name != "O" else "store")
        else:
            end = now
        self.done[info["id"]] = end


def recorded_run(step, blocks: int = BLOCKS, tiles: int = 2, head_dim: int = 128):
    """The trace of a Hopper step in the emulator: CTAs that each take ``tiles`` query tiles in turn."""
    from jfa import emulator
    from jfa.kernels.hopper.launch import EMULATED_SMS
    from jfa.lab import ladder

    lengths = [128 * blocks] * EMULATED_SMS
    problem = ladder.problem_of(lengths, 128, tiles, head_dim)
    tensors = ladder.tensors_of(problem, lengths)
    with emulator.emulate(policy="eager", trace=True) as machine:
        ladder.run_step(step, problem, *tensors)
    return machine.reports[-1]


def roles_of(events) -> dict[str, str]:
    """Task name -> what a figure calls it, for the Hopper forward kernel."""
    tasks = sorted({event[2] for event in events if event[1] is not None})
    return dict(zip(tasks, ("group 0", "group 1", "loader")))


def specialized(step, clocks: float, load_bytes: float = LOAD_BYTES, **sizes) -> list[dict]:
    """Predicted spans of one CTA of a Hopper step whose groups need ``clocks`` for a block's softmax."""
    events = recorded_run(step, **sizes).events
    return Replay(events, (0, 0, 0), pace_of(events, clocks, load_bytes), roles_of(events)).spans


def item_cost(step, clocks: float, load_bytes: float = HBM_BYTES, tiles: int = 3) -> tuple[float, float]:
    """Predicted clocks of a static Hopper step: of a query tile without its keys, and of a block of keys."""
    ends = {}
    for blocks in (2, 8):
        spans = specialized(step, clocks, load_bytes, blocks=blocks, tiles=tiles)
        ends[blocks] = max(span["end"] for span in spans) / tiles
    slope = (ends[8] - ends[2]) / 6
    return ends[2] - 2 * slope, slope


def in_turns(tensor: float, rest: float, finish: float, blocks: int = BLOCKS, tiles: int = 2) -> list[dict]:
    """Predicted spans of the baseline: per block of keys S, softmax, PV in turn, a CTA a tile, loads ahead.

    tensor, rest: clocks of a block, as notebook 02 predicts them; finish: clocks of an epilogue.
    """
    spans, now = [], 0.0
    transfer = 128 * 128 * 2 / LOAD_BYTES

    def add(lane, clocks, label, kind, start=None):
        at = now if start is None else start
        spans.append({"lane": lane, "start": at, "end": at + clocks, "label": label, "kind": kind})
        return at + clocks

    for _ in range(tiles):
        memory, arrived = now, []
        for name in ["Q", *["K", "V"] * blocks]:  # as far ahead as memory allows
            add("copies", transfer + LOAD_CLOCKS, name, "load", memory)
            memory += transfer
            arrived.append(memory + LOAD_CLOCKS)
        for block in range(blocks):
            ready = arrived[2 * block + 1]
            if ready > now:
                now = add("all 8 warps", ready - now, "", "wait")
            start, now = now, add("tensor cores", tensor / 2, "S", "mma")
            add("all 8 warps", now - start, "", "wait", start)
            now = add("all 8 warps", rest, "softmax", "softmax")
            start, now = now, add("tensor cores", tensor / 2, "PV", "mma")
            add("all 8 warps", now - start, "", "wait", start)
        now = add("all 8 warps", finish, "finish", "store")
        now = add("copies", transfer, "O", "store")
    return spans


def busy(spans, lane: str = "tensor cores") -> float:
    """Share of the time, until the last span ends, in which a lane works; its spans do not overlap."""
    worked = sum(span["end"] - span["start"] for span in spans if span["lane"] == lane)
    return worked / max(span["end"] for span in spans)


def timeline_rows() -> list[dict]:
    """Predicted spans of two tiles, baseline beside warp-specialized (03_timeline)."""
    from jfa import steps
    from jfa.lab import figure_data, ladder

    step = steps.FORWARD["hopper"][0]
    roles = specialized(step, block_clocks(ladder.compiled(step).text("sass")))
    finish = next(span for span in roles if span["label"] == "finish")
    tensor, rest = (row["predicted_clocks"] for row in figure_data.turns() if row["arch"] == ARCH)
    turns = in_turns(tensor, rest, 2 * (finish["end"] - finish["start"]))  # both groups' epilogues in one
    rows = []
    for kernel, spans in (("baseline", turns), ("warp_specialized", roles)):
        for span in spans:
            clocks = {f"predicted_{side}": round(span[side], 1) for side in ("start", "end")}
            rows.append(
                {"kernel": kernel, **{name: span[name] for name in ("lane", "label", "kind")}, **clocks}
            )
    return rows


def spans_of(rows, kernel: str) -> list[dict]:
    """Spans of one kernel from rows of the timeline (dicts or a DataFrame)."""
    records = rows.to_dict("records") if hasattr(rows, "to_dict") else rows
    return [
        {**row, "start": row["predicted_start"], "end": row["predicted_end"]}
        for row in records
        if row["kernel"] == kernel
    ]


def gained(before: str, after: str):
    """Measured forward TFLOPS of two steps by shape, and "times", as a DataFrame; None without a recording.

    "useful": share of the tensor cores' time, 0 to 1, that the products of real lengths take at the clock of
    the run; what a replay calls busy also holds the products of padded rows.
    """
    from jfa.lab import dealing

    rows = dealing.measured_rows(("forward",))
    if rows is None or not {before, after} <= set(rows["step"]):
        return None
    shape = ["M", "N", "density"]
    table = rows.pivot_table(index=shape, columns="step", values="tflops")[[before, after]].dropna()
    table["times"] = table[after] / table[before]
    clock = rows.groupby(shape)["sm_clock_mhz"].median().reindex(table.index) * 1e6
    peak = rates.RATES[ARCH].tensor_flops * rates.RATES[ARCH].sms * clock / 1e12
    for name in (before, after):
        table[f"useful, {name}"] = table[name] / peak
    return table.rename_axis(columns=None)
