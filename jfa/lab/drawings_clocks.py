"""How notebook 10 draws what the clock does: a time after different neighbours, and everyone's own clock."""

import matplotlib.pyplot as plt

from jfa.lab import neighbours, reach, style
from jfa.lab.cases import shape_text
from jfa.lab.results import DIRECTIONS

BEFORE = {
    neighbours.IDLE: "softmax",
    neighbours.COPY: "load",
    "the baseline": "mma",
    "itself": "staged",
    "a backward pass": "ink",
}


def neighbour_curves(rows):
    """Lines: time of one kernel after different neighbours, from their end on (10_neighbours)."""
    table = neighbours.curves(rows)
    figure, axes = plt.subplots(figsize=(7.2, 3.9))
    for name in table:
        axes.plot(table.index, table[name], color=style.color_of(BEFORE[name]), label=f"after {name}")
    axes.axvspan(0, neighbours.SETTLE_MS, color=style.FAINT, alpha=0.15, linewidth=0)
    top = table.max().max() + 0.25 * (table.max().max() - table.min().min())
    said = "grey: untimed in notebook 09's benchmark"
    axes.text(neighbours.SETTLE_MS + 4, top, said, va="top", fontsize=8.5, color=style.INK)
    low = 0.96 * table.min().min()
    axes.set(xlim=(0, table.index.max()), ylim=(low, top * 1.005))
    axes.set(xlabel="time since the neighbour ended, ms", ylabel="ms a call")
    axes.legend(frameon=False, fontsize=8.5, loc="lower right")
    caption = style.caption(rows) + " · medians · the y axis does not begin at 0"
    return style.finish(figure, neighbours_finding(table), caption)


def neighbours_finding(table) -> str:
    """How far apart the neighbours' curves are at first, and at the end of the untimed calls."""
    gap = neighbours.spread(table)
    first, then = gap.iloc[0], gap[gap.index > neighbours.SETTLE_MS].iloc[0]
    later = f"{neighbours.SETTLE_MS:.0f} ms later by {100 * then:.0f} %"
    return f"What ran before changes a kernel's time by {100 * first:.0f} %, {later}"


OURS, THEIRS = "jfa", "fa4"
LOOKS = {OURS: ("stationary", "o", "ours"), THEIRS: (THEIRS, "D", ""), "cudnn": ("cudnn", "s", "")}


def alone(rows):
    """Rows of kernels that ran alone, one a (pass, shape, implementation); short jagged ones first."""
    kept = rows[rows["direction"].isin(DIRECTIONS) & rows["ms_p50"].notna()].copy()
    kept["shape"] = [_shape(row) for row in kept.to_dict("records")]
    kept["other"], kept["mean"] = kept["suite"] != "jagged", kept["N"] * kept["density"]
    return kept.sort_values(["direction", "other", "mean", "M"], ascending=[False, True, True, True])


def _shape(row) -> str:
    return shape_text(row) + (f" density {row['density']:g}" if row["suite"] == "jagged" else "")


def side_by_side(rows, column: str):
    """A column of `alone` rows: a DataFrame, a line a (direction, shape), a column an implementation."""
    kept = alone(rows)
    table = kept.pivot(index=["direction", "shape"], columns="impl", values=column)
    return table.loc[list(dict.fromkeys(zip(kept["direction"], kept["shape"])))]


def clocks(rows):
    """Dots: SM clock of a kernel that has the GPU to itself, a line a shape, a panel a pass (10_clocks)."""
    table, watts = (side_by_side(rows, column) for column in ("sm_clock_mhz", "power_w"))
    figure, panels = plt.subplots(1, 2, figsize=(9.2, 4.2), sharex=True, sharey=True)
    for axes, direction in zip(panels, DIRECTIONS):
        part = table.loc[direction]
        for name, (color, marker, label) in LOOKS.items():
            if name in part:
                label = label or style.label_of(name)
                front = 3 if name == OURS else 2
                look = {"color": style.color_of(color), "label": label, "zorder": front}
                axes.plot(part[name], part.index, marker, **look)
        for shape, line in part.iterrows():
            ours, theirs = line[OURS], line[THEIRS]
            axes.plot((ours, theirs), (shape, shape), color=style.FAINT, linewidth=1, zorder=0)
        for name, side in ((OURS, -1), (THEIRS, 1)):
            for shape, power in watts.loc[direction, name].items():
                if power < 0.95 * rows["power_limit_w"].max():
                    place = {"xytext": (8 * side, 0), "textcoords": "offset points", "va": "center"}
                    where = (part.loc[shape, name], shape)
                    axes.annotate(
                        f"{power:.0f} W", where, ha="right" if side < 0 else "left", fontsize=8, **place
                    )
        axes.set_title(direction, loc="left")
        axes.set_xlabel("SM clock, MHz")
        axes.grid(axis="y")
        axes.set_xlim(right=1.07 * table[THEIRS].max())
    panels[0].invert_yaxis()
    panels[1].legend(frameon=False, fontsize=8.5, loc="upper left", bbox_to_anchor=(1, 1))
    notes = ("each alone for a second", "at the limit of power but where watts stand")
    return style.finish(figure, clocks_finding(table), " · ".join((style.caption(rows), *notes)))


def clocks_finding(table) -> str:
    """At how many shapes and passes our kernels run at a lower clock than FlashAttention-4's."""
    table = table[[OURS, THEIRS]].dropna()
    lower = (table[OURS] < table[THEIRS]).sum()
    return (
        f"Alone, our kernel's clock is below FlashAttention-4's at {lower} of {len(table)} shapes and passes"
    )


def slowed(rows):
    """Rate after a second over that when rested, of the product and of our passes, by name (09_reach)."""
    found = reach.table(rows)
    named = found.loc[sorted([reach.PRODUCT, *reach.ours(found).index])]
    return named[reach.LONG.name] / named[reach.RESTED.name]
