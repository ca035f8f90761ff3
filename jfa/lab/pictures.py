"""Pictures of a machine at work: SMs over time, the timeline of a pipeline, and who owns which memory."""

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.patches import Patch, Rectangle

from jfa.lab.style import FAINT, INK, KINDS, caption, color_of, finish, spread_apart, styled, text_color

# Operations of a trace by the beginning of their category, first match wins.
KIND_OF = {
    "wait": "wait",
    "tma_load": "load",
    "bulk_load": "load",
    "cp_async": "load",
    "dsmem": "load",
    "tma_reduce": "reduce",
    "tma_store": "store",
    "wgmma": "mma",
    "mma": "mma",
    "clc": "schedule",
}


def events_of(spans, process=None):
    """Events of one CTA for `timeline`, from spans in Chrome's trace form (the emulator's Perfetto).

    ``process`` is the CTA's name there ("CTA (0, 0, 0)"; default: the first one). Lanes are its tasks and
    engines. The unit of time is the trace's: the emulator's counts steps of the run, not clocks.
    """
    spans = [span for span in spans if span.get("ph") == "X"]
    process = spans[0]["pid"] if process is None and spans else process
    events = []
    for span in spans:
        if span["pid"] == process:
            kind = next((kind for name, kind in KIND_OF.items() if span["cat"].startswith(name)), "other")
            label = span["name"].removeprefix(f"{span['cat']} ")
            start, end = span["ts"], span["ts"] + span["dur"]
            events.append({"lane": span["tid"], "start": start, "end": end, "label": label, "kind": kind})
    return sorted(events, key=lambda event: event["start"])


def occupancy(events, lanes=None, bins=200, end=None):
    """Share of every time bin in which a lane is busy, as an array (lanes, bins) from 0 to 1.

    ``events`` are dicts with lane, start and end, in one unit of time; ``lanes`` names the rows (default: as
    they sort), ``end`` is the last moment (default: the latest end). Events of a lane must not overlap.
    """
    events = list(events)
    lanes = sorted({event["lane"] for event in events}) if lanes is None else list(lanes)
    end = max((event["end"] for event in events), default=0) if end is None else end
    row = {lane: i for i, lane in enumerate(lanes)}
    edges = np.linspace(0, end or 1, bins + 1)
    busy = np.zeros((len(lanes), bins))
    for event in events:
        shared = np.minimum(edges[1:], event["end"]) - np.maximum(edges[:-1], event["start"])
        busy[row[event["lane"]]] += np.maximum(shared, 0)
    return busy / (edges[1] - edges[0])


def heatmap(panels, title, *, unit="clk", end=None, ylabel="SM", note="", bins=240):
    """SM by time, dark where it works; one panel a schedule, all on one time axis.

    ``panels`` maps a name to events (dicts with lane, start, end in ``unit``). Each panel says when its last
    SM ends and how much of the machine was busy until then.
    """
    last = end or max((event["end"] for events in panels.values() for event in events), default=1)
    shades = LinearSegmentedColormap.from_list("busy", ["#f4f4f4", KINDS["load"]])
    with styled():
        size = (7.2, 1.15 * len(panels) + 1.0)
        figure, axes = plt.subplots(len(panels), 1, figsize=size, sharex=True, squeeze=False)
        for ax, (name, events) in zip(axes[:, 0], panels.items()):
            share = occupancy(events, bins=bins, end=last)
            done = max((event["end"] for event in events), default=0)
            worked = sum(event["end"] - event["start"] for event in events)
            busy = worked / (done * share.shape[0]) if done else 0.0
            area = (0, last, share.shape[0], 0)
            ax.imshow(share, cmap=shades, vmin=0, vmax=1, aspect="auto", extent=area, interpolation="nearest")
            ax.axvline(done, color=KINDS["mma"], linewidth=1.5)
            ax.set_title(
                f"{name}: {done:,.0f} {unit}, {busy:.0%} busy".replace("%", " %"), loc="left", fontsize=10
            )
            ax.set_ylabel(ylabel)
            ax.set_yticks([0, share.shape[0]])
        axes[-1, 0].set(xlabel=f"time, {unit}", xlim=(0, 1.01 * last))
        return finish(figure, title, note if isinstance(note, str) else caption(note))


