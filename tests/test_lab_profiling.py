"""What notebook 10 rests on: targets, reading Nsight Compute's CSV, and kernels with a stage left out."""

import functools

import pytest
import torch

from jfa import emulator, steps
from jfa.lab import ablation, counters, measure, neighbours, rounds, targets
from jfa.lab.targets import BASELINE, Target

SMALL = {"M": 70, "N": 300, "B": 4, "D": 64}
PASSES = [*ablation.PASSES, ("forward", "stationary")]  # what is recorded, and the last forward step


def results(target):
    with emulator.emulate(arch="sm_90") as machine:
        found = targets.prepare(target, "cpu")()
    return found, [finding for report in machine.reports for finding in report.errors()]


@pytest.mark.parametrize(("direction", "step"), PASSES)
def test_a_stage_left_out_leaves_a_kernel_that_runs(direction, step):
    whole = Target(direction, step, **SMALL)
    wanted, findings = results(Target(direction, BASELINE, **SMALL))
    assert findings == []
    differ = {}
    for stage in ("", *ablation.edits_of(targets.step_of(whole))):
        found, findings = results(Target(direction, step, **SMALL, left_out=stage))
        assert findings == [], stage
        differ[stage] = ablation.difference(found, wanted)
    assert differ[""] < 0.01
    for stage, difference in differ.items():
        # Only keys past a sequence's end are masked here, and their dQ is zero: they come as zeros.
        assert stage in ("", "masks") or not difference < 0.02, stage


def test_an_edit_reaches_what_a_role_calls_and_nothing_else():
    peeled = steps.find("hopper", "forward", "peeled")
    changed = ablation.without(peeled, "masks")
    assert changed.attend.fn.__module__ != peeled.attend.fn.__module__
    assert changed.draw is peeled.draw
    assert changed.tiling is peeled.tiling
    assert ablation.without(peeled, "masks").attend is changed.attend
    with pytest.raises(ValueError, match="stage: expected one of exponentials"):
        ablation.without(peeled, "gravity")


def test_an_edit_that_fits_nowhere_is_refused(monkeypatch):
    monkeypatch.setitem(ablation.FORWARD, "nothing", [("no such line", "pass")])
    with pytest.raises(ValueError, match="nothing like 'no such line'"):
        ablation.without(steps.find("hopper", "forward", "peeled"), "nothing")


def test_a_process_that_compiles_says_what_went_wrong():
    if torch.cuda.is_available():
        pytest.skip("this checks the message of a machine without CUDA")
    target = Target("forward", "stationary", **SMALL)
    assert targets.compile_all([target], workers=1)[target]


def printed(*launches):
    header = ["ID", "Kernel Name", "gpu__time_duration.sum", counters.COUNTERS["tensor_busy"][0]]
    lines = [header, ["", "", "ns", "%"]]
    lines += [[str(i), *launch] for i, launch in enumerate(launches)]
    return "==PROF== Connected\n" + "\n".join(",".join(f'"{cell}"' for cell in line) for line in lines)


def test_the_profile_is_read_launch_by_launch():
    text = printed(("kernel", "12,500", "50"), ("void at::cuda::<unnamed>::spin_kernel(long)", "9", "0"))
    kernel, mark = counters.rows_of(text)
    assert (kernel["kernel"], kernel["duration_us"], kernel["tensor_busy"]) == ("kernel", 12.5, 0.5)
    assert kernel["dram_busy"] == ""
    assert mark["kernel"] == "spin_kernel"
    with pytest.raises(ValueError, match="--page raw"):
        counters.rows_of("==ERROR== nothing was profiled")


def test_a_mark_ends_a_target():
    chosen = [Target("backward", BASELINE), Target("forward", "peeled")]
    names = ["dkdv_kernel", "dq_kernel", "spin_kernel", "kernel", "spin_kernel"]
    rows = counters.by_target([{"kernel": name} for name in names], chosen)
    assert [(row["step"], row["kernel"]) for row in rows] == [
        (BASELINE, "dkdv_kernel"),
        (BASELINE, "dq_kernel"),
        ("peeled", "kernel"),
    ]
    with pytest.raises(ValueError, match="expected 2 targets, the profile holds 1"):
        counters.by_target([{"kernel": name} for name in names[:3]], chosen)


def test_only_metrics_that_the_chip_has_are_asked_for():
    wanted = ["sm__cycles_elapsed.avg", "sm__gone.sum", "launch__registers_per_thread"]
    said = "Device NVIDIA H200\n-----\nsm__cycles_elapsed   Counter  cycle\nlts__t_sectors  Counter"
    assert counters.known(wanted, said) == [wanted[0], wanted[2]]
    assert counters.known(wanted, "") == wanted


