"""How notebook 10 draws stamps: a CTA's groups over time, and where the clocks of an item go."""

import matplotlib.pyplot as plt
import pandas
from matplotlib.ticker import PercentFormatter

from jfa.lab import stamps, style
from jfa.lab.targets import Target, case_text

KINDS = {
    stamps.SCORES: "mma",
    stamps.SOFTMAX: "softmax",
    stamps.LAST: "reduce",
    stamps.WRITE: "store",
    stamps.NEXT: "schedule",
    stamps.LOAD: "load",
} | dict.fromkeys(stamps.WAITS, "wait")
WAITING = "waits"
BARS = (stamps.SCORES, stamps.SOFTMAX, stamps.LAST, stamps.WRITE, stamps.NEXT, WAITING)
LANES = {stamps.LOADER: "loader, also waiting"} | {name: name for name in stamps.GROUPS}


def kind(rows, name: str):
    """The rows of a kind, "mean" or "span"; columns that are empty for the other kind are made numeric."""
    part = rows[rows["kind"] == name].copy()
    for column in part.columns.intersection(["clocks", "spans", "item", "begin"]):
        part[column] = pandas.to_numeric(part[column], errors="coerce")
    return part


def label(row) -> str:
    """A shape with its density, where that is not the one of most counters."""
    usual = row["suite"] != "jagged" or row["density"] == Target("forward", "staged").density
    return case_text(row) + ("" if usual else f", density {row['density']:g}")


def shares(rows):
    """Share of an item's clocks by what a group does, a line a shape; waits are one column, `WAITING`.

    Every span holds what a stamp costs. That is at most the mean of the shortest kind of span, which is taken
    off all of them: so waits are rather too short than too long.
    """
    part = kind(rows, "mean")
    part["case"] = [case_text(row) for row in part.to_dict("records")]
    cost = (part["clocks"] / part["spans"]).groupby(part["case"]).min()
    part["clocks"] -= part["spans"] * part["case"].map(cost)
    table = part.pivot(index="case", columns="what", values="clocks").loc[list(dict.fromkeys(part["case"]))]
    table[WAITING] = table[list(stamps.WAITS)].sum(axis=1)
    table = table[list(BARS)]
    return table.div(table.sum(axis=1), axis=0)


def clocks(rows):
    """Bars: a CTA's lanes over time, then shares of an item's clocks, a bar a shape (10_stamps)."""
    table = shares(rows).rename({case_text(row): label(row) for row in rows.to_dict("records")})
    figure, (over, bars) = plt.subplots(2, 1, figsize=(8.6, 5.6), height_ratios=[1, 1.5])
    _timeline(over, kind(rows, "span"))
    left = table.iloc[:, 0] * 0
    for what in table:
        color = style.KINDS[KINDS.get(what, "wait")]
        bars.barh(table.index, table[what], 0.7, left=left, color=color, edgecolor="white", label=what)
        for place, (value, start) in enumerate(zip(table[what], left)):
            if value > 0.035:
                words = {"ha": "center", "va": "center", "fontsize": 8.5, "color": style.text_color(color)}
                bars.text(start + value / 2, place, f"{100 * value:.0f} %", **words)
        left = left + table[what]
    bars.invert_yaxis()
    bars.set_xlim(0, 1)
    bars.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    bars.set_xlabel("share of a group's clocks for an item")
    place = {"loc": "lower left", "bbox_to_anchor": (-0.02, 1), "handlelength": 1}
    bars.legend(frameon=False, fontsize=8.5, ncols=len(BARS), **place)
    low, high = (100 * (value - 1) for value in (rows["slower"].min(), rows["slower"].max()))
    note = f"with stamps {low:.0f} to {high:.0f} % slower · bars without what stamps cost"
    return style.finish(figure, finding(table), f"{style.caption(rows)} · {note}")


def _timeline(axes, shown):
    """Bars of the loader and of both groups over time, with the number of each item."""
    lanes = list(LANES)
    groups = shown[shown["lane"] != stamps.LOADER]
    stop = (groups["begin"] + groups["clocks"]).max()
    named = set()
    for row in shown[shown["what"] != stamps.EMPTY].to_dict("records"):
        color, place = style.KINDS[KINDS[row["what"]]], lanes.index(row["lane"])
        axes.barh(
            place, row["clocks"], 0.72, left=row["begin"], color=color, edgecolor="white", linewidth=0.4
        )
        key = (row["lane"], row["item"])
        if row["what"] in (stamps.SOFTMAX, stamps.LOAD) and key not in named:
            named.add(key)
            begin, end = max(row["begin"], 0), min(row["begin"] + row["clocks"], stop)
            words = {"ha": "center", "va": "center", "fontsize": 8, "color": style.text_color(color)}
            axes.text((begin + end) / 2, place, f"{row['item']:.0f}", **words)
    axes.set_xlim(0, stop)
    axes.set_yticks(range(len(lanes)), LANES.values())
    axes.invert_yaxis()
    axes.set_xlabel("clocks of the SM")
    first = shown.iloc[0].to_dict()
    axes.set_title(
        f"{label(first)}: items {groups['item'].min():.0f} to {groups['item'].max():.0f} of a CTA", loc="left"
    )


def finding(table) -> str:
    """How much of its time a consumer group waits."""
    low, high = 100 * table[WAITING].min(), 100 * table[WAITING].max()
    return f"A consumer group waits for loads or other warps {low:.0f} to {high:.0f} % of its time"
