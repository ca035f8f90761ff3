"""What a notebook of this course looks like: its parameters cell, and the rules a committed one keeps."""

import ast
import base64
import io
import re
import statistics
from pathlib import Path

import nbformat

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "notebooks"

MAX_BYTES = 500_000
CELLS = (25, 45)
CODE_MEDIAN = 10
CODE_MAX = 30
WORDS_MAX = 80

# Paths of somebody's machine have no place in a shared notebook, in source or output.
ABSOLUTE = re.compile(
    r"(?<![\w.])/(?:root|home|work|tmp|Users|opt|mnt|data)/[\w.]"
    r"|\b[A-Za-z]:\\\\?[A-Za-z]|\.venv/|site-packages|dist-packages"
)
PARSE = ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
TEXT_TYPES = ("text/plain", "text/html", "text/markdown", "image/svg+xml", "application/json")


def paths() -> list[Path]:
    """Return the notebooks of the course in order."""
    return sorted(FOLDER.glob("[0-9][0-9]_*.ipynb"))


def read(path: str | Path) -> nbformat.NotebookNode:
    """Read a notebook and validate it against nbformat's schema."""
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    return notebook


def code_cells(notebook) -> list:
    """Return the code cells in order."""
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def parameters(notebook) -> dict[str, object]:
    """Return name -> default of the one cell tagged ``parameters``.

    Raises ValueError unless exactly one cell has the tag and it holds nothing but ``name = literal`` lines:
    papermill injects its cell after this one, so a value derived here would keep the default.
    """
    tagged = [cell for cell in code_cells(notebook) if "parameters" in cell.metadata.get("tags", [])]
    if len(tagged) != 1:
        raise ValueError(f"expected exactly one cell tagged 'parameters', found {len(tagged)}")
    found: dict[str, object] = {}
    try:
        body = ast.parse(tagged[0].source).body
    except SyntaxError as error:
        raise ValueError(f"the parameters cell is not plain Python: {error}") from error
    for statement in body:
        target = statement.targets[0] if isinstance(statement, ast.Assign) else None
        if not isinstance(target, ast.Name) or len(statement.targets) != 1:
            raise ValueError(
                f"the parameters cell may hold only `name = literal`, not `{ast.unparse(statement)}`"
            )
        try:
            value = ast.literal_eval(statement.value)
        except ValueError:
            value = ...
        if not isinstance(value, bool | int | float | str | None):
            raise ValueError(f"parameter {target.id} is not a flat literal: `{ast.unparse(statement)}`")
        found[target.id] = value
    return found


def not_python(notebook) -> list[str]:
    """Return which code cells are not plain Python, one sentence each.

    A failed shell command fails nothing (`!false`, `%%bash`, and `%ls` is one too), so none is allowed.
    """
    wrong = []
    for index, cell in enumerate(notebook.cells):
        if cell.cell_type != "code":
            continue
        try:
            tree = compile(cell.source, f"cell {index}", "exec", PARSE)
        except (SyntaxError, ValueError) as error:
            lines = cell.source.splitlines()
            line = lines[min(getattr(error, "lineno", None) or 1, len(lines)) - 1].strip()
            wrong.append(f"cell {index}: a magic or a shell command, or bad syntax, not plain Python: {line}")
            continue
        if any(
            "get_ipython" in (getattr(node, "id", ""), getattr(node, "name", "")) for node in ast.walk(tree)
        ):
            wrong.append(f"cell {index}: get_ipython() runs magics and shell commands; use plain Python")
    return wrong


def clean(notebook) -> None:
    """Strip, in place, the metadata that a run leaves behind, and set the kernelspec to python3."""
    notebook.metadata = nbformat.from_dict(
        {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        }
    )
    for cell in notebook.cells:
        tags = [tag for tag in cell.metadata.get("tags", []) if not tag.startswith("papermill")]
        cell.metadata = nbformat.from_dict({"tags": tags} if tags else {})
        for output in cell.get("outputs", []):
            if "metadata" in output:
                output.metadata = nbformat.from_dict({})
            if "image/png" in output.get("data", {}):
                output.data["image/png"] = _small(output.data["image/png"])
    _join_streams(notebook)


def _small(png: str) -> str:
    """A picture in base64 with a palette of 256 colours, all that a plot needs: a third of the bytes."""
    from PIL import Image

    picture = Image.open(io.BytesIO(base64.b64decode(png)))
    if picture.mode == "P":
        return png
    out = io.BytesIO()
    picture.convert("RGB").quantize(256, dither=Image.Dither.NONE).save(out, "PNG", optimize=True)
    return base64.b64encode(out.getvalue()).decode()