def test_the_profiled_program_marks_every_target(monkeypatch):
    calls = []
    monkeypatch.setattr(counters, "prepare", lambda target: functools.partial(calls.append, target.step))
    for name in ("synchronize", "cudart", "_sleep"):
        monkeypatch.setattr(torch.cuda, name, lambda *args, name=name: Runtime(calls, name))
    counters.run([Target("forward", "peeled"), Target("forward", "stationary")])
    counted = "".join(str(call)[0] for call in calls)
    assert counted == "pppSp_EsssSs_E".replace("_", "w")


class Runtime:
    """Stands for torch.cuda.cudart(); notes the profiler's start and end, and the mark."""

    def __init__(self, calls, name):
        self.calls = calls
        if name == "_sleep":
            calls.append("wait")

    def cudaProfilerStart(self):
        self.calls.append("Start")

    def cudaProfilerStop(self):
        self.calls.append("End")


def test_rows_of_an_ablation_say_what_was_left_out_and_how_wrong_it_is(monkeypatch):
    prepare = targets.prepare
    clock = iter(range(1, 100))

    def timed(functions, rounds, **options):
        row = {"timer": "cuda-graph", "error": "", **measure.provenance()}
        return [{"name": name, "ms_p50": float(next(clock)), **row} for name in functions]

    monkeypatch.setattr(ablation, "prepare", lambda target: prepare(target, "cpu"))
    monkeypatch.setattr(measure, "interleave", timed)
    whole = Target("forward", "stationary", **SMALL)
    chosen = [whole, Target("forward", "stationary", **SMALL, left_out="exponentials")]
    with emulator.emulate(arch="sm_90"):
        first, second = ablation.measured(chosen)
    assert (first["left_out"], second["left_out"]) == ("", "exponentials")
    assert first["rel_error"] < 0.01 < second["rel_error"]
    assert first["tflops"] == 2 * second["tflops"]
    assert "without exponentials" in ablation.show(second)


def test_rounds_take_everyone_in_turn():
    assert rounds.in_blocks("ab", 3) == list("aaabbb")
    assert rounds.in_turn("ab", 3) == list("abbaab")
    assert rounds.mean_places(rounds.in_turn, "ab") == [3.5, 3.5]
    assert rounds.mean_places(rounds.in_blocks, "ab") == [1.5, 5.5]
    turns = rounds.in_turn("abc", 3)
    assert sorted(turns[:3]) == sorted(turns[3:6]) == list("abc")


def test_the_limit_is_the_busiest_unit_if_it_is_near_its_peak():
    import pandas

    from jfa.lab import drawings_profile

    facts = {name: 0.1 for name in counters.COUNTERS} | {"kernel": "kernel", "duration_us": 5.0}
    facts |= {"suite": "jagged", "M": 256, "N": 1024, "density": 0.5}
    rows = [
        {**facts, "direction": "forward", "step": "staged", "tensor_busy": 0.9},
        {**facts, "direction": "backward", "step": "stationary", "stall_gmma": 3.0, "l2_busy": ""},
    ]
    first, second = drawings_profile.limits(pandas.DataFrame(rows))
    assert (first["unit"], first["limit"]) == ("tensor cores", "tensor cores, near its peak")
    assert second["limit"] == "no unit"
    assert "not counted" in drawings_profile.limits_text(None)


def test_what_missed_a_target_stands_behind_the_shape_of_all_steps():
    import pandas

    from jfa.lab import drawings_profile

    facts = {name: 0.1 for name in counters.COUNTERS} | {"kernel": "kernel", "duration_us": 5.0}
    chosen = [target for target in counters.targets() if target.step == "staged"]
    rows = pandas.DataFrame([facts | target.columns() for target in reversed(chosen)])
    table = drawings_profile.by_pass(rows)
    assert list(table["case"]) == ["M=128", "M=256", "M=128 N=512", "dense N=1024"]
    assert "forward  dense N=1024" in drawings_profile.limits_text(rows)
    assert "Tensor cores busy" not in drawings_profile.counters_finding(table)  # no baseline to begin at


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_target_may_be_dense(direction):
    small = {"M": 70, "N": 70, "density": 1.0, "B": 3, "D": 64, "suite": "dense"}
    wanted, _ = results(Target(direction, BASELINE, **small))
    found, findings = results(Target(direction, "peeled", **small))
    assert findings == [] and ablation.difference(found, wanted) < 0.01


