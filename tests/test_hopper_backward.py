"""The Hopper backward ladder: compiled as launched, in the emulator, and on a Hopper GPU."""

import dataclasses
import functools
import re

import pytest
import torch

import jfa
from jfa import emulator, jagged, steps
from jfa.kernels import gradients
from jfa.kernels import launch as shared
from jfa.kernels.blackwell import launch as blackwell_launch
from jfa.kernels.hopper import backward_launch, launch
from jfa.kernels.problem import Problem
from jfa.lab import launches
from jfa.lab.answers import compute
from jfa.lab.check import check_attention, expected, results_of
from jfa.schedule import make_schedule

LADDER = steps.BACKWARD["hopper"]
NAMES = [step.name for step in LADDER]
RAGGED = [0, 1, 127, 130, 64, 5, 128]  # 0, 1, block - 1, more than a block, half a block, odd, a block


def tensors(lengths, query, heads=2, heads_kv=None, dim=64, dtype=torch.bfloat16, device="cpu", slack=3):
    """q, k, v, kv_offsets, q_offsets; NaN rows behind the last sequence. ``query``: M or lengths."""
    draw = torch.Generator().manual_seed(7)
    total = sum(lengths) + slack
    heads_kv = heads_kv or heads

    def normal(rows, count):
        return torch.randn(rows, count, dim, generator=draw).to(dtype).to(device)

    q = normal(query if isinstance(query, int) else sum(query), heads)
    k, v = normal(total, heads_kv), normal(total, heads_kv)
    k[total - slack :] = float("nan")
    v[total - slack :] = float("nan")
    kv_offsets = jagged.lengths_to_offsets(torch.tensor(lengths)).to(device)
    q_offsets = None
    if not isinstance(query, int):
        q_offsets = jagged.lengths_to_offsets(torch.tensor(query)).to(device)
    return q, k, v, kv_offsets, q_offsets


def check(step, *inputs, **rule):
    """Gradients within the error budget, forward by the peeled kernel."""
    options = {"backend": "hopper", "step": step}
    check_attention(jfa.jagged_flash_attention, *inputs, options=options, **rule).check()


def check_in_blocks(step, q, k, v, kv_offsets, q_offsets=None, rows=128):
    """As `check`, for a kernel whose blocks of query rows add dK and dV in the input's dtype.

    PyTorch's own computation in that dtype, by which the error is judged, then does so as well.
    """
    wanted = expected(q, k, v, kv_offsets)
    sums = {}
    for start in range(0, q.shape[0], rows):
        part = slice(start, start + rows)
        inputs = dataclasses.replace(
            wanted.inputs, q=q[part], dout=wanted.inputs.dout[:, part], dlse=wanted.inputs.dlse[..., part]
        )
        found = compute(inputs, q.dtype)
        sums = {name: found[name] + sums.get(name, 0) for name in ("dk", "dv")}
    wanted = dataclasses.replace(wanted, low=wanted.low | sums)
    wanted.check(results_of(jfa.jagged_flash_attention, wanted.inputs, backend="hopper", step=step)).check()


# ----------------------------------------------------------------------------------------- in the emulator


@pytest.mark.parametrize("policy", ["eager", "lazy", "random"])
@pytest.mark.parametrize("name", NAMES)
def test_core_shape_is_right_and_clean(name, policy):
    with emulator.emulate(policy=policy, seed=3) as emulation:
        check(name, *tensors(RAGGED, 72))
    assert [str(finding) for report in emulation.reports for finding in report.errors()] == []
    assert any(report.ops for report in emulation.reports)


@pytest.mark.parametrize("rows", [1, 64, 129, 192, 200, 300])
def test_dq_on_chip_for_any_number_of_rows(rows):
    """One CTA, a pair that hands dK and dV over, and a second launch that adds to the first."""
    with emulator.emulate(policy="random", seed=rows) as emulation:
        check_in_blocks("stationary", *tensors([0, 1, 64, 130, 5], rows))
    assert [str(finding) for report in emulation.reports for finding in report.errors()] == []


CHAINS = [
    (300, 2, "lazy", dict(dim=64, heads=1)),
    (300, 2, "eager", dict(dim=64, heads=2)),
    (512, 1, "random", dict(dim=128, heads=1, dtype=torch.float16)),
    (640, 1, "random", dict(dim=64, heads=1, dtype=torch.float16)),
    (1024, 1, "random", dict(dim=64, heads=1)),
]


