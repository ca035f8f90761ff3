"""How notebook 10 draws stamps: a CTA's groups over time, and where the clocks of an item go."""

import matplotlib.pyplot as plt
from matplotlib.ticker import PercentFormatter

from jfa.lab import stamps, style
from jfa.lab.drawings_profile import case_text

KINDS = {
    stamps.SCORES: "mma",
    stamps.SOFTMAX: "softmax",
    stamps.LAST: "reduce",
    stamps.WRITE: "store",
    stamps.LOAD: "load",
} | dict.fromkeys(stamps.WAITS, "wait")
WAITING = "waits"
BARS = (stamps.SCORES, stamps.SOFTMAX, stamps.LAST, stamps.WRITE, WAITING)


def shares(rows):
    """Share of an item's clocks by what a group does, a line a shape; waits are one column, `WAITING`.

    What two stamps with nothing in between take is taken off every span.
    """
    part = rows[rows["kind"] == "mean"].copy()
    part["case"] = [case_text(row) for row in part.to_dict("records")]
    nothing = part[part["what"] == stamps.EMPTY].set_index("case")["clocks"]
    part["clocks"] = (part["clocks"] - part["spans"] * part["case"].map(nothing)).clip(lower=0)
    table = part.pivot(index="case", columns="what", values="clocks").loc[list(dict.fromkeys(part["case"]))]
    table[WAITING] = table[list(stamps.WAITS)].sum(axis=1)
    table = table[list(BARS)]
    return table.div(table.sum(axis=1), axis=0)


def clocks(rows):
    """Bars: a CTA's lanes over time, then shares of an item's clocks, a bar a shape (10_stamps)."""
    table = shares(rows)
    figure, (over, bars) = plt.subplots(2, 1, figsize=(8.6, 5.4), height_ratios=[1, 1.5])
    shown = rows[(rows["kind"] == "span") & (rows["what"] != stamps.EMPTY)]
    lanes = [stamps.LOADER, *stamps.GROUPS]
    for row in shown.to_dict("records"):
        look = {"color": style.KINDS[KINDS[row["what"]]], "edgecolor": "white", "linewidth": 0.4}
        over.barh(lanes.index(row["lane"]), row["clocks"], 0.72, left=row["begin"], **look)
    groups = shown[shown["lane"] != stamps.LOADER]
    over.set_xlim(0, (groups["begin"] + groups["clocks"]).max())
    over.set_yticks(range(len(lanes)), lanes)
    over.invert_yaxis()
    over.set_xlabel("clocks of the SM")
    case = case_text(shown.iloc[0].to_dict())
    over.set_title(f"{case}: items {shown['item'].min()} to {shown['item'].max()} of a CTA", loc="left")
    left = table.iloc[:, 0] * 0
    for what in table:
        color = style.KINDS[KINDS.get(what, "wait")]
        bars.barh(table.index, table[what], 0.7, left=left, color=color, edgecolor="white", label=what)
        for place, (value, start) in enumerate(zip(table[what], left)):
            if value > 0.04:
                text = f"{100 * value:.0f} %"
                ink = style.text_color(color)
                bars.text(start + value / 2, place, text, ha="center", va="center", fontsize=8.5, color=ink)
        left = left + table[what]
    bars.invert_yaxis()
    bars.set_xlim(0, 1)
    bars.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    bars.set_xlabel("share of a group's clocks for an item")
    bars.legend(
        frameon=False, fontsize=8.5, ncols=5, loc="lower left", bbox_to_anchor=(-0.02, 1), handlelength=1
    )
    slower = rows["slower"]
    note = f"with stamps {100 * (slower.min() - 1):.0f} to {100 * (slower.max() - 1):.0f} % slower"
    return style.finish(figure, finding(table), f"{style.caption(rows)} · {note}")


def finding(table) -> str:
    """How much of its time a consumer group waits."""
    low, high = 100 * table[WAITING].min(), 100 * table[WAITING].max()
    return f"A consumer group waits for others {low:.0f} to {high:.0f} % of its time"
