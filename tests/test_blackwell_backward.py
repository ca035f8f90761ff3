"""The Blackwell backward ladder: compiled as launched, and in the emulator. Nothing of it ran on a GPU."""

import dataclasses
import functools

import pytest
import torch
from test_hopper_backward import FEATURES, RAGGED, tensors

import jfa
from jfa import emulator, jagged, steps
from jfa.kernels.blackwell import backward_launch, launch
from jfa.kernels.problem import Problem
from jfa.lab import launches
from jfa.lab.check import check_attention

LADDER = steps.BACKWARD["blackwell"]
NAMES = [step.name for step in LADDER]


def check(step, *inputs, **rule):
    """Gradients within the error budget."""
    options = {"backend": "blackwell", "step": step}
    check_attention(jfa.jagged_flash_attention, *inputs, options=options, **rule).check()


def findings(emulation):
    """What the emulator reported, as text."""
    return [str(finding) for report in emulation.reports for finding in report.errors()]


# ----------------------------------------------------------------------------------------- in the emulator


@pytest.mark.parametrize("policy", ["eager", "lazy", "random"])
@pytest.mark.parametrize("name", NAMES)
def test_ragged_lengths_are_right_and_clean(name, policy):
    """One block of query rows, or two; few resident CTAs, so that each is handed several items."""
    rows, resident = {"eager": (72, 1), "lazy": (130, 2), "random": (130, 3)}[policy]
    with emulator.emulate(policy=policy, seed=3, resident=resident) as emulation:
        check(name, *tensors(RAGGED, rows, heads=1))
    assert findings(emulation) == []
    assert any(report.ops for report in emulation.reports)


@pytest.mark.parametrize("name", ["peeled", "two_cta"])
@pytest.mark.parametrize("feature", FEATURES)
def test_features(name, feature):
    facts = dict(FEATURES[feature])
    rule = {key: facts.pop(key) for key in ("causal", "window", "scale") if key in facts}
    query = facts.pop("query")
    with emulator.emulate(policy="random", seed=len(feature), resident=2) as emulation:
        check(name, *tensors(RAGGED, query, **facts), **rule)
    assert findings(emulation) == []


def test_dq_on_chip_in_two_launches():
    """More than 128 rows: the second launch adds to the dK and dV of the first."""
    with emulator.emulate(policy="random", seed=1) as emulation:
        check("stationary", *tensors([0, 1, 64, 130, 5], 200, dim=128, dtype=torch.float16))
    assert findings(emulation) == []


@pytest.mark.parametrize("held", [1, 2])
def test_slices_of_dq_that_wait_in_registers(held):
    """How many is a number to be tuned; a head dimension of 64 has two slices."""
    step = steps.find("blackwell", "backward", "dq_released")
    step = dataclasses.replace(step, tiling=lambda problem, of=step.tiling: of(problem) | {"HELD": held})
    with emulator.emulate(policy="lazy", seed=held) as emulation:
        check(step, *tensors([130, 5], 130, heads=1))
    assert findings(emulation) == []


@pytest.mark.parametrize("name", ["peeled", "two_cta", "stationary"])
def test_gradients_through_lse(name):
    q, k, v, offsets, _ = tensors([5, 66, 0], 20, heads=1, slack=0)
    grads = []
    for backend, step, dtype in (("blackwell", name, q.dtype), ("reference", None, torch.float64)):
        leaves = [x.to(dtype).requires_grad_() for x in (q, k, v)]
        options = {"backend": backend, "step": step, "return_lse": True}
        out, lse = jfa.jagged_flash_attention(*leaves, offsets, **options)
        loss = out.double().square().sum() + (lse[:2].double() * torch.arange(20)).sum()
        grads.append(torch.autograd.grad(loss, leaves))
    for ours, truth in zip(*grads, strict=True):
        assert (ours.double() - truth).abs().max() <= 0.02 * truth.abs().max()


def test_more_processors_than_tiles():
    """A CTA of the stationary kernel without a tile writes a zero sum."""
    with emulator.emulate(policy="random", seed=2) as emulation:
        check("stationary", *tensors([5], 3, heads=1))
    assert findings(emulation) == []


def test_a_neighbours_nan_stays_there():
    """Sequence 1's keys and rows are NaN; the others' gradients must not see them."""
    q, k, v, kv_offsets, q_offsets = tensors([66, 40, 5], [3, 20, 66], heads=1)
    poisoned = [x.clone() for x in (q, k, v)]
    poisoned[0][3:23] = float("nan")
    poisoned[1][66:106] = float("nan")
    poisoned[2][66:106] = float("nan")
    dout = torch.randn(q.shape, generator=torch.Generator().manual_seed(1)).to(q.dtype)
    for name in ("peeled", "two_cta"):
        grads = []
        for inputs in ((q, k, v), poisoned):
            leaves = [x.detach().clone().requires_grad_() for x in inputs]
            out = jfa.jagged_flash_attention(*leaves, kv_offsets, q_offsets, backend="blackwell", step=name)
            incoming = dout.clone()
            if inputs is poisoned:
                incoming[3:23] = float("nan")
            grads.append(torch.autograd.grad(out, leaves, incoming))
        for clean, other, rows in zip(*grads, ((3, 23), (66, 106), (66, 106)), strict=True):
            keep = torch.ones(clean.shape[0], dtype=torch.bool)
            keep[rows[0] : rows[1]] = False
            torch.testing.assert_close(other[keep], clean[keep], rtol=0, atol=0)