@pytest.mark.parametrize("rows, shares, policy, facts", CHAINS, ids=str)
def test_dq_on_chip_in_a_chain_of_pairs(rows, shares, policy, facts, monkeypatch):
    """All query rows in one launch: a pair hands dK and dV to the next by a counter; a list in shares."""
    ctas = -(-rows // 256) * 2 * shares * facts["heads"]
    monkeypatch.setattr(shared, "EMULATED_SMS", ctas)
    with emulator.emulate(policy=policy, seed=rows) as emulation:
        check_in_blocks("stationary", *tensors([0, 70, 1, 5, 64], rows, **facts))
    assert [str(finding) for report in emulation.reports for finding in report.errors()] == []
    mains = [report for report in emulation.reports if report.ops["tma_reduce"]]
    assert [report.grid[0] for report in mains] == [ctas]


@pytest.mark.parametrize("name", ["peeled", "two_cta"])
def test_a_device_of_one_multiprocessor(name, monkeypatch):
    """A pair needs two; in the emulator its CTAs are there all the same."""
    monkeypatch.setattr(shared, "EMULATED_SMS", 1)
    with emulator.emulate():
        check(name, *tensors([130, 5], 70))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scale_zero_on_chip(dtype):
    with emulator.emulate():
        check("stationary", *tensors([70, 0, 5], 9, dtype=dtype), scale=0.0)


FEATURES = {
    "packed": dict(query=[3, 70, 0, 5, 65, 64, 9]),
    "packed causal, grouped": dict(query=[3, 70, 0, 5, 65, 64, 9], heads=4, heads_kv=2, causal=True),
    "packed window": dict(query=[3, 70, 0, 5, 65, 64, 9], window=(20, 30)),
    "broadcast window, grouped": dict(query=77, heads=6, heads_kv=2, window=(50, None)),
    "float16, 128 columns": dict(query=70, dim=128, dtype=torch.float16, heads=1),
    "negative scale": dict(query=5, scale=-0.3),
}


@pytest.mark.parametrize("name", ["peeled", "two_cta", "ds_buffered"])
@pytest.mark.parametrize("feature", FEATURES)
def test_features(name, feature):
    facts = dict(FEATURES[feature])
    rule = {key: facts.pop(key) for key in ("causal", "window", "scale") if key in facts}
    query = facts.pop("query")
    check(name, *tensors(RAGGED, query, **facts), **rule)


def test_a_neighbours_nan_stays_there():
    """Sequence 2's keys and rows are NaN; the others' gradients must not see them."""
    q, k, v, kv_offsets, q_offsets = tensors([30, 66, 40, 5], [70, 3, 20, 66])
    poisoned = [x.clone() for x in (q, k, v)]
    poisoned[0][73:93] = float("nan")
    poisoned[1][96:136] = float("nan")
    poisoned[2][96:136] = float("nan")
    dout = torch.randn(q.shape, generator=torch.Generator().manual_seed(1)).to(q.dtype)
    for name in ("peeled", "two_cta", "ds_buffered"):
        grads = []
        for inputs in ((q, k, v), poisoned):
            leaves = [x.detach().clone().requires_grad_() for x in inputs]
            out = jfa.jagged_flash_attention(*leaves, kv_offsets, q_offsets, backend="hopper", step=name)
            incoming = dout.clone()
            if inputs is poisoned:
                incoming[73:93] = float("nan")
            grads.append(torch.autograd.grad(out, leaves, incoming))
        for clean, other, rows in zip(*grads, ((73, 93), (96, 136), (96, 136)), strict=True):
            keep = torch.ones(clean.shape[0], dtype=torch.bool)
            keep[rows[0] : rows[1]] = False
            torch.testing.assert_close(other[keep], clean[keep], rtol=0, atol=0)


@pytest.mark.parametrize("name", [None, *NAMES[:-1]])
@pytest.mark.parametrize("backend", ["hopper", "blackwell"])
def test_slack_rows_of_queries_and_keys_do_not_meet(backend, name):
    """Rows behind the last offset, of q as well as of k and v: zero gradients, and nobody else notices."""
    if name is not None and name not in [step.name for step in steps.BACKWARD[backend]]:
        pytest.skip(f"{backend} has no step {name}")
    draw = torch.Generator().manual_seed(0)
    offsets = torch.tensor([0, 63], dtype=torch.int32)
    found = []
    for rows in (63, 70):
        leaves = [torch.randn(70, 1, 64, generator=draw).bfloat16() for _ in range(3)]
        draw.manual_seed(0)
        leaves = [x[:rows].clone().requires_grad_() for x in leaves]
        out = jfa.jagged_flash_attention(*leaves, offsets, offsets, backend=backend, step=name)
        found.append(torch.autograd.grad(out, leaves, torch.ones_like(out)))
    for short, long in zip(*found, strict=True):
        assert torch.equal(short, long[:63])
        assert (long[63:] == 0).all()


def test_same_bits_when_asked():
    """deterministic=True: dq of a shared query block is the same in any order of execution."""
    inputs = tensors([0, 130, 64, 257, 5], 72)
    found = []
    for seed in range(4):
        leaves = [x.detach().clone().requires_grad_() for x in inputs[:3]]
        with emulator.emulate(policy="random", seed=seed):
            out = jfa.jagged_flash_attention(*leaves, inputs[3], backend="hopper", deterministic=True)
            found.append(torch.autograd.grad(out.sum(), leaves))
    for grads in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(grads, found[0], strict=True))


