"""Rows of figures that are drawn from other recordings: pairs, roofline, ladder, dense shapes, two runs.

Each is a small table with the provenance of what it was made of, so that a figure lies beside its data.
"""

import statistics
from pathlib import Path

from jfa.lab import course, measure, pair, results
from jfa.lab.figures import FOLDER
from jfa.lab.machine import PROVENANCE
from jfa.lab.recorded import geometric_mean

DIRECTIONS = results.DIRECTIONS
KNOWN = [name for name, _, _ in course.LADDER]


def where(row: dict) -> dict:
    """How and where a row was measured."""
    return {name: row.get(name, "") for name in ("timer", *PROVENANCE)}


def baseline_rows(rows: list[dict]) -> list[dict]:
    """Whole calls of the baseline and of everybody else, on the jagged shapes on which the baseline ran."""
    found = results.Measured.of(rows)
    names = ("jfa_baseline", "jfa", "fa4", "cudnn", "torch_varlen")
    table = []
    for case in found.cases(results.plain):
        for direction in DIRECTIONS:
            calls = [found.rows.get((case, direction, name, "call")) for name in names]
            table += [row for row in calls if row is not None] if calls[0] is not None else []
    return table


def roofline_rows(rows: list[dict]) -> list[dict]:
    """For every shape and direction: FLOPs a byte, TFLOPS of ours and of FA4, and the roofline's."""
    found = results.Measured.of(rows)
    table = []
    for case in found.cases(
        lambda case: results.plain(case) or case.suite in ("histories", "dense", "packed")
    ):
        for direction in DIRECTIONS:
            row = found.rows.get((case, direction, "jfa", "call"))
            if row is None:
                continue
            work = case.work(direction)
            theirs = found.rows.get((case, direction, "fa4", "call"))
            facts = {name: value for name, value in case.columns().items() if name != "window"}
            table.append(
                facts
                | {"direction": direction, "flops_a_byte": round(work.flops / work.bytes, 3)}
                | {"tflops": row["tflops"], "fa4_tflops": theirs["tflops"] if theirs else ""}
                | {"roof_tflops": row["roof_tflops"], "share": round(row["tflops"] / row["roof_tflops"], 4)}
                | {"limit": work.bound, **where(row)}
            )
    return table


def ladder_rows(forward: list[dict], backward: list[dict]) -> list[dict]:
    """Geometric mean TFLOPS of every step over the shapes that all steps of its direction ran.

    The baseline is the first where it was measured; variants that are no step of the ladder are left out.
    None before both directions were measured.
    """
    table = []
    if not (forward and backward):
        return table
    for direction, rows in zip(DIRECTIONS, (forward, backward)):
        known = [row for row in rows if row["step"] in KNOWN]
        kept = [row for row in known if row["scope"] == "call" and row.get("tflops") not in (None, "")]
        steps = {}
        for row in kept:
            steps.setdefault(row["step"], {})[row["M"], row["N"], row["density"]] = row
        common = set.intersection(*map(set, steps.values())) if steps else set()
        for step, by_shape in steps.items():
            shared = [by_shape[shape] for shape in sorted(common)]
            if not shared:
                continue
            speeds = [row["tflops"] for row in shared]
            facts = {"direction": direction, "step": step, "shapes": len(shared)}
            facts |= {"tflops": round(geometric_mean(speeds), 2), "least": min(speeds), "most": max(speeds)}
            facts["settle_ms"] = shared[0].get("settle_ms") or 0
            medians = {
                name: statistics.median(
                    [row[name] for row in shared if row.get(name) not in (None, "")] or [0]
                )
                for name in ("sm_clock_mhz", "power_w")
            }
            table.append(facts | where(shared[0]) | medians)
    return table


def dense_rows(rows: list[dict]) -> list[dict]:
    """TFLOPS of every peer on dense shapes and packed self-attention, the whole call."""
    kept = results.Measured.of(rows).rows
    table = []
    for (case, direction, name, scope), row in kept.items():
        if (
            case.suite in ("dense", "packed")
            and scope == "call"
            and direction in DIRECTIONS
            and ":" not in name
        ):
            facts = {"suite": case.suite, "causal": int(case.causal), "N": case.N, "B": case.B}
            facts |= {"direction": direction, "impl": name, "tflops": row["tflops"]}
            table.append(facts | {"roof_tflops": row["roof_tflops"], **where(row)})
    return table


