"""The compiler-scheduled baseline: its features in the emulator, what it compiles to, and a GPU's answers."""

import itertools
from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl

import jfa
from jfa import emulator
from jfa.jagged import lengths_to_offsets
from jfa.kernels import baseline, baseline_launch
from jfa.kernels.baseline_launch import configurations, facts, launch, tuned
from jfa.kernels.baseline_parts import find_rows, find_tile, key_range, query_range
from jfa.kernels.problem import Problem
from jfa.lab.check import check_attention, expected, must_fail
from jfa.lab.launches import capture_launches
from jfa.reference import visible_keys

RAGGED = [0, 1, 127, 128, 129, 5, 63, 64, 65]
QUERIES = [3, 5, 1, 0, 129, 64, 65, 127, 128]


def tensors(lengths, query, heads=2, heads_kv=None, dim=40, dim_v=24, dtype=torch.bfloat16, slack=3):
    """q, k, v, kv_offsets, q_offsets; NaN rows behind the last sequence. ``query``: M, or lengths."""
    draw = torch.Generator().manual_seed(7)
    broadcast = isinstance(query, int)

    def normal(rows, count, size):
        return torch.randn(rows, count, size, generator=draw).to(dtype)

    q = normal(query if broadcast else sum(query) + slack, heads, dim)
    k = normal(sum(lengths) + slack, heads_kv or heads, dim)
    v = normal(sum(lengths) + slack, heads_kv or heads, dim_v)
    for x in (k, v) if broadcast else (q, k, v):
        x[len(x) - slack :] = float("nan")
    return q, k, v, lengths_to_offsets(lengths), None if broadcast else lengths_to_offsets(query)


def problem_of(q, k, v, kv_offsets, q_offsets, scale=None, window=(-1, -1)):
    """The Problem of a call."""
    return Problem(
        batch=len(kv_offsets) - 1,
        heads_q=q.shape[1],
        heads_kv=k.shape[1],
        head_dim=q.shape[2],
        head_dim_v=v.shape[2],
        total_q=q.shape[0],
        total_kv=k.shape[0],
        broadcast_q=q_offsets is None,
        scale=q.shape[2] ** -0.5 if scale is None else scale,
        window_left=window[0],
        window_right=window[1],
        dtype=q.dtype,
        device_type=q.device.type,
    )


def check(*inputs, deterministic=False, **rule):
    """out, lse and the gradients within the error budget."""
    options = {"backend": "triton", "deterministic": deterministic}
    check_attention(jfa.jagged_flash_attention, *inputs, options=options, **rule).check()


def run(inputs, dout, dlse=None, *, seed=0, scale=None, window=(-1, -1), **options):
    """(out, lse, (dq, dk, dv)) straight from the backend, in the emulator and without a finding."""
    problem = problem_of(*inputs, scale=scale, window=window)
    with emulator.emulate(arch="sm_90", policy="random", seed=seed) as emulation:
        out, lse = baseline.forward(problem, *inputs)
        grads = baseline.backward(problem, dout(out), dlse, *inputs[:3], out, lse, *inputs[3:], **options)
    assert [str(finding) for report in emulation.reports for finding in report.errors()] == []
    return out, lse, grads


def normal_like(out):
    """A gradient for out."""
    return torch.randn(out.shape, generator=torch.Generator().manual_seed(3)).to(out.dtype)


# ---------------------------------------------------------------------------------------- in the emulator

