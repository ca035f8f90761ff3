"""The benchmark on a CPU with tiny shapes: its rows, its check, what it does with peers that fail."""

import contextlib
import functools

import pytest
import torch

import jfa
from jfa.lab import bench, cases, child, measure, ours, peak, peers, truth, warm

TINY = {
    "shared": cases.Case("jagged", 16, 40, 0.5, B=3, Hq=2, Hkv=1, D=64),
    "window": cases.Case("jagged", 8, 40, 0.5, B=3, Hq=1, Hkv=1, D=64, window=(9, 0)),
    "packed": cases.Case("packed", 0, 40, 0.5, B=3, Hq=2, Hkv=2, D=64, causal=True),
    "dense": cases.Case("dense", 32, 32, 1.0, B=2, Hq=1, Hkv=1, D=64),
}


@pytest.mark.parametrize("name", TINY)
def test_what_is_expected_is_the_definition(name, monkeypatch):
    monkeypatch.setattr(truth, "SCORES", 1)  # a sequence a chunk
    case = TINY[name]
    inputs = cases.make_inputs(case, "cpu")
    leaves = [x.double().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    options = {"causal": case.causal, "window": case.window or (None, None), "dtype": torch.float64}
    out, _ = jfa.reference.attention(*leaves, inputs.kv_offsets, inputs.q_offsets, **options)
    wanted = dict(zip(("dq", "dk", "dv"), torch.autograd.grad(out, leaves, inputs.dout.double())))
    for key, found in truth.expected(inputs).items():
        exact = (wanted | {"out": out})[key].float()
        torch.testing.assert_close(found, exact.detach(), atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("name", TINY)
def test_the_budget_admits_the_dtype_and_no_more(name):
    inputs = cases.make_inputs(TINY[name], "cpu")
    wanted, allowed = truth.expected(inputs), truth.budgets(inputs)
    assert all(0.001 < share < 0.04 for share in allowed.values()) and len(allowed) == 4
    run = exact(inputs, "call")
    for factor, passes in ((1.0, True), (1 + 1e-3, True), (1.05, False)):
        off = {key: factor * x for key, x in wanted.items()}
        grads = [off[key] for key in ("dq", "dk", "dv")]
        run.result, run.gradients = lambda off=off: off["out"], lambda grads=grads: grads
        shares = truth.errors(run, wanted, allowed)["budget_share"]
        assert (max(shares.values()) <= 1) == passes


def exact(inputs, scope):
    """A peer that looks its answers up, with q expanded beforehand in scope "kernel"."""
    wanted = truth.expected(inputs)
    grads = [wanted[name] for name in ("dq", "dk", "dv")]
    if scope == "kernel" and inputs.q_offsets is None:
        share = grads[0] / inputs.case.B
        grads[0] = share.expand(inputs.case.B, *share.shape).flatten(0, 1)
    run = peers.Run(lambda: wanted["out"], lambda: grads, lambda: grads, lambda: wanted["out"], lambda: grads)
    run.steps = {"forward": "first", "backward": "second"}
    return run


def wrong(inputs, scope):
    run = exact(inputs, scope)
    run.result = lambda: 1.1 * run.forward()
    return run


def never(inputs, scope):
    raise peers.Unsupported("not today\nnor ever")


def late(inputs, scope):
    run = exact(inputs, scope)
    calls = []

    def forward():
        calls.append(1)
        if len(calls) > 1:
            raise ValueError("once only")

    run.forward = forward
    return run


@pytest.fixture
def stage(monkeypatch, tmp_path):
    """Fake peers, tiny shapes, and the options that every run here shares."""
    fakes = {"jfa": exact, "fa4": wrong, "cudnn": never, "torch_varlen": late}
    monkeypatch.setattr(bench, "PEERS", fakes)
    monkeypatch.setattr(bench, "SUITES", {"jagged": lambda: list(TINY.values())[:1], "dense": dense_alone})
    monkeypatch.setattr(ours, "schedule_maker", lambda inputs: lambda: None)
    output = tmp_path / "rows.csv"
    common = ["--device", "cpu", "--eager", "--rounds", "2", "--sample-ms", "0", "--output", str(output)]

    def run(*arguments):
        assert bench.main([*arguments, *common]) == 0
        return measure.read_rows(output)

    return run


def dense_alone():
    return [TINY["dense"]]


def test_a_row_a_measurement_and_a_row_for_what_failed(stage):
    rows = stage("--impl", "jfa", "fa4", "cudnn", "torch_varlen")
    by_key = {(row["name"], row["direction"], row["scope"]): row for row in rows}
    assert len(by_key) == len(rows) == 4 * 5 + 1  # three directions as a call, two as kernels; the schedule
    mine = by_key["jfa", "forward", "kernel"]
    assert (mine["step"], mine["impl"], mine["rel_error"], mine["error"]) == ("first", "jfa", 0, "")
    assert mine["ms_p20"] <= mine["ms_p50"] <= mine["ms_p80"] and mine["tflops"] > 0 < mine["roof_tflops"]
    assert mine["timer"] == "host-clock" and mine["Hkv"] == 1 and mine["date"]
    assert by_key["jfa", "backward", "kernel"]["rel_error"] < 1e-6  # dq summed over the sequences
    assert by_key["fa4", "forward", "call"]["rel_error"] == pytest.approx(0.1, rel=1e-3)
    assert by_key["fa4", "both", "call"]["rel_error"] == pytest.approx(0.1, rel=1e-3)
    assert by_key["cudnn", "both", "call"]["error"] == "Unsupported: not today"
    assert by_key["torch_varlen", "forward", "call"]["error"] == "ValueError: once only"
    assert by_key["torch_varlen", "backward", "call"]["error"] == ""
    schedule = by_key["jfa", "", "schedule"]
    assert schedule["ms_p50"] > 0 and schedule["tflops"] == "" and "in a row" in schedule["note"]


def test_what_the_host_does_is_timed_in_one_thread_too(stage):
    rows = stage("--impl", "fa4", "--host", "--scope", "call")
    by_key = {(row["name"], row["direction"]): row for row in rows}
    assert list(by_key) == [
        *[("fa4", way) for way in bench.DIRECTIONS],
        *[("fa4:one_thread", way) for way in ("backward", "both")],
    ]
    again = by_key["fa4:one_thread", "both"]
    assert again["impl"] == "fa4" and "calling thread" in again["note"] and not by_key["fa4", "both"]["note"]
    assert again["rel_error"] == by_key["fa4", "both"]["rel_error"] and again["ms_p50"] > 0


def test_in_one_thread_the_backward_pass_runs_where_it_is_asked_for():
    seen = []
    function = bench.in_one_thread(lambda: seen.append(torch._C._is_multithreading_enabled()) or 7)
    assert function() == 7 and seen == [False] and torch._C._is_multithreading_enabled()


def test_alone_each_function_is_timed_by_itself(stage, monkeypatch):
    groups, timed = [], bench.in_turn
    monkeypatch.setattr(
        bench,
        "in_turn",
        lambda functions, *a, **k: groups.append(set(functions)) or timed(functions, *a, **k),
    )
    rows = stage("--impl", "jfa", "--alone", "--scope", "call", "--suite", "dense")
    assert [len(group) for group in groups] == [1] * len(rows) and len(rows) == 3 + 1


def test_resuming_leaves_out_what_is_there(stage):
    rows = stage("--impl", "jfa", "--suite", "jagged")
    rows = stage("--impl", "jfa", "--suite", "jagged", "dense", "--resume")
    assert [row["suite"] for row in rows].count("jagged") == [row["suite"] for row in rows].count("dense")


def test_resuming_measures_what_has_no_time(stage):
    def names(rows):
        return [(row["name"], row["direction"]) for row in rows if row["scope"] == "call"]

    once = ("--impl", "jfa", "torch_varlen", "--scope", "call")
    first = stage(*once, "--direction", "backward")
    assert len(stage(*once, "--direction", "backward", "--resume")) == len(first) == 3
    both = stage(*once, "--direction", "forward", "--resume")  # a forward pass of torch_varlen fails
    assert names(both[3:]) == [("jfa", "forward"), ("torch_varlen", "forward")]
    assert len(stage(*once, "--direction", "forward", "--resume")) == len(both) + 3


@pytest.mark.parametrize("more", [[], ["--host", "--scope", "call"], ["--impl", "jfa", "flex"]], ids=" ".join)
def test_what_is_asked_for_is_what_is_measured(stage, monkeypatch, more):
    monkeypatch.setattr(ours, "prepare", lambda inputs, scope, step: exact(inputs, scope))
    arguments = ["--impl", "jfa", "fa4", "--steps", "backward:peeled", "forward:staged", *more]
    rows = stage(*arguments)
    (case,) = bench.SUITES["jagged"]()
    found = {
        (case, row["name"], row["direction"], row["scope"]) for row in rows if row["scope"] != "schedule"
    }
    assert found == bench.asked(case, bench.parser().parse_args(arguments))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--case-limit-s", "-1"], "--case-limit-s: expected seconds above 0, got -1"),
        (["--flex-limit-s", "inf"], "--flex-limit-s: expected seconds above 0, got inf"),
        (["--rounds", "0"], "--rounds: expected at least 1, got 0"),
        (["--compile", "-1"], "--compile: expected at least 1, got -1"),
        (["--M", "7"], "no case of these suites"),
        (["--output", "cut.csv"], "--output: cut.csv: line 3 has other cells than the header"),
        (["--resume", "--output", "foreign.csv"], "--output: foreign.csv: expected a CSV with a column M"),
        (["--memory", "foreign.csv"], "--memory: foreign.csv: expected a CSV with a column M"),
        (["--output", "foreign.csv/rows.csv"], "foreign.csv is no folder"),
        (["--output", "."], ".: is a folder"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_arguments_that_cannot_work_are_refused_before_anything_runs(
    arguments, said, stage, tmp_path, monkeypatch, capsys
):
    columns = ",".join((*bench.COLUMNS["output"], "share_of_kv"))
    (tmp_path / "cut.csv").write_text(f"{columns}\n{'1,' * columns.count(',')}1\n1,2\n")
    (tmp_path / "foreign.csv").write_text("suite,ms_p50\njagged,1\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bench, "measure_case", None)
    with pytest.raises(SystemExit) as ended:
        bench.main(["--device", "cpu", *arguments])
    assert ended.value.code == 2 and said in capsys.readouterr().err


def test_a_file_without_anything_in_it_and_a_missing_folder_are_written(stage, tmp_path):
    (tmp_path / "rows.csv").touch()
    assert len(stage("--impl", "jfa", "--scope", "call")) == 4
    assert measure.unwritable(tmp_path / "not" / "yet" / "rows.csv", "name") is None


def test_a_limit_starts_no_further_case(stage, capsys):
    with pytest.raises(FileNotFoundError):
        stage("--limit-s", "-1")
    assert "1 cases not measured" in capsys.readouterr().out


def test_a_peer_that_fails_in_its_process_is_a_row(stage, monkeypatch):
    class Absent(child.Child):
        def prepare(self, *args):
            raise child.Lost("no answer to prepare in 120 s")

    monkeypatch.setattr(child, "Child", Absent)
    rows = stage("--impl", "jfa", "flex", "--suite", "dense")
    said = [row["error"] for row in rows if row["impl"] == "flex"]
    assert len(said) == 5 and set(said) == {"Lost: no answer to prepare in 120 s"}


def test_steps_of_ours_are_timed_by_name(stage, monkeypatch, capsys):
    def prepare(inputs, scope, step):
        run = exact(inputs, scope)
        run.steps |= {step.direction: step.name}
        return run

    monkeypatch.setattr(ours, "prepare", prepare)
    rows = stage("--impl", "jfa", "--steps", "forward:peeled", "backward:two_cta", "backward:peeled")
    steps = {row["direction"]: row["step"] for row in rows if row["name"] == "jfa:peeled"}
    assert steps == {"forward": "peeled", "backward": "peeled"}
    rows = [row for row in rows if row["step"] != "peeled" or row["direction"] != "backward"]
    named = {(row["name"], row["direction"], row["scope"], row["impl"]) for row in rows if ":" in row["name"]}
    assert named == {
        ("jfa:peeled", "forward", "call", "jfa"),
        ("jfa:two_cta", "backward", "call", "jfa"),
    }
    for name, said in (("forward:nothing", "expected one of"), ("nope", "expected forward or backward")):
        with pytest.raises(SystemExit):
            bench.main(["--steps", name, "--device", "cpu"])
        assert f"--steps {name}: " in (error := capsys.readouterr().err) and said in error
    assert "backward:peeled" in ours.all_steps()


def test_ours_names_its_steps_and_brings_their_schedules(monkeypatch):
    from jfa.kernels import tiles

    case = cases.Case("jagged", 16, 150, 0.5, B=3, Hq=1, Hkv=1, D=64)
    inputs = cases.make_inputs(case, "cpu")
    run = ours.prepare(inputs, "kernel", backend="hopper")
    assert set(run.steps) == {"forward", "backward", "both"} and "" not in run.steps.values()
    found = truth.errors(run, truth.expected(inputs), truth.budgets(inputs))
    assert max(found["budget_share"].values()) <= 1
    made = []
    listed = tiles._listed
    monkeypatch.setattr(tiles, "_listed", lambda *args: made.append(1) or listed(*args))
    run.backward()
    assert made == []


def test_a_step_by_name_is_the_one_that_runs():
    case = cases.Case("jagged", 16, 40, 0.5, B=2, Hq=1, Hkv=1, D=64)
    inputs = cases.make_inputs(case, "cpu")
    run = ours.prepare(inputs, "call", backend="hopper", step=ours.named_step("forward:balanced"))
    assert run.steps["forward"] == "balanced"


@pytest.mark.parametrize("scope", ["call", "kernel"])
@pytest.mark.parametrize("suite", ["jagged", "packed", "dense"])
def test_padded_attention_is_checked_in_our_layout(suite, scope, monkeypatch):
    monkeypatch.setattr(torch.nn.attention, "sdpa_kernel", lambda backend: contextlib.nullcontext())
    rows = {"jagged": 24, "packed": 0, "dense": 24}[suite]
    case = cases.Case(suite, rows, 24, 1.0 if suite == "dense" else 0.5, B=3, Hq=2, Hkv=2, D=64)
    inputs = cases.make_inputs(case, "cpu")
    run = peers.cudnn(inputs, scope)
    found = truth.errors(run, truth.expected(inputs), truth.budgets(inputs))
    assert max(found["budget_share"].values()) <= 1
    assert len(run.both()) == 3


def test_padding_goes_there_and_back():
    for name in ("packed", "dense"):
        inputs = cases.make_inputs(TINY[name], "cpu")
        padding = peers._Padding.of(inputs)
        padded = padding.pad(inputs.k)
        assert padded.shape == (TINY[name].B, TINY[name].Hkv, inputs.max_kv_len, 64)
        assert torch.equal(padding.unpad(padded), inputs.k)
        assert padding.full == (name == "dense")


def test_a_training_step_holds_its_results():
    inputs = cases.make_inputs(TINY["shared"], "cpu")
    rows, total = 3 * 16, inputs.k.shape[0]
    out, statistics, gradients = rows * 2 * 64 * 2, rows * 2 * 8, (16 * 2 + 2 * total) * 64 * 2
    assert peak.granted_bytes(inputs) == out + statistics + gradients
    assert peak.kv_bytes(inputs) == 2 * total * 64 * 2


def test_the_suites_are_those_of_the_plan():
    jagged = cases.jagged_cases()
    assert len(jagged) == 48 and sum(cases.representative(case) for case in jagged) == 8
    assert sum(cases.representative(case, cases.FEWER) for case in jagged) == 3
    assert not any(cases.representative(case) for case in cases.extra_cases())
    assert all(cases.representative(case) for suite in ("dense", "packed") for case in cases.SUITES[suite]())


def test_caches_are_filled_for_one_case_of_a_kind(capsys):
    options = bench.parser().parse_args(["--more", "flex", "--steps", "forward:peeled", "--compile", "2"])
    jobs = warm.jobs_of(options)
    assert [name for _, name in jobs[:3]] == ["flex"] * 3
    ordinary = [case for case, name in jobs if name == "jfa"]
    assert 12 <= len(ordinary) < 30 and {case.M for case in ordinary} == {128, 256, 512}
    assert [name for _, name in jobs].count("forward:peeled") == len(ordinary)
    assert [name for _, name in jobs].count("fa4") == 2  # M of one block of rows, and more
    once = functools.partial(warm.once, TINY["dense"], device="cpu")
    assert once("jfa", ["forward"], ["call"]) == ""
    assert "no steps" in once("forward:peeled", ["forward"], ["call"])


@pytest.mark.gpu
@pytest.mark.parametrize("eager", [[], ["--eager"]], ids=["graph", "eager"])
def test_on_a_gpu_ours_runs_in_graphs_and_within_its_error(eager, monkeypatch, tmp_path):
    case = cases.Case("jagged", 128, 256, 0.5, B=16)
    monkeypatch.setattr(
        bench,
        "SUITES",
        {"jagged": lambda: [case], "packed": lambda: [cases.Case("packed", 0, 128, 0.5, B=8)]},
    )
    output, memory = tmp_path / "rows.csv", tmp_path / "memory.csv"
    arguments = [
        "--suite",
        "jagged",
        "packed",
        "--impl",
        "jfa",
        "jfa_baseline",
        "cudnn",
        "--rounds",
        "2",
        "--sample-ms",
        "1",
    ]
    assert bench.main([*arguments, *eager, "--output", str(output), "--memory", str(memory)]) == 0
    rows = measure.read_rows(output)
    ours_alone = [
        row for row in rows if row["impl"] in ("jfa", "jfa_baseline") and row["scope"] != "schedule"
    ]
    assert len(ours_alone) == 2 * 2 * 5
    for row in ours_alone:
        assert row["error"] == "" and row["budget_share"] <= 1 and row["ms_p50"] > 0, row
        assert row["timer"] == ("cuda-event" if eager else "cuda-graph")
    for row in measure.read_rows(memory):
        assert row["peak_extra_bytes"] >= 0
    assert torch.cuda.memory_allocated() < 1 << 30
