"""Figures: one colour a step, nothing overlaps, predictions look like predictions."""

import itertools
import random

import numpy as np
import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("seaborn")

import matplotlib.pyplot as plt  # noqa: E402
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: E402
from matplotlib.colors import to_rgb  # noqa: E402

from jfa.lab import pictures, plots, style  # noqa: E402

PROVENANCE = {
    "gpu": "NVIDIA H200", "driver": "580.82", "cuda": "12.8", "torch": "2.11.0", "fbtriton": "3.7.4",
    "commit": "abc123def0", "timer": "cuda-event", "power_limit_w": 700.0, "power_w": 691.0,
    "date": "2026-11-30",
}  # fmt: skip


def ladder(predicted=("two_cta",), panels=("M = 128", "M = 256")):
    rng = random.Random(0)
    rows = []
    for base, panel in enumerate(panels):
        for i, step in enumerate(plots.STEPS):
            speed = (200 + 90 * base) * (1 + 0.13 * i) * rng.uniform(0.95, 1.05)
            row = {"step": step, "shape": panel, "sm_clock_mhz": 1500 + 20 * i, **PROVENANCE}
            if step in predicted:
                rows.append(row | {"predicted_tflops": speed, "tflops": "", "model": "jfa.timing"})
            else:
                rows.append(row | {"tflops": speed, "p20": 0.97 * speed, "p80": 1.02 * speed})
    return rows


def tasks():
    events = []
    for i in range(5):
        t = 1000 * i
        events += [
            {"lane": "load", "start": t, "end": t + 300, "label": f"K{i}", "kind": "load"},
            {"lane": "mma", "start": t + 300, "end": t + 310, "label": "a label far too long", "kind": "mma"},
            {"lane": "mma", "start": t + 310, "end": t + 900, "label": f"QK {i}", "kind": "mma"},
            {
                "lane": "softmax",
                "start": t + 900,
                "end": t + 1800,
                "label": f"softmax {i}",
                "kind": "softmax",
            },
        ]
    return events


MEMORY = {
    "shared memory, KiB": {
        "size": 227,
        "regions": [
            {"name": "Q", "start": 0, "size": 32, "kind": "load", "when": "whole tile"},
            {"name": "K and V ring", "start": 32, "size": 128, "kind": "load"},
            {"name": "dQ staging 0", "start": 160, "size": 8, "kind": "reduce"},
            {"name": "dQ staging 1", "start": 168, "size": 8, "kind": "reduce"},
            {"name": "lse", "start": 176, "size": 1, "kind": "softmax"},
            {"name": "barriers", "start": 177, "size": 0.5, "kind": "schedule"},
            {"name": "O staging", "start": 0, "size": 32, "kind": "store"},
        ],
    },
    "tensor memory, columns": {
        "size": 512,
        "regions": [
            {"name": "S", "start": 0, "size": 128, "kind": "mma"},
            {"name": "P", "start": 0, "size": 64, "kind": "softmax"},
        ],
    },
}


def figures():
    return {
        "bars": plots.ladder_bars(
            ladder(), "title", predicted="predicted_tflops", low="p20", high="p80", panel="shape"
        ),
        "heatmap": plots.heatmap({"natural": tasks(), "sorted": tasks()[:12]}, "title", note="counted"),
        "timeline": plots.timeline(
            [*tasks(), *({"lane": "load", "start": 9 * i, "end": 999, "label": f"V{i}"} for i in range(3))],
            "title",
            note="predicted, not measured",
        ),
        "memory": plots.memory_map(MEMORY, "title", note="read from the kernel"),
    }


@pytest.fixture(scope="module")
def drawn():
    return figures()


def texts_of(figure):
    """(text, box in pixels) of everything that is written, tick labels outside the view left out."""
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw(renderer)
    unseen = set()
    for ax in figure.axes:
        for axis, limits in ((ax.xaxis, ax.get_xlim()), (ax.yaxis, ax.get_ylim())):
            low, high = sorted(limits)
            for tick in axis.get_major_ticks() + axis.get_minor_ticks():
                if not low <= tick.get_loc() <= high:
                    unseen |= {tick.label1, tick.label2}
    found = [text for text in figure.findobj(plt.Text) if text not in unseen and text.get_visible()]
    # an annotation's own extent would count its leader line as well
    return [(text, plt.Text.get_window_extent(text, renderer)) for text in found if text.get_text().strip()]


