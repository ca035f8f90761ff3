"""The tables of notebook 09 as text: jagged and dense shapes beside other kernels, and the extremes."""

import math
import statistics
import textwrap

from jfa.lab import results, style
from jfa.lab.recorded import geometric_mean, markdown
from jfa.lab.results import Measured

DENSITIES = results.MEAN_DENSITIES
PEERS = ("fa4", "cudnn", "flex", "torch_varlen", "jfa_baseline")
# Speed over FlashAttention-4's on a B200, as Meta reported it of its TLX kernels (May 2026): 13 and 50 %
# more on jagged batches with a shared query, 87 and 117 % of its speed on dense ones.
REPORTED = {
    ("jagged", "forward"): 1.13,
    ("jagged", "backward"): 1.50,
    ("dense", "forward"): 0.87,
    ("dense", "backward"): 1.17,
}


def _tflops(found: Measured, case, direction: str, name: str) -> str:
    row = found.rows.get((case, direction, name, "call"))
    return f"{row['tflops']:.0f}" if row else "-"


def jagged_table(rows: list[dict], direction: str) -> str:
    """A line a (M, N): our TFLOPS, FA4's, and how many times as fast, for each density; whole calls."""
    found = Measured.of(rows)
    cases = {(case.M, case.N, case.density): case for case in found.cases(results.plain)}
    titles = [f"density {density:g}" for density in DENSITIES]
    lines = [f"{'M':>4} {'N':>5}  " + "  ".join(f"{title:^18}" for title in titles)]
    lines.append(f"{'':>4} {'':>5}  " + "  ".join(f"{'ours':>5} {'FA4':>5} {'times':>6}" for _ in titles))
    for m, n in dict.fromkeys(key[:2] for key in sorted(cases)):
        cells = []
        for density in DENSITIES:
            case = cases.get((m, n, density))
            ratio = found.ratios([case], direction).get(case) if case else None
            speeds = (
                [_tflops(found, case, direction, name) for name in ("jfa", "fa4")] if case else ["-", "-"]
            )
            cells.append(f"{speeds[0]:>5} {speeds[1]:>5} {'-' if ratio is None else f'{ratio:.2f}':>6}")
        lines.append(f"{m:>4} {n:>5}  " + "  ".join(cells))
    return "\n".join(lines)


def other_table(rows: list[dict], direction: str, suites=("dense", "packed", "histories")) -> str:
    """A line a shape of other suites: TFLOPS of ours and of every peer, whole calls; "-" where none ran."""
    found = Measured.of(rows)
    cases = found.cases(lambda case: case.suite in suites)
    peers = [name for name in PEERS if any(key[2] == name for key in found.rows)]
    label = {"jfa_baseline": "baseline"}
    titles = [label.get(name) or style.label_of(name) for name in peers]
    width = [max(len(title), 5) for title in titles]
    heads = "  ".join(f"{title:>{size}}" for title, size in zip(titles, width))
    lines = [f"{'shape':<36} {'ours':>5}  {heads}"]
    for case in cases:
        speeds = [_tflops(found, case, direction, name) for name in peers]
        cells = "  ".join(f"{speed:>{size}}" for speed, size in zip(speeds, width))
        lines.append(f"{_marked(found, case):<36} {_tflops(found, case, direction, 'jfa'):>5}  {cells}")
    return "\n".join(lines) + _explained(found, cases) if cases else "no such shape was measured"


def _explained(found: Measured, cases) -> str:
    """A line on the mark of rows of another run, "" where there is none."""
    commits = sorted({found.other_run(case) for case in cases} - {""})
    return f"\n* of the run of {', '.join(commits)}" if commits else ""


def _marked(found: Measured, case) -> str:
    """A case in a few words, with a star if another run measured it than most others."""
    return results.described(case) + "*" * bool(found.other_run(case))


def failures(rows: list[dict]) -> list[str]:
    """Which peers could not run which suites, and why, one sentence each.

    A step of ours that was asked for by name and refuses the shape is no failure of a call, and says so.
    """
    found = {}
    for row in rows:
        if not row.get("error"):
            continue
        name, reason = row.get("name") or row.get("impl", ""), str(row["error"])
        step = name.partition(":")[2]
        if f"step {step}: " in reason and step:
            reason = "refused where asked for by name: " + reason.partition(f"step {step}: ")[2]
        key = name, row["suite"], textwrap.shorten(reason, 120, placeholder=" ...")
        found[key] = found.get(key, 0) + 1
    return [f"{name} on {suite}, {count} rows: {reason}" for (name, suite, reason), count in found.items()]


def gains(rows: list[dict], first: str, second: str, direction: str, suites=("dense", "packed")) -> dict:
    """Case -> how much faster the second step is than the first, as a share; both asked for by name."""
    found = Measured.of(rows)
    cases = found.cases(lambda case: case.suite in suites)
    before = {case: found.time(case, direction, f"jfa:{first}") for case in cases}
    after = {case: found.time(case, direction, f"jfa:{second}") for case in cases}
    return {case: before[case] / after[case] - 1 for case in cases if before[case] and after[case]}


