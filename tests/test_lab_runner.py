"""The runner turns every way in which a notebook can fail in silence into a failure that is seen."""

import nbformat
import pytest

from jfa.lab import course, notebooks, runner

CLAIM = "from jfa.lab.check import claim\nclaim('one is one', 1 == 1)"

CATCH = "try:\n    claim('two is one', "


def write(path, *cells, parameters="QUICK = False"):
    """Write a notebook of code cells; `parameters` is the source of the tagged cell (None: no such cell)."""
    notebook = nbformat.v4.new_notebook()
    if parameters is not None:
        tagged = nbformat.v4.new_code_cell(parameters, metadata={"tags": ["parameters"]})
        notebook.cells.append(tagged)
    notebook.cells += [nbformat.v4.new_code_cell(cell) for cell in cells]
    nbformat.write(notebook, path)
    return path


def run(path, **options):
    """Execute a notebook into a folder that does not exist yet."""
    return runner.run_notebook(path, path.parent / "not" / "yet" / path.name, **options)


def test_passes_in_its_own_folder_and_leaves_no_metadata(tmp_path):
    (tmp_path / "beside.txt").write_text("found")
    path = write(tmp_path / "a.ipynb", "print(open('beside.txt').read(), QUICK)", CLAIM, CLAIM)
    result = run(path, parameters={"QUICK": True})
    assert result.problems == []
    assert result.claims == 2
    executed = notebooks.read(tmp_path / "not" / "yet" / "a.ipynb")
    assert "found True" in notebooks.output_texts(executed.cells[2])[0]
    assert executed.metadata.kernelspec.name == "python3"
    assert set(executed.metadata) == {"kernelspec", "language_info"}
    assert all(set(cell.metadata) <= {"tags"} for cell in executed.cells)


def test_a_thread_that_dies_fails_the_notebook(tmp_path):
    """Its traceback goes to stderr, maybe of no cell at all, and nothing else notices."""
    starts = "import threading\nfails = threading.Thread(target=lambda: 1 / 0, name='worker')\nfails.start()"
    path = write(tmp_path / "a.ipynb", starts, "fails.join()", CLAIM)
    assert run(path).problems == ["a thread died: worker: ZeroDivisionError: division by zero"]
    names = "assert not {'remember', 'show', 'jfa_dead_threads'} & set(globals())"
    assert run(write(tmp_path / "b.ipynb", starts.replace("1 / 0", "1"), names, CLAIM)).problems == []


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("QUICK = False\nSIZE = 2 * 4", "not a flat literal"),
        ("QUICK: bool = False", "only `name = literal`"),
        (None, "exactly one cell tagged"),
        ("SIZE = 3", "unknown parameters ['QUICK']"),
    ],
)
def test_parameters_that_would_be_ignored_are_refused(tmp_path, source, message):
    path = write(tmp_path / "a.ipynb", CLAIM, parameters=source)
    result = run(path, parameters={"QUICK": True})
    assert len(result.problems) == 1
    assert message in result.problems[0]


def test_two_tagged_cells_are_refused(tmp_path):
    path = write(tmp_path / "a.ipynb", CLAIM)
    notebook = nbformat.read(path, as_version=4)
    notebook.cells.append(nbformat.v4.new_code_cell("QUICK = True", metadata={"tags": ["parameters"]}))
    nbformat.write(notebook, path)
    assert "found 2" in run(path).problems[0]


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        ((CLAIM, "1 / 0", CLAIM), "ZeroDivisionError"),
        ((CLAIM, "%nosuchmagic", CLAIM), "magic"),
        ((CLAIM, "%run nosuchfile.py"), "nosuchfile"),
        ((CLAIM, "import os\nos._exit(3)", CLAIM), "DeadKernelError"),
        ((CLAIM, "import sys\nsys.exit(0)", CLAIM), "last cell did not run"),
        (("1 + 1",), "no claim was checked"),
        (("print('claim holds: all of it')",), "no claim was checked"),
        (
            (CLAIM, "claim('two is one', 2 == 1)", CLAIM),
            "cell 2: ClaimError: claim does not hold: two is one",
        ),
        ((CLAIM, f"{CATCH}2 == 1)\nexcept AssertionError:\n    pass", CLAIM), "caught: two is one"),
        ((CLAIM, f"{CATCH}'yes')\nexcept TypeError:\n    pass"), "caught: two is one"),
    ],
    ids=[
        "error",
        "unknown magic",
        "failed magic",
        "dead kernel",
        "sys.exit",
        "no claim",
        "printed claim",
        "failed claim",
        "caught claim",
        "claim of no condition",
    ],
)
def test_what_fails_is_reported(tmp_path, cells, message):
    result = run(write(tmp_path / "a.ipynb", *cells))
    assert not result.passed
    assert any(message in problem for problem in result.problems), result.problems


