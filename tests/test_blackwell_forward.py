"""The Blackwell forward ladder: compiled for sm_100, and run in the emulator. No Blackwell GPU has run it."""

import dataclasses
import functools

import pytest
import torch
import triton
import triton.language as tl
import triton.language.extra.tlx as tlx

import jfa
from jfa import emulator, steps
from jfa.jagged import lengths_to_offsets
from jfa.kernels.blackwell import launch
from jfa.kernels.problem import Problem
from jfa.lab import ladder
from jfa.lab.check import check_attention
from jfa.schedule import make_schedule

LADDER = steps.FORWARD["blackwell"]
NAMES = [step.name for step in LADDER]
RAGGED = [0, 1, 127, 128, 129, 300, 5, 64]
QUERIES = [3, 5, 0, 130, 129, 264, 1, 128]


@pytest.fixture(autouse=True)
def poisoned_outputs(monkeypatch):
    """Memory that a kernel does not write reads as NaN."""
    plain = torch.Tensor.new_empty

    def new_empty(self, *args, **options):
        fresh = plain(self, *args, **options)
        return fresh.fill_(float("nan")) if fresh.is_floating_point() else fresh.fill_(-(2**30))

    monkeypatch.setattr(torch.Tensor, "new_empty", new_empty)


def tensors(lengths, query, heads=2, heads_kv=None, dim=64, dtype=torch.bfloat16, slack=3):
    """q, k, v, kv_offsets, q_offsets; NaN rows behind the last sequence. ``query``: M, or lengths."""
    draw = torch.Generator().manual_seed(11)
    broadcast = isinstance(query, int)
    total = sum(lengths) + slack

    def normal(rows, count):
        return torch.randn(rows, count, dim, generator=draw).to(dtype)

    q = normal(query if broadcast else sum(query), heads)
    k, v = normal(total, heads_kv or heads), normal(total, heads_kv or heads)
    k[total - slack :] = float("nan")
    v[total - slack :] = float("nan")
    offsets = [lengths_to_offsets(x) for x in ([lengths] if broadcast else [lengths, query])]
    return q, k, v, *offsets, *([None] if broadcast else [])


def emulated(step, *inputs, policy="random", seed=0, schedule=None, **rule):
    """out and lse within the error budget, and nothing for the emulator to complain of."""
    options = {"backend": "blackwell", "step": step, "schedule": schedule}
    with emulator.emulate(arch="sm_100", policy=policy, seed=seed) as emulation:
        checked = check_attention(
            jfa.jagged_flash_attention, *inputs, options=options, gradients=False, **rule
        )
    checked.check()
    assert emulation.reports
    assert [str(finding) for report in emulation.reports for finding in report.errors()] == []


# ----------------------------------------------------------------------------------------- in the emulator


@pytest.mark.parametrize("policy", ["eager", "lazy", "random"])
@pytest.mark.parametrize("rows", [72, 150], ids=["keys in turn", "two query blocks"])
@pytest.mark.parametrize("name", NAMES)
def test_core_shapes_are_right_and_clean(name, rows, policy):
    emulated(name, *tensors(RAGGED, rows), policy=policy, seed=3)


FEATURES = {
    "one query row": ((RAGGED, 1), {}, {}),
    "three query blocks": (([0, 129, 5, 300], 300), {}, {}),
    "packed": ((RAGGED, QUERIES), {}, {}),
    "packed causal": ((RAGGED, QUERIES), {}, {"causal": True}),
    "dense": (([130, 130, 130], [130, 130, 130]), {}, {"causal": True}),
    "causal": ((RAGGED, 150), {}, {"causal": True}),
    "causal, keys in turn": (([0, 500, 70, 5], 90), {}, {"causal": True}),
    "window": (([0, 700, 129, 5], 260), {}, {"window": (40, 20)}),
    "window, keys in turn": (([0, 700, 129, 5], 90), {}, {"window": (150, 20)}),
    "left window": ((RAGGED, QUERIES), {}, {"window": (130, None)}),
    "right window": ((RAGGED, QUERIES), {}, {"window": (None, 7)}),
    "no key in the window": (([2, 300], [300, 2]), {}, {"window": (0, 0)}),
    "two heads share keys": ((RAGGED, 72), {"heads": 4, "heads_kv": 2}, {}),
    "two heads share keys, causal": ((RAGGED, 72), {"heads": 4, "heads_kv": 1}, {"causal": True}),
    "three heads a group": ((RAGGED, 72), {"heads": 6, "heads_kv": 2}, {}),
    "groups and two query blocks": (([0, 1, 129, 300], 200), {"heads": 4, "heads_kv": 2}, {}),
    "float16": ((RAGGED, 72), {"dtype": torch.float16}, {}),
    "D = 128": (([0, 130, 129, 1], 130), {"dim": 128}, {}),
    "D = 128, float16, keys in turn": (([0, 130, 385, 1], 128), {"dim": 128, "dtype": torch.float16}, {}),
    "one giant": (([3, 4000, 0, 9], 20), {"heads": 1}, {}),
    "only empty": (([0, 0, 0], 72), {}, {}),
    "one key": (([1], 1), {"heads": 1}, {}),
    "negative scale": (([5, 129, 0], 72), {}, {"scale": -0.3}),
    "scale 0": (([5, 129], 72), {}, {"scale": 0.0}),
    "large scores": (([5, 300, 129], 72), {}, {"scale": 20.0}),
}