def gains_text(rows: list[dict], first: str, second: str, direction: str) -> str:
    """The shares of `gains`, a line a shape, and their geometric mean."""
    found = gains(rows, first, second, direction)
    if not found:
        return f"{second} beside {first}, {direction}: {results.NOTHING}"
    mean = geometric_mean([1 + share for share in found.values()]) - 1
    every = Measured.of(rows)
    lines = [f"{_marked(every, case):<36} {100 * share:+5.1f} %" for case, share in found.items()]
    lines.append(f"{'geometric mean':<36} {100 * mean:+5.1f} %{_explained(every, found)}")
    return "\n".join([f"speed of {second} over {first}, {direction}, whole calls", *lines])


def by_name_ratios(rows: list[dict]) -> dict[str, list[float]]:
    """Direction -> times of steps asked for by name over those of the calls that take them, a shape each.

    Both run the same kernel in the same rounds: the distance from 1 says how far to trust a few percent.
    """
    measured, found = Measured.of(rows), {}
    for direction in results.DIRECTIONS:
        for case in measured.cases():
            call = measured.rows.get((case, direction, "jfa", "call"))
            again = call and measured.time(case, direction, f"jfa:{call['step']}")
            if again:
                found.setdefault(direction, []).append(again / call["ms_p50"])
    return found


def by_name_text(rows: list[dict]) -> str:
    """The ratios of `by_name_ratios` as a line a direction."""
    return "\n".join(
        f"{direction:<8} {min(found):.2f} to {max(found):.2f}, median {statistics.median(found):.3f}, "
        f"{len(found)} shapes"
        for direction, found in by_name_ratios(rows).items()
    )


def climb(table) -> dict[str, list[str]]:
    """Direction -> the steps that are no faster than the best one before them, from the rows of 09_ladder."""
    slower_ones = {}
    for direction, lines in table.groupby("direction", sort=False):
        best = 0.0
        slower_ones[direction] = []
        for step, speed in zip(lines["step"], lines["tflops"]):
            if speed <= best:
                slower_ones[direction].append(step)
            best = max(best, speed)
    return slower_ones


def tuning_gaps(rows: list[dict]) -> list[dict]:
    """Rows of the tuning log whose prediction and result are numbers, the farthest apart first."""
    gaps = []
    for row in rows:
        try:
            gap = abs(float(row.get("measured_percent", "")) - float(row.get("predicted_percent", "")))
        except ValueError:  # nothing, or a range
            continue
        gaps.append((gap, row))
    return [row for _, row in sorted(gaps, key=lambda pair: -pair[0])]


def tuning_extremes(rows: list[dict], count: int = 10) -> str:
    """The ideas of the tuning log whose prediction was farthest off, as Markdown."""
    columns = ("direction", "idea", "predicted_percent", "measured_percent", "shapes", "verdict")
    gaps = tuning_gaps(rows)[:count]
    return tuning_table([{name: row.get(name, "") for name in columns} for row in gaps])


def targets_table(rows: list[dict], memory: list[dict] = ()) -> str:
    """Every target with its value, as Markdown."""
    lines = ["| target | wanted | measured | | values |", "|---|---|---|---|---|"]
    for one in results.targets(rows, memory):
        values = f"{one.shapes}{'; ' + one.note if one.note else ''}"
        lines.append(f"| {one.name} | {one.wanted} | {one.measured} | {one.verdict} | {values} |")
    return "\n".join(lines)


def tuning_text(rows: list[dict]) -> str:
    """How many ideas the tuning log holds, and how many predictions had the right sign."""
    gaps = tuning_gaps(rows)
    signs = sum(float(row["predicted_percent"]) * float(row["measured_percent"]) > 0 for row in gaps)
    predicted = sum(row.get("predicted_percent", "") not in ("", "not predicted") for row in rows)
    return (
        f"{len(rows)} rows; {predicted} with a predicted number, {len(gaps)} of them measured as one number; "
        f"the sign was right in {signs} of these"
    )


def slower(rows: list[dict], chosen=lambda case: True) -> list[str]:
    """Shapes on which FlashAttention-4 takes less time than ours, whole calls, in words."""
    found = Measured.of(rows)
    return [
        f"{results.described(case)}, {direction} ({ratio:.2f})"
        for direction in results.DIRECTIONS
        for case, ratio in found.ratios(found.cases(chosen), direction).items()
        if ratio < 1
    ]