def test_same_bits_when_asked():
    """deterministic=True: dq of a shared query block is the same in any order of execution."""
    inputs = tensors([0, 130, 64, 5], 72)
    found = []
    for seed in range(3):
        leaves = [x.detach().clone().requires_grad_() for x in inputs[:3]]
        with emulator.emulate(policy="random", seed=seed):
            out = jfa.jagged_flash_attention(*leaves, inputs[3], backend="blackwell", deterministic=True)
            found.append(torch.autograd.grad(out.sum(), leaves))
    for grads in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(grads, found[0], strict=True))


def test_only_the_gradients_that_are_needed():
    q, k, v, offsets, _ = tensors([5, 66, 0], 20, heads=1, slack=0)
    whole = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    every = torch.autograd.grad(
        jfa.jagged_flash_attention(*whole, offsets, backend="blackwell").sum(), whole
    )  # fmt: skip
    for at in range(3):
        leaves = [x.detach().clone().requires_grad_(i == at) for i, x in enumerate((q, k, v))]
        out = jfa.jagged_flash_attention(*leaves, offsets, backend="blackwell")
        (one,) = torch.autograd.grad(out.sum(), [leaves[at]])
        assert torch.equal(one, every[at])


# ------------------------------------------------------------------------------ compiled as it is launched


@functools.cache
def report(
    name, rows=256, dim=128, heads=4, heads_kv=4, window=(-1, -1), packed=False, dtype=torch.bfloat16, at=0
):
    """Compile report for sm_100 of the main kernel as the call's launch number ``at`` would compile it."""
    lengths = torch.tensor([70, 300, 5])
    offsets = jagged.lengths_to_offsets(lengths)
    total = int(lengths.sum())
    problem = Problem(
        batch=3,
        heads_q=heads,
        heads_kv=heads_kv,
        head_dim=dim,
        head_dim_v=dim,
        total_q=total if packed else rows,
        total_kv=total,
        broadcast_q=not packed,
        scale=dim**-0.5,
        dtype=dtype,
        window_left=window[0],
        window_right=window[1],
    )
    q = torch.zeros(problem.total_q, heads, dim, dtype=dtype)
    k = torch.zeros(total, heads_kv, dim, dtype=dtype)
    out = torch.zeros(problem.out_shape, dtype=dtype)
    lse = torch.zeros(problem.lse_shape)
    with launches.capture_launches() as captured:
        launch.backward(
            problem, out, None, q, k, k, out, lse, offsets, offsets if packed else None, step=name
        )
    return [one for one in captured if one.name == "kernel"][at].report("sm_100")


@pytest.mark.parametrize("name", NAMES)
def test_compiles_without_silent_traps(name):
    found = report(name).check()
    assert found.tmem_columns == 512
    assert found.shared_bytes <= 232448
    assert found.opcodes["UTCHMMA"] + found.opcodes["UTCHMMA.2CTA"] > 0
    assert found.setmaxnreg


def test_each_step_has_its_instruction():
    def count(name, opcode):
        return sum(number for key, number in report(name).opcodes.items() if key.startswith(opcode))

    for name in NAMES[:-1]:
        assert count(name, "UTMAREDG") > 0, name
    assert count("stationary", "UTMAREDG") == 0, "dQ is not added to memory"
    assert count("balanced", "UGETNEXTWORKID") == 0
    assert count("dynamic", "UGETNEXTWORKID") > 0
    assert count("dq_staged", "UTMAREDG") == count("dq_released", "UTMAREDG")
    assert count("two_cta", "UTCHMMA.2CTA") > 0
    assert report("two_cta").cluster == (2, 1, 1)
    assert report("peeled").cluster == (1, 1, 1)


def test_a_pair_leaves_together():
    """The compiler's own cluster barriers: after barrier initialization, and at the end, by all warps.

    Worker warps arrive once, as their task ends. One barrier more in the default task would never complete.
    """
    text = report("two_cta").text("ptx")
    assert text.count("barrier.cluster.wait") == 2
    assert text.rindex("barrier.cluster.wait") > text.rindex("setmaxnreg")
    assert "barrier.cluster" not in report("peeled").text("ptx")


@pytest.mark.parametrize("name", ["peeled", "two_cta", "stationary"])
def test_narrow_heads_do_not_spill(name):
    report(name, dim=64).check()


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_last_step_does_not_spill(dim, dtype):
    """In the first launch, and in a further one, which adds to what is there."""
    for at in range(2):
        report("stationary", 256, dim, dtype=dtype, at=at).check()


def test_masks_and_groups_hardly_spill():
    found = report("peeled", packed=True, window=(-1, 0), heads=8, heads_kv=2)
    found.check(allow_spills=True)
    assert found.spill_store_bytes + found.spill_load_bytes <= 32


def test_the_dispatcher_looks_at_shapes_alone():
    def chosen(deterministic=False, **changes):
        facts = dict(
            batch=3, heads_q=4, heads_kv=4, head_dim=128, head_dim_v=128, total_q=128, total_kv=900,
            broadcast_q=True, scale=0.1,
        )  # fmt: skip
        return backward_launch.find_step(Problem(**(facts | changes)), None, deterministic)

    assert chosen().name == "stationary"
    assert chosen(True, total_q=512).name == "stationary"
    assert chosen(True, heads_kv=2) is None
    assert chosen(total_q=512).name == "two_cta"
    assert chosen(total_q=512, total_kv=300).name == "peeled"
    for change in (dict(total_q=512), dict(heads_kv=2), dict(window_left=3), dict(broadcast_q=False)):
        assert chosen(**change).name != "stationary"
