"""The mutation runner on a small kernel, and its short form on this project's kernels and the wheel's."""

import ast
import re
import sys
from pathlib import Path

import mutant_kernels
import pytest
import torch

from jfa.emulator import edits, emulate, mutate, trial
from jfa.lab import mutants as registry
from jfa.lab.report import compile_report

if not sys.platform.startswith("linux"):
    pytest.skip("the wheel's kernels and compiler are for Linux only", allow_module_level=True)

SMALL = "mutant_kernels:TARGETS"
FAST = [target.name for target in registry.TARGETS if target.fast]
FIGURE = Path(__file__).parents[1] / "figures" / "03_mutation.csv"


def small(name):
    return next(target for target in mutant_kernels.TARGETS if target.name == name)


def wrong_versions(line):
    """{kind: new text} of one statement."""
    return {edit.kind: edit.new for edit in edits.edits(ast.parse(line))}


@pytest.mark.parametrize(
    "line, expected",
    [
        ("tlx.barrier_wait(a[i], p)", {"delete wait": "pass", "flip phase": "tlx.barrier_wait(a[i], p ^ 1)"}),
        ("tlx.named_barrier_wait(9, 256)", {"delete named barrier wait": "pass"}),
        ("tlx.tcgen05_commit(a)", {"delete commit": "pass"}),
        ("tlx.fence('async_shared')", {"delete fence": "pass"}),
        (
            "x = tlx.async_dot_wait(1, x)",
            {"delete MMA wait": "x = x", "weaken MMA wait": "x = tlx.async_dot_wait(1 + 1, x)"},
        ),
        (
            "tlx.async_dot(a, b, c, mBarriers=[d, e])",
            {
                "drop signal d": "tlx.async_dot(a, b, c, mBarriers=[e])",
                "drop signal e": "tlx.async_dot(a, b, c, mBarriers=[d])",
            },
        ),
        (
            "t = tl.atomic_add(p, 1, sem='release')",
            {"relax atomic": "t = tl.atomic_add(p, 1, sem='relaxed')"},
        ),
        ("t = tl.atomic_add(p, 1, sem='relaxed')", {}),
        (
            "n = tl.inline_asm_elementwise('fence.acq_rel.gpu; mov.b32 $0, $1;', '=r,r', [n], d)",
            {"delete fence": "n = n"},
        ),
        ("x = tlx.local_load(a)", {}),
    ],
)
def test_wrong_versions_of_a_statement(line, expected):
    assert wrong_versions(line) == expected


def test_bytes_arrivals_and_stores():
    assert set(wrong_versions("tlx.barrier_expect_bytes(a, n)")) == {
        "delete expect bytes",
        "double bytes",
        "halve bytes",
    }
    assert (
        wrong_versions("tlx.barrier_arrive(a)")["arrive twice"]
        == "tlx.barrier_arrive(a); tlx.barrier_arrive(a)"
    )
    assert set(wrong_versions("tlx.async_descriptor_store_wait(0)")) == {
        "delete store wait",
        "weaken store wait",
    }
    wait = "tl.inline_asm_elementwise('cp.async.bulk.wait_group 0; mov.b32 $0, $1;', '=r,r', [n], d)"
    found = wrong_versions(f"def f():\n    return {wait}")
    assert found["delete store wait"] == "return n"
    assert "wait_group.read 0" in found["weaken store wait"]
    both = wait.replace("group 0; ", "group 0; fence.proxy.async; ")
    assert wrong_versions(both)["delete fence"] == wait


def test_an_edit_keeps_the_lines():
    source = "def f():\n    if x: tlx.barrier_wait(\n        a, p)\n    y = 1\n"
    (change,) = [e for e in edits.edits(ast.parse(source)) if e.kind == "delete wait"]
    assert change.apply(source) == "def f():\n    if x: __reached(); pass\n\n    y = 1\n"


def test_a_mutant_breaks_one_call_only():
    """Two calls wait in one method: deleting the wait behind one of them leaves the other."""
    waits = [m for m in trial.mutants(small("twice")) if m.kind == "delete wait" and "receive" in m.where]
    assert [m.key for m in waits] == list(mutant_kernels.EXPLAINED["twice"])
    for mutant in waits:
        reached = []
        with mutant.active(lambda: reached.append(1)):  # noqa: B023
            wrong, _, _ = trial.attempt(small("twice"), "eager", 0)
        assert wrong == []
        assert len(reached) == 5
    wrong, _, _ = trial.attempt(small("twice"), "eager", 0)
    assert wrong == []


def test_every_fault_of_a_small_kernel_is_seen():
    rows = mutate.run(SMALL, ["once"], {})
    assert mutate.unexpected(rows) == ([], [])
    assert mutate.score(rows) == (9, 0, 9)  # 2 waits and their phases, 1 arrive, 1 count of bytes: nine ways
    assert {row.verdict for row in rows} == {"detected", "not run"}


def test_code_that_does_not_run_is_no_survivor():
    rows = mutate.run(SMALL, ["once"], {})
    assert {row.where for row in rows if row.verdict == "not run"} == {"total > Ring.receive #2"}


