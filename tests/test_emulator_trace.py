"""The trace: operations with task, buffer, phase, work and dependencies, and its Perfetto form."""

import json

import pytest

from jfa.emulator import bench


@pytest.fixture(scope="module")
def report():
    return bench.launch(bench.make_kernel(), bench.inputs(), trace=True)


def by_op(report, op):
    return [e for e in report.events if e[3] == op]


def test_the_benchmark_kernel_is_right_and_clean():
    tensors = bench.inputs()
    for policy in ("random", "eager", "lazy"):
        assert bench.launch(bench.make_kernel(), tensors, policy=policy).findings == []
        error = (tensors[3].float() - bench.reference(*tensors[:3])).abs().max()
        assert error < 2e-3


def test_operations_carry_task_buffer_line_and_work(report):
    mma = [e for e in by_op(report, "issue") if e[6]["kind"] == "mma"]
    assert len(mma) == 2 * bench.BLOCKS
    assert {e[6]["flop"] for e in mma} == {2 * 128**3}
    assert {e[4] for e in mma} == {"scores[0]", "acc[0]"}
    assert all(e[1] == (0, 0, 0) and e[2].startswith("task1@L") and e[5] > 0 for e in mma)
    loads = [e for e in by_op(report, "issue") if e[6]["kind"] == "tma_load"]
    assert {e[6]["bytes"] for e in loads} == {128 * 128 * 2}
    softmax = [e for e in report.events if e[2].startswith("default")]
    assert sum(e[6].get("work", {}).get("exp2", 0) for e in softmax) >= bench.BLOCKS * 128 * 128


def test_every_operation_completes_after_it_was_issued(report):
    issued = {e[6]["id"]: e[0] for e in by_op(report, "issue")}
    done = {e[6]["id"]: e[0] for e in report.events if e[3].startswith("done:")}
    assert issued.keys() == done.keys()
    assert all(done[i] > issued[i] for i in issued)


def test_every_wait_knows_the_phase_and_what_completed_it(report):
    phases = {e[6]["key"]: e[6]["src"] for e in by_op(report, "phase_done")}
    events = {e[0] for e in report.events}
    operations = {e[6]["id"] for e in by_op(report, "issue")}
    waits = [e for e in by_op(report, "wait") if e[6]["phase"] >= 0]
    assert len(waits) > 4 * bench.BLOCKS
    for e in waits:
        sources = phases[e[6]["key"]]
        assert sources
        for kind, number in sources:
            assert number in (events if kind == "t" else operations)


def test_nothing_is_recorded_without_trace():
    assert bench.launch(bench.make_kernel(), bench.inputs()).events == []


def test_perfetto(report, tmp_path):
    path = report.perfetto(tmp_path / "trace.json")
    spans = json.loads(path.read_text())["traceEvents"]
    assert {s["ph"] for s in spans} == {"X"}
    assert {s["pid"] for s in spans} == {"CTA (0, 0, 0)"}
    assert {"mma", "tma_load", "tma_store", "wait"} <= {s["cat"] for s in spans}
    assert all(s["dur"] > 0 for s in spans)
