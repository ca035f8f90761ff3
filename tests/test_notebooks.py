"""Every notebook runs in its quick parameters, and what is committed keeps the rules of the course."""

import base64
import io
import re
import subprocess
import sys

import nbformat
import pytest
from PIL import Image

from jfa.lab import notebooks, runner

PATHS = notebooks.paths()
NAMES = [path.stem for path in PATHS]


def test_the_course_begins_with_its_map():
    assert NAMES[:3] == ["00_map", "01_jagged_batches", "02_baseline"]
    assert [name[:2] for name in NAMES] == [f"{number:02d}" for number in range(len(NAMES))]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("path", PATHS, ids=NAMES)
def test_runs_in_quick_parameters(path, tmp_path):
    result = runner.run_notebook(path, tmp_path / path.name, parameters={"QUICK": True}, timeout=600)
    assert result.problems == []
    assert result.claims >= 3


@pytest.mark.parametrize("path", PATHS, ids=NAMES)
def test_solutions_run(path):
    solution = path.parent / "solutions" / f"{path.stem}.py"
    assert f"(solutions/{path.stem}.py)" in "".join(cell.source for cell in notebooks.read(path).cells)
    run = subprocess.run([sys.executable, str(solution)], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert [line[:2] for line in run.stdout.splitlines()][0] == "1."


@pytest.mark.parametrize("path", PATHS, ids=NAMES)
def test_is_committed_clean(path):
    assert notebooks.check(path) == []


@pytest.mark.parametrize("path", PATHS, ids=NAMES)
def test_parameters_default_to_the_full_notebook(path):
    parameters = notebooks.parameters(notebooks.read(path))
    assert parameters["QUICK"] is False
    assert 2 <= len(parameters) <= 6


@pytest.mark.parametrize("path", PATHS, ids=NAMES)
def test_begins_and_ends_as_every_notebook_does(path):
    notebook = notebooks.read(path)
    first = notebook.cells[0]
    assert first.cell_type == "markdown"
    assert first.source.startswith("# ")
    assert all(word in first.source for word in ("Before", "Runs on", "Minutes"))
    headings = [cell.source.splitlines()[0] for cell in notebook.cells if cell.source.startswith("## ")]
    wanted = ["Prediction", "What we learned", "Exercises", "Next"]
    assert [heading[3:] for heading in headings if heading[3:] in wanted] == wanted
    assert "claim(" in notebooks.code_cells(notebook)[-1].source


@pytest.mark.parametrize("path", PATHS, ids=NAMES)
def test_numbers_with_a_unit_come_from_cells(path):
    """A measured number in Markdown would drift from its data: prose may hold sizes, no times or rates."""
    cells = [cell.source for cell in notebooks.read(path).cells if cell.cell_type == "markdown"]
    found = [
        text for cell in cells for text in re.findall(r"\d[\d.,]* ?(?:TFLOPS|ms|us|µs|GB/s|TB/s|%)", cell)
    ]
    assert found == []


def build(tmp_path, **changes):
    """Write a small notebook that keeps every rule but the number of cells, with changes; return its path."""
    notebook = nbformat.v4.new_notebook()
    notebooks.clean(notebook)
    code = nbformat.v4.new_code_cell("QUICK = False", metadata={"tags": ["parameters"]}, execution_count=1)
    notebook.cells = [nbformat.v4.new_markdown_cell("# Claim"), code]
    code.update({key: value for key, value in changes.items() if key in code})
    code.outputs = [nbformat.from_dict(output) for output in changes.get("outputs", [])]
    code.metadata.update(changes.get("cell_metadata", {}))
    notebook.metadata.update(changes.get("notebook_metadata", {}))
    notebook.cells[0].source = changes.get("markdown", "# Claim")
    nbformat.write(notebook, tmp_path / "00_small.ipynb")
    return tmp_path / "00_small.ipynb"


def printed(text, name="stdout"):
    return {"output_type": "stream", "name": name, "text": text}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"notebook_metadata": {"papermill": {"duration": 1}}}, "metadata holds ['papermill']"),
        ({"notebook_metadata": {"kernelspec": {"name": "jfa", "display_name": "jfa"}}}, "not python3"),
        ({"cell_metadata": {"execution": {}}}, "cell 1: metadata holds ['execution']"),
        ({"execution_count": 4}, "execution counts are [4]"),
        ({"execution_count": None}, "execution counts are [None]"),
        ({"outputs": [printed("wrote /root/x.csv")]}, "the path of a machine"),
        ({"outputs": [printed("in .venv/lib/python3")]}, "the path of a machine"),
        ({"outputs": [printed("careful", "stderr")]}, "wrote to stderr"),
        ({"markdown": "see /home/me/notes"}, "the path of a machine"),
        ({"markdown": "word " * 81}, "81 words of markdown"),
        ({"source": "QUICK = False\n" * 31}, "31 lines of code"),
        ({"source": "!pip install x"}, "a magic or a shell command"),
        ({"outputs": [printed("x" * 600_000)]}, "more than 500000"),
    ],
)
def test_a_committed_notebook_that_breaks_a_rule_is_refused(tmp_path, changes, message):
    found = notebooks.check(build(tmp_path, **changes))
    assert any(message in problem for problem in found), found


def test_a_notebook_within_the_rules_is_only_too_short(tmp_path):
    outputs = [printed("ratio 1/2, and/or 3/4 per second")]
    assert notebooks.check(build(tmp_path, outputs=outputs)) == ["2 cells, not 25 to 45"]


def test_clean_makes_pictures_small_and_keeps_what_they_show():
    import matplotlib.pyplot as plt
    import numpy as np

    figure, axes = plt.subplots()
    axes.bar(range(5), range(5), color=["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#000000"])
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    plt.close(figure)
    before = base64.b64encode(buffer.getvalue()).decode()
    output = nbformat.v4.new_output("display_data", {"image/png": before + "\n"})
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("1", outputs=[output])])
    notebooks.clean(notebook)
    after = notebook.cells[0].outputs[0].data["image/png"]
    pixels = [np.asarray(Image.open(io.BytesIO(base64.b64decode(x))).convert("RGB")) for x in (before, after)]
    assert len(after) < len(before) / 2
    assert np.abs(pixels[0].astype(int) - pixels[1]).max() < 32
    notebooks.clean(notebook)
    assert notebook.cells[0].outputs[0].data["image/png"] == after


def test_clean_strips_a_run_and_joins_its_prints(tmp_path):
    path = build(tmp_path, outputs=[printed("a\n"), printed("b\n")], cell_metadata={"papermill": {"x": 1}})
    notebook = notebooks.read(path)
    notebooks.clean(notebook)
    assert notebook.cells[1].outputs[0].text == "a\nb\n"
    assert notebook.cells[1].metadata == {"tags": ["parameters"]}
