"""Timing: refuses where there is nothing to measure, takes turns fairly, keeps provenance."""

import itertools
import os
import stat
import time

import pytest
import torch

from jfa.lab import flops, machine, measure


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks what happens without a GPU")
def test_without_a_gpu_it_refuses_and_says_why():
    with pytest.raises(RuntimeError, match="host_clock=True"):
        measure.interleave({"a": lambda: None})


def test_wrong_requests_are_named():
    with pytest.raises(ValueError, match="no CUDA graph"):
        measure.interleave({"a": lambda: None}, host_clock=True, graph=True)
    with pytest.raises(ValueError, match="one round"):
        measure.interleave({"a": lambda: None}, rounds=0, host_clock=True)


def test_host_clock_times_each_function_and_takes_turns():
    order = []

    def sleeper(name, seconds):
        def fn():
            order.append(name)
            time.sleep(seconds)

        return fn

    rows = measure.interleave(
        {"short": sleeper("short", 0.002), "long": sleeper("long", 0.01)},
        rounds=20,
        sample_ms=1,
        warmup_ms=1,
        host_clock=True,
    )
    short, long = rows
    assert [row["name"] for row in rows] == ["short", "long"] and short["timer"] == "host-clock"
    assert 2 <= short["ms_p50"] < 8 < long["ms_p50"] < 40
    assert short["ms_p20"] <= short["ms_p50"] <= short["ms_p80"] and short["calls"] == 1
    taken = [tuple(order[i : i + 2]) for i in range(len(order) - 40, len(order), 2)]
    assert set(taken) == {("short", "long"), ("long", "short")}  # not one order
    assert set(machine.PROVENANCE) <= set(short) and short["torch"] == torch.__version__


def test_a_sample_lasts_long_enough():
    calls = []
    (row,) = measure.interleave(
        {"a": lambda: calls.append(time.sleep(0.001))}, rounds=1, sample_ms=12, warmup_ms=0, host_clock=True
    )
    assert 1 <= row["calls"] <= 12 and len(calls) >= row["calls"]  # fewer where a sleep lasts longer
    assert row["calls"] * row["ms_p50"] >= 6


def test_a_sample_follows_untimed_calls_of_its_own():
    order = []
    functions = {name: lambda name=name: order.append((name, time.sleep(0.002))[0]) for name in "ab"}
    rows = measure.interleave(functions, rounds=5, sample_ms=1, settle_ms=5, warmup_ms=0, host_clock=True)
    assert [row["calls"] for row in rows] == [1, 1] and {row["settle_ms"] for row in rows} == {5}
    turns = [len(list(same)) for _, same in itertools.groupby(order)]
    assert len(turns) >= 6 and min(turns) >= 2  # warm-up, then five rounds: no sample stands alone


def test_a_function_that_fails_is_a_row_that_says_so():
    def broken():
        raise NotImplementedError("head dimension 80\nmore")

    with pytest.raises(NotImplementedError):
        measure.interleave({"broken": broken}, host_clock=True)
    rows = measure.interleave(
        {"broken": broken, "fine": lambda: None},
        rounds=1,
        sample_ms=0,
        warmup_ms=0,
        host_clock=True,
        keep_going=True,
    )
    assert rows[0]["error"] == "NotImplementedError: head dimension 80" and "ms_p50" not in rows[0]
    assert rows[1]["error"] == "" and rows[1]["ms_p50"] >= 0


def test_rows_survive_a_round_trip_in_stable_columns(tmp_path):
    rows = measure.interleave({"a": lambda: None}, rounds=2, sample_ms=0, warmup_ms=0, host_clock=True)
    row = measure.add_work(
        rows[0] | {"ms_p50": 2.0, "M": 128, "suite": "jagged", "own": True}, flops.roofline([64], 128, 4, 128)
    )
    path = measure.write_rows(tmp_path / "figures" / "09.csv", [row])
    header = path.read_text().splitlines()[0].split(",")
    assert header[:2] == ["suite", "M"] and header[-1] == "own"
    known = [column for column in measure.COLUMNS if column in header]
    assert header[: len(known)] == known
    (again,) = measure.read_rows(path)
    assert again["M"] == 128 and again["ms_p50"] == 2.0 and again["own"] == 1 and again["error"] == ""
    assert again["tflops"] == pytest.approx(4 * 128 * 64 * 4 * 128 / 2e9, rel=1e-5)
    assert again["torch"] == torch.__version__ and again["commit"] == row["commit"]
    before = path.read_bytes()
    measure.write_rows(path, measure.read_rows(path))
    assert path.read_bytes() == before
    measure.write_rows(path, [{"name": "b", "later": 1}], append=True)
    assert [r["name"] for r in measure.read_rows(path)] == ["a", "b"]