def distances(rows: list[dict], direction: str) -> list[dict]:
    """Every jagged shape with share of the roofline, limit and ratio over FA4, the nearest first."""
    found = Measured.of(rows)
    lines = []
    for case in found.cases(results.plain):
        row = found.rows.get((case, direction, "jfa", "call"))
        if row is None:
            continue
        bound = case.work(direction).bound
        ratio = found.ratios([case], direction).get(case)
        share = row["tflops"] / row["roof_tflops"]
        lines.append({"case": case, "share": share, "bound": bound, "ratio": ratio, "ms": row["ms_p50"]})
    return sorted(lines, key=lambda line: -line["share"])


def power_text(rows: list[dict]) -> str:
    """Median SM clock and power of the runs, peers too, by direction and our bound; "" where unknown."""
    found = Measured.of(rows)
    seen: dict = {}
    for (case, direction, name, scope), row in found.rows.items():
        if direction not in results.DIRECTIONS:
            continue  # both passes in one call are neither bound
        if (name, scope) == ("jfa", "call") and results.plain(case) and row.get("sm_clock_mhz"):
            clock, power = row["sm_clock_mhz"], row.get("power_w") or math.nan
            seen.setdefault((direction, case.work(direction).bound), []).append((clock, power))
    lines = []
    for (direction, bound), samples in sorted(seen.items(), reverse=True):
        clock, power = (statistics.median(values) for values in zip(*samples))
        lines.append(
            f"{direction:<8} bound by {bound:<7} {len(samples):3d} shapes: {clock:.0f} MHz, {power:.0f} W"
        )
    return "\n".join(lines)


def distance_table(rows: list[dict], direction: str, count: int = 4) -> str:
    """The shapes nearest to the roofline and those farthest from it, with what bounds them."""
    lines = distances(rows, direction)
    shown = [*lines[:count], None, *lines[-count:]] if len(lines) > 2 * count else lines
    text = [f"{direction:<34} {'bound':<8} {'of roofline':>11} {'over FA4':>9} {'us':>8}"]
    for line in shown:
        if line is None:
            text.append("...")
            continue
        ratio = "-" if line["ratio"] is None else f"{line['ratio']:.2f}"
        name = results.described(line["case"])
        text.append(
            f"{name:<34} {line['bound']:<8} {line['share']:>11.2f} {ratio:>9} {1e3 * line['ms']:>8.0f}"
        )
    return "\n".join(text)


def choice(direction: str, queries: int = 128) -> str:
    """The Hopper step that a call over jagged batches gets, by its shapes alone."""
    import torch

    from jfa.lab import ladder, ours
    from jfa.lab.launches import capture_launches

    lengths = [512] * 4
    problem = ladder.problem_of(lengths, queries, 1, 128)
    q, k, v, offsets = ladder.tensors_of(problem, lengths)
    out, lse = torch.empty(problem.out_shape, dtype=q.dtype), torch.empty(problem.lse_shape)
    module = ladder.module_of("hopper")
    with ours.watched_steps() as seen, capture_launches():
        if direction == "forward":
            module.forward(problem, q, k, v, offsets, None)
        else:
            module.backward(problem, out, None, q, k, v, out, lse, offsets, None)
    return seen[direction][0].name


def spills_text(name: str, made) -> str:
    """What ptxas spilled of a compiled kernel, and how much of it is in the loops that form weights."""
    from jfa.lab import live

    if not made.spill_store_bytes + made.spill_load_bytes:
        return f"{name}: nothing is spilled"
    said = (
        f"{name}: {made.spill_store_bytes} bytes of spill stores a thread, {made.spill_load_bytes} of loads"
    )
    if reason := live.missing():
        return f"{said} ({reason})"
    bodies = [one for body in live.block_loops(made) for one in body]
    inside = sum(one.opcode.startswith(("STL", "LDL")) for one in bodies)
    return f"{said}; {inside} such instructions are in the {len(bodies)} of its innermost loops of scores"


def tuning_table(rows: list[dict] | None = None) -> str:
    """The tuning log as Markdown: every idea, what was predicted, what came out, and what limits now.

    Columns idea, why, predicted_percent, measured_percent (change of speed; a number or a range as text),
    shapes, verdict, limit, optionally direction, variant and source; a column without entries is left out.
    """
    rows = results.load(results.TUNING) if rows is None else rows
    if not rows:
        return f"{results.NOTHING}: there is no tuning log\n"
    titles = {"direction": "pass", "idea": "idea", "variant": "variant", "why": "why"}
    titles |= {"predicted_percent": "predicted", "measured_percent": "measured", "shapes": "shapes"}
    titles |= {"verdict": "verdict", "limit": "what limits", "source": "source"}
    titles = {name: title for name, title in titles.items() if any(row.get(name) for row in rows)}
    lines = []
    for row in rows:
        cells = []
        for name in titles:
            value = row.get(name, "")
            text_of = f"{value:+g}" if isinstance(value, (int, float)) else str(value).replace("|", "/")
            cells.append(f"{text_of} %" if name.endswith("_percent") and text_of else text_of)
        lines.append(cells)
    return markdown(list(titles.values()), lines) + "\n"