FEATURES = {
    "broadcast": ((RAGGED, 37), {}, {}),
    "packed": ((RAGGED, QUERIES), {}, {}),
    "one query row": ((RAGGED, 1), {}, {}),
    "two query blocks": (([0, 130, 1], 150), {}, {}),
    "broadcast causal": ((RAGGED, 70), {}, {"causal": True}),
    "packed causal": ((RAGGED, QUERIES), {}, {"causal": True}),
    "window": ((RAGGED, 70), {}, {"window": (40, 20)}),
    "packed window": ((RAGGED, QUERIES), {}, {"window": (40, 20)}),
    "left window": ((RAGGED, QUERIES), {}, {"window": (66, None)}),
    "right window": ((RAGGED, 37), {}, {"window": (None, 7)}),
    "window past int32": (([4, 0, 70], [9, 2, 1]), {}, {"window": (2**31 - 1, 2**31 - 1)}),
    "no key in the window": (([2, 130], [130, 2]), {}, {"window": (0, 0)}),
    "grouped heads": (([0, 130, 7], 37), {"heads": 6, "heads_kv": 2}, {}),
    "grouped heads, packed causal": (
        ([0, 130, 7], [5, 66, 9]),
        {"heads": 6, "heads_kv": 3},
        {"causal": True},
    ),
    "float16": (([0, 130, 7], 37), {"dtype": torch.float16}, {}),
    "wide values": (([0, 130, 7], 37), {"dim": 16, "dim_v": 72}, {}),
    "wide keys": (([0, 130, 7], [5, 66, 9]), {"dim": 120, "dim_v": 8}, {}),
    "D = 256": (([0, 70, 33], 37), {"dim": 256, "dim_v": 200}, {}),
    "D = 1": (([0, 70, 33], 37), {"dim": 1, "dim_v": 3}, {}),
    "one giant": (([3, 1500, 0, 9], 37), {"heads": 1}, {}),
    "only empty": (([0, 0, 0], 37), {}, {}),
    "float32": (([0, 1, 31, 32, 33, 100], 37), {"dtype": torch.float32}, {}),
    "float32, packed window": (([0, 33, 65], [5, 40, 64]), {"dtype": torch.float32}, {"window": (20, 5)}),
    "float32, D = 96": (([0, 33, 1], 17), {"dtype": torch.float32, "dim": 96, "dim_v": 80}, {}),
    "negative scale": (([0, 130, 7], 37), {}, {"scale": -0.3, "causal": True}),
    "scale 0": (([0, 130, 7], 37), {}, {"scale": 0.0, "causal": True}),
}


@pytest.mark.parametrize("name", FEATURES)
def test_feature_is_within_the_error_budget(name):
    shape, kinds, rule = FEATURES[name]
    check(*tensors(*shape, **kinds), **rule)


@pytest.mark.parametrize("name", [name for name in FEATURES if isinstance(FEATURES[name][0][1], int)])
def test_feature_is_within_the_error_budget_when_deterministic(name):
    shape, kinds, rule = FEATURES[name]
    check(*tensors(*shape, **kinds), deterministic=True, **rule)


def test_the_check_refuses_wrong_answers_here():
    for name in ("broadcast causal", "packed"):
        shape, kinds, rule = FEATURES[name]
        verdicts = must_fail(expected(*tensors(*shape, **kinds), **rule))
        assert {"zeros", "dropped tail", "swapped sequences"} <= {verdict[0] for verdict in verdicts}


def test_float32_is_ieee():
    inputs = tensors([0, 100, 33], 37, dtype=torch.float32, slack=0)
    wanted = expected(*inputs)
    out, lse, grads = run(inputs, lambda out: wanted.inputs.dout, wanted.inputs.dlse)
    for name, found in zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *grads), strict=True):
        exact = wanted.exact[name]
        finite = torch.isfinite(exact)
        error = (found.double() - exact)[finite].abs().max() / exact[finite].abs().max()
        assert error < 2e-6, (name, error)  # TF32 would give 5e-4


@pytest.mark.parametrize("offsets", [torch.int32, torch.int64])
@pytest.mark.parametrize("query", [37, [5, 66, 9]], ids=["broadcast", "packed"])
def test_offsets_of_either_type(offsets, query):
    q, k, v, kv_offsets, q_offsets = tensors([0, 130, 7], query)
    check(q, k, v, kv_offsets.to(offsets), None if q_offsets is None else q_offsets.to(offsets))


def layouts(x):
    """The same values as a plain tensor, head-major, cut from wider rows, and at every other place."""
    rows, heads, size = x.shape
    head_major = x.transpose(0, 1).contiguous().transpose(0, 1)
    cut = torch.full((rows, heads, size + 5), float("nan"), dtype=x.dtype)[:, :, 3 : 3 + size].copy_(x)
    spread = torch.full((rows, heads, 2 * size), float("nan"), dtype=x.dtype)[:, :, ::2].copy_(x)
    return [x, head_major, cut, spread]


