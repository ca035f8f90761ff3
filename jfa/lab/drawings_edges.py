"""How the figures of notebook 07 are drawn: tiles with an edge, registers along the loop, what masks cost."""

import matplotlib.pyplot as plt
import pandas
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import PercentFormatter

from jfa.lab import edges, style

FILL = {"skipped": style.KINDS["free"], "bulk": "#cfe3f1", "edge": style.STEPS["peeled"]}
SAID = {"skipped": "not walked", "bulk": "bulk: no mask", "edge": "an edge: masked"}
LOOPS = {"masked": ("dynamic", "with masks"), "bulk": ("peeled", "bulk, peeled")}
ARCHES = {"hopper": "Hopper, a warp group's block", "blackwell": "Blackwell, a warp group's block"}
MASKS = {"shared queries": "dynamic", "causal": "peeled", "causal window of 256": "dq_released"}


def masks(rows):
    """Tiles of three sequences: skipped, bulk or masked, with the edges drawn in (07_masks)."""
    cases = list(dict.fromkeys(rows["case"]))
    figure, panels = plt.subplots(1, len(cases), figsize=(9, 4.3))
    for case, axes in zip(cases, panels, strict=True):
        part = rows[rows["case"] == case]
        queries, keys, left, right = edges.CASES[case]
        for row in part.itertuples():
            corner = (row.key_block * edges.BLOCK, row.query_block * edges.BLOCK)
            axes.add_patch(
                Rectangle(corner, edges.BLOCK, edges.BLOCK, facecolor=FILL[row.tile], edgecolor="white")
            )
        shift = keys - queries
        bounds = [
            (shift + right + 1) if right is not None else None,
            shift - left if left is not None else None,
        ]
        for bound in bounds:
            if bound is not None:
                axes.plot([bound, bound + queries], [0, queries], color=style.INK, linewidth=1.2)
        axes.plot([keys, keys], [0, queries], color=style.INK, linewidth=1.2)
        blocks = [-(-length // edges.BLOCK) * edges.BLOCK for length in (queries, keys)]
        axes.set(xlim=(-8, blocks[1] + 8), ylim=(max(blocks[0], 256) + 8, -8), xlabel="keys")
        axes.set_aspect("equal")
        axes.set_title(case, loc="left", fontsize=9)
        axes.set_xticks(range(0, blocks[1] + 1, 256))
        axes.set_yticks(range(0, blocks[0] + 1, 256))
        axes.spines[["left", "bottom"]].set_visible(False)
    panels[0].set_ylabel("query rows")
    walked = rows[rows["tile"] != "skipped"]
    share = walked.groupby("case", sort=False)["tile"].agg(lambda tiles: (tiles == "edge").mean())
    keys = [Patch(facecolor=FILL[tile], label=SAID[tile], edgecolor="#cccccc") for tile in FILL]
    figure.legend(
        handles=keys, loc="upper left", bbox_to_anchor=(0.005, 0.9), ncols=3, frameon=False, fontsize=9
    )
    title = "Of the walked tiles an edge runs through " + ", ".join(f"{100 * part:.0f} %" for part in share)
    note = (
        "decided by the kernels' own functions, run in the emulator · tiles of 128 x 128 · black: the edges"
    )
    return style.finish(figure, title, note, top=0.28)


def registers(rows):
    """Live registers from instruction to instruction of the block loop, masked and bulk (07_registers)."""
    arches = list(dict.fromkeys(rows["arch"]))
    figure, panels = plt.subplots(1, len(arches), figsize=(9, 3.6), sharey=True)
    found = edges.peaks(rows)
    for arch, axes in zip(arches, panels, strict=True):
        for loop, (step, label) in LOOPS.items():
            line = rows[(rows["arch"] == arch) & (rows["loop"] == loop)]
            color = style.color_of(step)
            axes.plot(line["place"], line["registers"], color=color, linewidth=1.6)
            most = found[arch, loop]
            text = f"{label}: {most['instructions']} instructions,\n{most['registers']} registers, "
            text += f"{most['predicates']} predicates"
            axes.text(
                0.98,
                0.97 - 0.17 * (loop == "bulk"),
                text,
                color=color,
                fontsize=9,
                transform=axes.transAxes,
                va="top",
                ha="right",
            )
        axes.set(xlabel="instruction of the loop", ylim=(0, 310))
        axes.set_title(ARCHES[arch], loc="left", fontsize=10)
    panels[0].set_ylabel("live registers of a thread")
    more = found["hopper", "masked"]["registers"] - found["hopper", "bulk"]["registers"]
    longer = found["hopper", "masked"]["instructions"] / found["hopper", "bulk"]["instructions"]
    title = f"On Hopper masks take {more} registers and make the loop {longer:.1f} times as long"
    return style.finish(
        figure, title, "counted in the compiled forward kernels, D = 128, by the disassembler's live ranges"
    )


def share(rows):
    """Bars: share of the tiles that need a mask, by lengths and kind of mask (07_share)."""
    names = list(dict.fromkeys(rows["lengths"]))
    figure, axes = plt.subplots(figsize=(7.6, 3.6))
    height = 0.8 / len(MASKS)
    for index, (mask, step) in enumerate(MASKS.items()):
        line = rows[rows["mask"] == mask].set_index("lengths")["edge_share"]
        at = [place - 0.4 + height * (index + 0.5) for place in range(len(names))]
        values = [line[name] for name in names]
        axes.barh(at, values, 0.9 * height, color=style.color_of(step), label=mask)
        for place, value in zip(at, values, strict=True):
            axes.text(value + 0.008, place, f"{100 * value:.0f} %", va="center", fontsize=8)
    axes.set_yticks(range(len(names)), names)
    axes.set(xlim=(0, 1.08), ylim=(len(names) - 0.45, -0.55), xlabel="share of the walked tiles with an edge")
    axes.xaxis.set_major_formatter(PercentFormatter(1))
    axes.tick_params(axis="y", length=0)
    axes.legend(
        frameon=False, fontsize=9, ncols=3, loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0.2
    )
    few = rows[rows["mask"] == "shared queries"]["edge_share"]
    title = f"Shared queries mask {100 * few.min():.0f} to {100 * few.max():.0f} % of their tiles: "
    title += "short histories are all edge"
    return style.finish(figure, title, "tiles of 128 x 128, counted from the lengths by the kernels' rule")


def gain(rows):
    """Dots: measured gain of peeling over the share of tiles with an edge; lines: predicted (07_gain)."""
    rows = rows.copy()
    for column in ("predicted_gain_fast", "predicted_gain_slow", "measured_gain"):
        rows[column] = pandas.to_numeric(rows[column], errors="coerce")
    forward = rows[rows["direction"] == "forward"].sort_values("edge_share")
    same = forward["block_n"] == edges.BLOCK
    figure, axes = plt.subplots(figsize=(9, 3.9))
    color = style.color_of("peeled")
    lines = {
        "predicted_gain_slow": ("--", "predicted, an instruction\nevery other clock"),
        "predicted_gain_fast": (":", "predicted, an instruction\nevery clock"),
    }
    for column, (dashes, label) in lines.items():
        axes.plot(forward["edge_share"], forward[column], dashes, color=style.FAINT, lw=1.4, label=label)
    marks = {128: "o", 256: "s", 512: "^"}
    for m, part in forward[same].groupby("M"):
        shown = {"color": color, "marker": marks.get(m, "o"), "s": 40, "label": f"forward, M = {m}"}
        axes.scatter(part["edge_share"], part["measured_gain"], zorder=3, **shown)
    short = forward[~same]
    shown = {"facecolor": "white", "edgecolor": color, "s": 40, "zorder": 3}
    for place, row in enumerate(short.itertuples()):
        label = "hollow: forward, with\nsmaller blocks as well" if place == 0 else None
        mark = marks.get(row.M, "o")
        axes.scatter(row.edge_share, row.measured_gain, marker=mark, label=label, **shown)
    backward = rows[rows["direction"] == "backward"]
    axes.scatter(
        backward["edge_share"], backward["measured_gain"], marker="x", color=style.INK, s=28, label="backward"
    )
    axes.axhline(1, color="#cccccc", linewidth=0.8, zorder=0)
    axes.set(xlim=(-0.03, 1.05), ylim=(0.9, 1.05 * rows["measured_gain"].max()))
    axes.set(ylabel="times as fast with peeling", xlabel="share of the tiles that have an edge")
    axes.set_xticks([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    axes.xaxis.set_major_formatter(PercentFormatter(1))
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    peeling = forward[same]["measured_gain"]
    title = f"Peeled, long histories are {peeling.min():.2f} to {peeling.max():.2f} times as fast forward"
    if len(backward):
        low, high = backward["measured_gain"].min(), backward["measured_gain"].max()
        title += f", {low:.2f} to {high:.2f} backward"
    note = "the tile list given · hollow: blocks of 64 keys for short sequences, so not peeling alone"
    return style.finish(figure, title, f"{note} · {style.caption(rows)}")
