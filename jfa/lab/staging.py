"""The way of dQ out of a CTA: what staging tiles and early release would gain. The rows of notebooks 05, 06.

Everything here is predicted by `jfa.lab.replay`, apart from registers, which are counted in compiled code.
"""

import dataclasses
import functools

from jfa.lab import ladder, live, replay

QUERIES = (384, 640)  # rows a tile meets in the two runs whose difference is the time of a turn
RATES = (6.0, 8.0, 10.0, 12.0, 14.0, 16.0, 20.0, 26.0, 40.0)  # bytes a clock that an SM's reduce-adds get
HELD = (0, 1, 2, 3, 4)  # slices of dQ that may wait in registers: all four are the whole accumulator
FAST = 30.0  # bytes a clock: a GPU whose reduce-adds were twice as fast as a B200's are thought to be
KERNELS = {"one": "dynamic", "two": "dq_staged"}


def ladder_of(arch: str) -> dict:
    """Backward steps of an architecture by name."""
    from jfa import steps

    return {step.name: step for step in steps.BACKWARD[arch]}


@functools.cache
def clocks_of(step) -> float:
    """Clocks of a compute group's arithmetic in a turn, from the step as compiled, or about that."""
    from jfa.lab import course

    if course.compiler_missing():
        return {"hopper": 430.0, "blackwell": 512.0}[step.arch]
    return replay.turn_clocks(step, ladder.compiled(step))


@functools.cache
def _events(step, queries: int, tiles: int):
    return tuple(replay.recorded_run(step, queries, tiles).events)