@pytest.mark.parametrize("query", [37, [5, 66, 9]], ids=["broadcast", "packed"])
def test_any_strides(query):
    q, k, v, *offsets = tensors([0, 130, 7], query)
    wanted = run((q, k, v, *offsets), normal_like, deterministic=True)
    for order in ((1, 2, 3), (2, 3, 1), (3, 1, 2)):
        strided = [layouts(x)[i] for x, i in zip((q, k, v), order, strict=True)]
        assert all(not x.is_contiguous() for x in strided)
        gradient = order[0]

        def incoming(out, gradient=gradient):
            flat = normal_like(out).reshape(-1, *out.shape[-2:])
            return (
                layouts(flat)[gradient].unflatten(0, out.shape[:-2])
                if out.dim() == 4
                else layouts(flat)[gradient]
            )

        found = run((*strided, *offsets), incoming, deterministic=True)
        for a, b in zip((*wanted[:2], *wanted[2]), (*found[:2], *found[2]), strict=True):
            assert torch.equal(a, b)
        assert all(x.is_contiguous() for x in (*found[:2], *found[2]))


@pytest.mark.parametrize("query", [37, [5, 66, 9]], ids=["broadcast", "packed"])
def test_expanded_gradients(query):
    inputs = tensors([0, 130, 7], query)
    one = torch.ones((), dtype=torch.bfloat16)
    found = run(inputs, lambda out: one.expand(out.shape), deterministic=True)
    wanted = run(inputs, lambda out: one.expand(out.shape).contiguous(), deterministic=True)
    row = torch.ones(24, dtype=torch.bfloat16)
    by_rows = run(inputs, lambda out: row.expand(out.shape), deterministic=True)
    for a, b, c in zip(found[2], wanted[2], by_rows[2], strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)


@pytest.mark.parametrize("query", [37, [5, 66, 9]], ids=["broadcast", "packed"])
def test_only_what_is_needed(query):
    inputs = tensors([0, 130, 7], query)
    problem = problem_of(*inputs)
    out, lse, full = run(inputs, normal_like, deterministic=True)
    for needs in itertools.product((False, True), repeat=3):
        arguments = (problem, normal_like(out), None, *inputs[:3], out, lse, *inputs[3:])
        with capture_launches() as launches:
            baseline.backward(*arguments, needs=needs)
        names = {recorded.name for recorded in launches}
        assert ("dkdv_kernel" in names) == (needs[1] or needs[2])
        assert ("delta_kernel" in names) == (needs[0] or needs[1])
        with emulator.emulate(arch="sm_90"):
            found = baseline.backward(*arguments, needs=needs, deterministic=True)
        for need, one, other in zip(needs, found, full, strict=True):
            assert torch.equal(one, other) if need else one is None


def test_deterministic_gradients_do_not_depend_on_the_order_of_programs():
    inputs = tensors([0, 130, 7, 64, 65, 300], 37)
    runs = [run(inputs, normal_like, seed=seed, deterministic=True)[2] for seed in (0, 1)]
    for one, other in zip(*runs, strict=True):
        assert torch.equal(one, other)
    problem = problem_of(*inputs)
    dout, lse = torch.zeros(problem.out_shape, dtype=torch.bfloat16), torch.zeros(problem.lse_shape)
    for deterministic in (True, False):
        with capture_launches() as launches:
            baseline.backward(
                problem, dout, None, *inputs[:3], dout, lse, *inputs[3:], deterministic=deterministic
            )
        (dkdv,) = (recorded for recorded in launches if recorded.name == "dkdv_kernel")
        assert dkdv.arguments["ADD_DQ"] is not deterministic  # the only atomics that there are


def test_a_sequence_keeps_its_bits_whoever_its_neighbours_are():
    q, k, v, _, _ = tensors([200], 37, slack=0)
    gradient = normal_like(torch.empty(3, 37, 2, 24, dtype=torch.bfloat16))
    results = []
    for lengths in ([70, 9], [70, 130], [9, 70], [0, 1, 70]):
        at = lengths.index(70)
        start = sum(lengths[:at])
        own, before, after = range(70), range(70, 70 + start), range(70 + start, sum(lengths))
        rows = [*before, *own, *after]
        dout = gradient[[b - at for b in range(len(lengths))]]  # the same for this sequence in every batch
        inputs = (q, k[rows], v[rows], lengths_to_offsets(lengths), None)
        out, lse, (_, dk, dv) = run(inputs, lambda out, dout=dout: dout, deterministic=True)
        results.append((out[at], lse[at], dk[start : start + 70], dv[start : start + 70]))
    for other in results[1:]:
        for one, again in zip(results[0], other, strict=True):
            assert torch.equal(one, again)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("query", [37, [5, 66, 9, 40]], ids=["broadcast", "packed"])
