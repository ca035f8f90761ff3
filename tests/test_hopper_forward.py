"""The Hopper forward ladder: compiled as launched, in the emulator, and on a Hopper GPU."""

import dataclasses
import functools

import pytest
import torch
import triton
import triton.language as tl

import jfa
from jfa import emulator, steps
from jfa.jagged import lengths_to_offsets
from jfa.kernels.hopper import launch
from jfa.kernels.problem import Problem
from jfa.lab import ladder
from jfa.lab.check import check_attention

LADDER = steps.FORWARD["hopper"]
NAMES = [step.name for step in LADDER]
USED = (None, NAMES[-1])  # what a call gets, and the end of the ladder
RAGGED = [0, 1, 127, 128, 129, 300, 5, 64]
QUERIES = [3, 5, 0, 130, 129, 64, 1, 128]


def tensors(lengths, query, heads=2, heads_kv=None, dim=64, dtype=torch.bfloat16, device="cpu", slack=3):
    """q, k, v, kv_offsets, q_offsets; NaN rows behind the last sequence. ``query``: M, or lengths."""
    draw = torch.Generator().manual_seed(7)
    total = sum(lengths) + slack
    broadcast = isinstance(query, int)

    def normal(rows, count):
        return torch.randn(rows, count, dim, generator=draw).to(dtype).to(device)

    q = normal(query if broadcast else sum(query), heads)
    k, v = normal(total, heads_kv or heads), normal(total, heads_kv or heads)
    k[total - slack :] = float("nan")
    v[total - slack :] = float("nan")
    offsets = [lengths_to_offsets(x).to(device) for x in ([lengths] if broadcast else [lengths, query])]
    return q, k, v, *offsets, *([None] if broadcast else [])


def check(step, *inputs, **rule):
    """out and lse within the error budget."""
    options = {"backend": "hopper", "step": step}
    check_attention(jfa.jagged_flash_attention, *inputs, options=options, gradients=False, **rule).check()


def emulated(step, *inputs, policy="random", seed=0, **rule):
    """The same in the emulator, and without a finding."""
    with emulator.emulate(arch="sm_90", policy=policy, seed=seed) as emulation:
        check(step, *inputs, **rule)
    assert [str(finding) for report in emulation.reports for finding in report.errors()] == []
    assert emulation.reports


# ----------------------------------------------------------------------------------------- in the emulator


@pytest.mark.parametrize("policy", ["eager", "lazy", "random"])
@pytest.mark.parametrize("name", NAMES)
def test_core_shape_is_right_and_clean(name, policy):
    emulated(name, *tensors(RAGGED, 72), policy=policy, seed=3)


FEATURES = {
    "one query row": ((RAGGED, 1), {}, {}),
    "two query blocks": ((RAGGED, 200), {}, {}),
    "packed": ((RAGGED, QUERIES), {}, {}),
    "packed causal": ((RAGGED, QUERIES), {}, {"causal": True}),
    "causal": ((RAGGED, 150), {}, {"causal": True}),
    "window": ((RAGGED, 150), {}, {"window": (40, 20)}),
    "left window": ((RAGGED, QUERIES), {}, {"window": (130, None)}),
    "right window": ((RAGGED, QUERIES), {}, {"window": (None, 7)}),
    "no key in the window": (([2, 300], [300, 2]), {}, {"window": (0, 0)}),
    "grouped heads": ((RAGGED, 72), {"heads": 6, "heads_kv": 2}, {}),
    "float16": ((RAGGED, 72), {"dtype": torch.float16}, {}),
    "D = 128": (([0, 130, 129, 1], 130), {"dim": 128}, {}),
    "one giant": (([3, 2500, 0, 9], 72), {}, {}),
    "only empty": (([0, 0, 0], 72), {}, {}),
    "one sequence": (([70], 72), {}, {}),
    "short blocks": (([50, 0, 64, 63, 65, 1], 72), {}, {}),
    "negative scale": ((RAGGED, 72), {}, {"scale": -0.3}),
    "scale 0": (([5, 129], 72), {}, {"scale": 0.0}),
}


@pytest.mark.parametrize("name", USED)
@pytest.mark.parametrize("feature", FEATURES)
def test_final_steps_have_every_feature(feature, name):
    args, options, rule = FEATURES[feature]
    emulated(name, *tensors(*args, **options), **rule)


@pytest.mark.parametrize("name", ["warp_specialized", "dynamic"])
@pytest.mark.parametrize("feature", ["packed causal", "window", "one giant"])
def test_earlier_steps_have_the_features_that_touch_their_roles(name, feature):
    args, options, rule = FEATURES[feature]
    emulated(name, *tensors(*args, **options), **rule)


@pytest.mark.parametrize("name", USED)
@pytest.mark.parametrize("seed", range(4))
def test_many_small_items_and_more_ctas_than_some_classes_have_items(seed, name, monkeypatch):
    monkeypatch.setattr("jfa.kernels.launch.EMULATED_SMS", 5)
    lengths = [(7 * i + seed) % 40 for i in range(30)]
    emulated(name, *tensors(lengths, 130), seed=seed)


