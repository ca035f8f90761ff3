"""Figures of measurements: the bars of a ladder; `jfa.lab.pictures` has the rest.

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
    "memory_map",
    "occupancy",
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