@pytest.mark.parametrize("feature", FEATURES)
def test_final_step_has_every_feature(feature):
    args, options, rule = FEATURES[feature]
    emulated(NAMES[-1], *tensors(*args, **options), **rule)


@pytest.mark.parametrize("name", ["warp_specialized", "dynamic", "peeled"])
@pytest.mark.parametrize("feature", ["packed causal", "window", "two heads share keys"])
def test_earlier_steps_have_the_features_that_touch_their_roles(name, feature):
    args, options, rule = FEATURES[feature]
    emulated(name, *tensors(*args, **options), **rule)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["balanced", "lean"])
def test_many_small_items_and_many_empty_ones(name, seed, monkeypatch):
    monkeypatch.setattr("jfa.kernels.launch.EMULATED_SMS", 4 + seed)
    lengths = [(37 * i + seed) % 90 if i % 3 else 0 for i in range(24)]
    emulated(name, *tensors(lengths, 130 if seed else 7), seed=seed)


def test_a_neighbours_nan_and_inf_stay_with_the_neighbour():
    q, k, v, offsets, _ = tensors([40, 30, 50], 72)
    clean = jfa.jagged_flash_attention(q, k, v, offsets, backend="blackwell")
    k[40:70] = float("nan")
    v[40:70] = float("inf")
    out = jfa.jagged_flash_attention(q, k, v, offsets, backend="blackwell")
    assert torch.equal(out[0], clean[0]) and torch.equal(out[2], clean[2])
    assert torch.isnan(out[1]).all()


@pytest.mark.parametrize("column", [0, 40, 70, 127])
def test_one_nan_key_makes_every_row_nan(column):
    """Also where a polynomial does the exponential: bit tricks must not turn NaN into a number."""
    q, k, v, offsets, _ = tensors([128], 72, slack=0)
    k[column] = float("nan")
    out, lse = jfa.jagged_flash_attention(q, k, v, offsets, backend="blackwell", return_lse=True)
    assert torch.isnan(out).all() and torch.isnan(lse).all()


def test_inputs_that_tma_cannot_address_are_copied():
    q, k, v, offsets, _ = tensors([40, 0, 130], 72, slack=0)
    wide = torch.randn(k.shape[0], 2, 67).to(k.dtype)
    wide[..., 3:] = k
    turned = v.transpose(0, 1).contiguous().transpose(0, 1)
    shifted = torch.cat([q.flatten(), q.flatten()[:1]])[1:].view_as(q).copy_(q)
    a = jfa.jagged_flash_attention(q, k, v, offsets, backend="blackwell")
    b = jfa.jagged_flash_attention(shifted, wide[..., 3:], turned, offsets.long(), backend="blackwell")
    assert torch.equal(a, b)


@pytest.mark.parametrize("block_m", [128, 256])
@pytest.mark.parametrize("rows", [72, 300])
def test_schedules_for_either_tile_serve_every_query_length(rows, block_m):
    inputs = tensors([0, 129, 300, 5], rows)
    schedule = make_schedule((rows, inputs[1].shape[0]), inputs[3], None, block_m)
    emulated(None, *inputs, schedule=schedule)


def test_a_schedule_for_another_tile_is_refused():
    q, k, v, offsets, _ = tensors([5, 129], 72)
    wrong = make_schedule((72, k.shape[0]), offsets, None, 64)
    with pytest.raises(ValueError, match="schedule: expected one for 128 or 256 query rows a tile, got 64"):
        jfa.jagged_flash_attention(q, k, v, offsets, backend="blackwell", schedule=wrong)


