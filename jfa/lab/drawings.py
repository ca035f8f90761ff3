"""How the figures of notebooks 00 to 02 are drawn from their rows; one function a figure."""

import matplotlib.pyplot as plt
from matplotlib.patches import Rectangle
from matplotlib.ticker import PercentFormatter

from jfa.lab import loops, style
from jfa.lab.figure_data import QUERIES

COUNTED = "counted from the lengths, not measured"
COMPILED = "read from the machine code that the compiler makes, no GPU involved"
PREDICTED = "predicted from published rates and instruction counts, not measured"
GPUS = {"sm_90": "H200 (sm_90)", "sm_100": "B200 (sm_100)"}
GREY = style.color_of("baseline")
BLUE, RED, GREEN, ORANGE = (style.color_of(kind) for kind in ("load", "mma", "softmax", "reduce"))
SEQUENCES = (BLUE, ORANGE, GREY, RED, GREEN, style.color_of("two_cta"))


def percent(share: float) -> str:
    """Return a share, 0 to 1, as a whole percentage."""
    return f"{100 * share:.0f} %"


def where_work_goes(rows):
    """Bars in two panels: the real share of computed rows, and the busy share of the SMs' time (00_waste)."""
    panels = {"rows": ("padding", "tiles"), "SMs": ("deal",)}
    colors = {"padding": GREY, "tiles": BLUE, "deal": ORANGE}
    axis = {"rows": "real rows of all rows computed", "SMs": "busy share of the SMs' time, predicted"}
    figure, both = plt.subplots(2, 1, figsize=(7.2, 4.1), height_ratios=(3, 2), sharex=True)
    for (name, losses), axes in zip(panels.items(), both, strict=True):
        part = rows[rows["loss"].isin(losses)]
        bars = axes.barh(part["case"], part["useful_share"], color=[colors[loss] for loss in part["loss"]])
        if name == "SMs":
            for bar in bars:
                bar.set(hatch="//", edgecolor="white")
        axes.bar_label(bars, [percent(share) for share in part["useful_share"]], padding=4)
        axes.invert_yaxis()
        axes.set(xlim=(0, 1.08))
        axes.set_xlabel(axis[name], fontsize=10)
        axes.tick_params(labelbottom=True)
        axes.xaxis.set_major_formatter(PercentFormatter(1))
    padded, tiled = (percent(share) for share in rows["useful_share"].iloc[:2])
    note = (
        "rows: counted from the lengths · SM time: key tiles of 128, and 1.5 more for each item (notebook 04)"
        " · not counted: waiting inside a tile, masks, memory"
    )
    title = f"Real histories: {padded} of padded rows are real, {tiled} in tiles of 128"
    return style.finish(figure, title, note)


def histories(rows):
    """Area under the sorted lengths, in the rectangle that padding would fill (01_histories)."""
    longest, count, total = rows["length"].max(), len(rows), rows["length"].sum()
    figure, axes = plt.subplots(figsize=(7.2, 3.2))
    axes.add_patch(Rectangle((0, 0), count, longest, color=GREY, alpha=0.3, linewidth=0))
    axes.fill_between(rows["rank"], rows["length"], color=BLUE, linewidth=0)
    axes.text(0.5 * count, 0.55 * longest, "padding", ha="center", color="#555555")
    axes.text(0.02 * count, 0.06 * longest, "real rows", color="white")
    axes.set(
        xlim=(0, count), ylim=(0, longest), xlabel="user, longest history first", ylabel="rows of K and V"
    )
    title = f"{percent(total / (count * longest))} of the padded rectangle is real"
    return style.finish(figure, title, "MovieLens 100K, events per user · " + COUNTED)