def test_a_neighbours_nan_and_inf_stay_with_the_neighbour():
    q, k, v, offsets, _ = tensors([40, 30, 50], 72)
    clean, _ = jfa.jagged_flash_attention(q, k, v, offsets, backend="hopper", return_lse=True)
    k[40:70] = float("nan")
    v[40:70] = float("inf")
    out = jfa.jagged_flash_attention(q, k, v, offsets, backend="hopper")
    assert torch.equal(out[0], clean[0]) and torch.equal(out[2], clean[2])
    assert torch.isnan(out[1]).all()


def test_inputs_that_tma_cannot_address_are_copied():
    q, k, v, offsets, _ = tensors([40, 0, 130], 72, slack=0)
    wide = torch.randn(k.shape[0], 2, 67).to(k.dtype)
    wide[..., 3:] = k
    turned = v.transpose(0, 1).contiguous().transpose(0, 1)
    shifted = torch.empty(q.numel() + 1, dtype=q.dtype)[1:].view_as(q).copy_(q)
    a = jfa.jagged_flash_attention(q, k, v, offsets, backend="hopper")
    b = jfa.jagged_flash_attention(shifted, wide[..., 3:], turned, offsets.long(), backend="hopper")
    assert torch.equal(a, b)
    packed = torch.cat([k, v], 1)
    assert launch.packed_rows(packed[:, :2]).data_ptr() == packed.data_ptr()


def test_a_schedule_made_once_serves_the_call_and_a_wrong_one_is_refused():
    q, k, v, offsets, _ = tensors(RAGGED, 150)
    shapes = (q.shape[0], k.shape[0])
    fitting = jfa.schedule.make_schedule(shapes, offsets, None, order="natural", pruned=False)
    a = jfa.jagged_flash_attention(q, k, v, offsets, backend="hopper")
    b = jfa.jagged_flash_attention(q, k, v, offsets, backend="hopper", schedule=fitting)
    assert torch.equal(a, b)
    with pytest.raises(ValueError, match="schedule: expected query tiles of 128 rows, got 64"):
        wrong = jfa.schedule.make_schedule(shapes, offsets, None, 64)
        jfa.jagged_flash_attention(q, k, v, offsets, backend="hopper", schedule=wrong)


@triton.jit
def uniform(scores, top, scale, GUARD: tl.constexpr):
    """A reader's softmax: every visible key weighs the same."""
    seen = tl.where(scores == -float("inf"), 0.0, 1.0)
    return seen, tl.zeros_like(top), tl.full(top.shape, 1.0, tl.float32), tl.sum(seen, 1)


def test_a_role_of_the_readers_takes_effect():
    q, k, v, offsets, _ = tensors([40, 7, 130], 72)
    mine = dataclasses.replace(LADDER[-1], softmax=uniform)
    out = jfa.jagged_flash_attention(q, k, v, offsets, backend="hopper", step=mine)
    for b in range(3):
        mean = v[offsets[b] : offsets[b + 1]].float().mean(0)
        torch.testing.assert_close(out[b].float(), mean.expand(72, 2, 64), atol=4e-3, rtol=1e-2)


# ------------------------------------------------------------------------------------------------- compiled


@pytest.mark.parametrize(
    "name", ["staged folded", "staged late wait", "staged late wait no turns", "staged Q1 more V"]
)
def test_what_may_be_measured_next_is_right_and_does_not_spill(name):
    tried = ladder.experiments()[name]
    args, options, rule = FEATURES["window"]
    emulated(tried, *tensors(*args, **options), **rule)
    ladder.compiled(tried).check()


@functools.cache
def report(name):
    return ladder.compiled(steps.find("hopper", "forward", name))


@pytest.mark.parametrize("name", NAMES)
def test_step_compiles_without_a_trap_and_has_its_instructions(name):
    found = report(name).check()
    assert found.opcodes["HGMMA"] >= 48 and found.opcodes["UTMALDG"] >= 6 and found.opcodes["UTMASTG"] >= 2
    assert {232, 40} <= {count for _, count in found.setmaxnreg}
    assert found.warps == 12 and found.shared_bytes <= 232448


def test_what_each_step_is_about_is_in_the_code():
    atomics = {name: report(name).opcodes["ATOMG"] + report(name).opcodes["ATOM"] for name in NAMES}
    assert atomics["warp_specialized"] == atomics["balanced"] == 0
    assert all(atomics[name] > 0 for name in ("dynamic", "peeled", "staged", "stationary"))


@pytest.mark.parametrize(
    "broadcast,rule",
    [(False, {"window_right": 0}), (True, {"window_left": 256, "window_right": 0})],
    ids=["packed causal", "broadcast window"],
)
@pytest.mark.parametrize("name", USED)
def test_final_steps_do_not_spill_with_windows(broadcast, rule, name):
    problem = Problem(4, 4, 4, 128, 128, 128, 1600, broadcast, 0.1, **rule)
    q, k, v = (torch.empty(rows, 4, 128, dtype=torch.bfloat16) for rows in (128, 1600, 1600))
    offsets = lengths_to_offsets([400, 400, 400, 400])
    queries = None if broadcast else lengths_to_offsets([32, 32, 32, 32])
    with ladder.capture_launches() as launches:
        launch.forward(problem, q, k, v, offsets, queries, step=name)
    launches[-1].report("sm_90").check()