def test_three_equal_sequences_give_three_times_the_dq_of_one():
    q, k, v, offsets, _ = tensors([70], 40, slack=0)
    dout = torch.randn(1, 40, 2, 64, generator=torch.Generator().manual_seed(2)).to(q.dtype)
    gradients = []
    for copies in (1, 3):
        leaves = [q.clone().requires_grad_(), k.repeat(copies, 1, 1), v.repeat(copies, 1, 1)]
        many = jagged.lengths_to_offsets(torch.full((copies,), 70))
        out = jfa.jagged_flash_attention(*leaves, many, backend="hopper", step="peeled")
        gradients.append(torch.autograd.grad(out, leaves[0], dout.expand(copies, -1, -1, -1))[0].double())
    torch.testing.assert_close(gradients[1], 3 * gradients[0], rtol=2**-7, atol=1e-6)  # two roundings


@pytest.mark.parametrize("layout", ["strided", "expanded", "transposed"])
def test_layouts_of_incoming_gradients(layout):
    q, k, v, offsets, _ = tensors([5, 66, 0], 20, slack=0)
    shape = (3, 20, 2, 64)
    draw = torch.Generator().manual_seed(4)
    if layout == "strided":
        dout = torch.randn(3, 20, 2, 128, generator=draw).to(q.dtype)[..., ::2]
    elif layout == "expanded":
        dout = torch.randn(1, 1, 1, 64, generator=draw).to(q.dtype).expand(shape)
    else:
        dout = torch.randn(3, 2, 20, 64, generator=draw).to(q.dtype).transpose(1, 2)
    found = []
    for incoming in (dout, dout.contiguous()):
        leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
        out = jfa.jagged_flash_attention(*leaves, offsets, backend="hopper")
        found.append(torch.autograd.grad(out, leaves, incoming))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("backend", ["hopper", "blackwell"])
def test_refuses_in_the_forward_what_the_backward_step_cannot_do(backend):
    q, k, v, offsets, _ = tensors([5, 66], 20, heads=4, heads_kv=2, slack=0)
    packed, lengths = torch.cat([q, q])[:25], jagged.lengths_to_offsets(torch.tensor([20, 5]))
    options = dict(backend=backend, step="stationary")
    q.requires_grad_()
    packed.requires_grad_()
    with pytest.raises(ValueError, match="step stationary: q: expected as many heads as k, got 4 and 2"):
        jfa.jagged_flash_attention(q, k, v, offsets, **options)
    with pytest.raises(ValueError, match="step stationary: q_offsets: expected none"):
        jfa.jagged_flash_attention(packed, k, v, offsets, lengths, **options)
    with pytest.raises(ValueError, match="step stationary: window: expected none"):
        jfa.jagged_flash_attention(q[:, :2], k, v, offsets, causal=True, **options)
    with pytest.raises(ValueError, match="deterministic: expected a step that adds dq in a fixed order"):
        jfa.jagged_flash_attention(q, k, v, offsets, backend=backend, step="balanced", deterministic=True)


@pytest.mark.parametrize("module", [launch, blackwell_launch])
def test_the_launch_modules_refuse_by_themselves(module):
    q, k, v, offsets, _ = tensors([5, 66], 20, slack=0)
    problem = Problem(2, 2, 2, 64, 64, 20, 71, True, 0.1)
    out, lse = q.new_zeros(problem.out_shape), torch.zeros(problem.lse_shape)
    facts = (problem, out, None, q, k, v, out, lse, offsets, None)
    for step, deterministic, message in (
        ("balanced", True, "deterministic: expected a step that adds dq in a fixed order, got balanced"),
        ("other", False, "step: expected one of warp_specialized, balanced"),
    ):
        with pytest.raises(ValueError, match=message):
            module.backward(*facts, step=step, deterministic=deterministic)
    assert module.backward_supports(problem, None, deterministic=True) is None


