"""Deals played through: nobody is forgotten, kernels deal the same, and the rows of figures can be drawn."""

import dataclasses
import math

import pandas
import pytest

from jfa import emulator
from jfa.kernels import parts
from jfa.lab import dealing, figures, ladder

LENGTHS = [0, 1, 127, 128, 0, 129, 640, 63, 300, 5]
FORWARD, BACKWARD = dealing.forward_deals(), dealing.backward_deals()


@pytest.mark.parametrize("rule", [parts.round_robin.fn, parts.boustrophedon.fn])
@pytest.mark.parametrize("items", [0, 1, 7, 8, 9, 31])
def test_static_deals_give_every_item_to_one_sm(rule, items):
    hands = dealing.deal_out(rule, items, 8)
    assert sorted(item for hand in hands for item in hand) == list(range(items))


def test_tickets_give_every_item_to_one_sm_and_keep_an_sm_busy():
    costs = [5, 1, 1, 1, 1, 3, 1, 1, 1]
    events = dealing.play_tickets(costs, 3, ahead=2)
    assert sorted(event["item"] for event in events) == list(range(len(costs)))
    for sm in range(3):
        own = sorted((e["start"], e["end"]) for e in events if e["lane"] == sm)
        assert own[0][0] == 0
        assert all(a[1] == b[0] for a, b in zip(own, own[1:]))
    # Without looking ahead nobody is held up behind the long item, with it two short ones are.
    assert max(e["end"] for e in dealing.play_tickets(costs, 3, ahead=1)) <= max(e["end"] for e in events)


def test_items_are_those_of_the_kernels_lists():
    natural, dynamic = FORWARD["natural order"], FORWARD["dynamic"]
    blocks = [max(math.ceil(length / 128), 1) for length in LENGTHS]
    assert dealing.forward_items(LENGTHS, natural, heads=2) == [b for b in blocks for _ in range(2)]
    real = sorted((math.ceil(length / 128) for length in LENGTHS if length), reverse=True)
    assert dealing.forward_items(LENGTHS, dynamic, heads=1) == real
    assert len(dealing.forward_items(LENGTHS, dynamic, heads=1, queries=200)) == 2 * len(real)
    assert dealing.backward_items(LENGTHS, BACKWARD["listed tiles"], heads=1) == [1] * sum(real)
    assert sum(dealing.backward_items(LENGTHS, BACKWARD["whole sequences"], heads=1)) == sum(real)


@pytest.mark.parametrize("name", ["natural order", "sorted", "boustrophedon"])
def test_the_model_deals_as_the_kernel_does(name):
    problem = ladder.problem_of(LENGTHS, 70, 2, 64)
    with emulator.emulate(policy="eager", trace=True) as machine:
        ladder.run_step(FORWARD[name], problem, *ladder.tensors_of(problem, LENGTHS))
    loaded = dealing.key_loads(machine.reports[-1].events)
    model = dealing.plan(FORWARD[name], LENGTHS, sms=3, heads=2, tile_cost=0).loads()
    assert [loaded.get(cta, 0) for cta in range(3)] == model


def test_a_plan_adds_up():
    plan = dealing.plan(FORWARD["boustrophedon"], LENGTHS, sms=4, heads=2, tile_cost=0)
    assert sum(plan.loads()) == plan.useful == 2 * sum(math.ceil(length / 128) for length in LENGTHS)
    assert plan.busy == plan.efficiency == pytest.approx(plan.useful / (4 * plan.time))
    assert dealing.plan(FORWARD["dynamic"], [0, 0], sms=4).busy == 1


def test_a_reader_may_change_the_deal():
    def everything_to_the_first(deal, k, before=0):
        return k if deal.program == 0 else deal.items

    class Role:
        fn = staticmethod(everything_to_the_first)

    step = dataclasses.replace(FORWARD["sorted"], hear=Role)
    assert dealing.plan(step, LENGTHS, sms=4).busy == pytest.approx(1 / 4)