def test_missed_keeps_the_shapes_of_missed_targets_only():
    import pandas

    from jfa.lab import drawings_profile

    rows = pandas.DataFrame([target.columns() for target in counters.targets()])
    kept = drawings_profile.missed(rows)
    found = set(zip(kept["direction"], kept["suite"], kept["M"], kept["N"], kept["step"]))
    assert ("forward", "jagged", 256, 1024, "staged") in found
    assert ("backward", "dense", 1024, 1024, "ds_buffered") in found
    assert len(kept) == len(counters.MISSED) + 4


def test_stages_that_hold_each_other_are_added_once():
    import pandas

    from jfa.lab import drawings_profile

    facts = {"direction": "forward", "step": "staged", "M": 128, "tflops": 100.0, "roof_tflops": 800.0}
    times = {"": 1.0, "exponentials": 0.9, "softmax": 0.8, "masks": 0.95, ablation.ALL: 0.5}
    rows = pandas.DataFrame([facts | {"left_out": name, "ms_p50": took} for name, took in times.items()])
    (line,) = drawings_profile.together(rows).to_dict("records")
    assert line["single, summed"] == pytest.approx(0.25) and line["all"] == 0.5
    (far,) = drawings_profile.explained(rows).to_dict("records")
    assert (far["distance"], far["saves most"]) == (0.875, "softmax")
    assert far["of the distance"] == pytest.approx(0.2 / 0.875)
    title = drawings_profile.ablation_finding(drawings_profile.saved(rows))
    assert title == "One stage left out saves at most 20 % of the time, all of them 50 to 50 %"


def test_apart_compares_a_kernel_with_itself_in_both_orders():
    import pandas

    from jfa.lab import drawings_profile

    samples = {"block after block": {"staged": [1, 1, 1], "the same again": [1, 1, 4]}}
    samples["in turn"] = {"staged": [1, 2], "the same again": [1, 2], "peeled": [3, 3]}
    rows = pandas.DataFrame(
        [
            {"order": order, "name": name, "ms_p50": float(took)}
            for order, names in samples.items()
            for name, values in names.items()
            for took in values
        ]
    )
    assert drawings_profile.apart(rows) == {"block after block": 0.0, "in turn": 0.0}
    assert drawings_profile.apart(rows, "mean") == {"block after block": 1.0, "in turn": 0.0}
    assert drawings_profile.apart(rows[rows["order"] == "in turn"], second="peeled") == {"in turn": 1.0}


def test_steps_by_name_are_compared_with_each_other():
    from jfa.lab import cases, tables

    case = cases.dense_cases()[0]
    facts = case.columns() | {"direction": "backward", "scope": "call", "timer": "cuda-graph", "impl": "jfa"}
    times = {"jfa": 2.0, "jfa:peeled": 2.2, "jfa:ds_buffered": 2.0}
    rows = [facts | {"name": name, "ms_p50": took, "step": "peeled"} for name, took in times.items()]
    assert tables.gains(rows, "peeled", "ds_buffered", "backward") == {case: pytest.approx(0.1)}
    assert "+10.0 %" in tables.gains_text(rows, "peeled", "ds_buffered", "backward").splitlines()[-1]
    assert tables.gains(rows, "peeled", "ds_buffered", "forward") == {}
    assert tables.by_name_ratios(rows) == {"backward": [pytest.approx(1.1)]}
    assert tables.by_name_text(rows) == "backward 1.10 to 1.10, median 1.100, 1 shapes"
    refused = facts | {
        "name": "jfa:stationary",
        "error": "ValueError: step stationary: window: expected none",
    }
    said = "jfa:stationary on dense, 1 rows: refused where asked for by name: window: expected none"
    assert tables.failures([refused]) == [said]


def test_the_log_of_tuning_begins_where_a_prediction_was_farthest_off():
    from jfa.lab import tables

    log = [
        {"predicted_percent": 4.0, "measured_percent": 5.0},
        {"predicted_percent": 2.0, "measured_percent": -9.0},
    ]
    log += [
        {"predicted_percent": "", "measured_percent": 7.0},
        {"predicted_percent": 3.0, "measured_percent": "-1 to 2"},
    ]
    log = [row | {"idea": str(place), "verdict": "kept"} for place, row in enumerate(log)]
    assert [row["idea"] for row in tables.tuning_gaps(log)] == ["1", "0"]
    assert "4 rows; 3 with a predicted number, 2 of them" in tables.tuning_text(log)
    assert tables.tuning_extremes(log, 1).splitlines()[-1] == "| 1 | +2 % | -9 % | kept |"


def test_a_step_that_is_no_faster_than_the_best_before_it_is_named():
    import pandas

    from jfa.lab import tables

    speeds = {"baseline": 1.0, "peeled": 3.0, "two_cta": 2.0, "ds_buffered": 3.0, "stationary": 4.0}
    table = pandas.DataFrame([{"direction": "backward", "step": s, "tflops": t} for s, t in speeds.items()])
    assert tables.climb(table) == {"backward": ["two_cta", "ds_buffered"]}


