"""How the figures of notebook 10 are drawn: counters and stalls, stages left out, samples over time."""

import matplotlib.pyplot as plt
import pandas
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.ticker import PercentFormatter

from jfa.lab import ablation, style, targets, waits
from jfa.lab import rounds as orders
from jfa.lab.counters import CALLED, COUNTERS
from jfa.lab.targets import case_text

UNITS = {
    "tensor_busy": "tensor\ncores",
    "issue_busy": "issue\nslots",
    "xu_busy": "exp2\nunit",
    "l2_busy": "L2",
    "dram_busy": "HBM",
}
# Stall reasons as people say them, in the order of the bars.
REASONS = {
    "stall_long_scoreboard": "memory, mbarrier",
    "stall_barrier": "barrier, product",
    "stall_gmma": "tensor cores",
    "stall_math_pipe_throttle": "busy unit",
    "stall_short_scoreboard": "shared memory, exp2",
    "stall_wait": "fixed latency",
    "stall_not_selected": "other warp chosen",
}
HUES = ("load", "wait", "mma", "softmax", "correction", "store", "schedule")
OTHER = "#aaaaaa"


def numeric(rows):
    """Rows with every column of ``COUNTERS`` as numbers; empty cells become NaN."""
    columns = [name for name in COUNTERS if name in rows]
    return rows.assign(**{name: pandas.to_numeric(rows[name], errors="coerce") for name in columns})


def by_pass(rows):
    """One row a (direction, case, step): times added over its kernels, the rest weighted by time.

    ``case`` is the shape in words; the shape on which all steps were counted comes first.
    """
    rows = numeric(rows)
    rows["case"] = [case_text(row) for row in rows.to_dict("records")]
    key = ["direction", "case", "M", "step"]
    shares = [name for name in COUNTERS if name in rows and name != "duration_us"]
    weighted = rows[shares].mul(rows["duration_us"], axis=0).join(rows[[*key, "duration_us"]])
    total = weighted.groupby(key, sort=False).sum(min_count=1).reset_index()
    total[shares] = total[shares].div(total["duration_us"], axis=0)
    order = {name: place for place, name in enumerate(style.step_order(total["step"]))}
    total["place"] = total["step"].map(order)
    total["way"] = total["direction"].map({"forward": 0, "backward": 1})
    total["aside"] = [" " in name for name in total["case"]]
    order = ["way", "aside", "M", "case", "place"]
    return total.sort_values(order).drop(columns=["way", "place", "aside"]).reset_index(drop=True)


def stalls(table):
    """Share of the warps' waiting by reason: a DataFrame with a column a reason, "other" the rest."""
    known = [name for name in table if name.startswith("stall_") and name != "stall_selected"]
    total = table[known].sum(axis=1)
    found = {label: table[name] / total for name, label in REASONS.items() if name in table}
    shares = pandas.DataFrame(found)
    return shares.assign(other=1 - shares.sum(axis=1))


BUSY = 0.75  # below this share of its peak no unit is called the limit


def limits(rows) -> list[dict]:
    """What the profiler names as the limit of each step: the busiest unit, if it is near its peak.

    Rows of `10_counters`; direction, case, step, ``unit`` and ``busy`` (share of its peak), ``tensor`` and
    ``hbm`` beside it, and ``limit`` in words.
    """
    table = by_pass(rows)
    units = [name for name in UNITS if name in table]
    found = []
    for _, line in table.iterrows():
        busy = line[units].astype(float).dropna()
        row = {name: line[name] for name in ("direction", "case", "step")}
        row |= {"tensor": line.get("tensor_busy"), "hbm": line.get("dram_busy")}
        row |= {"unit": "-", "busy": float("nan")}
        if len(busy):
            row |= {"unit": UNITS[busy.idxmax()].replace("\n", " "), "busy": float(busy.max())}
        row["limit"] = f"{row['unit']}, near its peak" if row["busy"] >= BUSY else "no unit"
        found.append(row)
    return found


def missed(rows):
    """Rows of shapes on which a target of speed was missed: what a call gets, and what was tried there."""
    names = ("suite", "M", "N", "density", "direction", "step")
    wanted = {tuple(target.columns()[name] for name in names) for target in CALLED}
    return rows[[row in wanted for row in rows[list(names)].itertuples(index=False, name=None)]]


