"""What README and the other pages say holds: the example runs, and every path, name and link exists."""

import importlib
import re
from pathlib import Path

import pytest

from jfa.lab import notebooks

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"\]\(([^)\s]+)\)")
CODE = re.compile(r"`([^`\n]+)`")
REPOSITORY_PATH = re.compile(r"(?:jfa|notebooks|figures|tests|\.ci)/[\w./*-]*")
DOTTED = re.compile(r"jfa(?:\.[A-Za-z_]\w*)+")


def pages() -> dict[str, tuple[Path, str]]:
    """Return name -> (folder that links are relative to, text) of every Markdown file and notebook."""
    found = {
        str(path.relative_to(ROOT)): (path.parent, path.read_text())
        for path in sorted([*ROOT.glob("*.md"), *(ROOT / "notebooks").rglob("*.md")])
        if ".ipynb_checkpoints" not in path.parts
    }
    for path in notebooks.paths():
        cells = [cell.source for cell in notebooks.read(path).cells if cell.cell_type == "markdown"]
        found[str(path.relative_to(ROOT))] = (path.parent, "\n\n".join(cells))
    return found


PAGES = pages()


def prose(text: str) -> str:
    """Return a page without its fenced blocks."""
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


def examples() -> list[str]:
    """Return the Python examples of README: the one for any machine, and the one for a GPU."""
    found = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert len(found) == 2
    return found


def test_the_example_of_the_readme_runs(capsys):
    exec(compile(examples()[0], "README.md", "exec"), {"__name__": "readme"})
    assert "reference" in capsys.readouterr().out


@pytest.mark.gpu
def test_gpu_the_second_example_of_the_readme_runs():
    names = {"__name__": "readme"}
    exec(compile(examples()[1], "README.md", "exec"), names)
    assert all(gradient.abs().sum() > 0 for gradient in names["gradients"])


def test_the_readme_names_the_two_commands_and_every_notebook():
    text = (ROOT / "README.md").read_text()
    assert re.search(r"```sh\nmake +#.*\nmake test +#", text)
    linked = set(re.findall(r"\(notebooks/(\w+)\.ipynb\)", text))
    assert linked == {path.stem for path in notebooks.paths()}


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(name):
    folder, text = PAGES[name]
    targets = [link.partition("#")[0] for link in LINK.findall(CODE.sub("", prose(text)))]
    local = [link for link in targets if link and not re.match(r"[a-z]+:", link)]
    assert [link for link in local if not (folder / link).exists()] == []


@pytest.mark.parametrize("name", PAGES)
def test_paths_of_the_repository_exist(name):
    _, text = PAGES[name]
    paths = [code for code in CODE.findall(prose(text)) if REPOSITORY_PATH.fullmatch(code)]
    # figures/02_*.csv is where a GPU's rows will be, NN_name stands for any figure: neither has to exist.
    paths = [path for path in paths if "NN_" not in path and not path.startswith("figures/02_")]
    assert [path for path in paths if not list(ROOT.glob(path.rstrip("/")))] == []


@pytest.mark.parametrize("name", PAGES)
def test_names_of_the_package_resolve(name):
    _, text = PAGES[name]
    missing = []
    for dotted in {code for code in CODE.findall(prose(text)) if DOTTED.fullmatch(code)}:
        parts = dotted.split(".")
        for end in range(len(parts), 0, -1):
            try:
                found = importlib.import_module(".".join(parts[:end]))
                break
            except ModuleNotFoundError:
                continue
        for attribute in parts[end:]:
            found = getattr(found, attribute, None)
        if found is None:
            missing.append(dotted)
    assert missing == []
