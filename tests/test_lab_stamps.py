"""Clocks stamped inside a kernel: the answers stay, a group's spans follow each other, waits add up."""

import functools

import numpy as np
import pandas
import pytest
import torch

from jfa import emulator, steps
from jfa.lab import ablation, drawings_stamps, figures, ladder, late, loops, pipeline, stamps, targets
from jfa.lab.targets import Target

SMALL = Target("forward", "staged", M=200, N=300, B=6, D=64)


@functools.cache
def stamped():
    """(out and lse without stamps, with stamps, the stamps, findings of the emulator)."""
    with emulator.emulate(arch="sm_90") as machine:
        wanted = targets.prepare(SMALL, "cpu")()
        run, found = stamps.stamped(SMALL, "cpu")
        got = run()
    findings = [finding for report in machine.reports for finding in report.errors()]
    return wanted, got, found.numpy(), findings


def test_a_stamped_kernel_gives_the_same_answers():
    wanted, got, found, findings = stamped()
    assert findings == []
    assert all(torch.equal(a, b) for a, b in zip(wanted, got, strict=True))
    assert (found > 0).any(axis=(1, 2, 3)).all()  # every CTA


def test_every_item_is_stamped_and_spans_have_no_gap():
    found = stamped()[2]
    items = 0
    for cta in found:
        each = list(stamps.spans(cta))
        for lane in stamps.GROUPS:
            mine = [span for span in each if span[0] == lane]
            assert all(span[3] <= span[4] for span in mine)
            assert all(one[4] == following[3] for one, following in zip(mine, mine[1:]))
            items += len({span[1] for span in mine})
        loaded = [span for span in each if span[0] == stamps.LOADER]
        assert len(loaded) == len({span[1] for span in each if span[0] == stamps.GROUPS[0]})
    heads, tiles = 4, -(-SMALL.M // 128)
    full = int((SMALL.case.lengths() > 0).sum())
    assert items == len(stamps.GROUPS) * heads * tiles * full


def test_blocks_of_keys_are_counted_for_their_item():
    spans = [span for cta in stamped()[2] for span in stamps.spans(cta)]
    blocks = int((-(-SMALL.case.lengths() // 64)).sum())  # such short sequences are cut into blocks of 64
    for lane in stamps.GROUPS:
        found = [span for span in spans if span[0] == lane and span[2] == stamps.SCORES]
        assert len(found) == 4 * -(-SMALL.M // 128) * blocks  # 4 heads


def test_the_means_are_those_of_the_inner_items():
    one = np.zeros((stamps.LANES.value, stamps.ROOM.value, stamps.POINTS.value), np.int64)
    for item in range(6):
        at = 1000 * (item + 1)
        for group in (0, 1):
            one[group, item, :6] = at, at + 10, at + 30, at + 600, at + 620, at + 900
            one[2 + group, item, :6] = at + 40, at + 60, at + 65, at + 265, at + 500, at + 510
        one[4, item, :2] = at - 500, at
    found, items = stamps.means(one[None])
    assert items == 2 * 2  # items 2 and 3 of both groups
    assert found[stamps.EMPTY] == (10, 1) and found[stamps.Q] == (20, 1) and found[stamps.K] == (30, 1)
    assert found[stamps.SCORES] == (200, 1) and found[stamps.SOFTMAX] == (235, 1)
    assert (
        found[stamps.LAST] == (90, 1) and found[stamps.NEXT] == (120, 2) and found[stamps.WRITE] == (280, 1)
    )


def test_what_is_missing_ends_the_spans():
    cut = stamped()[2][0].copy()
    cut[0, 1, 5] = 0  # group 0's second item was never written
    items = {span[1] for span in stamps.spans(cut) if span[0] == "group 0"}
    assert items == {0}


def test_the_shares_leave_out_what_the_shortest_span_takes():
    clocks = {stamps.EMPTY: (50, 1), stamps.TURN: (40, 2), stamps.SCORES: (440, 2), stamps.SOFTMAX: (840, 2)}
    clocks |= {what: (20, 1) for what in stamps.WHAT if what not in clocks} | {stamps.K: (240, 2)}
    rows = [
        Target("forward", "staged").columns() | {"kind": "mean", "what": what, "clocks": mean, "spans": count}
        for what, (mean, count) in clocks.items()
    ]
    table = drawings_stamps.shares(pandas.DataFrame(rows))
    assert table.loc["M=128", stamps.SCORES] == pytest.approx(400 / 1400)
    assert table.loc["M=128", drawings_stamps.WAITING] == pytest.approx(200 / 1400)
    assert table.sum(axis=1).tolist() == pytest.approx([1])


def test_an_edit_that_fits_elsewhere_too_is_refused():
    step = steps.find("hopper", "forward", "staged")
    with pytest.raises(ValueError, match="expected .* 1 times, found it 2 times"):
        ablation.edited(step, [(r"group\.await_turn\(\)\n    scores", "scores", 1)])
    assert all(len(edit) == 3 for edit in (*stamps.EDITS, *late.EDITS))


def test_an_item_of_which_blocks_found_no_room_ends_the_spans():
    cut = stamped()[2][0].copy()
    cut[2, 3:] = 0  # group 0's blocks from the fourth on
    spans = [span for span in stamps.spans(cut) if span[0] == "group 0"]
    assert all(begin <= end for *_, begin, end in spans)
    whole = {span[1] for span in stamps.spans(stamped()[2][0]) if span[0] == "group 0"}
    assert {span[1] for span in spans} < whole


def test_what_was_recorded_adds_up():
    rows = figures.read("10_stamps")
    means, spans = (drawings_stamps.kind(rows, name) for name in ("mean", "span"))
    assert set(means["what"]) == set(stamps.WHAT) and len(means) == len(stamps.SHAPES) * len(stamps.WHAT)
    assert (means["slower"] > 1).all() and (means["items"] > 1000).all()
    table = drawings_stamps.shares(rows)
    assert (table >= 0).all(axis=None) and table.sum(axis=1).tolist() == pytest.approx(
        [1] * len(stamps.SHAPES)
    )
    for lane in stamps.GROUPS:
        mine = spans[spans["lane"] == lane].sort_values(["begin", "clocks"])
        assert (mine["begin"] + mine["clocks"]).iloc[:-1].tolist() == mine["begin"].iloc[1:].tolist()
    assert "waits" in drawings_stamps.finding(table)


def test_the_compiler_moves_the_wait_and_a_condition_holds_it():
    """What notebook 10 reads in the loop; a compiler that leaves the wait where it stands ends the story."""
    staged = steps.find("hopper", "forward", "staged")
    before = [
        loops.before_the_last_wait(pipeline.inner_loop(ladder.compiled(step).text("sass")))
        for step in (staged, late.waiting(staged))
    ]
    assert before == [(0, 66), (66, 66)]
