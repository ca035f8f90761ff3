"""Names that Triton's front end does not carry through a loop, though Python does."""

import pathlib

import pytest
import torch
import triton
import triton.language as tl

from jfa import emulator
from jfa.emulator.carried import lost_carries
from jfa.lab.report import compile_report


@triton.jit
def remembers_wrongly(values, out, n):
    i = 0
    now = tl.load(values)
    before = now
    while i < n:
        tl.store(out + i, now - before)
        before = now
        i += 1
        now = tl.load(values + i)


@triton.jit
def remembers(values, out, n):
    i = 0
    now = tl.load(values)
    before = tl.load(values)
    while i < n:
        tl.store(out + i, now - before)
        before = now
        i += 1
        now = tl.load(values + i)


def run(kernel):
    values, out = torch.arange(6, dtype=torch.int32) ** 2, torch.zeros(5, dtype=torch.int32)
    with emulator.emulate() as emulation:
        kernel[(1,)](values, out, 5)
    return out.tolist(), [finding for finding in emulation.reports[0].errors()]


def test_the_emulator_reports_what_the_compiler_loses():
    out, findings = run(remembers_wrongly)
    assert out == [0, 1, 3, 5, 7], "Python carries the name"
    assert [finding.kind for finding in findings] == ["carried value lost"]
    assert "before is not carried by the loop" in str(findings[0])
    assert run(remembers) == ([0, 1, 3, 5, 7], [])


def test_the_compiler_does_lose_it():
    """The finding is about the installed Triton: the loop of the wrong kernel carries one value less."""
    carried = {}
    for kernel in (remembers_wrongly, remembers):
        signature = {"values": "*i32", "out": "*i32", "n": "i32"}
        text = compile_report(kernel, signature, {}, "sm_90").text("ttgir")
        carried[kernel] = text[text.index("scf.while") :].split(")", 1)[0].count("=")
    assert carried[remembers] == carried[remembers_wrongly] + 1


SAFE = {
    "a value of its own": "a = f()\nb = g()\nwhile c():\n  a = b\n  b = g()",
    "copied after it moved": "b = g()\na = b\nwhile c():\n  b = g()\n  a = b",
    "never moves": "b = g()\na = b\nwhile c():\n  a = b",
    "set otherwise as well": "b = g()\na = b\nwhile c():\n  a = b\n  b = g()\n  a = f(a)",
    "moved before the loop": "b = g()\na = b\nb = g()\nwhile c():\n  a = b\n  b = g()",
    "unrolled": "b = g()\na = b\nfor i in tl.static_range(3):\n  a = b\n  b = g()",
}
LOST = {
    "while": "b = g()\na = b\nwhile c():\n  a = b\n  b = g()",
    "for": "b = g()\na = b\nfor i in range(n):\n  use(a)\n  a = b\n  b = g()",
    "other way round": "a = g()\nb = a\nwhile c():\n  a = b\n  b = g()",
    "tuple": "b = g()\na = b\nwhile c():\n  a, b = b, g()\n  b = g()",
    "both copies of a third": "x = g()\na = x\nb = x\nwhile c():\n  a = b\n  b = g()",
}


@pytest.mark.parametrize("name", SAFE)
def test_what_is_carried(name):
    assert lost_carries(SAFE[name]) == []


@pytest.mark.parametrize("name", LOST)
def test_what_is_lost(name):
    assert [(lost.name, lost.source) for lost in lost_carries(LOST[name])] == [("a", "b")]


def test_no_kernel_of_ours_loses_a_name():
    for path in sorted((pathlib.Path(__file__).parent.parent / "jfa" / "kernels").rglob("*.py")):
        assert lost_carries(path.read_text(encoding="utf-8")) == [], path