def limits_text(rows, sampled=None) -> str:
    """The lines of `limits` as a table; rows is None where nothing is recorded.

    ``sampled``: rows of `10_waits`, for what the consumers wait most.
    """
    if rows is None:
        return "not counted: there is no figures/10_counters.csv, so nothing here is named as the limit"

    def share(value):
        return "  -" if value != value else f"{100 * value:3.0f}"

    doing = None if sampled is None else waits.table(sampled)
    title = f"{'pass':<8} {'case':<12} {'step':<11} {'tensor':>6} {'HBM':>4}  {'busiest unit':<17}"
    lines = [f"{title}  {'suspect':<26}" + ("" if doing is None else "  consumers wait for, % of their time")]
    for row in limits(rows):
        unit = f"{row['unit']} {share(row['busy'])} %"
        head = f"{row['direction']:<8} {row['case']:<12} {row['step']:<11} {share(row['tensor']):>4} %"
        line = f"{head} {share(row['hbm'])} %  {unit:<17}  {row['limit']:<26}"
        key = (row["direction"], row["case"], row["step"])
        if doing is not None and key in doing.index:
            part = doing.loc[key, [why for why in waits.WHY if why not in (waits.ISSUE, waits.OWN)]]
            line += "  " + ", ".join(f"{why} {100 * part[why]:.0f}" for why in part.nlargest(3).index)
        lines.append(line.rstrip())
    said = "of a kernel's time under Nsight Compute, which runs every kernel alone"
    clocks = (
        pandas.to_numeric(rows["sm_clock_mhz"], errors="coerce").dropna() if "sm_clock_mhz" in rows else []
    )
    if len(clocks):
        said += f"; SM clock {clocks.min() / 1e3:.2f} to {clocks.max() / 1e3:.2f} GHz"
    return "\n".join([*lines, said])


def counters(rows):
    """Table of busy shares, and beside it why warps wait; a line a step (10_counters)."""
    table = by_pass(rows)
    shade = LinearSegmentedColormap.from_list("busy", ["#ffffff", style.color_of("mma")])
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.6, 0.3 * len(table) + 2.1), width_ratios=(1, 1.15))
    units = [name for name in UNITS if name in table]
    values = table[units].to_numpy(dtype=float)
    left.imshow(values, cmap=shade, vmin=0, vmax=1, aspect="auto")
    for line in range(len(table)):
        for column in range(len(units)):
            value = values[line, column]
            text = "-" if value != value else f"{100 * value:.0f}"
            ink = style.text_color(shade(0 if value != value else value))
            left.text(column, line, text, ha="center", va="center", fontsize=9, color=ink)
    left.set_xticks(range(len(units)), [UNITS[name] for name in units], fontsize=9)
    left.xaxis.tick_top()
    names = [f"{row.direction} {row.case}: {style.label_of(row.step)}" for row in table.itertuples()]
    left.set_yticks(range(len(table)), names, fontsize=9)
    left.tick_params(length=0)
    left.set_xlabel("busy, % of the kernel's time", fontsize=9)
    shares, start = stalls(table), 0.0
    colors = [*(style.color_of(hue) for hue in HUES), OTHER]
    for reason, color in zip(shares, colors):
        right.barh(range(len(table)), shares[reason], left=start, color=color, height=0.78, label=reason)
        start = start + shares[reason]
    right.set(xlim=(0, 1), ylim=(len(table) - 0.5, -0.5), yticks=[])
    right.set_xlabel("why warps waited, share of their waiting", fontsize=9)
    right.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    right.legend(
        frameon=False, fontsize=8, ncols=3, loc="lower right", bbox_to_anchor=(1.02, 1.02),
        handlelength=1, columnspacing=1,
    )  # fmt: skip
    for axes in (left, right):
        for line in range(1, len(table)):
            if (table.loc[line, ["direction", "case"]] != table.loc[line - 1, ["direction", "case"]]).any():
                axes.axhline(line - 0.5, color=style.INK, linewidth=0.8)
    shape = targets.Target("forward", "staged")
    note = f"jagged shapes: N = {shape.N}, density {shape.density:g}, where no other N is named · "
    return style.finish(figure, counters_finding(table), note + style.caption(_clocked(rows)))