def packing(rows):
    """The same small batch as a padded rectangle and packed, with the query that all share (01_packing)."""
    longest, total = rows["length"].max(), rows["stop"].max()
    figure, (padded, packed) = plt.subplots(1, 2, figsize=(7.2, 3.6), width_ratios=(1, 2.1))
    for row in rows.itertuples():
        color = SEQUENCES[row.sequence]
        for key in range(longest):
            real = key < row.length
            padded.add_patch(_cell(key, -row.sequence, color if real else "#e4e4e4"))
        padded.text(-0.4, 0.5 - row.sequence, f"{row.length}", ha="right", va="center", fontsize=8)
        middle = (row.start + row.stop) / 2
        for key in range(row.start, row.stop):
            packed.add_patch(_cell(key, -3, color))
        for query in range(QUERIES):
            packed.add_patch(_cell(total / 2 - QUERIES / 2 + query, 0.6, "#555555"))
        if row.length:
            packed.annotate(
                "",
                (middle, -1.9),
                (total / 2, 0.5),
                arrowprops={"arrowstyle": "->", "color": color, "lw": 1.5},
            )
    ends = sorted({*rows["start"], *rows["stop"]})
    for end in ends:
        packed.plot([end, end], [-3.25, -2], color="black", lw=0.8)
        packed.text(end, -3.4, str(end), ha="center", va="top", fontsize=8)
    packed.text(total / 2, 1.75, f"q: {QUERIES} rows, shared by all sequences", ha="center", fontsize=9)
    packed.text(0, -4.7, "offsets " + str([0, *rows["stop"].tolist()]).replace(",", ""), fontsize=9)
    padded.set(xlim=(-1.5, longest), ylim=(-len(rows) + 0.8, 1.6))
    padded.set_title(f"padded: {len(rows)} x {longest} = {len(rows) * longest} rows", loc="left", fontsize=10)
    packed.set(xlim=(-0.6, total + 0.6), ylim=(-5, 2.6))
    packed.set_title(f"packed: {total} rows and {len(rows) + 1} offsets", loc="left", fontsize=10)
    for axes in (padded, packed):
        axes.axis("off")
    title = "Packed rows and offsets, and one query block that serves them all"
    note = "each square is one row of K and V · the third sequence is empty, so its offset repeats"
    return style.finish(figure, title, note)


def _cell(x: float, y: float, color):
    return Rectangle((x, y), 1, 1, facecolor=color, edgecolor="white", linewidth=1)


def padding(rows):
    """Lines: useful share over density for padding and for tiles; stars: the real histories (01_padding)."""
    colors = {"padded": GREY, "tiles of 128": BLUE, "tiles of 64": GREEN}
    figure, axes = plt.subplots(figsize=(7.2, 3.8))
    for layout, color in colors.items():
        line = rows[(rows["layout"] == layout) & (rows["lengths"] == "density")]
        star = rows[(rows["layout"] == layout) & (rows["lengths"] == "histories")]
        axes.plot(line["density"], line["useful_share"], color=color, marker="o", markersize=3, label=layout)
        axes.plot(star["density"], star["useful_share"], color=color, marker="*", markersize=13, linestyle="")
    axes.plot([], [], color="black", marker="*", markersize=11, linestyle="", label="943 real histories")
    real = rows[(rows["layout"] == "padded") & (rows["lengths"] == "histories")]["useful_share"].iloc[0]
    axes.set(xlim=(0, 1.02), ylim=(0, 1.03), xlabel="density (mean length over longest allowed)")
    axes.set_ylabel("useful share of the work")
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    axes.legend(frameon=False, loc="lower right")
    title = f"Padding wastes up to half of uniform lengths, and {percent(1 - real)} of real ones"
    return style.finish(figure, title, "1024 sequences of at most 1024 rows at each density · " + COUNTED)


def instructions(rows):
    """Strips: which unit each instruction of the main loop uses, in program order (02_instructions)."""
    kinds = [*loops.KINDS, loops.OTHER]
    colors = dict(zip(kinds, (RED, "black", ORANGE, BLUE, GREY), strict=True))
    archs = list(dict.fromkeys(rows["arch"]))
    figure, panels = plt.subplots(len(archs), 1, figsize=(7.2, 1.9 * len(archs) + 0.4), squeeze=False)
    for arch, axes in zip(archs, panels[:, 0], strict=True):
        loop = rows[rows["arch"] == arch]
        for lane, kind in enumerate(kinds):
            at = loop["index"][loop["kind"] == kind].tolist()
            axes.broken_barh(_spans(at), (lane - 0.38, 0.76), color=colors[kind], linewidth=0)
        axes.set(xlim=(0, len(loop)), ylim=(len(kinds) - 0.4, -0.6), yticks=range(len(kinds)))
        axes.set_yticklabels(kinds, fontsize=8)
        axes.set_ylabel(GPUS[arch], fontsize=8)
    panels[-1, 0].set_xlabel("instruction of the loop body, in program order")
    return style.finish(figure, "A warp's program: matrix products and softmax take turns", COMPILED)


def _spans(places: list[int]) -> list[tuple[float, float]]:
    """Return (start, width) of runs of neighbouring places; a single one is widened to be seen."""
    found: list[list[int]] = []
    for place in places:
        if found and place == found[-1][1]:
            found[-1][1] = place + 1
        else:
            found.append([place, place + 1])
    return [(start, max(stop - start, 1.6)) for start, stop in found]