@pytest.mark.parametrize(
    "source",
    [
        "!false",
        "files = !ls nothing",
        "if True:\n    !false",
        "%%bash\nfalse",
        "%ls nothing",
        "1 + 1?",
        "get_ipython().system('false')",
        "from IPython import get_ipython as shell",
    ],
)
def test_what_is_no_plain_python_is_refused_before_it_runs(tmp_path, source):
    """A shell command that fails raises nothing, so the notebook would pass."""
    path = write(tmp_path / "a.ipynb", "open('ran.txt', 'w').close()", source, CLAIM)
    (problem,) = run(path).problems
    assert problem.startswith("cell 2: ") and "shell command" in problem
    assert not (tmp_path / "ran.txt").exists()
    assert problem in notebooks.check(path)


def test_the_cell_that_asks_for_the_claims_leaves_no_trace(tmp_path):
    path = write(tmp_path / "a.ipynb", "print('before')", CLAIM)
    assert run(path, write=True).passed
    assert [cell.source for cell in notebooks.read(path).cells] == ["QUICK = False", "print('before')", CLAIM]
    assert "vnd.jfa" not in path.read_text()
    assert [cell.execution_count for cell in notebooks.read(path).cells] == [1, 2, 3]


def test_a_cell_that_hangs_ends_at_the_timeout(tmp_path):
    result = run(write(tmp_path / "a.ipynb", CLAIM, "import time\ntime.sleep(60)"), timeout=2)
    assert any("Timeout" in problem for problem in result.problems), result.problems
    assert result.seconds < 40


def test_write_puts_back_only_what_passed(tmp_path):
    good, bad = write(tmp_path / "a.ipynb", CLAIM), write(tmp_path / "b.ipynb", CLAIM, "assert False")
    before = bad.read_text()
    assert run(good, write=True).passed
    assert not run(bad, write=True).passed
    assert bad.read_text() == before
    assert [cell.execution_count for cell in notebooks.read(good).cells] == [1, 2]


def test_table_and_exit_status(tmp_path, capsys):
    good, bad = write(tmp_path / "good.ipynb", CLAIM), write(tmp_path / "bad.ipynb", "1 / 0")
    assert runner.main([str(good), str(bad), "--jobs", "2"]) == 1
    printed = capsys.readouterr().out
    assert "notebook  seconds  claims checked  passed" in printed
    lines = [line.split() for line in printed.splitlines()]
    assert ["good", "1", "yes"] in [[line[0], line[2], line[3]] for line in lines if len(line) == 4]
    assert "bad: cell 1: ZeroDivisionError: division by zero" in printed
    assert runner.main([str(good)]) == 0


@pytest.mark.parametrize("source", ["[]", "null", '{"cells": 3}', '{"nbformat": 4, "cells": [3]}', "{"])
def test_what_is_no_notebook_is_a_line_of_the_table(source, tmp_path):
    path = tmp_path / "a.ipynb"
    path.write_text(source)
    result = run(path)
    assert len(result.problems) == 1 and "a: " in runner.table([result])


def test_a_name_is_a_number_a_name_or_a_path_that_is_there(tmp_path):
    first, second, *_ = notebooks.paths()
    own = write(tmp_path / first.name, CLAIM)
    names = [first.stem[:2], first.stem, first.name, str(first), second.stem, str(own), str(own)]
    assert runner.find(names) == [first, second, own.resolve()]
    assert runner.find([]) == notebooks.paths()
    for name in (str(tmp_path / "no" / first.name), "notes/00.txt", f"no/{first.stem}", "0", ""):
        with pytest.raises(ValueError, match="no notebook"):
            runner.find([name])


def test_unknown_names_and_quick_writes_are_refused(capsys):
    with pytest.raises(SystemExit):
        runner.main(["99"])
    with pytest.raises(SystemExit):
        runner.main(["--write", "--quick"])
    assert "--write keeps the default parameters" in capsys.readouterr().err


def test_outputs_of_a_gpu_are_not_written_over_where_there_is_none(monkeypatch, capsys):
    plain, measured = runner.find(["00", "09"])
    assert runner.from_a_gpu(measured) and not runner.from_a_gpu(plain)
    started = []
    monkeypatch.setattr(runner, "run_all", lambda paths, jobs, **options: started.append(paths) or [])
    monkeypatch.setattr(course, "gpu", lambda: None)
    with pytest.raises(SystemExit):
        runner.main(["--write", "00", "09"])
    assert "09_full_kernel were measured on a GPU" in capsys.readouterr().err and not started
    assert runner.main(["--write", "00"]) == runner.main(["--write", "--replace", "09"]) == 0
    monkeypatch.setattr(course, "gpu", lambda: "NVIDIA H200")
    assert runner.main(["--write", "09"]) == 0 and started == [[plain], [measured], [measured]]
    with pytest.raises(SystemExit):
        runner.main(["--jobs", "-1", "00"])
    assert "--jobs: expected a positive number" in capsys.readouterr().err