# ------------------------------------------------------------------------------------- the choice, and limits


@pytest.mark.parametrize("lengths", [[512, 300, 40, 777], [5, 0, 64]], ids=["long", "short"])
@pytest.mark.parametrize("query", [1, 128, 512, (7, 70, 40, 130)], ids=str)
def test_a_call_gets_the_step_that_was_fastest(query, lengths):
    query = query if isinstance(query, int) else query[: len(lengths)]
    q, k, v, offsets, queries = tensors(lengths, query, slack=0)
    problem = Problem(len(lengths), 2, 2, 64, 64, q.shape[0], k.shape[0], queries is None, 0.125)
    chosen = launch.choose(problem, LADDER)
    assert chosen is steps.find("hopper", "forward", "staged")
    with ladder.capture_launches() as launches:
        launch.forward(problem, q, k, v, offsets, queries)
    given = launches[-1].arguments
    expected = chosen.constexprs(problem)
    assert {name: given[name] for name in expected} == expected


# ------------------------------------------------------------------------------------------------- on a GPU

SHAPES = {
    "broadcast": (RAGGED + [700, 257], 128),
    "odd": (RAGGED + [700, 257], 77),
    "wide": (RAGGED + [1030], 300),
    "packed": (RAGGED + [700], QUERIES + [333]),
}
RULES = {"plain": {}, "causal": {"causal": True}, "window": {"window": (100, 30)}}
# Depths and blocks beside those of the ladder: each must end and be right on a GPU.
CONFIGURATIONS = [
    {"BLOCK_N": 128, "Q_DEPTH": 1, "K_DEPTH": 3, "V_DEPTH": 2},
    {"BLOCK_N": 128, "Q_DEPTH": 2, "K_DEPTH": 2, "V_DEPTH": 2},
    {"BLOCK_N": 128, "Q_DEPTH": 2, "K_DEPTH": 2, "V_DEPTH": 2, "PINGPONG": False},
    {"BLOCK_N": 128, "Q_DEPTH": 1, "K_DEPTH": 1, "V_DEPTH": 1},
    {"BLOCK_N": 64, "Q_DEPTH": 1, "K_DEPTH": 5, "V_DEPTH": 5},
    {"BLOCK_N": 64, "Q_DEPTH": 2, "K_DEPTH": 4, "V_DEPTH": 4, "PINGPONG": False},
    {"BLOCK_N": 64, "Q_DEPTH": 2, "K_DEPTH": 2, "V_DEPTH": 1},
]


@pytest.mark.gpu
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("name", USED)
def test_on_a_gpu_the_final_steps_are_within_the_budget(name, dim, shape, rule):
    for dtype, heads_kv in ((torch.bfloat16, 4), (torch.float16, 2)):
        inputs = tensors(*SHAPES[shape], heads=4, heads_kv=heads_kv, dim=dim, dtype=dtype, device="cuda")
        check(name, *inputs, **RULES[rule])


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES[:-1])
def test_on_a_gpu_every_step_is_within_the_budget(name):
    for dim, dtype, shape, rule in (
        (128, torch.bfloat16, "broadcast", "plain"),
        (64, torch.float16, "odd", "causal"),
        (128, torch.float16, "packed", "window"),
        (64, torch.bfloat16, "packed", "causal"),
        (128, torch.bfloat16, "wide", "window"),
    ):
        inputs = tensors(*SHAPES[shape], heads=4, heads_kv=2, dim=dim, dtype=dtype, device="cuda")
        check(name, *inputs, **RULES[rule])


@pytest.mark.gpu
@pytest.mark.parametrize("numbers", CONFIGURATIONS, ids=str)
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.timeout(60)
def test_on_a_gpu_every_configuration_ends_in_time_and_is_right(numbers, dim):
    for name in ("peeled", "staged", "stationary"):
        step = steps.find("hopper", "forward", name)
        tried = dataclasses.replace(step, tiling=lambda problem, of=step.tiling: of(problem) | numbers)
        check(tried, *tensors(*SHAPES["wide"], heads=4, dim=dim, device="cuda"))
        torch.cuda.synchronize()


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_on_a_gpu_200_runs_are_bitwise_equal(name):
    draw = torch.Generator().manual_seed(0)
    lengths = torch.randint(0, 1000, (300,), generator=draw).tolist()
    q, k, v, offsets, _ = tensors(lengths, 256, heads=4, dim=128, device="cuda", slack=0)
    first, lse = jfa.jagged_flash_attention(q, k, v, offsets, backend="hopper", step=name, return_lse=True)
    for _ in range(200):
        again = jfa.jagged_flash_attention(q, k, v, offsets, backend="hopper", step=name, return_lse=True)
        assert torch.equal(first, again[0]) and torch.equal(lse, again[1])