def replayed(step, queries: int, tiles: int = 1, add: float | None = None, like=None):
    """Replay one CTA of a step; ``add``: bytes a clock of its reduce-adds; ``like``: a step to time alike.

    Runs are kept, so that another rate costs no second run in the emulator.
    """
    pace = replay.PACES[step.arch]
    events = _events(step, queries, tiles)
    rows = 64 if step.arch == "hopper" else 128
    operations = replay.operations_of_a_turn(events, step.arch, tiles * -(-queries // rows))
    operation = clocks_of(like or step) / operations
    pace = dataclasses.replace(pace, operation=operation, add=add or pace.add)
    return replay.Replay(events, step.arch, pace)


def turn_time(step, add: float | None = None, like=None, queries=QUERIES) -> float:
    """Predicted clocks of one more turn of a tile that has many: 64 rows (Hopper) or 128 (Blackwell)."""
    ends = [max(replayed(step, rows, add=add, like=like).ends.values()) for rows in queries]
    return (ends[1] - ends[0]) / ((queries[1] - queries[0]) / (64 if step.arch == "hopper" else 128))


def turn_bytes(arch: str, head_dim: int = 128) -> int:
    """Bytes of dQ that a turn adds to memory, in float32."""
    return (64 if arch == "hopper" else 128) * head_dim * 4


def turn_flops(arch: str, keys: int = 128, head_dim: int = 128) -> int:
    """FLOPs of the five products of a turn."""
    return 5 * 2 * (64 if arch == "hopper" else 128) * keys * head_dim


def holding(count: int):
    """Blackwell's dq_released with ``count`` slices that wait in registers."""
    step = ladder_of("blackwell")["dq_released"]
    rule = step.tiling
    return dataclasses.replace(step, tiling=lambda problem: rule(problem) | {"HELD": count})


# ----------------------------------------------------------------------------------- rows of the figures


def rate_rows(rates=RATES) -> list[dict]:
    """Predicted clocks of a turn over the rate of reduce-adds, with one and two staging tiles (05_rate)."""
    rows = []
    for arch in ("hopper", "blackwell"):
        for tiles, name in KERNELS.items():
            step = ladder_of(arch)[name]
            for rate in rates:
                row = {"arch": arch, "staging": tiles, "add_bytes_per_clock": rate}
                rows.append({**row, "predicted_clocks": round(turn_time(step, rate), 1)})
    return rows


LANES = ("tensor cores", "reduce", "adds to dQ", "columns")


def _span_rows(kernel: str, run, lanes, first: float = 0.0) -> list[dict]:
    return [
        {
            "kernel": kernel,
            **{name: span[name] for name in ("lane", "label", "kind")},
            "predicted_start": round(span["start"] - first, 1),
            "predicted_end": round(span["end"] - first, 1),
        }
        for span in run.spans
        if span["lane"] in lanes
    ]


def timeline_rows() -> list[dict]:
    """Predicted spans of one Blackwell tile with one and with two staging tiles (05_timeline)."""
    rows = []
    for kernel, name in KERNELS.items():
        rows += _span_rows(kernel, replayed(ladder_of("blackwell")[name], QUERIES[0]), LANES[:3])
    return rows


def release_timeline_rows(counts=(0, 2)) -> list[dict]:
    """Predicted spans of one Blackwell tile, dQ released at its end or two slices early (06_timeline)."""
    like = ladder_of("blackwell")["dq_released"]
    rows = []
    for count in counts:
        rows += _span_rows(str(count), replayed(holding(count), QUERIES[0], like=like), LANES)
    return rows


def released_rows(counts=HELD, compile_it: bool = True) -> list[dict]:
    """Per slice count: predicted clocks of a turn at two rates, live registers as compiled (06_released)."""
    like = ladder_of("blackwell")["dq_released"]
    rows = []
    for count in counts:
        step = holding(count)
        row = {"held": count}
        for name, rate in (("", replay.PACES["blackwell"].add), ("_fast", FAST)):
            row[f"predicted_clocks{name}"] = round(turn_time(step, rate, like), 1)
        if compile_it:
            made = ladder.compiled(step)
            drain = live.drain_loop(made)
            row |= {"registers_at_release": live.at_release(drain), "registers_peak": live.peak(drain)}
            row |= {"registers_allowed": allowed_registers(made), "spill_bytes": made.spill_store_bytes}
        rows.append(row)
    return rows


def allowed_registers(made) -> int:
    """Registers of a thread of the default group: the first that it falls back to in the compiled code."""
    return next(count for way, count in made.setmaxnreg if way == "dec")


# ------------------------------------------------------------------------- what was measured, and predicted


def recorded_steps():
    """Rows of the backward ladder (05_steps) as a DataFrame, None if nothing is recorded."""
    from jfa.lab import drawings_staging, figures

    if not figures.path_of("05_steps").exists():
        return None
    return drawings_staging.measured(figures.read("05_steps"))


def measured_text(names) -> str:
    """Median TFLOPS of backward steps by shape with provenance, or the statement that there are none."""
    from jfa.lab import recorded

    rows = recorded_steps()
    if rows is None:
        return "not measured yet: there is no figures/05_steps.csv, so this notebook claims no speed"
    return recorded.speeds_text(rows, names, "measured, backward, TFLOPS")


def tile_gain(before, after, queries: int, arch: str = "hopper") -> float:
    """Predicted speedup of a step over another for tiles that meet ``queries`` rows, all of it counted."""
    steps = ladder_of(arch)
    ends = [max(replayed(steps[name], queries, tiles=2).ends.values()) for name in (before, after)]
    return ends[0] / ends[1]


def measured_gains(before: str, after: str) -> dict[tuple, float]:
    """(M, N, density) -> recorded speed of a backward step over another, whole calls; {} without one."""
    rows = recorded_steps()
    if rows is None or not {before, after} <= set(rows["step"]):
        return {}
    wide = rows.pivot_table(index=["M", "N", "density"], columns="step", values="tflops")
    return (wide[after] / wide[before]).dropna().to_dict()


def compared_text(before: str, after: str) -> str:
    """Measured and predicted ratio of two backward steps by shape, or that they were not recorded."""
    gains = measured_gains(before, after)
    if not gains:
        return f"{before} or {after} is not among the recorded steps"
    lines = [f"{'M':>4} {'N':>5} {'density':>7}  measured  predicted  ({after} over {before})"]
    for (m, n, density), ratio in gains.items():
        model = tile_gain(before, after, int(m))
        lines.append(f"{m:>4} {n:>5} {density:>7g}  {ratio:8.2f}  {model:9.2f}")
    return "\n".join(lines)


def live_text(names, quick: bool = False) -> str:
    """Measure backward steps on the current GPU; a line a shape and step."""
    shapes = ladder.SHAPES[1:2] if quick else ladder.SHAPES[1:5:2]
    return ladder.live_text("backward", names, shapes, 3 if quick else 9)


def added_bytes(events) -> tuple[int, int]:
    """(bytes of dQ that reduce-adds carried, FLOPs of all products) in a trace of all CTAs."""
    issued = [event[6] for event in events if event[3] == "issue"]
    adds = sum(info["bytes"] for info in issued if info["kind"] == "tma_reduce")
    return adds, sum(info["flop"] for info in issued if info["kind"] in ("wgmma", "mma"))


def sliced(width: int, tiles: int):
    """Blackwell's dq_staged with ``tiles`` staging tiles of ``width`` columns."""
    step = ladder_of("blackwell")["dq_staged"]
    rule = step.tiling
    return dataclasses.replace(
        step, tiling=lambda problem: rule(problem) | {"SLICE": width, "DQ_STAGES": tiles}
    )