# ------------------------------------------------------------------------------ compiled as it is launched


def launched(name, rows=128, dim=128, heads=4, heads_kv=4, window=(-1, -1), packed=False, dlse=False):
    """Everything that a backward pass launches, in order."""
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
        window_left=window[0],
        window_right=window[1],
    )
    q = torch.zeros(problem.total_q, heads, dim, dtype=torch.bfloat16)
    k = torch.zeros(total, heads_kv, dim, dtype=torch.bfloat16)
    out = torch.zeros(problem.out_shape, dtype=torch.bfloat16)
    lse = torch.zeros(problem.lse_shape)
    with launches.capture_launches() as captured:
        launch.backward(
            problem,
            out,
            lse if dlse else None,
            q,
            k,
            k,
            out,
            lse,
            offsets,
            offsets if packed else None,
            step=name,
        )
    return captured


@functools.cache
def report(name, **facts):
    """Compile report for sm_90 of the main kernel as a launch would compile it."""
    return next(one for one in launched(name, **facts) if one.name == "kernel").report("sm_90")


@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
@pytest.mark.parametrize("packed", [False, True])
def test_what_runs_before_and_after_compiles(packed, arch):
    """The emulator knows no types of loop-carried values, so that only the compiler can tell."""
    around = [one for one in launched("peeled", packed=packed, dlse=True) if one.name != "kernel"]
    assert [one.name for one in around] == ["prepare_kernel", "finish_kernel"]
    for one in around:
        one.report(arch).check()


@pytest.mark.parametrize("name", NAMES)
def test_compiles_without_silent_traps(name):
    found = report(name)
    found.check()
    assert found.spill_store_bytes + found.spill_load_bytes == 0
    assert found.opcodes["HGMMA"] > 0
    assert found.opcodes["UTMALDG"] > 0
    assert found.setmaxnreg


def test_rings_of_equal_tiles_keep_their_kinds_of_barriers():
    """K's ring is released by every thread, the staging ring by one: the compiler must not mix up the two."""
    arrivals = re.findall(r"ttng\.arrive_barrier [^\n]*", report("stationary").text("ttgir"))
    assert sum("perThread" not in arrival for arrival in arrivals) == 2, "the writer's, for dV and dK"
    assert sum("perThread" in arrival for arrival in arrivals) == 4, "each group's, for K and its staged tile"


def test_each_step_has_its_instruction():
    for name in NAMES[:-1]:
        assert report(name).opcodes["UTMAREDG"] > 0, name
    assert report("stationary").opcodes["UTMAREDG"] == 0, "dQ is not added to memory"
    assert report("stationary").opcodes["UTMASTG"] > 0
    assert report("dynamic").opcodes["RED"] > 0
    assert report("balanced").opcodes["RED"] == 0
    assert report("two_cta").cluster == (2, 1, 1)
    assert "multicast" in report("two_cta").text("ptx")
    assert report("stationary", rows=256).cluster == (2, 1, 1)


@pytest.mark.parametrize(
    "facts",
    [
        dict(dim=64),
        dict(packed=True),
        dict(packed=True, window=(-1, 0)),
        dict(packed=True, window=(-1, 0), heads=8, heads_kv=2),
        dict(packed=True, window=(30, 40), dim=64),
        dict(heads=8, heads_kv=2),
    ],
    ids=str,
)
def test_the_step_for_every_call_never_spills(facts):
    report("ds_buffered", **facts).check()


@pytest.mark.parametrize(
    "query, order, used",
    [(9, "sorted", True), (9, "natural", True), ([4, 5], "sorted", False), ([4, 5], "natural", True)],
)
def test_a_schedule_is_used_if_its_key_tiles_stand_as_the_step_wants_them(query, order, used):
    """With a shared query block both orders are the same: the default schedule serves dQ on chip, too."""
    q, k, _, *offsets = tensors([5, 66], query)
    problem = Problem(2, 2, 2, 64, 64, q.shape[0], k.shape[0], offsets[1] is None, 0.1)
    mine = make_schedule(problem, *offsets, order=order)
    for name in ("ds_buffered", "stationary") if offsets[1] is None else ("ds_buffered",):
        step = steps.find("hopper", "backward", name)
        found = gradients.tiles_for(problem, mine, *offsets, 128, step.order)
        assert (found is mine) == used
        assert found.order == (order if used else step.order)


