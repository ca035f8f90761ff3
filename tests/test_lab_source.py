"""Source and diffs: what a reader sees of a step, and how its changed lines are counted."""

import dataclasses
from typing import Any

import pytest

triton = pytest.importorskip("triton")
pytest.importorskip("triton.language.extra.tlx", reason="needs fbtriton (Linux only)")

import triton.language as tl  # noqa: E402

from jfa.lab.source import changed_lines, code_lines, diff, source, step_diff  # noqa: E402


@triton.jit
def halve(x):
    return x / 2


@triton.jit
def softmax_plain(x):
    """Exponentials of a row."""
    # one pass
    return tl.exp2(x)


@triton.jit
def softmax_shifted(x):
    """Exponentials of a row, shifted by half."""
    # another pass

    y = halve(x)
    return tl.exp2(y)


@triton.autotune([triton.Config({}, num_warps=4)], key=[])
@triton.jit
def tuned(x):
    return x


@triton.aggregate
class Pair:
    left: tl.tensor
    right: tl.tensor

    @triton.constexpr_function
    def __init__(self, left, right):
        self.left = left
        self.right = right

    @triton.jit
    def total(self):
        return self.left + self.right


@triton.jit
def reduce_pair(x):
    return Pair(x, x).total()


@triton.aggregate
class Bare:
    only: tl.tensor


@dataclasses.dataclass(frozen=True)
class Tiles:
    block: int = 64
    depth: int = 2


@dataclasses.dataclass(frozen=True)
class Step:
    name: str
    idea: str
    softmax: Any
    reduce: Any = None
    tiles: Tiles = Tiles()


FIRST = Step("first", "one", softmax_plain)


def test_source_of_functions_of_every_kind():
    assert source(softmax_plain).splitlines()[:2] == ["@triton.jit", "def softmax_plain(x):"]
    assert source(tuned).startswith("@triton.autotune") and source(tuned).endswith("return x\n")
    assert source(test_source_of_functions_of_every_kind).startswith("def test_source_of")
    aggregate = source(Pair)
    assert aggregate.startswith("@triton.aggregate\nclass Pair:") and "def total" in aggregate
    assert source(Bare) == "@triton.aggregate\nclass Bare:\n    only: tl.tensor\n"
    assert source(Tiles).startswith("@dataclasses.dataclass(frozen=True)")
    assert source(None) == ""
    with pytest.raises(TypeError, match="source"):
        source(len)


def test_inner_functions_are_dedented():
    @triton.jit
    def inner(x):
        return x

    assert source(inner) == "@triton.jit\ndef inner(x):\n    return x\n"


def test_diff_is_unified_and_counts():
    text = diff(softmax_plain, softmax_shifted)
    assert text.splitlines()[:2] == ["--- softmax_plain", "+++ softmax_shifted"]
    assert "-    return tl.exp2(x)" in text.splitlines() and "+    y = halve(x)" in text.splitlines()
    assert (text.added, text.removed) == (6, 4)
    assert diff(softmax_plain, softmax_plain) == ""
    assert diff(None, halve).added == 3 and diff(source(halve), "").removed == 3


def test_code_lines_leave_out_what_does_nothing():
    text = 'def f(x):\n    """Doc\n    string."""\n\n    # why\n    y = "# no"  # because\n    return y\n'
    assert code_lines(text) == ["def f(x):", '    y = "# no"', "    return y"]


def test_step_diff_shows_roles_settings_and_new_helpers():
    second = dataclasses.replace(
        FIRST, name="second", idea="two", softmax=softmax_shifted, tiles=Tiles(64, 3)
    )
    lines = step_diff(FIRST, second).splitlines()
    assert lines[:2] == ["-tiles.depth = 2", "+tiles.depth = 3"]
    assert "+++ softmax: softmax_shifted" in lines and "+++ halve: halve" in lines
    assert not any("idea" in line or "second" in line for line in lines)
    # out: def, return, depth; in: def, y, return, depth and the helper's decorator, def and return
    assert changed_lines(FIRST, second) == 3 + 7
    assert changed_lines(second, FIRST) == 3 + 7


def test_added_role_brings_its_aggregate():
    second = dataclasses.replace(FIRST, reduce=reduce_pair)
    text = step_diff(FIRST, second)
    assert "+class Pair:" in text.splitlines() and "--- reduce: (nothing)" in text.splitlines()
    assert changed_lines(FIRST, second) == len(code_lines(source(reduce_pair))) + len(
        code_lines(source(Pair))
    )


def test_equal_steps_do_not_differ():
    copy = dataclasses.replace(FIRST, name="other", idea="other words")
    assert step_diff(FIRST, copy) == "" and changed_lines(FIRST, copy) == 0


def test_roles_in_dicts_and_tuples():
    a = {"roles": {"mma": halve}, "stages": (softmax_plain, halve), "blocks": (64, 128)}
    b = {"roles": {"mma": halve}, "stages": (softmax_shifted, halve), "blocks": (64, 64)}
    lines = step_diff(a, b).splitlines()
    assert lines[:2] == ["-blocks = (64, 128)", "+blocks = (64, 64)"]
    assert "+++ stages.0: softmax_shifted" in lines
    # out: def, return, blocks; in: def, y, return, blocks (halve is a role of both)
    assert changed_lines(a, b) == 3 + 4


CELLS = """
import triton
import triton.language as tl
from jfa.lab.source import diff, source
@triton.jit
def role(x):
    return x + 1
""", """
first = role
@triton.jit
def role(x):
    return x + 2
""", """
print(diff(first, role))
"""  # fmt: skip


def test_functions_of_notebook_cells_also_when_redefined():
    pytest.importorskip("IPython")
    from IPython.core.interactiveshell import InteractiveShell
    from IPython.utils.capture import capture_output

    shell = InteractiveShell()
    for cell in CELLS[:2]:
        shell.run_cell(cell).raise_error()
    with capture_output() as captured:
        shell.run_cell(CELLS[2]).raise_error()
    changed = "-    return x + 1\n+    return x + 2\n"
    assert changed in captured.stdout
    assert shell.user_ns["source"](shell.user_ns["first"]).endswith("return x + 1\n")
    plain, _ = shell.display_formatter.format(
        shell.user_ns["diff"](shell.user_ns["first"], shell.user_ns["role"])
    )
    assert changed.strip() in plain["text/plain"] and "\\n" not in plain["text/plain"]
