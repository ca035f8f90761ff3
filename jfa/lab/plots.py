"""Figures of measurements: ladder bars and lines over lengths; `jfa.lab.pictures` has the rest.

Every function takes rows (dicts, or a pandas DataFrame) and gives a finished matplotlib Figure with its
finding as the title and its provenance as the caption.
"""

import matplotlib.pyplot as plt
from matplotlib.patches import Patch

from jfa.lab.pictures import events_of, heatmap, memory_map, occupancy, timeline
from jfa.lab.style import (
    FAINT,
    INK,
    KINDS,
    PEERS,
    STEPS,
    caption,
    color_of,
    finish,
    label_of,
    save,
    spread_apart,
    step_order,
    styled,
)

__all__ = [
    "KINDS",
    "PEERS",
    "STEPS",
    "caption",
    "color_of",
    "events_of",
    "heatmap",
    "ladder_bars",
    "lines_over_lengths",
    "memory_map",
    "occupancy",
    "save",
    "spread_apart",
    "styled",
    "timeline",
]


def _records(rows):
    return rows.to_dict("records") if hasattr(rows, "columns") else [dict(row) for row in rows]


def _number(row, column):
    value = row.get(column) if column else None
    return None if value in (None, "") or value != value else float(value)


def ladder_bars(
    rows,
    title,
    value="tflops",
    unit="TFLOPS",
    *,
    name="step",
    panel=None,
    predicted=None,
    low=None,
    high=None,
    note=None,
    relative=True,
    absent="not measured",
):
    """Horizontal bars in the order of the ladder, each with its value and its ratio to the first bar.

    ``rows`` hold ``name`` (a step or peer) and ``value``; a row without the latter takes ``predicted`` (a
    column) and is hatched, and ``absent`` stands where there is neither. ``low`` and ``high`` are columns for
    whiskers. ``panel`` is a column: one panel of bars for each of its values, on one scale.
    """
    records = _records(rows)
    panels = list(dict.fromkeys(row[panel] for row in records)) if panel else [None]
    names = step_order(row[name] for row in records)
    tallest = max(_number(row, value) or _number(row, predicted) or 0 for row in records)
    with styled():
        size = (max(7.2, 3.1 * len(panels) + 1.4), 0.36 * len(names) + 1.5)
        figure, axes = plt.subplots(1, len(panels), figsize=size, sharey=True, squeeze=False)
        hatched = False
        for ax, which in zip(axes[0], panels):
            shown = {row[name]: row for row in records if not panel or row[panel] == which}
            first = None
            for y, step in enumerate(names):
                row = shown.get(step, {})
                measured = _number(row, value)
                size = measured if measured is not None else _number(row, predicted)
                if size is None:
                    ax.text(0.01 * tallest, y, absent, va="center", fontsize=9, color=FAINT)
                    continue
                guess = measured is None
                hatched |= guess
                fill = "white" if guess else color_of(step)
                hatch = "///" if guess else (PEERS[step][3] if step in PEERS else None)
                edge = color_of(step) if guess else "white"
                ax.barh(y, size, 0.72, color=fill, hatch=hatch, edgecolor=edge, linewidth=1 if guess else 0)
                ends = _number(row, low), _number(row, high)
                if None not in ends:
                    ax.plot(ends, (y, y), color=INK, linewidth=1.2, solid_capstyle="butt")
                first = size if first is None else first
                ratio = f"  {size / first:.2f}x" if relative and first else ""
                end = max(size, ends[1] or 0)
                ax.text(end + 0.015 * tallest, y, f"{size:.3g}{ratio}", va="center", fontsize=9.5)
            ax.set(xlim=(0, 1.30 * tallest), xlabel=unit, ylim=(len(names) - 0.5, -0.5))
            ax.set_yticks(range(len(names)), [label_of(step) for step in names])
            ax.tick_params(axis="y", length=0)
            ax.grid(axis="x")
            if which is not None:
                ax.set_title(str(which), loc="left")
        if hatched:
            key = Patch(facecolor="white", edgecolor=INK, hatch="///", label="predicted")
            axes[0][-1].legend(
                handles=[key],
                loc="lower right",
                bbox_to_anchor=(1, 1),
                frameon=False,
                fontsize=9,
                borderaxespad=0,
            )
        return finish(figure, title, caption(records) if note is None else note)


def lines_over_lengths(
    rows,
    title,
    x="N",
    value="tflops",
    unit="TFLOPS",
    *,
    name="step",
    low=None,
    high=None,
    panel=None,
    xlabel="longest sequence, keys",
    note=None,
):
    """Lines over lengths (log2) with a band from ``low`` to ``high``, named directly at their right ends.

    ``rows`` hold ``name`` (a step or peer), ``x`` and ``value``; ``low`` and ``high`` are columns, the p20
    and p80 of a measurement. ``panel`` is a column: one panel for each of its values, on one scale.
    """
    records = [row for row in _records(rows) if _number(row, value) is not None]
    panels = list(dict.fromkeys(row[panel] for row in records)) if panel else [None]
    names = step_order(row[name] for row in records)
    top = 1.06 * max(_number(row, high) or _number(row, value) for row in records)
    ticks = sorted({float(row[x]) for row in records})
    with styled():
        size = (max(7.2, 3.2 * len(panels) + 1.6), 3.6)
        figure, axes = plt.subplots(1, len(panels), figsize=size, sharey=True, squeeze=False)
        for ax, which in zip(axes[0], panels):
            ends = {}
            for line in names:
                points = [r for r in records if r[name] == line and (not panel or r[panel] == which)]
                points.sort(key=lambda row: float(row[x]))
                if not points:
                    continue
                at, values = [float(row[x]) for row in points], [_number(row, value) for row in points]
                dashes = PEERS[line][2] if line in PEERS else "-"
                ax.plot(at, values, color=color_of(line), linestyle=dashes, marker="o", markersize=4)
                band = [(_number(row, low), _number(row, high)) for row in points]
                if all(None not in pair for pair in band):
                    ax.fill_between(at, *zip(*band), color=color_of(line), alpha=0.18, linewidth=0)
                ends[line] = at[-1], values[-1]
            ax.set(xscale="log", xlabel=xlabel, ylim=(0, top))
            ax.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
            ax.minorticks_off()
            ax.grid(axis="y")
            if which is not None:
                ax.set_title(str(which), loc="left")
            if ax is axes[0][-1]:
                _name_lines(ax, ends, top)
        axes[0][0].set_ylabel(unit)
        return finish(figure, title, caption(records) if note is None else note)


def _name_lines(ax, ends, top):
    """Write every line's name to the right of its end, moved apart so that none overlaps another."""
    gap = 0.08 * top
    places = spread_apart([value for _, value in ends.values()], gap, gap / 2, top)
    for (line, (at, value)), y in zip(ends.items(), places):
        ax.annotate(
            label_of(line),
            xy=(at, value),
            xytext=(1.05, y),
            textcoords=ax.get_yaxis_transform(),
            color=color_of(line),
            va="center",
            fontsize=10,
            annotation_clip=False,
            arrowprops={
                "arrowstyle": "-",
                "color": "#bbbbbb",
                "linewidth": 0.6,
                "shrinkA": 1,
                "shrinkB": 4,
                "relpos": (0, 0.5),
            },
        )