@pytest.mark.parametrize("explained, status", [("EXPLAINED", 0), ("TOO_MUCH", 1), ("TOO_LITTLE", 1)])
def test_the_exit_status_follows_the_explanations(explained, status, capsys, tmp_path):
    """A survivor without an explanation fails, and so does an explanation of what is detected."""
    path = tmp_path / "rows.csv"
    options = ["--targets", SMALL, "--explained", f"mutant_kernels:{explained}", "--processes", "1"]
    assert mutate.main([*options, "--csv", str(path)]) == status
    printed = capsys.readouterr().out
    assert ("NOT EXPLAINED" in printed) == (explained == "TOO_LITTLE")
    assert ("explained as harmless, but detected" in printed) == (explained == "TOO_MUCH")
    rows = mutate.read(path)
    assert len(rows) == len(trial.mutants(small("once"))) + len(trial.mutants(small("twice")))


def test_two_processes_find_what_one_finds():
    alone = mutate.run(SMALL, ["once", "twice"], {})
    assert mutate.run(SMALL, ["once", "twice"], {}, processes=2) == alone


def test_clean_runs_count_false_alarms(capsys):
    assert mutate.main(["--clean", "6", "--targets", SMALL, "--processes", "1"]) == 0
    assert "6 clean runs of 2 kernels" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [["--targets", "nope:X"], ["--targets", "jfa.lab.mutants"], ["--explained", "nope:X"]],
    ids=" ".join,
)
def test_a_list_that_is_not_there_is_told(arguments, capsys):
    assert mutate.main(arguments) == 2
    assert "expected package.module:NAME" in capsys.readouterr().err


def test_verdicts_that_cannot_be_written_are_refused_first(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(mutate, "run", None)
    nowhere, kept = tmp_path / "no" / "rows.csv", tmp_path / "rows.csv"
    kept.write_text("as it was")
    assert mutate.main(["--csv", str(nowhere), "--targets", SMALL]) == 2
    assert f"--csv {nowhere}: No such file or directory" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        mutate.main(["--csv", str(kept), "--clean", "1", "--targets", SMALL])
    assert "leave out --clean or --csv" in capsys.readouterr().err
    assert kept.read_text() == "as it was"


# ------------------------------------------------------------------ this project's kernels and the wheel's


@pytest.mark.parametrize("name", FAST)
def test_a_sample_of_mutants(name):
    """The short form: a few mutants of each kernel, drawn by a fixed seed."""
    rows = mutate.run(mutate.TARGETS, [name], registry.EXPLAINED, sample=mutate.QUICK)
    assert mutate.unexpected(rows) == ([], [])
    assert len(rows) == mutate.QUICK


@pytest.mark.parametrize("name", FAST)
def test_explained_mutants_exist(name):
    keys = {mutant.key for mutant in mutate.trial(mutate.TARGETS, name).mutants}
    assert set(registry.EXPLAINED.get(name, {})) - keys == set()


def test_a_sweep_of_clean_runs():
    made, alarms = trial.sweep([target for target in registry.TARGETS if target.fast], 20)
    assert made == 20
    assert alarms == []


def test_the_full_run_on_record():
    """figures/03_mutation.csv: every survivor is explained, the rest is detected."""
    rows = mutate.read(FIGURE)
    assert {row.kernel for row in rows} == {target.name for target in registry.TARGETS}
    survivors = {(row.kernel, row.key): row.explanation for row in rows if row.verdict == "survived"}
    known = {(kernel, key): why for kernel, found in registry.EXPLAINED.items() for key, why in found.items()}
    assert survivors == known
    assert "" not in survivors.values()
    for kernels in (
        "hopper_forward",
        "hopper_backward",
        "blackwell_forward",
        "blackwell_backward",
        "fa_",
        "gemm_",
    ):
        found = [row for row in rows if row.kernel.startswith(kernels)]
        detected, equivalent, ran = mutate.score(found)
        assert detected / (ran - equivalent) >= 0.95
        assert detected / ran >= 0.85  # with those that change nothing counted as missed
    assert len(rows) > 1500


def leaving(add, fence):
    """Arguments of the kernel whose tiles leave by TMA: positional, named."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    target = TensorDescriptor.from_tensor(torch.zeros(128, 64, dtype=torch.float16), [64, 64])
    return (target,), {"SIDE": 64, "FENCE": fence, "ADD": add}


@pytest.mark.parametrize("arch, add", [("sm_90", True), ("sm_100", False)])
def test_the_compiler_fences_what_a_tma_store_reads(arch, add):
    """Why a deleted fence before a task's own TMA store survives: the compiler puts one there by itself.

    It does so right before a store of a tile that another task has written too, but in the storing task.
    """
    for fence in (True, False):
        args, kwargs = leaving(add, fence)
        text = compile_report(mutant_kernels.leave, args=args, kwargs=kwargs, arch=arch).text("ptx")
        parts = re.split(r"\bcp\.(?:reduce\.)?async\.bulk\.tensor", text)
        assert len(parts) == 3
        for before in parts[:2]:  # the last of these before either store is the fence
            order = re.findall(r"st\.shared|mbarrier\.try_wait|fence\.proxy\.async", before)
            assert order[-1] == "fence.proxy.async"


@pytest.mark.parametrize("add", [False, True])
def test_a_missing_fence_between_tasks_is_a_warning(add):
    """A tile that another task's TMA store reads: the writer must fence before it hands over."""
    for fence in (True, False):
        args, kwargs = leaving(add, fence)
        with emulate() as emulation:
            mutant_kernels.leave[(1,)](*args, **kwargs)
        (report,) = emulation.reports
        assert [(f.kind, f.buffer) for f in report.warnings()] == [("proxy fence", "tiles[1]")] * (not fence)
        assert report.errors() == []
