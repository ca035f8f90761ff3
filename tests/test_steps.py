"""The ladders: complete, in order, one idea a step, and roles that can be replaced."""

import copy
import dataclasses
import pickle
import re

import pytest
import torch
import triton

from jfa import steps
from jfa.kernels.problem import Problem
from jfa.kernels.step import Step
from jfa.lab.ladder import module_of
from jfa.lab.source import changed_lines

ISSUED = ["warp_specialized", "balanced", "dynamic", "peeled", "stationary"]
LADDERS = [(arch, "forward", steps.FORWARD[arch]) for arch in steps.FORWARD]
LADDERS += [(arch, "backward", steps.BACKWARD[arch]) for arch in steps.BACKWARD]
# A step of another class is another kernel: there is no diff to read.
PAIRS = [(a, b) for _, _, ladder in LADDERS for a, b in zip(ladder, ladder[1:]) if type(a) is type(b)]
PROBLEM = Problem(8, 4, 4, 128, 128, 128, 4096, True, 128**-0.5)


@pytest.mark.parametrize("arch", steps.FORWARD)
def test_the_forward_ladder_has_the_steps_of_the_course_in_order(arch):
    names = [step.name for step in steps.FORWARD[arch]]
    assert [name for name in names if name in ISSUED] == ISSUED


@pytest.mark.parametrize("arch,direction,ladder", LADDERS)
def test_a_step_says_what_it_is(arch, direction, ladder):
    assert len({step.name for step in ladder}) == len(ladder)
    for step in ladder:
        assert isinstance(step, Step) and (step.arch, step.direction) == (arch, direction)
        assert step.title and step.idea.endswith(".") and step.notebook
        assert step.order in ("natural", "sorted")
        assert steps.find(arch, direction, step.name) is step
        assert steps.find(arch, direction, step) is step
    if ladder:
        assert steps.find(arch, direction) is ladder[-1]


@pytest.mark.parametrize("before,after", PAIRS, ids=lambda step: f"{step.arch}-{step.direction}-{step.name}")
def test_a_step_changes_something_and_at_most_80_lines(before, after):
    assert 0 < changed_lines(before, after) <= 80


@pytest.mark.parametrize("arch", steps.FORWARD)
def test_the_constexprs_of_a_step_are_its_roles_and_its_numbers(arch):
    for step in steps.FORWARD[arch]:
        numbers = step.constexprs(PROBLEM)
        assert len(step.roles()) >= 5
        assert all(numbers[name.upper()] is role for name, role in step.roles().items())
        assert numbers["BLOCK_M"] in (64, 128, 256) and numbers["BLOCK_N"] in (64, 128)


def test_a_replaced_role_is_the_one_that_is_compiled():
    step = steps.find("hopper", "forward", "peeled")
    other = dataclasses.replace(step, attend=steps.find("hopper", "forward", "dynamic").attend)
    assert other.constexprs(PROBLEM)["ATTEND"] is not step.constexprs(PROBLEM)["ATTEND"]
    assert steps.find("hopper", "forward", other) is other


def test_unknown_steps_are_refused_by_name():
    with pytest.raises(ValueError, match="expected one of warp_specialized, balanced"):
        steps.find("hopper", "forward", "fast")
    with pytest.raises(ValueError, match="arch: expected one of hopper, blackwell"):
        steps.find("ampere", "forward")
    with pytest.raises(ValueError, match="direction"):
        steps.find("hopper", "sideways")
    with pytest.raises(TypeError, match="expected one of blackwell forward, got hopper forward"):
        steps.find("blackwell", "forward", steps.FORWARD["hopper"][0])


def plain(x):
    return x


@triton.autotune([triton.Config({})], key=[])
@triton.jit
def tuned(x):
    return x


@pytest.mark.parametrize(
    "change, words",
    [
        (
            {"softmax": plain},
            "step 'peeled': expected a triton.jit function as softmax, got function plain",
        ),
        ({"softmax": "softmax"}, "expected a triton.jit function as softmax, got str softmax"),
        ({"softmax": tuned}, "expected a triton.jit function as softmax, got Autotuner"),
        ({"draw": None}, "expected a triton.jit function as draw, got None"),
        ({"tiling": None}, "expected a function of a Problem as tiling, got None"),
        ({"tiling": {"BLOCK_M": 128}}, "expected a function of a Problem as tiling, got {'BLOCK_M': 128}"),
    ],
    ids=["plain function", "text", "autotuned", "no role", "no tiling", "a dict for a tiling"],
)
def test_a_step_that_no_kernel_could_cast_is_refused_where_it_is_made(change, words):
    with pytest.raises(TypeError, match=re.escape(words)):
        dataclasses.replace(steps.find("hopper", "forward", "peeled"), **change)


def test_an_order_that_no_list_has_is_refused():
    with pytest.raises(ValueError, match="step 'peeled': expected order natural or sorted, got 'random'"):
        dataclasses.replace(steps.find("hopper", "forward", "peeled"), order="random")


def test_roles_that_a_kernel_can_do_without():
    """Blackwell's static steps have nobody who draws; a step of another kernel cannot stand in."""
    assert steps.find("blackwell", "forward", "balanced").draw is None
    base = Step("mine", "", "", "hopper", "forward", "", tiling=dict)
    with pytest.raises(TypeError, match="step: expected a HopperForward for hopper forward, got Step"):
        steps.find("hopper", "forward", base)


def test_a_step_is_copied_and_pickled_as_what_it_is():
    step = steps.find("hopper", "backward", "peeled")
    module = torch.nn.Linear(1, 1)
    module.step = step
    assert copy.copy(step) is step and copy.deepcopy(module).step is step
    assert pickle.loads(pickle.dumps(step)) is step
    with pytest.raises(pickle.PicklingError, match="'mine'"):
        pickle.dumps(dataclasses.replace(step, name="mine"))


@pytest.mark.parametrize("arch", steps.FORWARD)
@pytest.mark.parametrize(
    "change,message",
    [
        ({"dtype": torch.float32}, "q: expected bfloat16 or float16"),
        ({"head_dim": 96, "head_dim_v": 96}, "q: expected a head dimension of 64 or 128, got 96"),
        ({"head_dim_v": 64}, "v: expected the head dimension of q, 128, got 64"),
        ({"total_kv": 2**30 + 1}, "at most 2**30 rows"),
    ],
)
def test_what_the_kernels_cannot_run_is_named(arch, change, message):
    problem = Problem(1, 2, 2, 128, 128, 128, 1000, True, 0.1)
    supports = module_of(arch).supports
    assert supports(problem) is None
    assert message in supports(dataclasses.replace(problem, **change))