def test_the_dispatcher_looks_at_shapes_alone():
    def problem(**changes):
        facts = dict(
            batch=3, heads_q=4, heads_kv=4, head_dim=128, head_dim_v=128, total_q=128, total_kv=900,
            broadcast_q=True, scale=0.1,
        )  # fmt: skip
        return Problem(**(facts | changes))

    assert backward_launch.choose(problem()).name == "stationary"
    assert backward_launch.choose(problem(total_q=256)).name == "stationary"
    assert backward_launch.choose(problem(total_q=512)).name == "stationary"
    for change in (dict(total_q=513), dict(heads_kv=2), dict(window_left=3), dict(broadcast_q=False)):
        assert backward_launch.choose(problem(**change)).name == "ds_buffered"


# ----------------------------------------------------------------------------------------- on a Hopper GPU


LONG = [0, 5, 64, 129, 300, 1, 128, 0, 700, 257, 63]
ROWS = [3, 70, 0, 5, 65, 64, 200, 1, 129, 128, 500]


@pytest.mark.gpu
@pytest.mark.timeout(120)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("name", NAMES)
def test_gpu_steps(name, dim, dtype):
    check(name, *tensors(LONG, 128, dim=dim, dtype=dtype, device="cuda"))
    if name != "stationary":
        packed = tensors(LONG, ROWS, heads=4, heads_kv=2, dim=dim, dtype=dtype, device="cuda")
        check(name, *packed, causal=True)
        check(name, *packed, window=(30, 40))
        check(
            name, *tensors(LONG, 77, heads=6, heads_kv=2, dim=dim, dtype=dtype, device="cuda"), window=(50, 0)
        )


@pytest.mark.gpu
@pytest.mark.timeout(120)
@pytest.mark.parametrize("rows", [1, 64, 72, 129, 192, 200, 256, 300, 512, 640, 1024])
def test_gpu_dq_on_chip(rows):
    check_in_blocks("stationary", *tensors(LONG, rows, dim=128, device="cuda"))
    check_in_blocks("stationary", *tensors(LONG, rows, heads=3, dim=64, dtype=torch.float16, device="cuda"))


@pytest.mark.gpu
@pytest.mark.timeout(120)
@pytest.mark.parametrize("rows", [128, 256, 512, 1024])
def test_gpu_same_bits_in_20_runs(rows):
    inputs = tensors(LONG * 20, rows, heads=4, dim=128, device="cuda")
    leaves = [x.requires_grad_() for x in inputs[:3]]
    out = jfa.jagged_flash_attention(*leaves, inputs[3], backend="hopper", deterministic=True)
    dout = torch.randn_like(out)
    first = torch.autograd.grad(out, leaves, dout, retain_graph=True)
    for _ in range(20):
        again = torch.autograd.grad(out, leaves, dout, retain_graph=True)
        assert all(torch.equal(a, b) for a, b in zip(again, first, strict=True))


@pytest.mark.gpu
@pytest.mark.timeout(120)
@pytest.mark.parametrize("rows", [256, 512])
def test_gpu_a_pair_adds_after_the_store_on_cold_memory(rows):
    """Without a fence of the whole GPU's scope one call in 100 was wrong: the store overtook the add."""
    inputs = tensors(LONG * 20, rows, heads=4, dim=128, device="cuda")
    leaves = [x.requires_grad_() for x in inputs[:3]]
    out = jfa.jagged_flash_attention(*leaves, inputs[3], backend="hopper", step="stationary")
    dout = torch.randn_like(out)
    first = torch.autograd.grad(out, leaves, dout, retain_graph=True)
    evict = torch.empty(2**28, device="cuda")
    for _ in range(200):
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # so that dK and dV lie in pages just mapped
        evict.zero_()
        again = torch.autograd.grad(out, leaves, dout, retain_graph=True)
        assert all(torch.equal(a, b) for a, b in zip(again, first, strict=True))


@pytest.mark.gpu
@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", ["peeled", "ds_buffered", "stationary"])
def test_gpu_a_sum_over_4096_equal_sequences(name):
    q, k, v, offsets, _ = tensors([70], 40, dim=128, device="cuda", slack=0)
    dout = torch.randn(1, 40, 2, 128, device="cuda").to(q.dtype)
    gradients = []
    for copies in (1, 4096):
        leaves = [q.clone().requires_grad_(), k.repeat(copies, 1, 1), v.repeat(copies, 1, 1)]
        many = jagged.lengths_to_offsets(torch.full((copies,), 70)).cuda()
        out = jfa.jagged_flash_attention(*leaves, many, backend="hopper", step=name)
        gradients.append(torch.autograd.grad(out, leaves[0], dout.expand(copies, -1, -1, -1))[0].double())
    error = (gradients[1] - 4096 * gradients[0]).norm() / (4096 * gradients[0]).norm()
    assert error < 1e-2