@pytest.mark.parametrize("name", ["bars", "heatmap", "timeline", "memory"])
def test_no_two_texts_overlap_and_none_leaves_the_figure(drawn, name):
    boxes = texts_of(drawn[name])
    assert len(boxes) > 10
    for (one, a), (two, b) in itertools.combinations(boxes, 2):
        apart = a.x1 <= b.x0 + 0.5 or b.x1 <= a.x0 + 0.5 or a.y1 <= b.y0 + 0.5 or b.y1 <= a.y0 + 0.5
        assert apart, (one.get_text(), two.get_text())
    for text, box in boxes:
        right, top = drawn[name].bbox.max
        assert -1 <= box.x0 and -1 <= box.y0 and box.x1 <= right + 1 and box.y1 <= top + 1, text.get_text()
        assert text.get_fontsize() >= 6.5


def test_colours_are_fixed_and_distinct():
    assert list(plots.STEPS) == [
        *("baseline", "warp_specialized", "balanced", "dynamic", "dq_staged", "dq_released"),
        *("peeled", "staged", "two_cta", "ds_buffered", "stationary"),
    ]
    assert len(set(plots.STEPS.values())) == len(plots.STEPS)
    red, green, blue = to_rgb(plots.STEPS["baseline"])
    assert red == green == blue
    assert plots.color_of("stationary") == plots.STEPS["stationary"] != plots.color_of("fa4")


def test_bars_stand_in_ladder_order_with_values_and_ratios():
    rows = ladder(predicted=(), panels=("one",))
    figure = plots.ladder_bars(rows[::-1], "Twice as fast")
    (ax,) = figure.axes
    assert [tick.get_text() for tick in ax.get_yticklabels()] == [
        style.label_of(step) for step in plots.STEPS
    ]
    assert [bar.get_width() for bar in ax.patches] == [row["tflops"] for row in rows]
    said = [text.get_text() for text in ax.texts]
    assert (
        said[0].endswith("1.00x")
        and said[-1] == f"{rows[-1]['tflops']:.3g}  {rows[-1]['tflops'] / rows[0]['tflops']:.2f}x"
    )
    assert ax.get_xlim()[0] == 0 and figure.texts[0].get_text() == "Twice as fast"


def test_predictions_are_hatched_and_named():
    figure = plots.ladder_bars(ladder(panels=("one",)), "title", predicted="predicted_tflops")
    (ax,) = figure.axes
    hatched = [bar.get_hatch() is not None for bar in ax.patches]
    assert hatched == [step == "two_cta" for step in plots.STEPS]
    assert ax.get_legend().get_texts()[0].get_text() == "predicted"
    assert figure.texts[1].get_text().startswith("predicted by jfa.timing, the rest measured")
    without = plots.ladder_bars(ladder(panels=("one",)), "title")
    assert "not measured" in [text.get_text() for text in without.axes[0].texts]


def test_frames_and_lists_draw_the_same():
    pandas = pytest.importorskip("pandas")
    rows = ladder(predicted=())
    one, two = (plots.ladder_bars(data, "title", panel="shape") for data in (rows, pandas.DataFrame(rows)))
    bars = [[bar.get_width() for ax in figure.axes for bar in ax.patches] for figure in (one, two)]
    assert bars[0] == bars[1] and len(bars[0]) == 2 * len(plots.STEPS)


def test_caption_says_machine_versions_and_ranges():
    text = plots.caption(ladder(predicted=()))
    assert text == (
        "NVIDIA H200 · 1.50-1.70 GHz · 691 W of 700 W · driver 580.82 · CUDA 12.8 · torch 2.11.0 · "
        "fbtriton 3.7.4 · commit abc123def0 · 2026-11-30"
    )
    assert plots.caption({"gpu": "none (CPU)", "torch": "2.13.0"}) == "none (CPU) · torch 2.13.0"


def test_occupancy_conserves_time():
    share = plots.occupancy(tasks(), bins=37)
    assert share.shape == (3, 37) and share.max() <= 1 + 1e-9
    spent = share.sum(axis=1) * 5800 / 37
    np.testing.assert_allclose(spent, [5 * 300, 5 * 600, 5 * 900])
    assert plots.occupancy([], lanes=[0, 1], bins=4).sum() == 0