@pytest.mark.parametrize("name", ["04_forward", "04_backward", "04_balance", "04_empty"])
def test_the_data_is_what_the_lists_and_deals_give(name):
    computed = pandas.DataFrame(figures.REGISTRY[name].compute())
    pandas.testing.assert_frame_equal(computed, figures.read(name), check_dtype=False)


def recorded():
    shape = {"M": 128, "N": 1024, "density": 0.5, "B": 768, "gpu": "H200", "scope": "call"}
    speeds = {"warp_specialized": 300.0, "balanced": 320.0, "dynamic": 360.0, "peeled": 380.0}
    rows = [
        {**shape, "direction": way, "step": step, "ms_p50": 1.0, "tflops": tflops}
        for way in ("forward", "backward")
        for step, tflops in speeds.items()
    ]
    return [*rows, {**shape, "N": 2048, "direction": "forward", "step": "dynamic", "tflops": ""}]


def test_recorded_steps_are_shown_beside_the_model(tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "FOLDER", tmp_path)
    assert dealing.measured_text(["dynamic"]).startswith("not measured")
    assert dealing.compared_text() == ""
    pandas.DataFrame(recorded()).to_csv(tmp_path / "04_steps.csv", index=False)
    assert "360" in dealing.measured_text(["dynamic"])
    assert "H200" in dealing.measured_text(["dynamic"])
    elsewhere = [row | {"gpu": "B200"} if row["step"] == "balanced" else row for row in recorded()]
    pandas.DataFrame(elsewhere).to_csv(tmp_path / "04_steps.csv", index=False)
    assert "B200" not in dealing.measured_text(["dynamic"])  # where the rows that are shown come from
    assert "B200" in dealing.measured_text(["dynamic", "balanced"])
    lines = dealing.compared_text().splitlines()
    assert len(lines) == 3 and " 1.20 " in lines[2]
    assert len(figures.draw("04_steps").axes) == 2


def test_a_mutation_score_can_be_drawn():
    facts = {"kind": "delete wait", "where": "load", "line": "x", "by": "race", "explanation": ""}
    rows = [{"kernel": "k", "verdict": v, **facts} for v in ("detected", "survived", "not run")]
    figure = figures.draw("03_mutation", rows)
    assert "1 of 2" in "".join(text.get_text() for text in figure.texts)


def test_the_deal_is_told_apart_from_the_second_query_tile(tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "FOLDER", tmp_path)
    assert "not measured yet" in dealing.separated_text() and dealing.handed_out_text() == ""
    rows = recorded()
    pandas.DataFrame(rows).to_csv(tmp_path / "04_steps.csv", index=False)
    assert "not measured yet" in dealing.separated_text()
    apart = {**rows[0], "step": "dynamic, one Q tile", "tflops": 336.0}
    pandas.DataFrame([*rows, apart]).to_csv(tmp_path / "04_steps.csv", index=False)
    deal, tile, both = dealing.separated_text().splitlines()[1].split()[3:]
    assert (deal, tile, both) == ("1.05", "1.07", "1.12")
    told = dealing.handed_out_text().splitlines()
    assert len(told) == 2 and told[1].split()[4:] == ["1.125", "1.000", "1.125"]


def test_the_ladder_is_measured_from_the_baseline_on():
    from jfa.lab import ladder

    for direction in ("forward", "backward"):
        chosen = ladder.timed(direction)
        assert next(iter(chosen)) == "baseline" and chosen["baseline"] is None
        assert set(ladder.variants(direction)) < set(chosen)
    one = ladder.timed("forward")["dynamic, one Q tile"]
    problem = ladder.problem_of([128], 128, 1, 128)
    assert one.tiling(problem)["Q_DEPTH"] == 1 and one.draw is ladder.variants("forward")["dynamic"].draw


def test_the_recording_tells_both_parts_apart_at_every_shape():
    gains = dealing.separated()
    assert len(gains) == 8
    assert (gains["the deal"] * gains["second Q tile"]).to_list() == pytest.approx(gains["both"].to_list())
    assert "geometric mean" in dealing.separated_text()
