"""How the figures of notebook 04 are drawn: SMs over time, balance, empty tiles, measured steps."""

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.ticker import PercentFormatter

from jfa.lab import recorded, style

PREDICTED = "predicted from the kernels' own tile lists and deals on 132 SMs, not measured"
UNIT = "key tiles"
DEALS = {
    "natural order": "warp_specialized",
    "sorted": "baseline",
    "boustrophedon": "balanced",
    "dynamic": "dynamic",
    "whole sequences": "warp_specialized",
    "listed tiles": "balanced",
}
CASES = {
    "static, empty tiles kept": "warp_specialized",
    "dynamic, empty tiles kept": "peeled",
    "dynamic, pruned": "dynamic",
}
ONE_QUERY_TILE = "dynamic, one Q tile"  # as in jfa.lab.ladder, which needs Triton
STEPS = ("warp_specialized", "balanced", ONE_QUERY_TILE, "dynamic")


def _weights(events, last: float, bins: int = 400) -> np.ndarray:
    """Key tiles of the item that each SM works on at the middle of each bin, NaN where it is idle."""
    found = np.full((int(events["sm"].max()) + 1, bins), np.nan)
    middles = (np.arange(bins) + 0.5) * last / bins
    for event in events.itertuples():
        first, end = np.searchsorted(middles, (event.start, event.end))
        found[event.sm, first:end] = event.tiles
    return found


def heatmap(rows, title: str, note: str):
    """SM by time, a panel a deal; the darker, the more key tiles the item has that an SM works on."""
    last, heaviest = rows["end"].max(), rows["tiles"].max()
    deals = list(dict.fromkeys(rows["deal"]))
    shades = LinearSegmentedColormap.from_list("weight", ["#cfe3f1", style.KINDS["load"], "#00263f"])
    figure, axes = plt.subplots(
        len(deals), 1, figsize=(7.2, 1.15 * len(deals) + 1.1), sharex=True, squeeze=False
    )
    for deal, panel in zip(deals, axes[:, 0], strict=True):
        events = rows[rows["deal"] == deal]
        done, worked = events["end"].max(), (events["end"] - events["start"]).sum()
        sms = int(events["sm"].max()) + 1
        image = panel.imshow(
            _weights(events, last),
            cmap=shades,
            vmin=1,
            vmax=heaviest,
            aspect="auto",
            extent=(0, last, sms, 0),
            interpolation="nearest",
        )
        panel.axvline(done, color=style.KINDS["mma"], linewidth=1.5)
        panel.set_title(f"{deal}: {done:g} {UNIT}, {100 * worked / (sms * done):.0f} % busy", loc="left")
        panel.set(ylabel="SM", yticks=[0, sms])
    axes[-1, 0].set(xlabel=f"time, {UNIT}", xlim=(0, 1.01 * last))
    finished = style.finish(figure, title, note)
    if heaviest > 1:
        figure.subplots_adjust(right=0.89)
        bar = figure.colorbar(image, cax=figure.add_axes([0.905, 0.3, 0.018, 0.4]))
        bar.set_label("key tiles of the item", fontsize=9)
        bar.outline.set_visible(False)
    return finished


def forward_map(rows):
    """SM by time, one deal a panel (04_forward)."""
    ends = rows.groupby("deal")["end"].max()
    gain = 1 - ends["boustrophedon"] / ends["natural order"]
    title = f"Predicted: sorted, dealt back and forth, SMs end {100 * gain:.0f} % earlier"
    return heatmap(rows, title, f"768 sequences of density 0.5, 4 heads · {PREDICTED}")


def backward_map(rows):
    """The same for the backward pass (04_backward)."""
    ends = rows.groupby("deal")["end"].max()
    gain = 1 - ends["listed tiles"] / ends["whole sequences"]
    title = f"Predicted, backward: key tiles weigh the same, a list ends {100 * gain:.0f} % earlier"
    return heatmap(rows, title, f"943 real histories, 4 heads · {PREDICTED}")


def balance(rows):
    """Dots: busy share of the SMs, a line of dots for each set of lengths (04_balance)."""
    directions = list(dict.fromkeys(rows["direction"]))
    figure, panels = plt.subplots(1, len(directions), figsize=(9, 3.4), sharex=True)
    for direction, axes in zip(directions, panels, strict=True):
        part = rows[rows["direction"] == direction]
        names = list(dict.fromkeys(part["lengths"]))
        deals = list(dict.fromkeys(part["deal"]))
        height = 0.8 / len(deals)
        for index, deal in enumerate(deals):
            line = part[part["deal"] == deal].set_index("lengths")["predicted_busy"]
            at = [place - 0.4 + height * (index + 0.5) for place in range(len(names))]
            color = style.color_of(DEALS[deal])
            axes.barh(at, [line[name] for name in names], 0.92 * height, color=color, label=deal)
        axes.set_yticks(range(len(names)), names)
        axes.set(xlim=(0, 1), ylim=(len(names) - 0.45, -0.55), xlabel=f"{direction}: predicted busy share")
        axes.xaxis.set_major_formatter(PercentFormatter(1))
        axes.tick_params(axis="y", length=0)
        axes.legend(
            frameon=False, fontsize=9, ncols=2, loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0.2
        )
    worst = rows[rows["deal"] == "natural order"]["predicted_busy"].min()
    best = rows[rows["deal"] == "dynamic"]["predicted_busy"].min()
    title = f"Predicted: natural order leaves SMs idle up to {100 * (1 - worst):.0f} % of the time, "
    title += f"a dynamic deal {100 * (1 - best):.0f} %"
    return style.finish(figure, title, PREDICTED)