def _clocked(rows):
    """Rows whose clocks are in MHz as everywhere; ncu ran the kernels alone, so power says nothing."""
    return rows.drop(columns=[name for name in ("power_w", "temperature_c") if name in rows])


def counters_finding(table) -> str:
    """The busy share of the tensor cores, from the baseline to the best step, forward and backward."""
    parts, rows_of_q = [], 0
    for way in ("forward", "backward"):
        line = table[(table["direction"] == way) & ~table["case"].str.contains(" ")]
        rows_of_q = line["M"].max()
        line = line[line["M"] == rows_of_q].set_index("step")
        if "baseline" in line.index and len(line) > 1:
            best = line["tensor_busy"].drop("baseline").max()
            first, last = 100 * line.loc["baseline", "tensor_busy"], 100 * best
            parts.append(f"{way} {first:.0f} to {last:.0f} %")
    said = f"Tensor cores busy, baseline to best step (M = {rows_of_q}): {', '.join(parts)}"
    return said if parts else "What the hardware counted"


def saved(rows):
    """Share of the whole kernel's time that leaving a stage out saves, by direction, step, M and stage."""
    rows = rows.assign(ms_p50=pandas.to_numeric(rows["ms_p50"], errors="coerce"))
    rows["left_out"] = rows["left_out"].fillna("")
    key = ["direction", "step", "M"]
    whole = rows[rows["left_out"] == ""].set_index(key)["ms_p50"]
    part = rows[(rows["left_out"] != "") & rows["ms_p50"].notna()].copy()
    before = pandas.Series([whole[row.direction, row.step, row.M] for row in part.itertuples()], part.index)
    part["saved"] = 1 - part["ms_p50"] / before
    return part


def ablation_bars(rows):
    """Bars: time that a kernel saves without a stage, a panel a pass, two M a stage (10_ablation)."""
    part = saved(rows)
    passes = list(dict.fromkeys(zip(part["direction"], part["step"])))
    counts = [
        part[(part["direction"] == way) & (part["step"] == step)]["left_out"].nunique()
        for way, step in passes
    ]
    figure, panels = plt.subplots(
        len(passes), 1, figsize=(7.2, 0.36 * sum(counts) + 0.5 * len(passes) + 1.0),
        sharex=True, height_ratios=counts, squeeze=False,
    )  # fmt: skip
    for (way, step), axes in zip(passes, panels[:, 0], strict=True):
        table = part[(part["direction"] == way) & (part["step"] == step)]
        stages = list(dict.fromkeys(table["left_out"]))
        wide = table.pivot_table(index="left_out", columns="M", values="saved").reindex(stages)
        for index, M in enumerate(wide.columns):
            at = [place + 0.38 * (index - (len(wide.columns) - 1) / 2) for place in range(len(stages))]
            alpha = 1.0 if index else 0.55
            color = style.color_of(step)
            axes.barh(at, wide[M], 0.36, color=color, alpha=alpha, label=f"M = {M}")
            for place, value in zip(at, wide[M]):
                words = f"{round(100 * value) + 0:d} %"  # no "-0"
                axes.text(max(value, 0) + 0.004, place, words, va="center", fontsize=8)
        axes.set_yticks(range(len(stages)), [f"without {name}" for name in stages], fontsize=8.5)
        axes.set_ylim(len(stages) - 0.45, -0.55)
        axes.tick_params(axis="y", length=0)
        axes.axvline(0, color=style.FAINT, linewidth=0.8)
        axes.set_title(f"{way}, {style.label_of(step)}", loc="left", fontsize=10)
        axes.legend(frameon=False, fontsize=8.5, loc="upper right")
    panels[-1, 0].xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    panels[-1, 0].set_xlabel("time saved; the answers are wrong, by design")
    low, high = min(0, part["saved"].min()), part["saved"].max()
    panels[-1, 0].set_xlim(low - 0.02, high + 0.08)
    return style.finish(figure, ablation_finding(part), style.caption(rows))


def ablation_finding(part) -> str:
    """What the dearest single stage saves, and what all stages save together."""
    alone = part.loc[part["left_out"] != ablation.ALL, "saved"]
    every = part.loc[part["left_out"] == ablation.ALL, "saved"]
    if alone.empty or every.empty:
        return "Stages left out"
    span = f"{100 * every.min():.0f} to {100 * every.max():.0f} %"
    return f"One stage left out saves at most {100 * alone.max():.0f} % of the time, all of them {span}"


