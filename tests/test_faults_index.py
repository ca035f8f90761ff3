"""The table in faults.md names a test for every entry, and every test it names exists."""

import ast
import re
from pathlib import Path

TESTS = Path(__file__).resolve().parent
KINDS = {
    "K1": range(1, 8),
    "K2": range(8, 13),
    "K3": (14, 15, 17, 19, 20),
    "K4": (23, 25, 26, 27),
    "K5": (29, 30, 31, 32, 33),
    "K6": (35, 37, 38),
    "K7": range(39, 44),
    "K8": range(44, 50),
    "K9": (50, 51, 52),
    "K11": (60, 61),
    "K13": range(70, 76),
}


def table():
    rows = re.findall(
        r"^\| (\d+) \| (K\d+) [^|]+ \| ([^|]+) \|$", (TESTS / "faults.md").read_text(), re.MULTILINE
    )
    return [(int(entry), kind, names.split(", ")) for entry, kind, names in rows]


def functions():
    """Name to function of every test in the files about faults."""
    found = {}
    for path in [*TESTS.glob("test_faults_*.py"), TESTS / "test_compile.py"]:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                found[node.name] = node
    return found


def test_every_entry_is_in_the_table_once():
    assert [(entry, kind) for entry, kind, _ in table()] == [
        (n, kind) for kind, numbers in KINDS.items() for n in numbers
    ]


def test_every_test_of_the_table_exists_and_says_what_it_is_about():
    found = functions()
    for entry, _, names in table():
        assert names and all(name.startswith(f"test_{entry:02}_") for name in names), entry
        docstrings = [ast.get_docstring(found[name]) for name in names]
        assert all(docstrings) and re.search(r"#\d+", docstrings[0]), entry


def test_every_numbered_test_is_in_the_table():
    named = {name for *_, names in table() for name in names}
    assert named == {name for name in functions() if re.match(r"test_\d\d_", name)}
