"""README's text on the measurements: the table, where we lose, how far runs differ, and where they ran."""

import pandas

from jfa.lab import derived, measure, reach, recorded, results, style
from jfa.lab.recorded import geometric_mean, markdown
from jfa.lab.results import DIRECTIONS, Measured, averaged, plain

GROUPS = (
    ("jagged, M = 128", lambda case: averaged(case) and case.M == 128),
    ("jagged, M = 256", lambda case: averaged(case) and case.M == 256),
    ("jagged, M = 512", lambda case: averaged(case) and case.M == 512),
    ("jagged, all three", averaged),
    ("other jagged", lambda case: case.suite == "jagged" and not averaged(case)),
    ("943 real histories", lambda case: case.suite == "histories"),
    ("dense", lambda case: case.suite == "dense"),
    ("packed self-attention", lambda case: case.suite == "packed"),
)


def lines_of(found: Measured) -> list[dict]:
    """One line for each group of shapes and direction: our TFLOPS, share of the roofline, ratios.

    A ratio that is of fewer shapes than the line has their number in brackets. A group that another run
    measured than most others names that run's commit.
    """
    lines = []
    for label, chosen in GROUPS:
        cases = found.cases(chosen)
        for direction in DIRECTIONS:
            speeds = found.column(cases, direction, "tflops")
            if not speeds:
                continue
            over = found.ratios(cases, direction)
            others = {found.other_run(case) for case in cases}
            line = {
                "shapes": label if "" in others else f"{label} (run of {', '.join(sorted(others))})",
                "pass": direction,
                "count": len(speeds),
                "tflops": geometric_mean(speeds),
            }
            line["of the roofline"] = geometric_mean(found.shares(cases, direction))
            line["over FA4"] = geometric_mean(over.values()) if over else None
            line["least"] = min(over.values()) if over else None
            for peer in ("cudnn", "torch_varlen", "flex", "jfa_baseline"):
                ratios = found.ratios(cases, direction, peer=peer).values()
                few = f" ({len(ratios)})" if len(ratios) < len(speeds) else ""
                line[f"over {peer}"] = f"{geometric_mean(ratios):.2f}{few}" if ratios else None
            lines.append(line)
    return lines


TITLES = {"shapes": "shapes", "pass": "pass", "count": "count", "tflops": "TFLOPS"}
TITLES |= {name: name for name in ("of the roofline", "over FA4", "least")}
TITLES |= {"over cudnn": "over cuDNN", "over torch_varlen": "over PyTorch varlen"}
TITLES |= {"over flex": "over FlexAttention", "over jfa_baseline": "over our baseline"}


def table(lines: list[dict]) -> str:
    """Lines of `lines_of` as Markdown; what no line has is left out, else an empty cell."""
    titles = {name: title for name, title in TITLES.items() if any(line[name] is not None for line in lines)}
    return (
        markdown(list(titles.values()), [[_cell(name, line[name]) for name in titles] for line in lines])
        + "\n"
    )


def _cell(name: str, value) -> str:
    if isinstance(value, float):
        return f"{value:.0f}" if name == "tflops" else f"{value:.2f}"
    return "" if value is None else str(value)


def slower(found: Measured, lines: list[dict]) -> str:
    """A sentence: in which of `lines_of` FlashAttention-4 is faster on average, and at how many shapes."""
    lost = [
        f"{line['shapes']}, {line['pass']} (ours has {line['over FA4']:.3g} times its speed)"
        for line in lines
        if (line["over FA4"] or 1) < 1
    ]
    if not lost:
        return "It leads on no line of the table."
    ratios = [ratio for direction in DIRECTIONS for ratio in found.ratios(found.cases(), direction).values()]
    behind = f"at {sum(ratio < 1 for ratio in ratios)} of {len(ratios)} shapes and passes"
    told = f"FlashAttention-4 is faster on average on {'; '.join(lost)}, and {behind}"
    return f"{told} (least ratio {min(ratios):.2f})."


def text(rows: list[dict]) -> str:
    """The table, where we lose, the roofline that a GPU keeps, the spread of runs, provenance; or ""."""
    if not rows:
        return ""
    found = Measured.of(rows)
    met, short = results.reached(rows), results.load(results.SHORT)
    targets = f"{sum(met)} of our own {len(met)} targets are reached; notebook 09 has each with its value."
    lines = lines_of(found)
    first = [headline(found), table(lines), slower(found, lines), targets, _least(found), kept(found)]
    others = [
        runs_table({"": rows, results.EARLIER: results.load(results.EARLIER), results.SHORT: short}),
        derived.alone_text(results.load(results.CLOCKS), rows, short),
    ]
    host = host_table(results.load(results.HOST))
    where = recorded.provenance_lines(pandas.DataFrame([row for row in rows if row.get("timer")]))
    last = "Ratios are times of whole calls, as CUDA graphs in turn, FLOPs those of real lengths. The first\n"
    last += f"table was measured on {'; '.join(where)}; the others name their commits."
    blocks = [first, others, [host], [ladder_table(results.load("09_ladder"))], [last]]
    return "\n\n".join("\n".join(filter(None, block)) for block in blocks if any(block)) + "\n"