def test_heatmap_panels_say_when_and_how_busy():
    events = [{"lane": 0, "start": 0, "end": 100}, {"lane": 1, "start": 0, "end": 50}]
    figure = plots.heatmap({"natural": events}, "title")
    assert figure.axes[0].get_title(loc="left") == "natural: 100 clk, 75 % busy"


def test_timeline_cuts_and_orders_lanes():
    figure = plots.timeline(tasks(), "title", lanes=["softmax", "load"], start=0, end=1000)
    (ax,) = figure.axes
    assert [tick.get_text() for tick in ax.get_yticklabels()] == ["softmax", "load"]
    assert len(ax.patches) == 2 and ax.get_xlim() == (0, 1000)
    busy = [
        *tasks(),
        *({"lane": "load", "start": 10 * i, "end": 600, "label": f"in flight {i}"} for i in range(4)),
    ]
    levels = {round(box.get_y(), 6) for box in plots.timeline(busy, "t", lanes=["load"]).axes[0].patches}
    assert len(levels) == 5
    assert "a label far too long" not in [
        text.get_text() for text in plots.timeline(tasks(), "t").axes[0].texts
    ]


def test_events_of_a_trace():
    def span(name, category, pid, tid, start, duration):
        return {
            "ph": "X",
            "name": name,
            "cat": category,
            "pid": pid,
            "tid": tid,
            "ts": start,
            "dur": duration,
        }

    spans = [
        span("wgmma S", "wgmma", "CTA 0", "wgmma", 30, 10),
        span("tma_load K[0]", "tma_load", "CTA 0", "tma_load", 4, 6),
        span("wait full[0]", "wait", "CTA 0", "consumer", 5, 7),
        span("tma_load K[0]", "tma_load", "CTA 1", "tma_load", 1, 1),
    ]
    events = plots.events_of(spans)
    assert events[0] == {"lane": "tma_load", "start": 4, "end": 10, "label": "K[0]", "kind": "load"}
    assert [event["kind"] for event in events] == ["load", "wait", "mma"]
    assert len(plots.events_of(spans, "CTA 1")) == 1 and plots.events_of([]) == []
    assert set(pictures.KIND_OF.values()) <= set(plots.KINDS)


def test_memory_map_puts_aliases_in_rows_and_counts_once():
    figure = plots.memory_map(MEMORY, "title")
    assert [ax.get_title(loc="left") for ax in figure.axes] == [
        "shared memory, KiB: 177.5 of 227 in use",
        "tensor memory, columns: 128 of 512 in use",
    ]
    boxes = {(box.get_x(), box.get_width()): box.get_y() for box in figure.axes[1].patches[1:]}
    assert boxes[0, 64] == boxes[0, 128] + 1
    written = {text.get_text() for text in figure.axes[0].texts}
    assert {"lse", "barriers", "dQ staging 0", "dQ staging 1"} <= written


@given(
    st.lists(st.floats(0, 100), min_size=1, max_size=12),
    st.floats(0.1, 8),
)
@settings(max_examples=100, deadline=None)
def test_spread_apart_keeps_order_gap_and_limits(positions, gap):
    moved = plots.spread_apart(positions, gap, 0, 100)
    order = sorted(range(len(positions)), key=lambda i: positions[i])
    for left, right in itertools.pairwise(moved[i] for i in order):
        assert right - left >= gap - 1e-6
    assert min(moved) >= -1e-6 and max(moved) <= 100 + 1e-6


def test_spread_apart_leaves_what_is_apart_alone():
    assert plots.spread_apart([5, 1, 9], 2) == pytest.approx([5, 1, 9])
    assert plots.spread_apart([5, 5], 2) == pytest.approx([4, 6])


def test_the_readers_own_style_is_left_alone():
    with plt.rc_context({"font.size": 23, "axes.grid": True}):
        before = dict(plt.rcParams)
        figure = plots.timeline(tasks(), "title")
        assert dict(plt.rcParams) == before
        assert figure.axes[0].xaxis.label.get_fontsize() == 11
    assert not plt.get_fignums()
