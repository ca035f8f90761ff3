"""How the figures of notebooks 05 and 06 are drawn: the contended reduction, staging, early release."""

import matplotlib.pyplot as plt
from matplotlib.ticker import NullLocator

from jfa.lab import pictures, recorded, replay, staging, style

PREDICTED = "predicted: the emulator's trace of one CTA charged with rates, not measured"
NAMES = {"hopper": "H200, a turn of 64 rows", "blackwell": "B200, a turn of 128 rows"}
BASIS = {"hopper": "measured", "blackwell": "assumed"}  # where the rate of adds comes from
STEPS = ("dynamic", "dq_staged", "dq_released", "peeled")
# What is measured of the reduction: label ("" where another line's stands for it), colour, dashes, mark.
ADDS = {
    ("store", 64, 64, 2): ("plain stores", style.INK, ":", "o"),
    ("reduce-add", 128, 16, 2): ("TMA adds, 16 columns", style.STEPS["peeled"], "-", "o"),
    ("reduce-add", 64, 64, 1): ("", style.STEPS["stationary"], "-", "v"),
    ("reduce-add", 64, 64, 4): ("", style.STEPS["ds_buffered"], ":", "x"),
    ("reduce-add", 64, 64, 2): ("TMA adds, 1, 2 or 4 tiles in flight", style.STEPS["dq_released"], "-", "o"),
    ("atomics", 64, 64, 0): ("atomics of the threads", style.STEPS["warp_specialized"], "--", "o"),
}
QUERIES = (128, 256, 512)  # rows of a shared query block, whose dQ the marks stand for


def reduction(rows):
    """Lines: measured bandwidth over the number of distinct destinations (05_reduction)."""
    from jfa.lab.reduction import destinations_of

    figure, axes = plt.subplots(figsize=(7.6, 3.9))
    ends, lines, depths = [], [], {}
    for key, (label, color, dashes, mark) in ADDS.items():
        chosen = (rows["what"] == key[0]) & (rows["in_flight"] == key[3])
        line = rows[chosen & (rows["tile_rows"] == key[1]) & (rows["tile_columns"] == key[2])]
        line = line.sort_values("destinations")
        if len(line):
            size = 3 if mark == "o" else 6
            (drawn,) = axes.plot(
                line["destinations"], line["gb_s"] / 1e3, dashes, color=color, marker=mark, markersize=size
            )
            if key[:3] == ("reduce-add", 64, 64):
                depths[key[3]] = drawn
            if label:
                ends.append(line["gb_s"].iloc[-1] / 1e3)
                lines.append((label, color))
    axes.set_xscale("log", base=2)
    last = rows["destinations"].max()
    ticks = [2**n for n in range(0, 20, 2) if 2**n <= last]
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
    top = 1.12 * rows["gb_s"].max() / 1e3
    axes.set(ylim=(0, top), xlim=(0.8, last * 60), ylabel="TB/s added, whole GPU")
    axes.set_xlabel("distinct destination tiles that all SMs add to")
    for (label, color), y in zip(lines, style.spread_apart(ends, 0.065 * top, 0), strict=True):
        axes.text(last * 1.25, y, label, color=color, fontsize=9, va="center")
    names = [f"{depth} tile{'s' * (depth > 1)} in flight" for depth in sorted(depths)]
    handles = [depths[depth] for depth in sorted(depths)]
    axes.legend(handles, names, frameon=False, fontsize=8, loc="center right", bbox_to_anchor=(1, 0.58))
    for queries in QUERIES:
        at = destinations_of(queries)
        axes.axvline(at, color=style.FAINT, linewidth=0.8, linestyle=(0, (2, 2)))
        axes.text(at * 1.06, 0.02 * top, f"M={queries}", fontsize=8, color=style.FAINT, rotation=90)
    note = f"M: destinations of dQ for a shared block of M rows, 4 heads of 128 · {style.caption(rows)}"
    return style.finish(figure, _finding(rows), note)


def spread(rows) -> float:
    """Measured bandwidth at the destinations of M = 128 over the best, with two tiles in flight."""
    from jfa.lab.reduction import destinations_of

    line = rows[(rows["what"] == "reduce-add") & (rows["in_flight"] == 2) & (rows["tile_columns"] == 64)]
    line = line.set_index("destinations")["gb_s"]
    return float(line[destinations_of(128)] / line.max())


def _finding(rows) -> str:
    share = spread(rows)
    few = "Measured: adds to few destinations (M=128)"
    return f"{few} reach {100 * share:.0f} % of the best rate"