def test_bad_numbers_stay_in_their_sequence(bad, query):
    inputs = tensors([70, 3, 130, 5], query)
    good = run(inputs, normal_like, deterministic=True)
    for x in inputs[1:3]:
        x[70:73] = bad
    if inputs[4] is not None:
        inputs[0][5:71] = bad
    found = run(inputs, normal_like, deterministic=True)
    keep = [i for i in range(208) if not 70 <= i < 73]
    for one, other in zip(good[2][1:], found[2][1:], strict=True):
        assert torch.equal(one[keep], other[keep])
    if inputs[4] is None:
        assert torch.equal(good[0][[0, 2, 3]], found[0][[0, 2, 3]])
    else:
        rows = [i for i in range(120) if not 5 <= i < 71]
        assert torch.equal(good[0][rows], found[0][rows]) and torch.equal(good[1][:, rows], found[1][:, rows])
        assert torch.equal(good[2][0][rows], found[2][0][rows])


def test_gradients_of_rows_that_see_nothing_are_ignored():
    inputs = tensors([2, 0, 40], 37, slack=0)  # causal: 35 of 37 rows see none of two keys
    dlse = torch.randn(3, 2, 37, generator=torch.Generator().manual_seed(5))
    wanted = run(inputs, normal_like, dlse, window=(-1, 0), deterministic=True)
    blind = torch.isneginf(wanted[1])
    assert blind.sum() == 2 * (35 + 37)

    def incoming(out):
        return normal_like(out).masked_fill(blind.transpose(1, 2)[..., None], float("nan"))

    for options in ({"deterministic": True}, {}):
        found = run(inputs, incoming, dlse.masked_fill(blind, float("nan")), window=(-1, 0), **options)
        assert torch.equal(found[2][1], wanted[2][1]) and torch.equal(found[2][2], wanted[2][2])
        torch.testing.assert_close(found[2][0], wanted[2][0])


def test_logits_far_below_any_sentinel():
    q = torch.tensor([1.0, 0.0]).reshape(1, 1, 2)
    k = torch.tensor([[-100000.0, 0.0], [-100001.0, 0.0]]).reshape(2, 1, 2)
    v = torch.tensor([1.0, 3.0]).reshape(2, 1, 1)
    out, lse, _ = run((q, k, v, lengths_to_offsets([2]), None), torch.ones_like, scale=1.0)
    assert out.item() == pytest.approx(1.5379, abs=1e-3)
    assert lse.item() == pytest.approx(-99999.687, abs=0.01)


@pytest.mark.parametrize("sizes", [([], 37), ([0, 0], 37), ([5, 0], 0), ([5, 0], [0, 0]), ([], [])], ids=str)
def test_nothing_to_do(sizes):
    lengths, query = sizes
    inputs = tensors(lengths, query, slack=2 if isinstance(query, int) and lengths else 0)
    out, lse, grads = run(inputs, normal_like)
    assert out.shape == problem_of(*inputs).out_shape and lse.shape == problem_of(*inputs).lse_shape
    assert (out == 0).all() and torch.isneginf(lse).all()
    for x, grad in zip(inputs, grads, strict=False):
        assert grad.shape == x.shape and (grad == 0).all()


# ------------------------------------------------------------------------------------- tiles and launches


@triton.jit
def locate(offsets, tiles, found, batch, total, BLOCK: tl.constexpr):
    """Write sequence, first row in it, its start and its length of each tile of a list."""
    pid = tl.program_id(0)
    sequence, first = find_tile(offsets, tl.load(tiles + pid), batch, BLOCK)
    start, rows = find_rows(offsets, sequence, batch, total)
    tl.store(found + 4 * pid, sequence)
    tl.store(found + 4 * pid + 1, first)
    tl.store(found + 4 * pid + 2, start)
    tl.store(found + 4 * pid + 3, rows)


