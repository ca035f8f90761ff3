"""A peer in another process: turns, answers, errors, silence and death, without any GPU."""

import os
import sys

import pytest

from jfa.lab import child, measure
from jfa.lab.cases import Case

CASE = Case("jagged", 16, 64, 0.5, B=3, Hq=2, Hkv=2, D=64)
# A child that knows the protocol and nothing else, so that it starts at once.
FAKE = """
import json, os, sys, time

times = 0
for line in sys.stdin:
    message = json.loads(line)
    what, answer = message["do"], {}
    if what == "quit":
        break
    if what == "prepare":
        rows = message["case"]["M"]
        if rows == 1:
            answer = {"error": "ValueError: no such shape"}
        elif rows == 2:
            print("out of luck", file=sys.stderr)
            os._exit(3)
        elif rows == 3:
            time.sleep(60)
        else:
            names = [f"{way} {scope}" for scope in message["scopes"] for way in message["directions"]]
            answer = {"note": "a fake", "functions": dict.fromkeys(names, ""), "errors": {}}
    elif what == "ready":
        answer = {"timer": "cuda-graph"}
    elif what == "time":
        times += message["name"].startswith("backward")
        if times > 3:
            os._exit(4)
        answer = {"ms": 2.0}
    print(json.dumps(answer), flush=True)
"""
SERVING = """
import os
from jfa.lab import child

class Fake:
    def prepare(self, case, directions, scopes, graph):
        print("chatter that is no answer")
        os.system("echo more of it")
        if case["M"] == 1:
            raise ValueError("no such shape\\nmore")
        return {"note": f"{case['N']} {directions} {scopes} {graph}", "functions": {}, "errors": {}}

    def forget(self):
        pass

child.serve(Fake())
"""


@pytest.fixture
def process():
    with child.Child((sys.executable, "-u", "-c", FAKE), dict(os.environ), prepare_s=20, sample_s=20) as made:
        yield made


def prepared(process, M=16):
    return process.prepare(Case("jagged", M, 64, 0.5, B=3), ["forward", "backward"], ["call"], True)


def test_functions_of_another_process_take_their_turns(process):
    answer = prepared(process)
    assert answer["note"] == "a fake" and answer["functions"] == {"forward call": "", "backward call": ""}
    functions = {"there": child.There(process, "forward call"), "here": lambda: None}
    rows = measure.interleave(functions, 3, sample_ms=1, warmup_ms=1, host_clock=True)
    there, here = rows
    assert (there["ms_p50"], there["timer"], there["error"]) == (2.0, "cuda-graph", "")
    assert here["timer"] == "host-clock" and here["ms_p50"] < 2.0
    process.forget()


def test_an_error_there_is_told_and_the_process_lives_on(process):
    with pytest.raises(RuntimeError, match="^ValueError: no such shape$"):
        prepared(process, M=1)
    assert prepared(process)["note"] == "a fake" and process.starts == 1


def test_what_serves_prints_answers_alone():
    with child.Child((sys.executable, "-u", "-c", SERVING), dict(os.environ), prepare_s=60) as process:
        assert prepared(process)["note"] == "64 ['forward', 'backward'] ['call'] True"
        process.forget()
        with pytest.raises(RuntimeError, match="^ValueError: no such shape$"):
            prepared(process, M=1)
        child_process = process.process
    assert child_process.returncode == 0


def test_a_process_that_dies_says_its_last_words_and_is_started_again(process):
    with pytest.raises(child.Lost, match="died at prepare: out of luck"):
        prepared(process, M=2)
    assert prepared(process)["note"] == "a fake" and process.starts == 2


def test_a_process_that_is_silent_is_ended(process):
    process.prepare_s = 0.5
    with pytest.raises(child.Lost, match="no answer to prepare in 0.5 s"):
        prepared(process, M=3)
    assert process.process is None


def test_a_death_between_rounds_is_a_row_and_the_others_go_on(process):
    prepared(process)
    functions = {name: child.There(process, f"{name} call") for name in ("backward", "forward")}
    functions["here"] = lambda: None
    rows = measure.interleave(functions, 6, sample_ms=1, warmup_ms=1, host_clock=True, keep_going=True)
    by_name = {row["name"]: row for row in rows}
    assert "died at time: exit status 4" in by_name["backward"]["error"]
    assert "lost before" in by_name["forward"]["error"]
    assert by_name["here"]["error"] == "" and "ms_p50" not in by_name["forward"]


def test_a_process_that_is_always_lost_is_given_up(process):
    for _ in range(child.STARTS):
        with pytest.raises(child.Lost, match="out of luck"):
            prepared(process, M=2)
    with pytest.raises(child.Lost, match=f"lost {child.STARTS} times"):
        prepared(process)


def test_the_child_sees_no_triton_of_the_path(tmp_path):
    (tmp_path / "with" / "triton").mkdir(parents=True)
    (tmp_path / "without").mkdir()
    path = os.pathsep.join(str(tmp_path / name) for name in ("with", "without"))
    found = child.stock_environment({"PYTHONPATH": path, "TRITON_CACHE_DIR": "cache", "HOME": "x"})
    assert found["PYTHONPATH"].split(os.pathsep) == [str(child.ROOT), str(tmp_path / "without")]
    assert found["TRITON_CACHE_DIR"] == "cache-stock" and found["HOME"] == "x"


def test_a_case_survives_its_columns():
    for case in (CASE, Case("packed", 0, 64, 0.5, B=3, causal=True, window=(256, 0), dtype="float16")):
        assert Case.of(case.columns() | {"impl": "flex"}) == case


@pytest.mark.gpu
def test_flexattention_runs_in_its_own_process():
    case = Case("jagged", 128, 256, 0.5, B=8)
    with child.Child() as process:
        answer = process.prepare(case, ["forward", "backward", "both"], ["call", "kernel"], True)
        assert set(answer["functions"].values()) == {""}, answer
        assert "Triton" in answer["note"]
        for scope in ("call", "kernel"):
            assert max(answer["errors"][scope]["budget_share"].values()) < 1
        there = child.There(process, "backward kernel")
        (row,) = measure.interleave({"there": there}, 2, sample_ms=1, warmup_ms=1)
        assert row["ms_p50"] > 0 and row["timer"] in ("cuda-graph", "cuda-event")
