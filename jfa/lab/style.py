"""The one look of every figure: colours, type and captions."""

import math

import matplotlib.pyplot as plt
import seaborn

_HUES = seaborn.color_palette("colorblind").as_hex()

# The ladder in the order of the course, each step with its colour everywhere. Yellow is too pale for a line
# that matters, so it goes to a step in the middle; the last step has the strongest colour.
STEPS = {
    "baseline": _HUES[7],
    "warp_specialized": _HUES[0],
    "balanced": _HUES[9],
    "dynamic": _HUES[2],
    "dq_staged": _HUES[8],
    "dq_released": _HUES[1],
    "peeled": _HUES[5],
    "staged": _HUES[6],
    "two_cta": _HUES[4],
    "ds_buffered": "#7a1f5c",
    "stationary": _HUES[3],
}
OURS = {"jfa": "ours", "jfa_baseline": "our baseline"}
# Other people's kernels: dark, told apart by their dashes and hatches.
PEERS = {
    "fa4": ("FlashAttention-4", "#222222", (0, (5, 2)), "//"),
    "cudnn": ("cuDNN", "#4d4d4d", (0, (1, 1.2)), ".."),
    "torch_varlen": ("PyTorch varlen", "#6e6e6e", (0, (5, 1, 1, 1)), "\\\\"),
    "flex": ("FlexAttention", "#8c8c8c", (0, (3, 1, 1, 1, 1, 1)), "xx"),
}
# What an operation of a role is, in timelines and memory maps.
KINDS = {
    "load": _HUES[0],
    "mma": _HUES[3],
    "softmax": _HUES[2],
    "correction": _HUES[8],
    "store": _HUES[5],
    "reduce": _HUES[1],
    "schedule": _HUES[4],
    "wait": "#dddddd",
    "free": "#f2f2f2",
    "other": _HUES[9],
}
INK = "#333333"
FAINT = "#666666"
STYLE = {
    "font.family": ["DejaVu Sans"],
    "font.size": 11,
    "axes.titlesize": 11,
    "axes.labelsize": 11,
    "axes.edgecolor": "#999999",
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": False,
    "grid.color": "#e6e6e6",
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.labelsize": 10,
    "ytick.labelsize": 10,
    "figure.facecolor": "white",
    "figure.dpi": 100,
    "hatch.linewidth": 0.6,
    "svg.fonttype": "path",
    "lines.linewidth": 2,
}


def styled():
    """A context in which matplotlib draws as every figure of the course does."""
    return plt.rc_context({**plt.rcParamsDefault, **STYLE, "backend": plt.get_backend()})


def label_of(name):
    """A step's or an implementation's name as a figure prints it."""
    if name in PEERS:
        return PEERS[name][0]
    if name in OURS:
        return OURS[name]
    return (
        str(name).replace("_", " ").replace("two cta", "two-CTA").replace("dq ", "dQ ").replace("ds ", "dS ")
    )


def color_of(name):
    """The fixed colour of a step, peer or kind of operation; a neutral one for what has none."""
    if name in PEERS:
        return PEERS[name][1]
    return STEPS.get(name) or KINDS.get(name) or INK


def text_color(fill):
    """Black or white, whichever reads better on a colour."""
    red, green, blue = plt.matplotlib.colors.to_rgb(fill)
    return "white" if 0.299 * red + 0.587 * green + 0.114 * blue < 0.55 else "black"


def spread_apart(positions, gap, low=-math.inf, high=math.inf):
    """Positions moved as little as need be for neighbours at least ``gap`` apart, inside the limits."""
    order = sorted(range(len(positions)), key=lambda i: positions[i])
    groups = []  # runs of labels that touch: [sum of wished starts, count]
    for place, i in enumerate(order):
        groups.append([positions[i] - place * gap, 1])
        while len(groups) > 1 and groups[-2][0] / groups[-2][1] > groups[-1][0] / groups[-1][1]:
            total, count = groups.pop()
            groups[-1][0] += total
            groups[-1][1] += count
    starts = [total / count for total, count in groups for _ in range(count)]
    starts = [min(max(start, low), high - (len(order) - 1) * gap) for start in starts]
    moved = [0.0] * len(positions)
    for place, i in enumerate(order):
        moved[i] = starts[place] + place * gap
    return moved


def step_order(names):
    """Names with the steps first and in ladder order, then the others as they came."""
    names = list(dict.fromkeys(names))
    return [name for name in STEPS if name in names] + [name for name in names if name not in STEPS]


def caption(rows):
    """The provenance line under a figure, from one row or many (dicts or a DataFrame).

    Values that differ between rows appear as a range. Rows that were predicted or have no GPU say so.
    """
    rows = rows.to_dict("records") if hasattr(rows, "to_dict") and hasattr(rows, "columns") else rows
    rows = [rows] if isinstance(rows, dict) else list(rows)

    def seen(column):
        found = {row.get(column) for row in rows} - {None, ""}
        return sorted(value for value in found if value == value)

    def spread(column, unit, scale=1.0, digits=0):
        found = seen(column)
        if not found:
            return ""
        low, high = (f"{float(value) * scale:.{digits}f}" for value in (found[0], found[-1]))
        return f"{low} {unit}" if low == high else f"{low}-{high} {unit}"

    parts = ["/".join(seen("gpu")), spread("sm_clock_mhz", "GHz", 1e-3, 2)]
    power, limit = spread("power_w", "W"), spread("power_limit_w", "W")
    parts.append(f"{power} of {limit}" if power and limit else power or limit)
    parts += [f"driver {v}" for v in seen("driver")] + [f"CUDA {v}" for v in seen("cuda")]
    for name in ("torch", "fbtriton", "commit"):
        if seen(name):
            parts.append(f"{name} " + "/".join(map(str, seen(name))))
    parts.append("/".join(map(str, seen("date"))))
    models = seen("model")
    if models:
        rest = ", the rest measured" if seen("ms_p50") or seen("tflops") else ""
        parts.insert(0, f"predicted by {'/'.join(map(str, models))}{rest}")
    return " · ".join(part for part in parts if part)


def finish(figure, title, note="", top=0.0):
    """Set the title (the finding) and the caption of a figure, fit everything in, and close it for pyplot."""
    height, width = figure.get_figheight(), figure.get_figwidth()
    lines = _wrapped(note, int(width * 15.5))
    below, above = (0.10 + 0.15 * len(lines)) / height if note else 0.0, (0.34 + top) / height
    figure.tight_layout(rect=(0, below, 1, 1 - above))
    figure.text(0.08 / width, 1 - 0.08 / height, title, fontsize=12, weight="bold", va="top", ha="left")
    if note:
        figure.text(0.08 / width, 0.06 / height, "\n".join(lines), fontsize=7.5, color=FAINT, va="bottom")
    plt.close(figure)
    return figure


def _wrapped(note, width):
    """Lines of a caption, broken between its parts so that none is wider than ``width`` characters."""
    lines = [""]
    for part in note.split(" · "):
        joined = f"{lines[-1]} · {part}" if lines[-1] else part
        if len(joined) > width and lines[-1]:
            lines.append(part)
        else:
            lines[-1] = joined
    return [line for line in lines if line]