def timeline(events, title, *, lanes=None, unit="clk", note="", start=None, end=None):
    """Boxes of operations over time, one lane a task: what overlaps and what waits.

    Operations of one lane that overlap (copies in flight) are drawn in levels below each other.

    ``events`` are dicts with lane, start, end, and optionally label (written where it fits) and kind (a key
    of ``KINDS``, which colours it). ``lanes`` orders the lanes from the top (default: as they first appear);
    ``start`` and ``end`` cut the time axis.
    """
    events = [dict(event) for event in events]
    lanes = list(dict.fromkeys(event["lane"] for event in events)) if lanes is None else list(lanes)
    start = min((event["start"] for event in events), default=0) if start is None else start
    end = max((event["end"] for event in events), default=1) if end is None else end
    shown = [e for e in events if e["lane"] in lanes and e["end"] > start and e["start"] < end]
    top, centres, boxes = 0.0, [], []
    for lane in lanes:
        levels = _levels([event for event in shown if event["lane"] == lane])
        step = 0.8 if len(levels) <= 1 else 0.5  # of a lane's usual height
        for level, members in enumerate(levels):
            y = top + 0.1 + step * (level + 0.5)
            boxes += [(event, y, 0.96 * step) for event in members]
        height = 0.2 + step * max(len(levels), 1)
        centres.append(top + height / 2)
        top += height
    with styled():
        figure, ax = plt.subplots(figsize=(9, 0.44 * top + 1.55))
        labels = []
        for event, y, height in boxes:
            fill = KINDS.get(event.get("kind", "other"), KINDS["other"])
            left, right = max(event["start"], start), min(event["end"], end)
            box = (left, y - height / 2), right - left, height
            ax.add_patch(Rectangle(*box, facecolor=fill, edgecolor="white", linewidth=0.7))
            labels.append((str(event.get("label", "")), left, right, y, text_color(fill), height))
        ax.set(xlim=(start, end), ylim=(top, 0), xlabel=f"time, {unit}")
        ax.set_yticks(centres, [str(lane) for lane in lanes])
        ax.tick_params(axis="y", length=0)
        ax.spines["left"].set_visible(False)
        ax.grid(axis="x")
        used = {event.get("kind", "other") for event in shown}
        _key_above(ax, [Patch(facecolor=KINDS[kind], label=kind) for kind in KINDS if kind in used])
        finish(figure, title, note if isinstance(note, str) else caption(note))
        for label, left, right, y, ink, height in labels:
            _write_if_it_fits(figure, ax, label, left, right, y, ink, height)
        return figure


def _levels(events):
    """Events of one lane in as few levels as hold them without overlap, each in order of its start."""
    levels = []
    for event in sorted(events, key=lambda event: (event["start"], event["end"])):
        for level in levels:
            if level[-1]["end"] <= event["start"]:
                level.append(event)
                break
        else:
            levels.append([event])
    return levels


def _key_above(ax, keys):
    """The colours' key in one line above the axes, where no box can hide it."""
    if keys:
        ax.legend(
            handles=keys,
            loc="lower left",
            bbox_to_anchor=(0, 1.0),
            ncols=len(keys),
            frameon=False,
            fontsize=9,
            handlelength=1.0,
            columnspacing=1.2,
            borderaxespad=0.1,
        )


def _write_if_it_fits(figure, ax, label, left, right, y, color, height):
    """Write a label into a box, smaller if need be, and leave it out where it would not be readable."""
    if not label:
        return False
    renderer, size = FigureCanvasAgg(figure).get_renderer(), 9.0
    pixels = ax.transData.transform([(left, y), (right, y + height)])
    room, tall = pixels[1, 0] - pixels[0, 0] - 4, abs(pixels[1, 1] - pixels[0, 1])
    text = ax.text((left + right) / 2, y, label, ha="center", va="center", fontsize=size, color=color)
    while size >= 6.5:
        text.set_fontsize(size)
        box = text.get_window_extent(renderer)
        if box.width <= room and box.height <= tall:
            return True
        size -= 0.5
    text.remove()
    return False