def rate(rows):
    """Lines: predicted time of a turn over the rate of reduce-adds, a panel an architecture (05_rate)."""
    arches = list(dict.fromkeys(rows["arch"]))
    figure, panels = plt.subplots(1, len(arches), figsize=(9, 3.5))
    for arch, axes in zip(arches, panels, strict=True):
        part = rows[rows["arch"] == arch]
        top = 1.05 * part["predicted_clocks"].max()
        for tiles, step in staging.KERNELS.items():
            line = part[part["staging"] == tiles]
            color = style.color_of(step)
            label = f"{tiles} staging tile{'s' * (tiles == 'two')} ({style.label_of(step)})"
            axes.plot(
                line["add_bytes_per_clock"],
                line["predicted_clocks"],
                color=color,
                marker="o",
                markersize=4,
                label=label,
            )
        x = [rate / 10 for rate in range(55, 401)]
        axes.plot(
            x,
            [staging.turn_bytes(arch) / rate for rate in x],
            color=style.FAINT,
            linewidth=1,
            linestyle="--",
            label="adds alone",
        )
        tensor = staging.turn_flops(arch) / replay.PACES[arch].tensor_flops
        axes.axhline(tensor, color=style.FAINT, linewidth=1, linestyle=":", label="tensor cores alone")
        assumed = replay.PACES[arch].add
        axes.axvline(assumed, color=style.KINDS["mma"], linewidth=0.8)
        axes.text(assumed + 0.5, 0.93 * top, BASIS[arch], fontsize=8, color=style.KINDS["mma"])
        axes.set(xlim=(5, 41), ylim=(0, top), xlabel="bytes a clock added by each SM")
        axes.set_title(NAMES[arch], loc="left", fontsize=10)
    panels[0].set_ylabel("predicted clocks a turn")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(
        handles,
        labels,
        loc="upper left",
        bbox_to_anchor=(0.005, 0.9),
        ncols=4,
        frameon=False,
        fontsize=9,
        handlelength=1.6,
        columnspacing=1.4,
    )
    title = f"Predicted: a second staging tile saves {100 * saving(rows):.0f} % of a turn on a B200, "
    other = saving(rows, "hopper")
    title += f"{100 * other:.0f} % on an H200" if other > 0.01 else "nothing on an H200"
    return style.finish(figure, title, f"{PREDICTED} · no memory traffic but its own", top=0.28)


def saving(rows, arch: str = "blackwell") -> float:
    """Predicted share of a turn that the second staging tile saves, near the assumed rate of reduce-adds."""
    part = rows[rows["arch"] == arch]
    nearest = min(part["add_bytes_per_clock"], key=lambda x: abs(x - replay.PACES[arch].add))
    at = part[part["add_bytes_per_clock"] == nearest].set_index("staging")["predicted_clocks"]
    return float(1 - at["two"] / at["one"])


# What the colours of the time lines mean there.
WORDS = {"mma": "products", "softmax": "arithmetic", "reduce": "dQ on its way", "wait": "waiting"}
COLUMNS = {"softmax": "dP in the columns; arithmetic"}


def _said(figure, words):
    """The figure with the kinds of its key in words."""
    for text in figure.axes[0].get_legend().get_texts():
        text.set_text(words.get(text.get_text(), text.get_text()))
    return figure


def _lanes(rows, prefixes, shown):
    events, lanes = [], []
    for kernel, prefix in prefixes.items():
        lanes += [f"{prefix}: {name}" for name in shown]
        for row in rows[rows["kernel"].astype(str) == kernel].to_dict("records"):
            if row["kind"] == "wait" and row["lane"] != "reduce":
                continue
            times = {side: row[f"predicted_{side}"] for side in ("start", "end")}
            events.append({**row, **times, "lane": f"{prefix}: {row['lane']}"})
    return events, lanes


def timeline(rows):
    """One tile of the Blackwell kernel with one staging tile above, with two below (05_timeline)."""
    events, lanes = _lanes(rows, {"one": "one", "two": "two"}, staging.LANES[:3])
    ends = rows.groupby("kernel")["predicted_end"].max()
    gain = 1 - ends["two"] / ends["one"]
    title = f"Predicted: with two staging tiles a tile ends {100 * gain:.0f} % earlier"
    note = f"{PREDICTED} · Blackwell, one tile of 128 keys that meets {staging.QUERIES[0]} query rows"
    return _said(pictures.timeline(events, title, lanes=lanes, note=note), WORDS)