def test_what_q_and_dq_save_is_told_apart_from_the_tiles():
    from jfa.lab import onchip

    sizes = {"peeled": {"Q": 4, "dQ": 8, "K": 10}, "stationary": {"Q": 1, "dQ": 2, "K": 6}}
    rows = [
        {"direction": "backward", "step": step, "tensor": tensor, "how": "read", "kib": size}
        for step, parts in sizes.items()
        for tensor, size in parts.items()
    ]
    assert onchip.left(rows) == {"before": 22, "kept": 13, "last": 9}


def test_counted_steps_can_be_chosen(capsys):
    some = counters.targets((256,), ("staged",))
    assert {target.step for target in some} == {"staged"} and some[0] == Target("forward", "staged", M=256)
    assert set(some[1:]) == {target for target in counters.MISSED if target.step == "staged"}
    with pytest.raises(SystemExit):
        counters.main(["run", "--step", "no_such_step"])
    assert "two_cta" in capsys.readouterr().err


@pytest.mark.parametrize("asked", [[], ["--M", "256", "--step", "staged", "two_cta"]], ids=" ".join)
def test_what_ncu_watches_runs_the_targets_of_its_parent(asked, monkeypatch, capsys):
    handed, ran = [], []

    def record(chosen, arguments, raw):
        handed.append((chosen, list(arguments)))
        raise RuntimeError("enough")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(counters, "record", record)
    monkeypatch.setattr(counters, "run", ran.append)
    with pytest.raises(SystemExit):
        counters.main(["record", *asked])
    ((chosen, arguments),) = handed
    assert arguments == asked and counters.main(["run", *arguments]) == 0 and ran == [chosen]
    capsys.readouterr()
    assert counters.main(["command", *asked]) == 0
    assert capsys.readouterr().out.split()[-len(asked) - 1 :] == ["run", *asked]


def test_curves_of_neighbours_are_medians_by_stretch():
    import pandas
    from matplotlib import pyplot

    from jfa.lab import drawings_clocks

    samples = [("itself", (1.4, 1.4)), (neighbours.IDLE, (1.0, 1.4))]
    where = {"gpu": "H200", "commit": "abc", "date": "2026-12-01"}
    rows = pandas.DataFrame(
        {"before": before, "at_ms": 100 * turn + place, "ms_p50": factor * took, **where}
        for before, times in samples
        for turn, took in enumerate(times)
        for place, factor in ((3, 1), (4, 1), (8, 9))
    )
    table = neighbours.curves(rows)
    assert list(table.index) == [5, 105] and list(table) == [neighbours.IDLE, "itself"]
    assert neighbours.spread(table).tolist() == pytest.approx([0.4, 0])
    figure = drawings_clocks.neighbour_curves(rows)
    assert any("by 40 %, 50 ms later by 0 %" in text.get_text() for text in figure.texts)
    pyplot.close(figure)
    assert set(drawings_clocks.BEFORE) == set(neighbours.BEFORE)


def test_clocks_of_kernels_alone_stand_side_by_side():
    import pandas
    from matplotlib import pyplot

    from jfa.lab import drawings_clocks

    where = {"suite": "jagged", "M": 128, "density": 0.5, "gpu": "H200", "ms_p50": 1.0, "power_limit_w": 700}
    found = [
        ("jfa", 1024, 1400, 690),
        ("fa4", 1024, 1900, 500),
        ("jfa", 512, 1800, 690),
        ("fa4", 512, 1700, 690),
    ]
    rows = [
        where | {"direction": direction, "impl": impl, "N": n, "sm_clock_mhz": clock, "power_w": power}
        for direction in ("forward", "backward")
        for impl, n, clock, power in found
    ]
    schedule = where | {"direction": "", "impl": "jfa", "N": 512, "sm_clock_mhz": 1980, "power_w": 300}
    rows = pandas.DataFrame([*rows, schedule, rows[0] | {"N": 4096, "ms_p50": None}])
    table = drawings_clocks.side_by_side(rows, "sm_clock_mhz")
    shapes = ["M=128 N=512 density 0.5", "M=128 N=1024 density 0.5"]
    assert list(table.loc["forward"].index) == shapes and len(table) == 4
    assert table.loc["backward", "jfa"].tolist() == [1800, 1400]
    figure = drawings_clocks.clocks(rows)
    assert any("at 2 of 4 shapes and passes" in text.get_text() for text in figure.texts)
    assert [text.get_text() for text in figure.axes[0].texts] == ["500 W"]
    pyplot.close(figure)