def spread_rows(first: list[dict], second: list[dict]) -> list[dict]:
    """Every shape of two runs on which a call took the same step: milliseconds, ours and FA4's, our ratio.

    "settle_ms_first" and "settle_ms_second": what each run let pass, untimed, before a sample.
    """
    one, two = results.Measured.of(first), results.Measured.of(second)
    table = []
    for case in one.cases(lambda case: results.plain(case) or case.suite != "jagged"):
        for direction in DIRECTIONS:
            times = [run.time(case, direction) for run in (one, two)]
            ratios = [run.ratios([case], direction).get(case) for run in (one, two)]
            key = (case, direction, "jfa", "call")
            if None in times or None in ratios or one.rows[key]["step"] != two.rows[key]["step"]:
                continue  # not measured twice, or not the same kernel
            if all(one.rows[key].get(name) == two.rows[key].get(name) for name in ("ms_p50", "commit")):
                continue  # the second run was cut short and shows the first one's row
            facts = {"suite": case.suite, "M": case.M, "N": case.N, "density": case.density}
            facts |= {"causal": int(case.causal), "direction": direction}
            facts |= {"ms_first": times[0], "ms_second": times[1]}
            for run, found, ms, ratio in zip(("first", "second"), (one, two), times, ratios, strict=True):
                facts |= {f"fa4_ms_{run}": round(ms * ratio, 6), f"over_fa4_{run}": round(ratio, 4)}
                facts[f"settle_ms_{run}"] = found.rows[key].get("settle_ms") or 0
            dates = {"date_first": one.rows[key]["date"], "date_second": two.rows[key]["date"]}
            dates["commit_first"] = one.rows[key]["commit"]
            table.append(facts | dates | where(two.rows[key]))
    return table


def changes(rows: list[dict], column: str) -> tuple[float, float]:
    """From the first run to the second, as shares of a column of spread_rows: the median, and the largest."""
    shares = [row[f"{column}_second"] / row[f"{column}_first"] - 1 for row in rows]
    return statistics.median(shares), max(shares, key=abs)


def changes_text(rows: list[dict]) -> str:
    """From the first of two runs to the second, by `spread_rows`: every median change, and the largest."""
    told = []
    for column, name in (
        ("ms", "our times changed"),
        ("fa4_ms", "FA4's"),
        ("over_fa4", "our ratios over it"),
    ):
        median, most = changes(rows, column)
        told.append(f"{name} by {100 * median:+.1f} % (at most {100 * most:+.1f} %)")
    return ", ".join(told)


def spread_text(first: list[dict], second: list[dict]) -> str:
    """How far two runs differ, in a sentence."""
    rows = spread_rows(first, second)
    if not rows:
        return f"{results.NOTHING}: there is no second run to compare with"
    return (
        f"two runs have {len(rows)} measurements of the same step: from the first to the second, "
        f"in the median, {changes_text(rows)}"
    )


def alone_text(alone: list[dict], last: list[dict], short: list[dict]) -> str:
    """Our ratio over FA4 with the GPU to itself, beside two runs in turn on the same shapes, or ""."""
    runs = [results.Measured.of(rows) for rows in (alone, last, short)]
    ratios = {way: [run.ratios(runs[0].cases(), way) for run in runs] for way in DIRECTIONS}
    common = [
        (way, case)
        for way in DIRECTIONS
        for case in ratios[way][0]
        if all(case in found for found in ratios[way])
    ]
    if not common:
        return ""
    own, turn, brief = (geometric_mean(ratios[way][i][case] for way, case in common) for i in range(3))
    return (
        f"With the GPU to itself for a second, at {len(common)} shapes and passes, ours are {own:.2f} times "
        f"as fast as FlashAttention-4; in the table's run {turn:.2f}, in short samples {brief:.2f} times."
    )


def spread_table(first: list[dict], second: list[dict], count: int = 6) -> str:
    """Milliseconds (p50) of both runs side by side with their ratio, the shapes that differ most first."""
    rows = spread_rows(first, second)
    if not rows:
        return spread_text(first, second)
    rows = sorted(rows, key=lambda row: -abs(row["ms_second"] / row["ms_first"] - 1))
    lines = [f"{'whole call, ms p50':<44} {'run 1':>8} {'run 2':>8}  run 2 over run 1"]
    for row in rows[:count]:
        rows_of_q = f"M={row['M']} " if row["suite"] in ("jagged", "histories") else ""
        shape = f"{row['suite']} {rows_of_q}N={row['N']} density {row['density']:g}"
        name = f"{shape}{', causal' if row['causal'] else ''}, {row['direction']}"
        ratio = row["ms_second"] / row["ms_first"]
        lines.append(f"{name:<44} {row['ms_first']:8.3f} {row['ms_second']:8.3f}  {ratio:.3f}")
    rest = f"... {len(rows) - count} measurements that differ less\n" if len(rows) > count else ""
    return "\n".join(lines) + f"\n{rest}{spread_text(first, second)}"


def tables(folder: Path = FOLDER) -> dict[str, list[dict]]:
    """Every derived table by its name; empty where what it is made of was not measured."""
    now, earlier = (results.load(name, folder) for name in (results.RESULTS, results.EARLIER))
    backward = results.load("05_steps", folder)
    return {
        "02_baseline": baseline_rows(now),
        "08_steps": [r for r in backward if r["step"] in pair.TARGETS and r["direction"] == "backward"],
        "09_roofline": roofline_rows(now),
        "09_ladder": ladder_rows(results.load("04_steps", folder), backward),
        "09_dense": dense_rows(now),
        "09_spread": spread_rows(earlier, now) if earlier and now else [],
    }


def write_all(folder: Path = FOLDER) -> list[str]:
    """Write figures/NAME.csv of every derived table that has rows; says what it did."""
    said = []
    for name, rows in tables(folder).items():
        if rows:
            measure.write_rows(folder / f"{name}.csv", rows)
        said.append(f"{name}: {len(rows)} rows" if rows else f"{name}: {results.NOTHING}")
    return said