def turns(rows):
    """Stacked bars: clocks for a tile of scores if tensor cores and the rest take turns (02_turns)."""
    colors = {"tensor cores": RED, "everything else": GREY}
    archs = list(dict.fromkeys(rows["arch"]))
    figure, axes = plt.subplots(figsize=(7.2, 2.4))
    busy = {}
    for place, arch in enumerate(archs):
        left = 0.0
        for row in rows[rows["arch"] == arch].itertuples():
            axes.barh(
                place,
                row.predicted_clocks,
                left=left,
                color=colors[row.part],
                height=0.6,
                hatch="//",
                ec="white",
            )
            label = f"{row.part}: {row.predicted_clocks:.0f}"
            box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 1.5}
            axes.text(
                left + row.predicted_clocks / 2, place, label, ha="center", va="center", fontsize=8, bbox=box
            )
            left += row.predicted_clocks
        first = rows[(rows["arch"] == arch) & (rows["part"] == "tensor cores")]["predicted_clocks"].iloc[0]
        busy[arch] = first / left
    axes.set(
        yticks=range(len(archs)), yticklabels=[GPUS[arch] for arch in archs], ylim=(len(archs) - 0.5, -0.5)
    )
    axes.set_xlabel("clocks for 128 x 128 scores, predicted")
    shares = " and ".join(f"{percent(share)} on {GPUS[arch][:4]}" for arch, share in busy.items())
    return style.finish(figure, f"In turns, tensor cores would be busy {shares}", PREDICTED)


PUBLIC = {"jfa": "what a call of jfa runs", "jfa_baseline": "the baseline"}
SUBJECT = (
    "#0b3d91"  # the baseline where it is what a figure is about: grey there is for other people's kernels
)
MARKS = {"fa4": "s", "cudnn": "v", "torch_varlen": "D"}


def _baseline_finding(rows) -> str:
    """The baseline's TFLOPS over FlashAttention-4's, shortest and longest sequences."""
    key = ["direction", "mean", "N", "density"]
    wide = rows.pivot_table(index=key, columns="impl", values="tflops")
    if "fa4" not in wide or "jfa_baseline" not in wide:
        return "Where the ladder starts: the baseline beside other kernels"
    ratio = (wide["jfa_baseline"] / wide["fa4"]).dropna()
    means = ratio.index.get_level_values("mean")
    short, long = ratio[means == means.min()].mean(), ratio[means == means.max()].mean()
    return f"Baseline over FlashAttention-4: {short:.1f} times on short sequences, {long:.1f} on long"


def baseline_speed(rows):
    """Lines with a 20 to 80 % band: TFLOPS over jagged shapes, one line for what ran (02_baseline)."""
    rows = rows[(rows["suite"] == "jagged") & (rows["scope"] == "call") & rows["tflops"].notna()].copy()
    rows["mean"] = rows["N"] * rows["density"]
    key = ["mean", "N", "density", "M"]
    shapes = rows[key].drop_duplicates().sort_values(["mean", "M"]).reset_index(drop=True)
    place = {(row.N, row.density, row.M): index for index, row in shapes.iterrows()}
    peers = sorted(rows["impl"].unique(), key=lambda name: (name != "jfa_baseline", name != "jfa", name))
    looks = {name: {"color": style.color_of(name)} for name in peers}
    looks |= {name: {"color": peer[1], "linestyle": peer[2]} for name, peer in style.PEERS.items()}
    looks["jfa_baseline"] = {"color": SUBJECT, "linewidth": 3, "zorder": 3}
    looks["jfa"] = {"color": style.color_of("stationary")}
    figure, panels = plt.subplots(2, 1, figsize=(7.2, 5.8), sharex=True)
    for direction, axes in zip(("forward", "backward"), panels, strict=True):
        for name in peers:
            line = rows[(rows["direction"] == direction) & (rows["impl"] == name)].sort_values(["mean", "M"])
            at = [place[row.N, row.density, row.M] for row in line.itertuples()]
            look = {"marker": MARKS.get(name, "o"), "markersize": 4, "linewidth": 1.4} | looks[name]
            axes.plot(at, line["tflops"], label=PUBLIC.get(name) or style.label_of(name), **look)
            slow, fast = (line["tflops"] * line["ms_p50"] / line[column] for column in ("ms_p80", "ms_p20"))
            axes.fill_between(at, slow, fast, color=looks[name]["color"], alpha=0.2, linewidth=0)
        axes.set(ylim=(0, None), ylabel=f"{direction}, TFLOPS")
    labels = [f"{row.M}\n{row.N}\n{row.density:g}" for row in shapes.itertuples()]
    panels[1].set_xticks(range(len(labels)), labels, fontsize=9)
    panels[1].set_xlabel(
        "shared query rows, longest allowed, density; mean length rises to the right", fontsize=10
    )
    panels[0].legend(
        frameon=False, fontsize=9, ncols=3, handlelength=3, loc="lower left", bbox_to_anchor=(0, 1)
    )
    note = f"whole calls; bands: 20th to 80th percentile of the rounds · {style.caption(rows)}"
    return style.finish(figure, _baseline_finding(rows), note)