@pytest.mark.parametrize("batch", [1, 40, 1023, 1024, 1500, 2**20])
def test_every_row_has_one_tile(batch):
    draw = torch.Generator().manual_seed(1)
    lengths = torch.randint(0, 3, (batch,), generator=draw) * torch.randint(0, 40, (batch,), generator=draw)
    offsets, block = lengths_to_offsets(lengths, dtype=torch.int64), 16
    total = int(offsets[-1]) + 19
    count = total // block + batch + 1
    tiles = torch.arange(count)
    if batch > 40:
        tiles = torch.cat([tiles[:15], torch.randint(0, count, (30,), generator=draw), tiles[-15:]])
    found = torch.empty(len(tiles), 4, dtype=torch.int64)
    with emulator.emulate(arch="sm_90"):
        locate[(len(tiles),)](offsets, tiles.int(), found, batch, total, BLOCK=block)
    ends = torch.cat([offsets, torch.tensor([total])])
    sequence, first, start, rows = found.unbind(1)
    assert torch.equal(start, ends[sequence]) and torch.equal(rows, ends[sequence + 1] - ends[sequence])
    assert torch.equal(first, (tiles - sequence - ends[sequence] // block) * block) and (first >= 0).all()
    if batch <= 40:
        covered = torch.zeros(total, dtype=torch.int64)
        for at, size in zip((start + first)[first < rows], (rows - first)[first < rows], strict=True):
            covered[at : at + min(int(size), block)] += 1
        assert (covered == 1).all()


@triton.jit
def reach(sizes, found, left, right, BLOCK: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr):
    """Write the keys that a tile of queries sees and the queries that see a tile of keys."""
    pid = tl.program_id(0)
    q_len = tl.load(sizes + 4 * pid)
    kv_len = tl.load(sizes + 4 * pid + 1)
    query = tl.load(sizes + 4 * pid + 2)
    key = tl.load(sizes + 4 * pid + 3)
    low, high = key_range(query, BLOCK, kv_len - q_len, kv_len, left, right, HAS_LEFT, HAS_RIGHT)
    tl.store(found + 4 * pid, low)
    tl.store(found + 4 * pid + 1, high)
    low, high = query_range(key, BLOCK, kv_len - q_len, q_len, left, right, HAS_LEFT, HAS_RIGHT)
    tl.store(found + 4 * pid + 2, low)
    tl.store(found + 4 * pid + 3, high)


@pytest.mark.parametrize(
    "window", [(None, None), (0, 0), (5, 3), (9, None), (None, 0), (2**31 - 1, 2)], ids=str
)
def test_ranges_hold_what_is_seen_and_no_more(window):
    block = 4
    sizes = [(q, k) for q, k in itertools.product((1, 3, 8, 21), (1, 2, 9, 20))]
    cases = [(q, k, i % max(q - 3, 1), (3 * i) % max(k - 3, 1)) for i, (q, k) in enumerate(2 * sizes)]
    found = torch.empty(len(cases), 4, dtype=torch.int32)
    left, right = (-1 if side is None else side for side in window)
    with emulator.emulate(arch="sm_90"):
        table = torch.tensor(cases, dtype=torch.int32)
        reach[(len(cases),)](table, found, left, right, block, HAS_LEFT=left >= 0, HAS_RIGHT=right >= 0)
    for (q_len, kv_len, query, key), ranges in zip(cases, found.tolist(), strict=True):
        seen = visible_keys(q_len, kv_len, *window)
        keys = seen[query : query + block].any(dim=0).nonzero().flatten().tolist()
        queries = seen[:, key : key + block].any(dim=1).nonzero().flatten().tolist()
        for wanted, (low, high) in ((keys, ranges[:2]), (queries, ranges[2:])):
            if wanted:
                assert low == wanted[0] and wanted[-1] < high <= wanted[-1] + block
            else:
                assert high - low < block  # at most a tile that the mask empties


def test_a_million_sequences_fit_a_grid():
    batch = 2**20
    offsets = lengths_to_offsets(torch.ones(batch, dtype=torch.int64))
    k = torch.zeros(1, 1, 1, dtype=torch.bfloat16).expand(batch, 2, 16)
    inputs = (torch.zeros(3, 4, 16, dtype=torch.bfloat16), k, k, offsets, None)
    problem = problem_of(*inputs)
    with capture_launches() as launches:
        out, lse = baseline.forward(problem, *inputs)
        baseline.backward(problem, out, None, *inputs[:3], out, lse, *inputs[3:])
    assert {recorded.name for recorded in launches} >= {"forward_kernel", "dkdv_kernel", "delta_kernel"}
    for recorded in launches:
        x, y, z = recorded.grid
        assert 0 < x < 2**31 and (y, z) == (1, 1)


def test_a_grid_that_is_too_large_is_an_error():
    words = "locate would need 2147483648 programs for these shapes, a grid holds 2147483647"
    with emulator.emulate(arch="sm_90"), pytest.raises(ValueError, match=words):
        launch(locate, [(16, 16, 4, 1)], lambda block_m, block_n: 2**31, {})


def test_the_host_never_waits_for_the_device(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("reads a tensor's values")

    for query in (37, [5, 66, 9]):
        inputs = tensors([0, 130, 7], query)
        problem = problem_of(*inputs)
        with monkeypatch.context() as patch, capture_launches() as launches:
            for name in ("item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__index__"):
                patch.setattr(torch.Tensor, name, refuse)
            out, lse = baseline.forward(problem, *inputs)
            baseline.backward(problem, out, lse, *inputs[:3], out, lse, *inputs[3:])
        assert len(launches) >= 4


def test_tuning_depends_on_no_size_of_the_batch():
    q, k, v, *offsets = tensors([0, 130, 7], 37)
    base = facts(problem_of(q, k, v, *offsets), q)
    for lengths in ([9], [1000, 3, 0, 5, 7], [0] * 100):
        assert facts(problem_of(*tensors(lengths, 37)), q) == base
    assert facts(problem_of(*tensors([0, 130, 7], 64)), q) == base  # the same power of two
    assert facts(problem_of(*tensors([9], [5])), q) == facts(problem_of(*tensors([7, 300], [90, 1000])), q)
    for other in (tensors([9], 65), tensors([9], 37, dim=80), tensors([9], 37, dtype=torch.float16)):
        assert facts(problem_of(*other), q) != base
    assert facts(problem_of(q, k, v, *offsets, window=(-1, 0)), q) != base


@pytest.mark.parametrize("found", [None, {"BLOCK_M": 64, "BLOCK_N": 32}], ids=["first", "tuned"])
def test_a_capture_takes_what_an_earlier_call_found(found, monkeypatch):
    """A graph must replay the kernel that eager calls run, or what is timed is not what is used."""
    ran = []

    class Kernel:
        def __getitem__(self, grid):
            return lambda **options: ran.append((grid, options["BLOCK_M"], options["num_warps"]))

    best = {} if found is None else {"best_config": triton.Config(found, num_warps=8, num_stages=2)}
    monkeypatch.setattr(baseline_launch, "tuned", lambda *facts: SimpleNamespace(**best))
    monkeypatch.setattr(baseline_launch, "_may_tune", lambda arguments: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    configs = ((128, 64, 4, 3), (64, 32, 8, 2))
    launch(Kernel(), configs, lambda block_m, block_n: block_m, {"q": None})
    assert ran == ([((128,), 128, 4)] if found is None else [((64,), 64, 8)])


def test_supports_names_the_argument_and_the_limit():
    fits = problem_of(*tensors([9], 37))
    assert baseline.supports(fits) is None
    for kinds, words in (
        ({"dim": 257}, "the head dimension of q and k must be between 1 and 256, got 257"),
        ({"dim_v": 300}, "the head dimension of v must be between 1 and 256, got 300"),
        ({"dtype": torch.float64}, "q, k and v must be bfloat16, float16 or float32, got torch.float64"),
        ({"heads": 3, "heads_kv": 2}, "the heads of q must be a multiple of those of k, got 3 and 2"),
    ):
        assert baseline.supports(problem_of(*tensors([9], 37, **kinds))) == words


@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
@pytest.mark.parametrize("kernel", ["forward_kernel", "dkdv_kernel", "dq_kernel"])
def test_known_configurations_compile_clean(kernel, arch):
    inputs = tensors([0, 130, 7], 128, dim=128, dim_v=128)
    problem = problem_of(*inputs)
    with capture_launches() as launches:
        out, lse = baseline.forward(problem, *inputs)
        for deterministic in (False, True):
            baseline.backward(
                problem, out, lse, *inputs[:3], out, lse, *inputs[3:], deterministic=deterministic
            )
    recorded = next(one for one in launches if one.name == kernel)
    table = {"forward_kernel": baseline.FORWARD, "dkdv_kernel": baseline.DKDV, "dq_kernel": baseline.DQ}[
        kernel
    ]
    names = ("BLOCK_M", "BLOCK_N", "num_warps", "num_stages")
    known = configurations(table, problem, {"sm_90": "hopper", "sm_100": "blackwell"}[arch])[0]
    report = recorded.report(arch, **dict(zip(names, known, strict=True)))
    assert report.problems() == []


# --------------------------------------------------------------------------------------------- on a GPU


def on_gpu(inputs):
    """The same inputs on the GPU."""
    return [x if x is None else x.cuda() for x in inputs]


@pytest.mark.gpu
@pytest.mark.parametrize("query", [128, RAGGED[::-1]], ids=["broadcast", "packed"])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_gpu_answers_are_within_the_error_budget(dtype, dim, query):
    inputs = on_gpu(tensors([*RAGGED[:-1], 1000], query, heads=4, dim=dim, dim_v=dim, dtype=dtype))
    for rule in ({}, {"causal": True}, {"window": (40, 20)}):
        check(*inputs, **rule)


@pytest.mark.gpu
@pytest.mark.parametrize("name", FEATURES)
def test_gpu_features(name):
    shape, kinds, rule = FEATURES[name]
    for deterministic in (False, True):
        check(*on_gpu(tensors(*shape, **kinds)), deterministic=deterministic, **rule)


@pytest.mark.gpu
@pytest.mark.parametrize("query", [128, 1, QUERIES], ids=["broadcast", "one row", "packed"])
def test_gpu_first_call_after_tuning_equals_the_second(query, monkeypatch):
    monkeypatch.setenv("JFA_DISABLE_AUTOTUNE", "0")
    tuned.cache_clear()
    inputs = on_gpu(tensors(RAGGED, query, heads=4, dim=64, dim_v=64))
    for _ in range(2):
        check(*inputs)
    assert tuned.cache_info().misses >= 2
    misses = tuned.cache_info().misses
    for extra in range(1, 6):  # other lengths, T and B: nothing is tuned again
        queries = query if isinstance(query, int) else [*query, extra]
        more = on_gpu(tensors([*RAGGED, extra], queries, heads=4, dim=64, dim_v=64))
        check(*more)
    assert tuned.cache_info().misses == misses


@pytest.mark.gpu
def test_gpu_deterministic_gradients_are_equal_in_every_run():
    inputs = on_gpu(tensors([RAGGED[i % 9] for i in range(64)], 16, heads=4, dim=64, dim_v=64, slack=0))
    problem = problem_of(*inputs)
    out, lse = baseline.forward(problem, *inputs)
    dout = torch.randn_like(out)
    runs = [
        baseline.backward(problem, dout, None, *inputs[:3], out, lse, *inputs[3:], deterministic=True)
        for _ in range(20)
    ]
    for other in runs[1:]:
        for one, again in zip(runs[0], other, strict=True):
            assert torch.equal(one, again)


@pytest.mark.gpu
def test_gpu_is_never_waited_for():
    for query in (37, QUERIES):
        inputs = on_gpu(tensors(RAGGED, query))
        problem = problem_of(*inputs)
        for mode in ("default", "error"):
            torch.cuda.set_sync_debug_mode(mode)
            try:
                out, lse = baseline.forward(problem, *inputs)
                baseline.backward(problem, out, lse.nan_to_num(0, 0, 0), *inputs[:3], out, lse, *inputs[3:])
            finally:
                torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_gpu_rows_past_the_reach_of_32_bits():
    heads, dim, rows = 2, 128, 2**23 + 300  # 2**31 elements and some
    k = torch.empty(rows, heads, dim, dtype=torch.bfloat16, device="cuda").normal_()
    v = torch.empty_like(k).normal_()
    q = torch.randn(64, heads, dim, dtype=torch.bfloat16, device="cuda")
    offsets = torch.tensor([0, 5, rows - 200, rows - 200, rows - 100], device="cuda")
    inputs = (q, k, v, offsets, None)
    problem = problem_of(*inputs)
    out, lse = baseline.forward(problem, *inputs)
    dout = torch.randn_like(out)
    dout[1] = 0  # the giant in between takes no part in the gradients
    _, dk, dv = baseline.backward(problem, dout, None, *inputs[:3], out, lse, *inputs[3:])
    tail = slice(rows - 200, rows - 100)
    wanted = expected(
        q, k[tail], v[tail], torch.tensor([0, 100], device="cuda"), dout=dout[3:], through_lse=False
    )
    found = {"out": out[3:], "lse": lse[3:], "dk": dk[tail], "dv": dv[tail]}
    wanted.check(found).check()
    assert (dk[rows - 100 :] == 0).all() and (dv[rows - 100 :] == 0).all()