@triton.jit
def uniform(work, s, tile, rows, block, u, group, top, total, MASKED: tl.constexpr):
    """A reader's softmax: every visible key weighs the same."""
    tlx.barrier_wait(s.score_full[group], (u >> 1) & 1)
    columns = block * work.BLOCK_N + tl.arange(0, work.BLOCK_N)
    seen = tl.where(work.seen(tile, rows, columns), 1.0, tlx.local_load(s.scores[group]) * 0.0)
    tlx.local_store(s.factor[group], tl.full([128, 1], 1.0, tl.float32))
    tlx.barrier_arrive(s.factor_full[group])
    tlx.local_store(s.weights[group], seen.to(s.weights.dtype))
    tlx.barrier_arrive(s.ready[group])
    return tl.zeros_like(top), total + tl.sum(seen, 1)


def test_a_role_of_the_readers_takes_effect():
    q, k, v, offsets, _ = tensors([40, 7, 130], 72)
    mine = dataclasses.replace(LADDER[-1], weigh=uniform)
    out = jfa.jagged_flash_attention(q, k, v, offsets, backend="blackwell", step=mine)
    for b in range(3):
        mean = v[offsets[b] : offsets[b + 1]].float().mean(0)
        torch.testing.assert_close(out[b].float(), mean.expand(72, 2, 64), atol=4e-3, rtol=1e-2)


# ------------------------------------------------------------------------------------------------- compiled


@functools.cache
def report(name, rows=128, heads_kv=4, dim=128, packed=False, **rule):
    """The kernel as it is launched for q of ``rows`` and four heads."""
    problem = Problem(3, 4, heads_kv, dim, dim, rows, 1600, not packed, 0.1, **rule)
    q = torch.empty(rows, 4, dim, dtype=torch.bfloat16)
    k = torch.empty(1600, heads_kv, dim, dtype=torch.bfloat16)
    queries = lengths_to_offsets([rows - 40, 0, 40]) if packed else None
    with ladder.capture_launches() as launches:
        launch.forward(problem, q, k, k, lengths_to_offsets([400, 900, 0]), queries, step=name)
    return launches[-1].report("sm_100")


@pytest.mark.parametrize("name", NAMES)
def test_step_compiles_without_a_trap_and_has_its_instructions(name):
    found = report(name).check(allow_spills=name != NAMES[-1])
    assert found.spill_store_bytes <= 64
    assert found.opcodes["UTCHMMA"] >= 16 and found.opcodes["UTMALDG"] >= 6 and found.opcodes["UTMASTG"] >= 2
    assert found.tmem_columns == 512 and found.shared_bytes <= 232448 and found.warps == 16
    assert {24, 208} <= {count for _, count in found.setmaxnreg}


VARIANTS = {
    "two query blocks": {"rows": 256},
    "two heads": {"heads_kv": 2},
    "D = 64": {"dim": 64},
    "D = 64, two query blocks": {"dim": 64, "rows": 256},
    "window": {"rows": 256, "window_left": 256, "window_right": 0},
    "window, keys in turn": {"window_left": 256, "window_right": 0},
    "packed causal": {"rows": 512, "packed": True, "window_right": 0},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_final_step_compiles_without_a_trap_in_every_variant(variant):
    report(NAMES[-1], **VARIANTS[variant]).check()


def test_what_each_step_is_about_is_in_the_code():
    launches = [report(name).opcodes["UGETNEXTWORKID"] for name in NAMES]
    assert launches == [0, 0] + [1] * (len(NAMES) - 2)
    special = [report(name).opcodes["MUFU.EX2"] for name in NAMES]
    assert special[3] == special[4] > special[2]  # peeled: a masked and an unmasked walk
    assert special[5] <= 0.76 * special[4]  # lean: a quarter of them left to polynomials
    packed = [sum(report(name).opcodes[op] for op in ("FFMA2", "FADD2", "FMUL2")) for name in NAMES]
    assert packed[5] >= packed[4] + 200


def test_the_kernel_stays_small():
    files = ("forward", "softmax", "tmem")
    lines = [len(open(f"{launch.__file__.rsplit('/', 1)[0]}/{name}.py").readlines()) for name in files]
    assert sum(lines) <= 650, lines