def empty(rows):
    """Lines: efficiency over the share of empty sequences (04_empty)."""
    figure, axes = plt.subplots(figsize=(7.2, 3.4))
    for case, step in CASES.items():
        line = rows[rows["case"] == case]
        color = style.color_of(step)
        axes.plot(line["empty_share"], line["predicted_efficiency"], color=color, marker="o", markersize=4)
        last = line.iloc[-1]
        axes.annotate(
            case,
            (last["empty_share"], last["predicted_efficiency"]),
            xytext=(6, 6 if case == "dynamic, empty tiles kept" else -6 if "static" in case else 0),
            textcoords="offset points",
            color=color,
            fontsize=9,
            va="center",
        )
    axes.set(xlim=(-0.02, 1.12), ylim=(0, None), xlabel="share of the sequences that have no keys")
    axes.set_ylabel("useful share of the time")
    axes.set_xticks([0, 0.2, 0.4, 0.6, 0.8])
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(PercentFormatter(1))
    at = rows[rows["empty_share"] == 0.6].set_index("case")["predicted_efficiency"]
    factor = at["dynamic, pruned"] / at["dynamic, empty tiles kept"]
    title = f"Predicted: empty tiles cost under a dynamic deal too, {factor:.1f}x at 60 % empty"
    return style.finish(figure, title, f"real histories, some of them emptied · {PREDICTED}")


def steps(rows):
    """Bars: measured TFLOPS of the first Hopper steps over jagged shapes (04_steps)."""
    rows = recorded.timed(rows[rows["step"].isin(STEPS)])
    if "direction" not in rows:
        rows["direction"] = "forward"
    directions = [name for name in ("forward", "backward") if (rows["direction"] == name).any()]
    figure, panels = plt.subplots(
        len(directions), 1, figsize=(9, 2.3 * len(directions) + 1.3), sharex=True, squeeze=False
    )
    for direction, axes in zip(directions, panels[:, 0], strict=True):
        part = rows[rows["direction"] == direction]
        shapes = sorted({(row.M, row.N, row.density) for row in part.itertuples()})
        names = [step for step in STEPS if (part["step"] == step).any()]
        for index, step in enumerate(names):
            line = part[part["step"] == step].set_index(["M", "N", "density"])["tflops"]
            at = [place + 0.8 / len(names) * (index + 0.5) - 0.4 for place in range(len(shapes))]
            heights = [line.get(shape, 0.0) for shape in shapes]
            half = step == ONE_QUERY_TILE  # no step of its own: the deal without the tile
            color = style.color_of("dynamic" if half else step)
            look = {"facecolor": "white", "edgecolor": color, "hatch": "////"} if half else {"color": color}
            axes.bar(at, heights, 0.74 / len(names), label=style.label_of(step), **look)
        axes.set(ylim=(0, None), ylabel=f"{direction}, TFLOPS")
        axes.set_xticks(
            range(len(shapes)), [f"M {m}\nN {n}\n{density:g}" for m, n, density in shapes], fontsize=9.5
        )
    panels[0, 0].legend(frameon=False, fontsize=9.5, ncols=4, loc="lower left", bbox_to_anchor=(0, 1))
    panels[-1, 0].set_xlabel("query rows, longest allowed history, density")
    return style.finish(figure, _gain(rows), style.caption(rows))


def _gain(rows) -> str:
    wide = rows[rows["direction"] == "forward"].pivot_table(
        index=["M", "N", "density"], columns="step", values="tflops"
    )
    if ONE_QUERY_TILE not in wide:
        ratio = (wide["dynamic"] / wide["warp_specialized"]).dropna()
        times = f"{ratio.min():.2f} to {ratio.max():.2f} times"
        return f"Measured, forward: dynamic is {times} natural order, by deal and tiling"
    deal = wide[ONE_QUERY_TILE] / wide["balanced"]
    tile = wide["dynamic"] / wide[ONE_QUERY_TILE]
    return (
        f"Forward, measured: a run-time deal {_percent(deal.dropna())}, "
        f"a second Q tile {_percent(tile.dropna())}"
    )


def _percent(ratios) -> str:
    """What ratios say, in a few words: "gains 3 to 5 %", "loses ...", or "changes at most ..."."""
    low, high = sorted(abs(100 * (ratio - 1)) for ratio in (ratios.min(), ratios.max()))
    if ratios.min() >= 1 or ratios.max() <= 1:
        return f"{'gains' if ratios.min() >= 1 else 'loses'} {low:.0f} to {high:.0f} %"
    return f"changes at most {high:.0f} %"