def test_a_cut_file_is_named(tmp_path):
    path = tmp_path / "cut.csv"
    path.write_text("name,ms_p50,commit\na,1.5,abc\nb,2")
    with pytest.raises(ValueError, match="cut.csv: line 3 has other cells than the header"):
        measure.read_rows(path)
    assert "line 3" in measure.unreadable(path, "ms_p50")
    path.write_text("name,ms_p50,commit\na,1.5,abc\n")
    assert measure.unreadable(path, "ms_p50") is None and "column power" in measure.unreadable(path, "power")


def test_no_rows_are_no_file(tmp_path):
    with pytest.raises(ValueError, match="no rows to write"):
        measure.write_rows(tmp_path / "none.csv", [])
    assert not (tmp_path / "none.csv").exists()


def test_predictions_and_measurements_never_share_a_column(tmp_path):
    row = measure.predicted_row("two_cta", 1.5, "jfa.timing", M=128)
    work = flops.roofline([1024], 128, 4, 128, machine="B200")
    (again,) = measure.read_rows(measure.write_rows(tmp_path / "p.csv", [measure.add_work(row, work)]))
    assert again["predicted_tflops"] == pytest.approx(work.flops / 1.5e9, rel=1e-5) and "tflops" not in again
    with pytest.raises(ValueError, match="no ms_p50"):
        measure.predicted_row("two_cta", 1.5, "jfa.timing", ms_p50=1.0)
    with pytest.raises(ValueError, match="measured column"):
        measure.write_rows(tmp_path / "p.csv", [{"name": "x", "ms_p50": 1.5}])
    with pytest.raises(ValueError, match="model"):
        measure.write_rows(tmp_path / "p.csv", [{"name": "x", "predicted_ms": 1.5}])


def test_commit_is_of_this_checkout():
    assert machine.commit().rstrip("+").isalnum()


def test_monitor_reads_clock_and_power(monkeypatch, tmp_path):
    tool = tmp_path / "nvidia-smi"
    tool.write_text(
        '#!/bin/sh\necho "1500, 650.5, 60"\necho "1700, [N/A], 62"\necho "1600, 690.5, 61"\nexec sleep 30\n'
    )
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(machine, "_smi", lambda *args: ["nvidia-smi"])
    with machine.Monitor() as monitor:
        for _ in range(100):
            if len(monitor.samples) == 3:
                break
            time.sleep(0.02)
    assert monitor.medians() == {"sm_clock_mhz": 1600, "power_w": 670.5, "temperature_c": 61}
    assert monitor._process.returncode is not None and not monitor._thread.is_alive()


def test_monitor_without_a_gpu_sees_nothing():
    if torch.cuda.is_available():
        pytest.skip("asks what happens without a GPU")
    with machine.Monitor() as monitor:
        pass
    assert set(monitor.medians().values()) == {""}
    assert machine.provenance(monitor)["gpu"] == "none (CPU)"


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"graph": True}], ids=["events", "graph"])
def test_gpu_times_are_plausible(options):
    small, large = (torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for n in (1024, 4096))
    small_row, large_row = measure.interleave(
        {"small": lambda: small @ small, "large": lambda: large @ large}, rounds=5, sample_ms=5, **options
    )
    assert large_row["ms_p50"] > 3 * small_row["ms_p50"] > 0
    assert 50 < 2 * 4096**3 / large_row["ms_p50"] / 1e9 < 1000  # TFLOPS
    assert large_row["timer"] == ("cuda-graph" if "graph" in options else "cuda-event")
    assert large_row["gpu"] and large_row["driver"] and large_row["sm_count"] > 50
    assert 300 < large_row["sm_clock_mhz"] < 3000 and large_row["power_w"] > 50