def runs_table(runs: dict[str, list[dict]]) -> str:
    """The runs of the benchmark by the name of their CSV, the last one first: what each reached, and how
    times and ratios changed from it to the last one, on the shapes where a call took the same step.
    """
    (_, last), *before = ((name, rows) for name, rows in runs.items() if rows)
    if not before:
        return ""
    titles = ["run", "before a sample", "targets", "forward over FA4", "backward over FA4"]
    titles += ["change from it to the table's run: our times", "FA4's times", "our ratio"]
    lines = []
    for name, rows in [("", last), *before]:
        found, met = Measured.of(rows), results.reached(rows)
        row = next(iter(found.rows.values()))
        settle = row.get("settle_ms") or 0
        cells = [
            f"{row['date']}, {row['commit']}" + (f" ([rows](figures/{name}.csv))" if name else ", the table")
        ]
        cells += [f"{settle:g} ms of itself" if settle else "another kernel", f"{sum(met)} of {len(met)}"]
        for way in DIRECTIONS:
            ratios = found.ratios(found.cases(averaged), way).values()
            cells.append(f"{geometric_mean(ratios):.2f}" if ratios else "")
        spread = derived.spread_rows(rows, last) if name else []
        for column in ("ms", "fa4_ms", "over_fa4"):
            changes = [100 * share for share in derived.changes(spread, column)] if spread else []
            cells.append("{:+.1f} % ({:+.1f} %)".format(*changes) if changes else "")
        lines.append(cells)
    return markdown(titles, lines) + "\n\nChanges are medians over shapes, in brackets the largest.\n"


HOST_CALLS = (
    *(("host-clock", "", way) for way in (*DIRECTIONS, "both")),
    *(("host-clock", measure.ONE_THREAD, way) for way in ("backward", "both")),
    *(("cuda-graph", "", way) for way in (*DIRECTIONS, "both")),
)


def host_table(rows: list[dict]) -> str:
    """Microseconds of the host suite: eager calls until they return, in one thread too, as graphs; or ""."""
    found = {}
    for timer in measure.TIMERS:
        measured = Measured.of([row for row in rows if row.get("timer") == timer]).rows
        for (_, way, name, scope), row in measured.items():
            impl, _, mark = name.partition(":")
            if scope == "call":
                found[impl, timer, mark, way] = 1e3 * row["ms_p50"]
    row = next((row for row in rows if row.get("timer")), {})
    M, commit = row.get("M"), row.get("commit")
    impls = [impl for impl in dict.fromkeys(key[0] for key in found) if (impl, *HOST_CALLS[0]) in found]
    if not impls:
        return ""
    titles = [f"the host, us (M = N = {M}; {commit})", "forward", "backward", "both"]
    titles += ["one thread: backward", "one thread: both", "graph: forward", "graph: backward", "graph: both"]
    lines = []
    for impl in impls:
        values = (found.get((impl, *call)) for call in HOST_CALLS)
        lines.append([style.label_of(impl), *("" if value is None else f"{value:.0f}" for value in values)])
    return markdown(titles, lines)


def headline(found: Measured) -> str:
    """Our speed over FlashAttention-4's on the main groups of shapes, one sentence; "" without the peer."""
    told = []
    for words, chosen in (
        ("jagged batches", averaged),
        ("real histories", lambda case: case.suite == "histories"),
        ("dense batches", lambda case: case.suite == "dense"),
    ):
        ratios = [found.ratios(found.cases(chosen), way).values() for way in DIRECTIONS]
        if all(ratios):
            one, other = map(geometric_mean, ratios)
            told.append(f"on {words} {one:.2f} (forward) and {other:.2f} (backward)")
    if not told:
        return ""
    return f"On an H200 whole calls are this many times as fast as FlashAttention-4's: {', '.join(told)}.\n"


def ladder_table(rows: list[dict]) -> str:
    """TFLOPS of every timed step, in the ladder's order, from rows of `derived.ladder_rows`; or ""."""
    if not rows:
        return ""
    speeds = {(row["direction"], row["step"]): f"{row['tflops']:.0f}" for row in rows}
    commits = ", ".join(sorted({row["commit"] for row in rows}))
    titles = [f"step, TFLOPS on {rows[0]['shapes']} jagged shapes ({commits})", *DIRECTIONS]
    lines = [[name, *(speeds.get((way, name), "") for way in DIRECTIONS)] for name in derived.KNOWN]
    return markdown(titles, [line for line in lines if any(line[1:])])


def _least(found: Measured) -> str:
    """The least ratio of all jagged shapes, density 1 with them, or ""."""
    every = found.cases(plain)
    least = {way: found.ratios(every, way) for way in DIRECTIONS}
    if not all(least.values()):
        return ""
    lowest = ", ".join(f"{way} {min(ratios.values()):.2f}" for way, ratios in least.items())
    count = min(map(len, least.values()))
    text = f"*Least* is over the shapes of a line; over all {count} jagged shapes, those of density 1\n"
    return f"{text}with them, the least ratio over FlashAttention-4 is {lowest}."


def kept(found: Measured) -> str:
    """Shares of the roofline by the product's rate after a while of itself, which power limits; or ""."""
    recorded_rates = results.load(results.REACH)
    cases = found.cases(averaged)
    if not recorded_rates or not cases:
        return ""
    product = reach.table(pandas.DataFrame(recorded_rates)).loc[reach.PRODUCT]
    settled, ways = product[reach.SETTLED.name], []
    for way in DIRECTIONS:
        rested, here = (geometric_mean(found.shares(cases, way, rate)) for rate in (None, settled * 1e12))
        ways.append(f"{way} {here:.2f} instead of {rested:.2f}")
    return (
        f"A rested GPU reaches {product[reach.RESTED.name]:.0f} TFLOPS in a cuBLAS product; "
        f"after {reach.SETTLED.settle_ms:g} ms of itself, as all kernels in the table are, {settled:.0f} "
        f"([rows](figures/{results.REACH}.csv)).\nBy that rate our share of the roofline on the {len(cases)} "
        f"jagged shapes is {', '.join(ways)}."
    )
