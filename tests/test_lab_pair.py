"""What notebooks 08 and 09 count and tabulate: a pair's traffic, what stays on chip, tables of results."""

import dataclasses

import pandas
import pytest

from jfa import steps
from jfa.lab import drawings_pair, onchip, pair, results, tables
from jfa.lab.cases import Case


def test_operands_follow_from_a_products_shape():
    assert pair.operand_bytes((128, 128, 128), True) == 2 * 2 * 128 * 128
    assert pair.operand_bytes((128, 128, 128), False) == 2 * 128 * 128
    assert pair.operand_bytes((256, 128, 128), True, 2) == 2 * 128 * (128 + 64)


@pytest.fixture(scope="module")
def counted():
    return {
        (arch, name): pair.traffic(steps.find(arch, "backward", name))
        for arch in ("blackwell", "hopper")
        for name in pair.TARGETS
    }


def test_the_trace_agrees_with_the_shapes(counted):
    for name, products in pair.predicted_operands().items():
        assert {product: counted["blackwell", name][product] for product in products} == products


def test_a_pair_exchanges_and_adds_halves(counted):
    alone, paired = (counted["blackwell", name] for name in pair.TARGETS)
    assert alone["exchange"] == 0
    assert paired["exchange"] == 128 * 128 * 2 / 2
    assert alone["dQ added"] == 128 * 128 * 4 == 2 * paired["dQ added"]
    assert pair.shared_clocks(paired) < pair.shared_clocks(alone)


def test_a_multicast_is_asked_once_and_arrives_twice(counted):
    alone, paired = (counted["hopper", name] for name in pair.TARGETS)
    assert alone["arrives"] == alone["asked of L2"] == paired["arrives"] > paired["asked of L2"]


def test_the_recorded_figures_are_what_is_counted_now(counted):
    from jfa.lab import figures

    table = figures.read("08_traffic").set_index(["arch", "step", "what"])["kib"]
    for (arch, name), found in counted.items():
        for what, count in found.items():
            if (arch, name, what) in table:
                assert table[arch, name, what] == pytest.approx(count / 1024, abs=1e-3)


def test_the_order_has_every_product_of_every_turn():
    rows = pair.order_rows()
    labels = [row["label"] for row in rows if row["kind"] == "mma"]
    assert sorted(labels) == sorted(f"{name}{turn}" for name in pair.PRODUCTS for turn in range(3))
    ends = {(row["lane"], row["label"]): row for row in rows}
    for turn in range(3):
        sums = ends[pair.LANES[0], f"dQ{turn}"]
        assert all(ends[f"CTA {side} sends dS", str(turn)]["start"] < sums["start"] for side in range(2))


def measured(step, tflops, scope="call", **columns):
    columns = {"M": 128, "N": 512, "density": 0.5, "suite": "jagged", **columns}
    return {**columns, "direction": "backward", "scope": scope, "step": step, "tflops": tflops, "impl": "jfa"}


def test_ratios_need_both_steps_and_prefer_whole_calls():
    rows = [measured("peeled", 100.0), measured("two_cta", 90.0), measured("peeled", 1.0, scope="kernel")]
    assert pair.ratios(rows) == {(128, 512, 0.5): 0.9}
    assert pair.ratios(rows[:1]) == {}
    assert "0.90" in pair.text(rows)
    assert "0.90 to 0.90" in drawings_pair.steps(pandas.DataFrame(rows)).texts[0].get_text()


def test_on_chip_q_is_read_once_a_cta_and_dq_is_not_added():
    before, last = (steps.find("hopper", "backward", name) for name in onchip.STEPS)
    lengths = [128] * 6
    alone, kept = (onchip.moved(step, lengths) for step in (before, last))
    assert alone["Q", "read"] == 128 * 128 * 2
    assert kept["Q", "read"] == alone["Q", "read"] / 2  # six blocks of scores, three CTAs
    assert alone["dQ", "added"] == 128 * 128 * 4
    assert ("dQ", "added") not in kept
    assert alone["dK", "written"] == kept["dK", "written"] == 128 * 128 * 2


def row(case, impl, ms, direction="forward", **more):
    columns = {"direction": direction, "scope": "call", "impl": impl, "timer": "cuda-graph", "ms_p50": ms}
    return {**case.columns(), **columns, "tflops": 100.0 / ms, "roof_tflops": 200.0, "error": "", **more}


CASES = [
    Case("jagged", 128, 512, 0.5, B=8),
    Case("jagged", 128, 512, 0.9, B=8),
    Case("dense", 256, 256, 1.0, B=8),
]


def test_tables_put_ours_beside_the_others():
    rows = [row(case, impl, ms) for case in CASES for impl, ms in (("jfa", 1.0), ("fa4", 2.0))]
    text = tables.jagged_table(rows, "forward").splitlines()[-1].split()
    assert text == ["128", "512", "-", "-", "-", "100", "50", "2.00", "100", "50", "2.00"]
    assert tables.other_table(rows, "forward").splitlines()[-1].split()[-2:] == ["100", "50"]
    assert tables.other_table(rows, "backward").splitlines()[-1].split()[-2:] == ["-", "-"]
    assert tables.slower(rows) == []
    rows.append(row(CASES[2], "jfa", 4.0))
    assert len(tables.slower(rows)) == 1
    assert tables.slower(rows, results.plain) == []


def test_distances_are_sorted_and_say_what_bounds():
    rows = [row(CASES[0], "jfa", 1.0), row(CASES[1], "jfa", 0.8), row(CASES[1], "fa4", 1.2)]
    near, far = tables.distances(rows, "forward")
    assert (near["share"], far["share"]) == (0.625, 0.5)
    assert near["ratio"] == pytest.approx(1.5)
    assert far["ratio"] is None
    assert {near["bound"], far["bound"]} <= {"memory", "compute"}
    assert "1.50" in tables.distance_table(rows, "forward")


def test_failures_are_told_once():
    rows = [dataclasses.asdict(CASES[0]) | {"impl": "cudnn", "error": "no kernel"}] * 3
    assert tables.failures(rows) == ["cudnn on jagged, 3 rows: no kernel"]


def test_no_recording_is_no_table():
    assert tables.other_table([], "forward") == "no such shape was measured"


def test_a_call_gets_a_step_of_the_ladder():
    for direction in results.DIRECTIONS:
        names = [step.name for step in steps.ladder("hopper", direction)]
        assert {tables.choice(direction, rows) for rows in (64, 2048)} <= set(names)


def test_a_pair_of_short_histories_leaves_its_second_cta_empty():
    assert pair.empty_share([1, 100, 128]) == 1
    assert pair.empty_share([129, 256]) == 0
    assert pair.empty_share([0, 300]) == 0.5  # two pairs, the second of 44 keys
    assert pair.predicted_ratio([100], 1.25) == pytest.approx(0.625)
    assert pair.predicted_ratio([256], 1.25) == 1.25
