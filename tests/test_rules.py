"""The rules of the house, each read from the source rather than remembered."""

import ast
import io
import re
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "jfa"
FILES = sorted(PACKAGE.rglob("*.py"))
FILE_LINES = 400
ROLE_LINES = 80
PASS_LINES = {"forward": 1200, "backward": 1600}  # kernel code of a pass, both architectures, all steps
CAST_LINES = 150  # a kernel that allocates the rings, draws the timeline and lists its roles


def module_name(path: Path) -> str:
    """Return the dotted name of a file of the package."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path) for path in FILES}


def imported_names(path: Path) -> set[str]:
    """Return the dotted names of the modules a file imports anywhere in it, functions included."""
    package = module_name(path) if path.name == "__init__.py" else module_name(path).rpartition(".")[0]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *([base] if base else [])])
            names = {f"{base}.{alias.name}" for alias in node.names}
            found |= {name if name in MODULES else base for name in names}
    return found


def within(name: str, package: str) -> bool:
    """Whether a module is the package or lies in it."""
    return name == package or name.startswith(f"{package}.")


IMPORTS = {module_name(path): imported_names(path) for path in FILES}


def test_the_reader_of_imports_sees_them():
    assert "jfa.lab.notebooks" in IMPORTS["jfa.lab.runner"]
    assert "nbformat" in IMPORTS["jfa.lab.runner"]
    assert len(FILES) > 10


def test_nothing_imports_the_lab_but_the_lab():
    wrong = [
        (m, n)
        for m, names in IMPORTS.items()
        for n in names
        if within(n, "jfa.lab") and not within(m, "jfa.lab")
    ]
    assert wrong == []


def test_kernels_import_kernels_triton_torch_and_the_standard_library():
    wrong = [
        (module, name)
        for module, names in IMPORTS.items()
        if within(module, "jfa.kernels")
        for name in names
        if not within(name, "jfa.kernels")
        and name.split(".")[0] not in {"triton", "torch", *sys.stdlib_module_names}
    ]
    assert wrong == []


def test_the_emulator_knows_nothing_of_attention():
    wrong = [
        (module, name)
        for module, names in IMPORTS.items()
        if within(module, "jfa.emulator")
        for name in names
        if within(name, "jfa") and not within(name, "jfa.emulator")
    ]
    assert wrong == []


NO_TRITON = """
import sys
sys.modules["triton"] = None  # importing it raises
import jfa
assert not [name for name in sys.modules if name.startswith("triton.")]
assert "jfa.emulator" not in sys.modules
print(callable(jfa.jagged_flash_attention), jfa.__all__)
"""

NO_DEVICE = """
import importlib, pkgutil, sys, torch

def refuse(*args, **kwargs):
    raise RuntimeError("a device was asked for at import")

asks = "is_available device_count current_device get_device_properties get_device_capability get_device_name"
for name in asks.split() + ["init", "_lazy_init", "synchronize"]:
    setattr(torch.cuda, name, refuse)
torch.accelerator.current_accelerator = torch.accelerator.is_available = refuse
import jfa
names = [module.name for module in pkgutil.walk_packages(jfa.__path__, "jfa.")]
for name in names:
    importlib.import_module(name)
print(len(names))
"""


def python(code: str) -> subprocess.CompletedProcess:
    """Run code in a fresh interpreter, outside the repository."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd="/")


def test_import_jfa_needs_no_triton():
    run = python(NO_TRITON)
    assert run.returncode == 0, run.stderr
    assert "jagged_flash_attention" in run.stdout


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="fbtriton has wheels for Linux only")
def test_no_module_asks_for_a_device_at_import():
    run = python(NO_DEVICE)
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) >= 10


def test_files_stay_short():
    lines = {module_name(path): len(path.read_text().splitlines()) for path in FILES}
    assert {name: count for name, count in lines.items() if count >= FILE_LINES} == {}


def code_lines(path: Path) -> int:
    """Lines of a file that hold code: neither blank, nor comment, nor docstring."""
    text = path.read_text()
    documented = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node):
            documented |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    names = ("COMMENT", "NL", "NEWLINE", "INDENT", "DEDENT", "ENDMARKER")
    blank = [getattr(tokenize, name) for name in names]
    held = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in blank:
            held |= set(range(token.start[0], token.end[0] + 1))
    return len(held - documented)


def test_the_kernels_of_a_pass_stay_short():
    kernels = PACKAGE / "kernels"
    backward = {kernels / "gradients.py", kernels / "keys.py", *kernels.glob("*/backward*.py")}
    forward = set(kernels.glob("*/*.py")) - backward - set(kernels.glob("*/ladder.py"))
    assert len(backward) > 8 and len(forward) > 5
    for name, files in (("forward", forward), ("backward", backward)):
        assert sum(map(code_lines, files)) <= PASS_LINES[name], name


def test_lines_of_code_are_counted_without_words(tmp_path):
    source = tmp_path / "few.py"
    words = '"""Words\n\nof a module."""\n\n# a comment\n'
    source.write_text(words + 'x = (\n    1,\n)\n\n\ndef f():\n    """Words."""\n    return x\n')
    assert code_lines(source) == 5


def is_jit(function: ast.FunctionDef) -> bool:
    """Whether a decorator of the function is triton.jit, called or not."""
    return any(re.search(r"(^|\.)jit\b", ast.unparse(decorator)) for decorator in function.decorator_list)


def test_a_role_can_be_read_at_one_sight():
    long = []
    for path in sorted((PACKAGE / "kernels").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and is_jit(node):
                lines = node.end_lineno - node.lineno + 1
                limit = CAST_LINES if "async_tasks()" in ast.unparse(node) else ROLE_LINES
                if lines >= limit:
                    long.append(f"{module_name(path)}.{node.name}: {lines} lines")
    assert long == []


def test_no_module_begins_with_a_digit():
    assert [name for name in MODULES if re.search(r"(^|\.)\d", name)] == []


def test_every_figure_has_its_data():
    folder = ROOT / "figures"
    pictures = {path.stem for path in folder.glob("*.svg")}
    data = {path.stem for path in folder.glob("*.csv")}
    assert pictures - data == set()
    assert [name for name in pictures | data if not re.match(r"\d\d_[a-z0-9_]+$", name)] == []
    assert [path.name for path in folder.iterdir() if path.suffix not in (".svg", ".csv")] == []


def test_no_file_names_a_path_of_somebodys_machine():
    texts = [*FILES, *ROOT.glob("*.md"), *ROOT.glob("tests/*.py"), ROOT / "Makefile", ROOT / ".ci" / "run"]
    found = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in texts
        if path.name not in ("notebooks.py", "test_notebooks.py")  # they hold the pattern and its test
        for line in path.read_text().splitlines()
        if re.search(r"(?<![\w.])/(root|home|work|Users)/", line)
    ]
    assert found == []