def _join_streams(notebook) -> None:
    """Join neighbouring stream outputs of one name: how print() calls arrive is an accident of timing."""
    for cell in code_cells(notebook):
        joined = []
        for output in cell.outputs:
            last = joined[-1] if joined else None
            if last and output.output_type == last.output_type == "stream" and output.name == last.name:
                last.text += output.text
            else:
                joined.append(output)
        cell.outputs = joined


def output_texts(cell) -> list[str]:
    """Return every piece of text among a code cell's outputs (pictures in PNG are not text)."""
    texts = []
    for output in cell.outputs:
        if output.output_type == "stream":
            texts.append(output.text)
        elif output.output_type == "error":
            texts.append("\n".join(output.traceback))
        else:
            texts += [str(output.data[kind]) for kind in TEXT_TYPES if kind in output.data]
    return texts


def words(markdown: str) -> int:
    """Count the words of a markdown cell: runs of characters between blanks that hold a letter or a digit."""
    return sum(any(char.isalnum() for char in word) for word in markdown.split())


def check(path: str | Path) -> list[str]:
    """Return what is wrong with a committed notebook, one sentence each, [] if nothing is."""
    path = Path(path)
    notebook = read(path)
    wrong = []
    if path.stat().st_size > MAX_BYTES:
        wrong.append(f"{path.stat().st_size} bytes, more than {MAX_BYTES}")
    try:
        parameters(notebook)
    except ValueError as error:
        wrong.append(str(error))
    wrong += not_python(notebook) + _check_metadata(notebook) + _check_outputs(notebook)
    return wrong + _check_form(notebook)


def _check_metadata(notebook) -> list[str]:
    wrong = []
    spec = notebook.metadata.get("kernelspec", {})
    if spec.get("name") != "python3" or spec.get("display_name") != "Python 3":
        wrong.append(
            f"kernelspec is {spec.get('name')!r} ({spec.get('display_name')!r}), not python3 (Python 3)"
        )
    if extra := sorted(set(notebook.metadata) - {"kernelspec", "language_info"}):
        wrong.append(f"notebook metadata holds {extra}")
    ids = [cell.get("id") for cell in notebook.cells]
    if None in ids or len(set(ids)) != len(ids):
        wrong.append("cell ids are missing or not unique")
    for index, cell in enumerate(notebook.cells):
        if extra := sorted(set(cell.metadata) - {"tags"}):
            wrong.append(f"cell {index}: metadata holds {extra}")
    return wrong


def _check_outputs(notebook) -> list[str]:
    wrong = []
    counts = [cell.execution_count for cell in code_cells(notebook)]
    if counts != list(range(1, len(counts) + 1)):
        wrong.append(f"execution counts are {counts}, not 1 to {len(counts)}: execute it from top to bottom")
    for index, cell in enumerate(notebook.cells):
        texts = [cell.source] + (output_texts(cell) if cell.cell_type == "code" else [])
        for text in texts:
            if found := ABSOLUTE.search(text):
                wrong.append(
                    f"cell {index}: the path of a machine, {text[found.start() : found.end() + 20]!r}"
                )
        for output in cell.get("outputs", []):
            if output.output_type == "error":
                wrong.append(f"cell {index}: an error is among the outputs, {output.ename}: {output.evalue}")
            if output.output_type == "stream" and output.name == "stderr":
                wrong.append(f"cell {index}: wrote to stderr: {output.text.strip()[:80]!r}")
            if "application/vnd.jupyter.widget-view+json" in output.get("data", {}):
                wrong.append(f"cell {index}: a widget among the outputs")
    return wrong


def _check_form(notebook) -> list[str]:
    wrong = []
    if not CELLS[0] <= len(notebook.cells) <= CELLS[1]:
        wrong.append(f"{len(notebook.cells)} cells, not {CELLS[0]} to {CELLS[1]}")
    lines = [len(cell.source.splitlines()) for cell in code_cells(notebook)]
    if lines and statistics.median(lines) > CODE_MEDIAN:
        wrong.append(f"the median code cell has {statistics.median(lines)} lines, more than {CODE_MEDIAN}")
    for index, cell in enumerate(notebook.cells):
        if cell.cell_type == "markdown" and words(cell.source) > WORDS_MAX:
            wrong.append(f"cell {index}: {words(cell.source)} words of markdown, more than {WORDS_MAX}")
        if cell.cell_type == "code" and len(cell.source.splitlines()) > CODE_MAX:
            wrong.append(f"cell {index}: {len(cell.source.splitlines())} lines of code, more than {CODE_MAX}")
    return wrong
