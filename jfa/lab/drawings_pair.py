"""How the figures of notebook 08 are drawn: the exchange of dS, traffic, order, measured steps."""

import matplotlib.pyplot as plt
from matplotlib.patches import FancyArrowPatch, Rectangle

from jfa.lab import pair, pictures, recorded, style

COUNTED = "counted in the emulator's trace, no GPU involved"
CTAS = (style.color_of("load"), style.color_of("reduce"))
ALONE, PAIRED = style.color_of("peeled"), style.color_of("two_cta")


def exchange(rows):
    """dS of a pair before and after the exchange, a quarter a rectangle (08_exchange)."""
    figure, axes = plt.subplots(figsize=(7.2, 3.7))
    left, right = 0.0, 2.9
    for row in rows.itertuples():
        x, y = row.keys_of, 0.6 * row.rows_half
        for start, owner in ((left, row.made), (right, row.needed)):
            box = Rectangle((start + x, y), 1, 0.6, facecolor=CTAS[owner], edgecolor="white", linewidth=2)
            axes.add_patch(box)
            ink = style.text_color(CTAS[owner])
            text = f"in CTA {owner}"
            axes.text(start + x + 0.5, y + 0.3, text, ha="center", va="center", color=ink, fontsize=9)
    for start, title in ((left, "made: a CTA has its keys"), (right, "needed: dQ of a row sums all keys")):
        axes.text(start, -0.28, title, fontsize=9.5, weight="bold", va="bottom")
        for side in range(2):
            label = f"keys of CTA {side}"
            axes.text(start + side + 0.5, -0.04, label, ha="center", va="bottom", fontsize=8)
    for half in range(2):
        axes.text(
            -0.06, 0.6 * half + 0.3, f"rows {64 * half}-{64 * half + 63}", ha="right", va="center", fontsize=8
        )
    crossing = rows[rows["crosses"] == 1]
    arrow = FancyArrowPatch(
        (2.08, 0.6), (2.82, 0.6), arrowstyle="simple", mutation_scale=22, color=style.FAINT, linewidth=0
    )
    axes.add_patch(arrow)
    moved = crossing["bytes"].sum() / 1024
    axes.text(2.45, 0.34, f"{moved:.0f} KiB\nby DSMEM", ha="center", va="center", fontsize=9)
    axes.text(2.45, 0.86, "the other\nhalf stays", ha="center", va="center", fontsize=8, color=style.FAINT)
    axes.set(xlim=(-0.55, 4.95), ylim=(1.25, -0.4))
    axes.axis("off")
    title = f"Half of a pair's dS crosses over, {moved:.0f} KiB for 128 query rows"
    note = f"dS of 128 query rows and a pair's 256 keys · colour: whose shared memory · {COUNTED}"
    return style.finish(figure, title, note)


GROUPS = {
    "blackwell": {
        "operands of the\ntensor cores": pair.PRODUCTS,
        "copied in by TMA": ("arrives",),
        "dS sent to the\nother CTA": ("exchange",),
        "dQ added to memory": ("dQ added",),
    },
    "hopper": {
        "copied in by TMA": ("arrives",),
        "of that, asked of L2": ("asked of L2",),
        "dQ added to memory": ("dQ added",),
    },
}
NAMES = {
    "blackwell": "Blackwell: a pair shares each product",
    "hopper": "Hopper: a pair shares loads (multicast)",
}


