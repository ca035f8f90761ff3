"""One compiled function for two kinds of barriers: what the emulator says, and what the compiler does."""

import re

import pytest
import torch
import triton
import triton.language as tl
import triton.language.extra.tlx as tlx

from jfa import emulator
from jfa.lab.report import compile_report


@triton.aggregate
class Plain:
    """A ring whose type does not say which kind of barrier it holds."""

    empties: tlx.mbarrier
    depth: tl.constexpr

    @triton.jit
    def release(self, i):
        tlx.barrier_arrive(self.empties[i % self.depth])

    @triton.jit
    def await_empty(self, i):
        tlx.barrier_wait(self.empties[i % self.depth], (i // self.depth) & 1)


@triton.aggregate
class Told:
    """The same with the kind in its type."""

    empties: tlx.mbarrier
    depth: tl.constexpr
    warps: tl.constexpr

    @triton.jit
    def release(self, i):
        tlx.barrier_arrive(self.empties[i % self.depth])

    @triton.jit
    def await_empty(self, i):
        tlx.barrier_wait(self.empties[i % self.depth], (i // self.depth) & 1)


@triton.jit
def plain_rings(DEPTH: tl.constexpr):
    k_empties = tlx.alloc_warp_barrier(2, num_warps=4)
    v_empties = tlx.alloc_barriers(DEPTH)
    return Plain(k_empties, 2), Plain(v_empties, DEPTH)


@triton.jit
def told_rings(DEPTH: tl.constexpr):
    k_empties = tlx.alloc_warp_barrier(2, num_warps=4)
    v_empties = tlx.alloc_barriers(DEPTH)
    return Told(k_empties, 2, 4), Told(v_empties, DEPTH, 0)


@triton.jit
def release_both(k, v, n):
    for i in range(n):
        k.release(i)
        v.release(i)


@triton.jit
def release_in_turn(k, v, n):
    i = 0
    while i < n:
        k.release(i + 0 * n)
        i += 1
    for i in range(n):
        v.release(i)


@triton.jit
def release_as_told(k, v, n):
    for i in range(n):
        arrive_as(k.empties[i % 2], True)
        arrive_as(v.empties[i % 2], False)


@triton.jit
def arrive_as(barrier, EACH: tl.constexpr):
    tlx.barrier_arrive(barrier)


@triton.jit
def release_views(k, v, n):
    for i in range(n):
        arrive_on(k.empties[i % 2])
        arrive_on(v.empties[i % 2])


@triton.jit
def arrive_on(barrier):
    tlx.barrier_arrive(barrier)


@triton.jit
def release_of_pairs(k, v, n):
    for i in range(n):
        release_first((k, v), i)
        release_first((v, k), i)


@triton.jit
def release_first(pair, i):
    pair[0].release(i)


@triton.jit
def release_unrolled(k, v, n):
    for i in range(n):
        release_pair((k.empties, v.empties), i)


@triton.jit
def release_pair(empties, i):
    for which in tl.static_range(2):
        tlx.barrier_arrive(empties[which][i % 2])


@triton.jit
def release_elsewhere(k, v, n):
    """Both kinds reach one body, which arrives on another barrier that they come with."""
    for i in range(n):
        if i % 2 == 0:
            arrive_on_second(k.empties, v.empties, i)
        else:
            arrive_on_second(v.empties, v.empties, i)
        tlx.barrier_arrive(k.empties[i % 2])


@triton.jit
def arrive_on_second(first, second, i):
    tlx.barrier_arrive(second[i % 2])


@triton.jit
def release_prologue(k, v, n):
    """A literal and what a loop carries are two types: k is released with one, v with the other."""
    k.release(0)
    k.release(1)
    i = 0
    while i < n:
        v.release(i)
        i += 1


@triton.jit
def kernel(out, n, rings: tl.constexpr, release: tl.constexpr, DEPTH: tl.constexpr):
    """Each release arrives on both rings' barriers; await_empty, which only waits, may serve both kinds."""
    k, v = rings(DEPTH)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            release(k, v, n)
        with tlx.async_task(num_warps=1):
            for i in range(n):
                k.await_empty(i)
                v.await_empty(i)
            tl.store(out, n)


def run(rings, release, depth=2, **options):
    out = torch.zeros(1, dtype=torch.int32)
    with emulator.emulate(**options) as emulation:
        kernel[(1,)](out, 2, rings, release, depth)
    assert out.item() == 2
    return emulation.reports[0].errors()


def line_of(function, text):
    lines = function.raw_src
    return function.starting_line_number + next(i for i, line in enumerate(lines) if text in line)


@pytest.mark.parametrize("policy", ["eager", "lazy", "random"])
def test_one_method_of_two_kinds(policy):
    (found,) = run(plain_rings, release_both, policy=policy)
    assert (found.kind, found.level) == ("barrier kinds", "error")
    first, second = line_of(release_both, "k.release"), line_of(release_both, "v.release")
    assert found.message.startswith("release arrives on ")
    assert f"a warp barrier (call at line {first})" in found.message
    assert f"a plain barrier (call at line {second})" in found.message
    assert "k_empties" in found.message or "k.empties" in found.message
    assert found.line == second


@pytest.mark.parametrize(
    "release, name",
    [(release_in_turn, "release"), (release_views, "arrive_on"), (release_of_pairs, "release")],
)
def test_other_ways_to_one_body(release, name):
    found = run(plain_rings, release)
    assert [(f.kind, f.message.split()[0]) for f in found] == [("barrier kinds", name)]


def test_a_call_in_a_shared_function_names_the_way_to_it():
    (found,) = run(plain_rings, release_of_pairs)
    inner = line_of(release_first, "release(i)")
    assert f"(call at line {line_of(release_of_pairs, '((k, v)')} > {inner})" in found.message
    assert f"(call at line {line_of(release_of_pairs, '((v, k)')} > {inner})" in found.message


SOUND = {
    "the type tells": (told_rings, release_both, 2),
    "another number of barriers": (plain_rings, release_both, 3),
    "a constexpr argument tells": (plain_rings, release_as_told, 2),
    "unrolled in one body": (plain_rings, release_unrolled, 2),
    "arrives on one kind only": (plain_rings, release_elsewhere, 2),
    "a literal and a carried number": (plain_rings, release_prologue, 2),
}


@pytest.mark.parametrize("name", SOUND)
def test_no_false_alarm(name):
    assert run(*SOUND[name]) == []


def test_checks_can_be_off():
    assert run(plain_rings, release_both, checks=False) == []


@pytest.mark.parametrize(
    "rings, release, kinds", [(plain_rings, release_both, 1), (told_rings, release_both, 2)]
)
def test_the_compiler_does_it(rings, release, kinds):
    """The finding is about the installed TLX: with plain rings every arrive is of one kind."""
    constants = {"rings": rings, "release": release, "DEPTH": 2}
    text = compile_report(kernel, {"out": "*i32", "n": "i32"}, constants, "sm_90").text("ttgir")
    arrives = re.findall(r"ttng\.arrive_barrier [^\n]*", text)
    assert len(arrives) == 2
    assert len({"perThread" in arrive for arrive in arrives}) == kinds
