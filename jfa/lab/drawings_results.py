"""How the figures of notebook 09 are drawn: ratios over FA4, roofline, ladder, dense shapes, two runs."""

import matplotlib.pyplot as plt
import numpy as np
import pandas

from jfa.lab import derived, plots, results, style

DIRECTIONS = results.DIRECTIONS
QUERIES = {128: "warp_specialized", 256: "dynamic", 512: "peeled"}  # one colour for each M
OURS = "stationary"
NUMBERS = (
    "M",
    "N",
    "density",
    "tflops",
    "fa4_tflops",
    "roof_tflops",
    "share",
    "flops_a_byte",
    "least",
    "most",
)


def numeric(rows):
    """Rows with numbers where numbers belong; an empty cell is NaN."""
    columns = {name: pandas.to_numeric(rows[name], errors="coerce") for name in NUMBERS if name in rows}
    return rows.assign(**columns)


def records(rows) -> list[dict]:
    """The rows of a DataFrame as the benchmark's reader gives them."""
    return [
        {name: "" if value != value else value for name, value in row.items()}
        for row in rows.to_dict("records")
    ]


def ratios(rows):
    """Dots: time of FA4 over ours for every jagged shape, by N and M, with the targets (09_results)."""
    found = results.Measured.of(records(rows))
    cases = found.cases(results.plain)
    limits = sorted({case.N for case in cases})
    figure, panels = plt.subplots(1, 2, figsize=(9, 3.9), sharey=True)
    for direction, axes in zip(DIRECTIONS, panels):
        over = found.ratios(cases, direction)
        for index, (rows_of_q, hue) in enumerate(QUERIES.items()):
            points = [(case, ratio) for case, ratio in over.items() if case.M == rows_of_q]
            at = [limits.index(case.N) + 0.24 * (index - 1) for case, _ in points]
            sizes = [14 + 46 * case.density for case, _ in points]
            values = [ratio for _, ratio in points]
            color = style.color_of(hue)
            axes.scatter(at, values, s=sizes, color=color, alpha=0.75, linewidths=0, label=f"M = {rows_of_q}")
        axes.axhline(1, color=style.FAINT, linewidth=0.8)
        axes.axhline(results.LEAST, color=style.FAINT, linewidth=0.8, linestyle=":")
        axes.text(1.0, results.LEAST, " target of each", transform=axes.get_yaxis_transform(), fontsize=7.5)
        axes.axhline(results.OVER[direction], color=style.INK, linewidth=1, linestyle="--")
        axes.text(
            1.0,
            results.OVER[direction],
            " target of the mean",
            transform=axes.get_yaxis_transform(),
            fontsize=7.5,
        )
        axes.set_title(direction, loc="left")
        axes.set_xticks(range(len(limits)), [str(limit) for limit in limits])
        axes.set(xlabel="longest allowed sequence, keys", ylim=(0, None))
    panels[0].set_ylabel("times as fast as FA4, whole call")
    panels[0].legend(frameon=False, fontsize=8, ncols=3, loc="lower left", bbox_to_anchor=(0.3, 1.0))
    means = {target.name: target.found for target in results.targets(records(rows))}
    said = [
        f"{way} {value:.2f}"
        for way in DIRECTIONS
        if (value := means[f"jagged {way} over FA4, geometric mean"]) is not None
    ]
    title = f"Over FlashAttention-4 on jagged batches, geometric mean: {', '.join(said) or results.NOTHING}"
    note = f"{style.caption(measured(rows[rows['suite'] == 'jagged']))} · a larger dot is a denser batch"
    return style.finish(figure, title, note)


def measured(rows):
    """The rows that were measured, for a caption."""
    return rows[rows["timer"].astype(str).isin(("cuda-graph", "cuda-event"))] if "timer" in rows else rows


def roofline(rows):
    """Dots under the roofline: TFLOPS of ours and of FA4 over FLOPs a byte (09_roofline)."""
    rows = numeric(rows)
    figure, panels = plt.subplots(1, 2, figsize=(10.5, 4.1), sharey=True)
    said = []
    for direction, axes in zip(DIRECTIONS, panels):
        part = rows[rows["direction"] == direction].sort_values("flops_a_byte")
        axes.plot(part["flops_a_byte"], part["roof_tflops"], color=style.INK, linewidth=1.2, label="roofline")
        axes.scatter(
            part["flops_a_byte"],
            part["fa4_tflops"],
            s=14,
            color=style.color_of("fa4"),
            alpha=0.6,
            linewidths=0,
            label="FlashAttention-4",
        )
        for suite, mark in (("jagged", "o"), ("histories", "^"), ("dense", "s"), ("packed", "D")):
            some = part[part["suite"] == suite]
            axes.scatter(
                some["flops_a_byte"],
                some["tflops"],
                s=22,
                marker=mark,
                color=style.color_of(OURS),
                linewidths=0,
                label=f"ours, {suite}",
            )
        axes.set(xscale="log", xlabel="FLOPs a byte of least traffic", ylim=(0, None))
        axes.set_title(direction, loc="left")
        main = part[(part["suite"] == "jagged") & part["density"].isin(results.MEAN_DENSITIES)]
        shares = main["share"].dropna()
        if len(shares):
            said.append(f"{direction} {np.exp(np.log(shares).mean()):.2f}")
    panels[0].set_ylabel("TFLOPS")
    panels[1].legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    title = f"Share of the roofline on jagged batches, geometric mean: {', '.join(said) or results.NOTHING}"
    return style.finish(figure, title, style.caption(rows))