def memory_map(memories, title, *, note=""):
    """Who owns which part of the memories of an SM: boxes along the address axis, aliases above each other.

    ``memories`` maps a name ("shared memory, KiB") to a dict with ``size`` (in the unit of the name) and
    ``regions``: dicts with name, start, size, and optionally kind (a key of ``KINDS``) and when (a note on
    its lifetime). Regions that overlap in address are aliases and go to different rows. What nobody owns
    stays grey. Names too long for their box are written below it with a line.
    """
    laid_out = {name: _rows_of(memory["regions"]) for name, memory in memories.items()}
    strips = [
        0.5 if any(_too_long(region, memory) for region in memory["regions"]) else 0.0
        for memory in memories.values()
    ]
    tall = [0.12 + strip + 0.55 * len(rows) for strip, rows in zip(strips, laid_out.values())]
    with styled():
        size = (9, 1.0 + sum(tall) + 0.62 * len(tall))
        figure, axes = plt.subplots(len(memories), 1, figsize=size, squeeze=False, height_ratios=tall)
        pending = []
        for ax, strip, (name, memory) in zip(axes[:, 0], strips, memories.items()):
            rows = laid_out[name]
            ax.add_patch(Rectangle((0, -0.42), memory["size"], len(rows) - 0.16, facecolor=KINDS["free"]))
            for y, regions in enumerate(rows):
                for region in regions:
                    fill = color_of(region.get("kind", "other"))
                    left, right = region["start"], region["start"] + region["size"]
                    ax.add_patch(
                        Rectangle((left, y - 0.42), right - left, 0.84, facecolor=fill, edgecolor="white")
                    )
                    when = f"\n{region['when']}" if region.get("when") else ""
                    pending.append((ax, region["name"], when, left, right, y, fill))
            used = _covered(memory["regions"])
            ax.set(xlim=(0, memory["size"]), ylim=(len(rows) - 0.45 + strip / 0.62, -0.5))
            ax.set_title(f"{name}: {used:g} of {memory['size']:g} in use", loc="left", fontsize=10)
            ax.set_yticks([])
            ax.spines["left"].set_visible(False)
        used = {r.get("kind", "other") for memory in memories.values() for r in memory["regions"]}
        keys = [Patch(facecolor=KINDS[kind], label=kind) for kind in KINDS if kind in used]
        figure.legend(
            handles=keys, loc="upper left", bbox_to_anchor=(0.005, 1 - 0.36 / size[1]), ncols=len(keys) or 1,
            frameon=False, fontsize=9, handlelength=1.0, columnspacing=1.2, borderaxespad=0,
        )  # fmt: skip
        finish(figure, title, note if isinstance(note, str) else caption(note), top=0.30)
        crowded = {}
        for ax, label, when, left, right, y, fill in pending:
            ink = text_color(fill)
            if _write_if_it_fits(figure, ax, label + when, left, right, y, ink, 0.84):
                continue
            if not _write_if_it_fits(figure, ax, label, left, right, y, ink, 0.84):
                crowded.setdefault(ax, []).append(((left + right) / 2, y, label))
        for ax, labels in crowded.items():
            _write_below(figure, ax, labels)
        return figure


def _too_long(region, memory):
    """Whether a region's name will not fit its box at a readable size (estimated before drawing)."""
    return 0.062 * len(region["name"]) + 0.08 > 8.4 * region["size"] / memory["size"]


def _rows_of(regions):
    """Regions in rows of which none overlaps in address; the first row holds those named first."""
    rows = []
    for region in regions:
        left, right = region["start"], region["start"] + region["size"]
        for row in rows:
            if all(right <= other["start"] or left >= other["start"] + other["size"] for other in row):
                row.append(region)
                break
        else:
            rows.append([region])
    return rows


def _covered(regions):
    """Length of the union of regions."""
    total, reached = 0, 0
    for left, right in sorted((region["start"], region["start"] + region["size"]) for region in regions):
        total += max(0, right - max(left, reached))
        reached = max(reached, right)
    return total


def _write_below(figure, ax, labels):
    """Names of small boxes in the strip under the map, apart from each other, each with a line to its box."""
    renderer = FigureCanvasAgg(figure).get_renderer()
    floor = ax.get_ylim()[0]
    left, right = ax.get_xlim()
    to_data = (right - left) / ax.get_window_extent(renderer).width
    widths = []
    for _, _, label in labels:
        text = ax.text(0, 0, label, fontsize=8)
        widths.append(text.get_window_extent(renderer).width * to_data)
        text.remove()
    gap = max(widths) + 14 * to_data
    places = spread_apart([x for x, _, _ in labels], gap, left + gap / 2, right - gap / 2)
    for (x, y, label), place in zip(labels, places):
        ax.plot([x, place], [y + 0.3, floor - 0.3], color=FAINT, linewidth=0.7)
        ax.text(place, floor - 0.28, label, fontsize=8, color=INK, ha="center", va="top", clip_on=False)