def together(rows):
    """A line a pass, step and M: savings of the single stages added up, of all at once, and TFLOPS.

    "left" is the speed of what remains: the products, their barriers and what no stage names. A stage that
    holds another (softmax holds the exponentials) stands for both in the sum.
    """
    part, key = saved(rows), ["direction", "step", "M"]
    both = part[part["left_out"] == "softmax"].set_index(key).index
    held = (part["left_out"] == "exponentials") & part.set_index(key).index.isin(both)
    single = part[(part["left_out"] != ablation.ALL) & ~held]
    every = part[part["left_out"] == ablation.ALL].set_index(key)
    table = pandas.DataFrame({"single, summed": single.groupby(key)["saved"].sum(), "all": every["saved"]})
    whole = rows[rows["left_out"].fillna("") == ""].set_index(key)
    for name, found in (
        ("TFLOPS", whole["tflops"]),
        ("left", every["tflops"]),
        ("roof", whole["roof_tflops"]),
    ):
        table[name] = pandas.to_numeric(found, errors="coerce")
    return table


def explained(rows):
    """A line a pass, step and M: the distance to the roofline, a share of the time, and what saves most.

    "of the distance": what that stage's saving is of it.
    """
    key = ["direction", "step", "M"]
    part = saved(rows)
    part = part[part["left_out"] != ablation.ALL].reset_index(drop=True)
    most = part.loc[part.groupby(key)["saved"].idxmax()].set_index(key)
    whole = together(rows)
    table = pandas.DataFrame({"distance": 1 - whole["TFLOPS"] / whole["roof"]})
    table["saves most"], table["saved"] = most["left_out"], most["saved"]
    return table.assign(**{"of the distance": table["saved"] / table["distance"]})


ROUNDS = {"staged": "staged", "the same again": "ink", "peeled": "peeled"}


def rounds(rows):
    """Dots: every sample over time, block after block and in turn (10_rounds)."""
    found = [order for order in orders.ORDERS if (rows["order"] == order).any()]
    figure, panels = plt.subplots(1, len(found), figsize=(9, 3.9), sharey=True, squeeze=False)
    for order, axes in zip(found, panels[0], strict=True):
        for name, step in ROUNDS.items():
            line = rows[(rows["order"] == order) & (rows["name"] == name)]
            if line.empty:
                continue
            color, middle = style.color_of(step), line["ms_p50"].median()
            axes.plot(line["at_s"], line["ms_p50"], ".", markersize=5, color=color, alpha=0.8)
            axes.plot([], [], "o", markersize=6, color=color, label=f"{name}: median {middle:.3f} ms")
            if order == "block after block":
                axes.hlines(middle, line["at_s"].min(), line["at_s"].max(), color=color, linewidth=1.2)
        axes.set_title(order, loc="left", fontsize=10)
        axes.set(xlabel="time since the first sample, s", xlim=(0, None))
        axes.legend(frameon=False, fontsize=8.5, loc="upper right", handletextpad=0.2)
    low, high = rows["ms_p50"].min(), rows["ms_p50"].max()
    panels[0, 0].set_ylim(low - 0.1 * (high - low), high + 0.55 * (high - low))
    panels[0, 0].set_ylabel("ms a call")
    return style.finish(
        figure, rounds_finding(rows), style.caption(rows) + " · the y axis does not begin at 0"
    )


def apart(rows, middle: str = "median", first="staged", second="the same again") -> dict[str, float]:
    """Order -> how much longer the second candidate seems to take than the first, as a share.

    ``middle`` is "median" or "mean" of a candidate's samples. By default both are the same kernel.
    """
    took = orders.middles(rows, middle)
    return {
        order: took[order, second] / took[order, first] - 1
        for order in orders.ORDERS
        if (order, first) in took
    }


def rounds_finding(rows) -> str:
    """How far a kernel is from itself in both orders."""
    gap = apart(rows)
    text = ", ".join(f"{100 * abs(share):.1f} % {order}" for order, share in gap.items())
    return f"One kernel timed twice differs from itself by {text}"