def traffic(rows):
    """Bars: KiB a block of scores, a CTA alone and one of a pair, both targets (08_traffic)."""
    sizes = [len(groups) for groups in GROUPS.values()]
    figure, panels = plt.subplots(2, 1, figsize=(7.2, 5.0), sharex=True, height_ratios=sizes)
    table = rows.set_index(["arch", "step", "what"])["kib"]
    for axes, (arch, groups) in zip(panels, GROUPS.items(), strict=True):
        for index, (step, color) in enumerate((("peeled", ALONE), ("two_cta", PAIRED))):
            kib = [sum(table[arch, step, what] for what in parts) for parts in groups.values()]
            at = [place + 0.38 * (index - 0.5) for place in range(len(groups))]
            bars = axes.barh(at, kib, 0.36, color=color, label=pair.TARGETS[step])
            axes.bar_label(bars, [f"{value:.0f}" for value in kib], padding=3, fontsize=8)
        axes.set_yticks(range(len(groups)), list(groups), fontsize=9)
        axes.set_ylim(len(groups) - 0.45, -0.55)
        axes.tick_params(axis="y", length=0)
        axes.set_title(NAMES[arch], loc="left", fontsize=10)
    panels[0].legend(frameon=False, fontsize=9, loc="lower right")
    panels[1].set_xlabel("KiB a CTA moves for 128 x 128 scores")
    panels[1].set_xlim(0, 290)
    before, after = (sum(table["blackwell", step, what] for what in pair.PRODUCTS) for step in pair.TARGETS)
    title = (
        f"A pair reads {100 * (1 - after / before):.0f} % fewer operands and adds half of dQ, but loads more"
    )
    return style.finish(figure, title, f"five products of the backward pass, D = 128 · {COUNTED}")


def order(rows):
    """Lanes of a pair in the emulator's order of operations (08_order)."""
    title = "dQ of a block waits until both CTAs have sent their half of dS"
    note = (
        "256 keys and query blocks 0 to 2 on the Blackwell kernel in the emulator: the order of "
        "beginnings and ends, no time · products of both CTAs are issued by the first one"
    )
    figure = pictures.timeline(rows.to_dict("records"), title, lanes=list(pair.LANES), note=note)
    figure.axes[0].set_xlabel("order of the run")
    figure.axes[0].set_xticks([])
    figure.axes[0].get_legend().remove()
    return figure


def steps(rows):
    """Bars: measured TFLOPS of the Hopper backward without and with pairs, by shape (08_steps)."""
    rows = recorded.timed(rows)
    shapes = sorted({(row.M, row.N, row.density) for row in rows.itertuples()})
    figure, axes = plt.subplots(figsize=(9, 3.6))
    wide = rows.pivot_table(index=["M", "N", "density"], columns="step", values="tflops").reindex(shapes)
    for index, (step, color) in enumerate((("peeled", ALONE), ("two_cta", PAIRED))):
        at = [place + 0.4 * (index - 0.5) for place in range(len(shapes))]
        bars = axes.bar(
            at, wide[step], 0.38, color=color, label=f"{style.label_of(step)}: {pair.TARGETS[step]}"
        )
        axes.bar_label(bars, [f"{value:.0f}" for value in wide[step]], fontsize=7, padding=2)
    left = [pair.predicted_ratio(pair.lengths_of(shape)) for shape in shapes]
    for place, (speed, share) in enumerate(zip(wide["peeled"], left, strict=True)):
        label = "what empty second CTAs alone would leave of it (predicted)" if place == 0 else None
        axes.plot([place + 0.01, place + 0.39], 2 * [speed * share], color=style.INK, lw=1.6, label=label)
    labels = [f"M {m}\nN {n}\n{density:g}" for m, n, density in shapes]
    axes.set_xticks(range(len(shapes)), labels, fontsize=8)
    axes.set(ylim=(0, 1.12 * wide.max().max()), ylabel="backward, TFLOPS")
    axes.legend(
        frameon=False, fontsize=8, ncols=3, loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0.2
    )
    axes.set_xlabel("query rows, longest allowed history, density")
    ratio = (wide["two_cta"] / wide["peeled"]).dropna()
    speed = f"{ratio.min():.2f} to {ratio.max():.2f} times"
    title = f"Measured on Hopper: empty CTAs make a pair slower, {speed} as fast"
    if ratio.max() >= 1:
        title = f"Measured on Hopper: a pair has {speed} the speed of CTAs alone"
    return style.finish(figure, title, style.caption(rows))