def release_timeline(rows):
    """One tile of the Blackwell kernel, dQ's columns freed late above and early below (06_timeline)."""
    events, lanes = _lanes(
        rows, {"0": "held 0", "2": "held 2"}, ("tensor cores", "columns", "reduce", "adds to dQ")
    )
    taken = {}
    for kernel in ("0", "2"):
        mine = rows[
            (rows["kernel"].astype(str) == kernel) & (rows["lane"] == "columns") & (rows["label"] == "dQ")
        ]
        turns = list(mine["predicted_end"] - mine["predicted_start"])
        taken[kernel] = turns[len(turns) // 2]
    title = (
        f"Predicted: dQ keeps its columns {taken['0']:,.0f} clocks, or {taken['2']:,.0f} with two slices held"
    )
    note = (
        f"{PREDICTED} · columns: the tensor memory that dP and dQ share · {staging.QUERIES[0]} query rows, "
    )
    note += "three turns; the title tells of the middle one"
    return _said(pictures.timeline(events, title, lanes=lanes, note=note), WORDS | COLUMNS)


def released(rows):
    """Left: predicted time of a turn; right: live registers; both over the slices held (06_released)."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.5))
    color = style.color_of("dq_released")
    assumed, fast = replay.PACES["blackwell"].add, staging.FAST
    for column, rate, dashes in (("predicted_clocks", assumed, "-"), ("predicted_clocks_fast", fast, "--")):
        left.plot(rows["held"], rows[column], dashes, color=color, marker="o", markersize=5)
        floor = staging.turn_bytes("blackwell") / rate
        if rate == assumed:
            left.plot([-0.2, 4], [floor, floor], color=style.FAINT, linewidth=0.8, linestyle=":")
        left.text(
            4.1, rows[column].iloc[-1], f"adds get\n{rate:g} B a clock", color=color, fontsize=9, va="center"
        )
    tensor = staging.turn_flops("blackwell") / replay.PACES["blackwell"].tensor_flops
    left.plot([-0.2, 4], [tensor, tensor], color=style.KINDS["mma"], linewidth=0.8, linestyle=":")
    left.text(0, tensor - 60, "tensor cores alone", color=style.KINDS["mma"], fontsize=8, va="top")
    left.text(
        4,
        staging.turn_bytes("blackwell") / assumed - 90,
        "adds alone",
        color=style.FAINT,
        fontsize=8,
        va="top",
        ha="right",
    )
    left.set(
        xlim=(-0.2, 5.4), ylim=(0, None), xlabel="slices held in registers", ylabel="predicted clocks a turn"
    )
    left.set_xticks(list(rows["held"]))
    left.set_title("what it saves: predicted", loc="left", fontsize=10)
    right.bar(rows["held"], rows["registers_at_release"], 0.6, color=color)
    for row in rows.itertuples():
        right.text(
            row.held, row.registers_at_release - 2, f"{row.registers_at_release}",
            ha="center", va="top", fontsize=9,
        )  # fmt: skip
    allowed = rows["registers_allowed"].iloc[0]
    right.axhline(allowed, color=style.KINDS["mma"], linewidth=1)
    right.text(
        -0.4,
        allowed + 2,
        f"{allowed} registers: all that the group has",
        fontsize=8,
        color=style.KINDS["mma"],
    )
    right.set(
        ylim=(0, 1.15 * allowed), xlabel="slices held in registers", ylabel="live registers of a thread"
    )
    right.set_title("what it costs: counted in the compiled code", loc="left", fontsize=10)
    each = (rows["registers_at_release"].iloc[-1] - rows["registers_at_release"].iloc[0]) / rows["held"].max()
    title = f"Each slice of dQ held costs {each:.0f} registers, and pays as long as the adds keep up"
    return style.finish(figure, title, f"left {PREDICTED} · right: sm_100, disassembler's live ranges")


def steps(rows):
    """Bars: measured TFLOPS of the backward steps that change the way of dQ (05_steps)."""
    rows = measured(rows)
    shapes = sorted({(row.M, row.N, row.density) for row in rows.itertuples()})
    names = [step for step in STEPS if (rows["step"] == step).any()]
    figure, axes = plt.subplots(figsize=(9, 3.6))
    for index, step in enumerate(names):
        line = rows[rows["step"] == step].groupby(["M", "N", "density"])["tflops"].first()
        at = [place + 0.8 / len(names) * (index + 0.5) - 0.4 for place in range(len(shapes))]
        heights = [line.get(shape, 0.0) for shape in shapes]
        axes.bar(at, heights, 0.74 / len(names), color=style.color_of(step), label=style.label_of(step))
    axes.set(ylim=(0, None), ylabel="backward, TFLOPS")
    axes.set_xticks(
        range(len(shapes)), [f"M {m}\nN {n}\n{density:g}" for m, n, density in shapes], fontsize=9.5
    )
    axes.legend(frameon=False, fontsize=8, ncols=len(names), loc="lower left", bbox_to_anchor=(0, 1))
    axes.set_xlabel("query rows, longest allowed history, density")
    low, high = ratios(rows, "dynamic", "dq_staged")
    worth = f"{low:.2f} to {high:.2f} times"
    title = f"Measured on Hopper: the second staging tile gains nothing, {worth} as fast"
    if high > 1.02:
        title = f"Measured on Hopper: the second staging tile is worth {worth}"
    return style.finish(figure, title, style.caption(rows))


def measured(rows):
    """The backward rows of 05_steps that have a time, of the scope that a user sees if it was recorded."""
    return recorded.timed(rows[rows["direction"] == "backward"])


def ratios(rows, before: str, after: str) -> tuple[float, float]:
    """Smallest and largest measured ratio of a step to another over the shapes that both ran."""
    wide = rows.pivot_table(index=["M", "N", "density"], columns="step", values="tflops")
    ratio = (wide[after] / wide[before]).dropna()
    return float(ratio.min()), float(ratio.max())
