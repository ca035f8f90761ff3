"""The attention, GEMM and layer normalization kernels of the fbtriton wheel, unmodified, in the emulator."""

import sys

import pytest

from jfa.emulator import emulate, mutated

if not sys.platform.startswith("linux"):
    pytest.skip("fbtriton has wheels for Linux only", allow_module_level=True)

from jfa.lab import tutorial_attention, tutorial_matrix, tutorials  # noqa: E402

TARGETS = {target.name: target for target in tutorial_attention.TARGETS + tutorial_matrix.TARGETS}
POLICIES = ("random", "lazy", "eager")
# One policy for each kernel in turn, all of them for these: every mechanism is in one of them.
EVERY_POLICY = (
    "fa_pipelined_persistent_causal",
    "fa_backward_2cta_causal",
    "fa_hopper_pingpong",
    "fa_clc",
    "fa_mxfp8_backward",
    "gemm_ws_2cta",
    "gemm_pipelined",
    "layernorm_ws",
)
WRONG = ("gdpa",)  # the answer depends on luck: see test_gdpa_reads_its_sum_too_early
RUNS = [
    pytest.param(name, policy, id=f"{name}-{policy}")
    for number, name in enumerate(TARGETS)
    for policy in (POLICIES if name in EVERY_POLICY else POLICIES[number % 3 :][:1])
]


@pytest.mark.parametrize("name, policy", RUNS)
def test_tutorial(name, policy):
    """Numbers within the error budget, and no finding but the ones that are true."""
    target = TARGETS[name]
    with emulate(policy=policy, seed=len(name), **target.options) as emulation:
        share = target.run()
    if name not in WRONG:
        assert share <= 1
    assert any(report.ops for report in emulation.reports) or name.startswith(("addmm", "cross_attention"))
    assert {finding.kind for finding in emulation.errors()} == set(target.known)


def test_all_that_the_notes_name_is_here():
    assert len(TARGETS) >= 40
    assert {target.known for target in TARGETS.values()} == {
        (),
        ("unwaited store",),
        ("race", "unwaited mma", "unwaited store"),
        ("peer not ready",),
    }


def test_a_kernel_that_exits_with_stores_in_flight():
    """The pipelined GEMM never waits for its last TMA store: shared memory may be gone when it is read."""
    target = TARGETS["gemm_pipelined"]
    with emulate(policy="lazy") as emulation:
        assert target.run() <= 1
    (finding,) = emulation.errors()
    assert finding.kind == "unwaited store"
    source = open(tutorials.load("blackwell_gemm_pipelined").__file__).read().splitlines()
    assert "async_descriptor_store" in source[finding.line - 1]


def with_waits(source):
    """gdpa's source with a wait for the product in every iteration: what its FIXME comments ask for."""
    for group in "01":
        comment = f"# there is no need to wait for o{group} at each iteration"
        assert source.count(comment) == 1
        source = source.replace(comment, f"tlx.barrier_wait(producer_commit_o{group}[bufIdx], phase)")
    return source


def test_gdpa_reads_its_sum_too_early():
    """gdpa reads its accumulator without a wait for the last product; with the wait its answer is right."""
    target = TARGETS["gdpa"]
    with emulate(policy="eager") as emulation:
        assert target.run() > 1
    races = {finding.buffer for report in emulation.reports for finding in report.of_kind("race")}
    assert races == {"o0_buf[0]", "o1_buf[0]"}
    kernel = tutorials.load("blackwell-gdpa").gdpa_kernel_tma_ws_blackwell
    for policy in POLICIES:
        with mutated(kernel, with_waits), emulate(policy=policy) as emulation:
            assert target.run() <= 1
        assert {finding.kind for finding in emulation.errors()} == {"unwaited store"}
