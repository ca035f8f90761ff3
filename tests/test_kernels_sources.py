"""What kernel sources must not contain, because the compiler takes it for something else without a word."""

import ast
from pathlib import Path

import pytest

KERNELS = sorted((Path(__file__).parent.parent / "jfa" / "kernels").rglob("*.py"))


def copies(nodes):
    """(line, name, other) of every plain ``name = other`` in these nodes."""
    for node in nodes:
        for found in ast.walk(node):
            if isinstance(found, ast.Assign) and isinstance(found.value, ast.Name):
                for target in found.targets:
                    if isinstance(target, ast.Name):
                        yield found.lineno, target.id, found.value.id


def lost_carries(source: str) -> list[str]:
    """Names that a loop sets to a copy of another name of which they were a copy before the loop.

    Triton takes a name for carried by a loop only if a dry run of the body leaves it with another value; with
    ``a = b`` before the loop and ``a = b`` in it, it has the same, so ``a`` stays the first ``b`` for ever.
    """
    found = []
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef):
            continue
        loops = [node for node in ast.walk(function) if isinstance(node, (ast.While, ast.For))]
        for loop in loops:
            before = {(a, b) for line, a, b in copies(function.body) if line < loop.lineno}
            again = {(a, b) for _, a, b in copies(loop.body)}
            found += [f"{function.name}: {a} = {b} before and in the loop" for a, b in before & again]
    return found


def test_the_reader_sees_a_lost_carry():
    bad = "def f(n):\n    b = g()\n    a = b\n    while n:\n        h(a)\n        a = b\n        b = g()\n"
    assert lost_carries(bad) == ["f: a = b before and in the loop"]
    assert lost_carries(bad.replace("    a = b\n    while", "    a = g()\n    while")) == []


@pytest.mark.parametrize("path", KERNELS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_no_loop_loses_a_name_that_it_carries(path):
    assert lost_carries(path.read_text()) == []