def ladder(rows):
    """Bars in the order of the ladder, forward and backward: mean TFLOPS over shapes (09_ladder)."""
    rows = numeric(rows)
    said = []
    for direction in DIRECTIONS:
        speeds = rows[rows["direction"] == direction].set_index("step")["tflops"]
        if len(speeds) > 1:
            said.append(f"{direction} {speeds.max() / speeds.iloc[0]:.2f} times")
    counts = rows.groupby("direction", sort=False)["shapes"].first()
    start = "the baseline" if (rows["step"] == "baseline").any() else "the first"
    title = f"Best step over {start}: {', '.join(said)}"
    shapes = ", ".join(f"{direction} {int(count)}" for direction, count in counts.items())
    note = f"geometric mean of whole calls over jagged shapes: {shapes} · {style.caption(rows)}"
    bars = rows.to_dict("records")
    figure = plots.ladder_bars(bars, title, panel="direction", absent="no such step", note=note)
    for axes in figure.axes:
        axes.set_xlim(right=1.5 * rows["tflops"].max())  # room for the words behind the longest bar
    return figure


MARKERS = {"cudnn": "s", "torch_varlen": "v", "flex": "D", "jfa_baseline": "^"}  # greys alone look alike


def dense(rows):
    """Lines: TFLOPS on dense shapes and packed self-attention, a line a peer (09_dense)."""
    rows = numeric(rows)
    kinds = [("dense", 0), ("packed", 0), ("packed", 1)]
    kinds = [k for k in kinds if ((rows["suite"] == k[0]) & (rows["causal"] == k[1])).any()]
    figure, panels = plt.subplots(2, len(kinds), figsize=(3.1 * len(kinds) + 1.2, 5.6), squeeze=False)
    looks = {name: {"color": peer[1], "linestyle": peer[2]} for name, peer in style.PEERS.items()}
    looks["jfa"] = {"color": style.color_of(OURS)}
    looks["jfa_baseline"] = {"color": style.color_of("baseline")}
    for column, (suite, causal) in enumerate(kinds):
        for line, direction in enumerate(DIRECTIONS):
            axes = panels[line, column]
            part = rows[
                (rows["suite"] == suite) & (rows["causal"] == causal) & (rows["direction"] == direction)
            ]
            for name in sorted(part["impl"].unique(), key=lambda name: (name != "jfa", name)):
                points = part[part["impl"] == name].sort_values("N")
                label = style.label_of(name)
                look = looks[name] | {"marker": MARKERS.get(name, "o"), "markersize": 4}
                axes.plot(points["N"], points["tflops"], label=label, **look)
            ticks = sorted(part["N"].unique())
            axes.set(xscale="log", ylim=(0, None))
            axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks], fontsize=8)
            axes.minorticks_off()
            if line == 0:
                words = "dense" if suite == "dense" else f"packed{', causal' if causal else ''}"
                if part["commit"].iloc[0] != rows["commit"].mode()[0]:
                    words += f" ({part['commit'].iloc[0]})"
                axes.set_title(words, loc="left")
            if column == 0:
                axes.set_ylabel(f"{direction}, TFLOPS")
    panels[1, 0].set_xlabel("sequence, keys")
    key = panels[0, 0].get_legend_handles_labels()
    panels[0, -1].legend(*key, frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    return style.finish(figure, _dense_finding(rows), style.caption(rows))


def _dense_finding(rows) -> str:
    wide = rows.pivot_table(index=["suite", "causal", "N", "direction"], columns="impl", values="tflops")
    if not {"jfa", "fa4"} <= set(wide.columns):
        return f"Dense and packed self-attention: the comparison is {results.NOTHING}"
    ratio = (wide["jfa"] / wide["fa4"]).dropna().groupby("direction")
    said = [
        f"{way} {ratio.min()[way]:.2f} to {ratio.max()[way]:.2f}" for way in DIRECTIONS if way in ratio.groups
    ]
    return f"Dense and packed, times as fast as FlashAttention-4: {', '.join(said)}"


def spread(rows):
    """Dots: our ratio over FA4 in two runs, forward and backward (09_spread)."""
    table = records(rows)
    figure, panels = plt.subplots(1, 2, figsize=(8, 4.1), sharex=True, sharey=True)
    top = 1.05 * max(max(row["over_fa4_first"], row["over_fa4_second"]) for row in table)
    for direction, axes in zip(DIRECTIONS, panels):
        part = [row for row in table if row["direction"] == direction]
        axes.plot((0, top), (0, top), color=style.FAINT, linewidth=0.8)
        axes.scatter(
            [row["over_fa4_first"] for row in part],
            [row["over_fa4_second"] for row in part],
            s=18,
            color=style.color_of(OURS),
            alpha=0.7,
            linewidths=0,
        )
        axes.set(xlim=(0, top), ylim=(0, top), aspect="equal")
        axes.set_xlabel("times as fast as FA4, first run")
        axes.set_title(direction, loc="left")
    panels[0].set_ylabel("second run")
    ours, theirs = (100 * derived.changes(table, column)[0] for column in ("ms", "fa4_ms"))
    title = f"From the first run to the second, in the median: our times {ours:+.0f} %, FA4's {theirs:+.0f} %"
    runs = (("first", table[0]["commit_first"]), ("second", table[0]["commit"]))
    notes = [
        f"{run} run ({table[0][f'date_{run}']}, {commit}): {settled(table[0][f'settle_ms_{run}'])}"
        for run, commit in runs
    ]
    return style.finish(figure, title, " · ".join([style.caption(rows), *notes]))


def settled(milliseconds: float) -> str:
    """How a run took its samples, in words."""
    return (
        f"samples after {milliseconds:.0f} ms of their own"
        if milliseconds
        else "samples after another kernel"
    )
