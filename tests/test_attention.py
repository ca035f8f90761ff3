"""The public function: its rules on every backend, what reaches a backend, and the errors of bad input."""

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from probes import TARGETS, exact_gradients, index_probe, need, oracle, same

import jfa
from jfa import attention, backends, jagged
from jfa.jagged import lengths_to_offsets
from jfa.kernels.step import Step
from jfa.schedule import make_schedule

INF = math.inf
LENGTHS = [0, 1, 15, 16, 17, 63, 64, 65, 130, 0]
Q_LENGTHS = [3, 0, 17, 16, 1, 5, 64, 2, 33, 0]


@pytest.fixture(params=TARGETS)
def target(request):
    return need(request.param)


# ---------------------------------------------------------------------------------------- rules of the design


@pytest.mark.parametrize("packed", [False, True], ids=["broadcast", "packed"])
@pytest.mark.parametrize(
    "rule",
    [{}, {"causal": True}, {"window": (20, 3)}, {"scale": 0.3, "causal": True, "window": (40, None)}],
    ids=str,
)
def test_definition_and_gradients(target, packed, rule):
    """Lengths around the tiles' edges, grouped heads, Dv unlike D, slack rows of NaN: all results."""
    rows = sum(Q_LENGTHS) + 2 if packed else 19
    total = sum(LENGTHS) + 3
    q, k, v = target.seeds((rows, 6, 24), (total, 2, 24), (total, 2, 40))
    k[-3:], v[-3:] = math.nan, math.nan
    tensors = [x.requires_grad_() for x in (q, k, v)]
    offsets = target.offsets(LENGTHS), target.offsets(Q_LENGTHS, torch.int64) if packed else None
    out, lse = target.attention(*tensors, *offsets, return_lse=True, **rule)
    expected_out, expected_lse = oracle(*tensors, *offsets, **rule)
    same(out, expected_out)
    same(lse, expected_lse)

    dout, dlse = target.randn(*out.shape, seed=5), target.randn(*lse.shape, seed=6)
    seen = lse != -INF
    actual = torch.autograd.grad((out, lse), tensors, (dout, dlse))

    def loss(out, lse):
        weighted = lse.masked_fill(~seen.cpu(), 0) * dlse.cpu()
        return (out * dout.cpu()).sum() + weighted.sum()

    for grad, exact in zip(actual, exact_gradients(loss, *tensors, *offsets, **rule)):
        same(grad, exact, 1e-4)
    assert not actual[1][-3:].any() and not actual[2][-3:].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_dtypes(target, dtype):
    """out in the dtype of q, lse in float32, gradients in the dtype of their input."""
    tensors = target.seeds((5, 4, 32), (40, 2, 32), (40, 2, 32), dtype=dtype, grad=True)
    out, lse = target.attention(*tensors, target.offsets([7, 33]), return_lse=True)
    assert out.dtype == dtype and lse.dtype == torch.float32
    expected = oracle(*tensors, target.offsets([7, 33]))
    same(out, expected[0])
    same(lse, expected[1], 1e-3)
    for x, grad in zip(tensors, torch.autograd.grad(out.sum(), tensors)):
        assert grad.dtype == dtype and grad.shape == x.shape


def test_dense_is_equal_lengths(target):
    """Equal lengths are a dense batch: the same as scaled_dot_product_attention."""
    q, k, v = target.seeds((21, 6, 16), (21, 2, 16), (21, 2, 16), grad=True)
    offsets = target.offsets(jagged.equal_lengths(3, 7))
    for causal in (False, True):
        out = target.attention(q, k, v, offsets, offsets, causal=causal)
        dense = [x.unflatten(0, (3, 7)).transpose(1, 2) for x in (q, k, v)]
        expected = torch.nn.functional.scaled_dot_product_attention(*dense, is_causal=causal, enable_gqa=True)
        same(out, expected.transpose(1, 2).flatten(0, 1))
        for a, b in zip(*(torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (out, expected))):
            same(a, b, 1e-4)


def test_dq_is_the_sum_over_the_batch_in_float32(target):
    """320 sequences give each the same small gradient: added up in bfloat16 the sum stops growing at 256."""
    batch = 320
    q = target.randn(1, 1, 16, dtype=torch.bfloat16, seed=1, grad=True)
    k = target.randn(2, 1, 16, dtype=torch.bfloat16, seed=2).repeat(batch, 1, 1)
    v = target.randn(2, 1, 16, dtype=torch.bfloat16, seed=3).repeat(batch, 1, 1)
    (many,) = torch.autograd.grad(target.attention(q, k, v, target.offsets([2] * batch)).sum(), q)
    (one,) = torch.autograd.grad(target.attention(q, k[:2], v[:2], target.offsets([2])).sum(), q)
    same(many, one * batch, 0.05 * float(many.abs().max()))


@pytest.mark.parametrize("heads_first", [False, True])
def test_nested_tensors(target, heads_first):
    """k and v (and q, then packed) may be torch.nested jagged tensors; gradients reach their values."""
    q, k, v = target.seeds((6, 4, 16), (9, 2, 16), (9, 2, 16), grad=True)
    offsets, q_offsets = target.offsets([4, 0, 5]), target.offsets([1, 2, 3])

    def nested(values, offsets):
        tensor = jagged.to_nested(values, offsets)
        return tensor.transpose(1, 2) if heads_first else tensor

    out = target.attention(q, nested(k, offsets), nested(v, offsets))
    same(out, oracle(q, k, v, offsets)[0])
    right = exact_gradients(lambda out, lse: out.square().sum(), q, k, v, offsets)
    for grad, exact in zip(torch.autograd.grad(out.square().sum(), (q, k, v)), right):
        same(grad, exact)
    packed = target.attention(nested(q, q_offsets), nested(k, offsets), nested(v, offsets.clone()))
    same(packed, oracle(q, k, v, offsets, q_offsets)[0])


def test_real_histories():
    """The 943 user histories as one batch, on the reference: means of event numbers, by the index probe."""
    target = TARGETS[0].values[0]
    lengths = jagged.history_lengths().tolist()
    q, k, v, offsets = index_probe(target, lengths, rows=2, grad=False)
    out, lse = target.attention(q, k, v, offsets, return_lse=True)
    same(out[:, 0, 0, 0], [(n + 1) / 2 for n in lengths], 1e-4)
    same(lse[:, 0, 1], [math.log(n) for n in lengths])


def test_only_lse_in_the_loss(target):
    """out may go unused; its gradient is then nothing, not garbage."""
    q, k, v = target.seeds((3, 2, 16), (5, 2, 16), (5, 2, 16), grad=True)
    _, lse = target.attention(q, k, v, target.offsets([2, 3]), return_lse=True)
    actual = torch.autograd.grad(lse.square().sum(), (q, k, v))
    right = exact_gradients(lambda out, lse: lse.square().sum(), q, k, v, target.offsets([2, 3]))
    for grad, exact in zip(actual, right):
        same(grad, exact)


def test_gradcheck_in_float64():
    """The operator's own gradients against finite differences (the reference takes float64)."""
    target = TARGETS[0].values[0]
    tensors = target.seeds((3, 2, 4), (6, 1, 4), (6, 1, 5), dtype=torch.float64, grad=True)

    def function(*tensors):
        out, lse = target.attention(*tensors, target.offsets([2, 0, 3]), causal=True, return_lse=True)
        return out, lse.masked_fill(lse == -INF, 0)

    assert torch.autograd.gradcheck(function, tensors)
    assert function(*tensors)[1].dtype == torch.float64


# ------------------------------------------------------------------------------------- what reaches a backend


class Spy:
    """A backend that remembers what it was called with."""

    def __init__(self):
        self.calls = []

    def supports(self, problem):
        return None

    def forward(self, problem, *tensors, **options):
        self.calls.append((problem, options))
        return torch.zeros(problem.out_shape), torch.zeros(problem.lse_shape)

    def backward(self, problem, dout, dlse, q, k, v, *rest, **options):
        self.calls.append((problem, options))
        return q, k, v


@pytest.fixture
def spy(monkeypatch):
    spy = Spy()
    monkeypatch.setattr(backends, "module", lambda name: spy)
    monkeypatch.setattr(
        backends, "select", lambda name, problem, device: "hopper" if name == "auto" else name
    )
    return spy


def call(**options):
    q, k, v = (torch.ones(s, requires_grad=True) for s in ((4, 6, 16), (7, 2, 16), (7, 2, 24)))
    return jfa.jagged_flash_attention(q, k, v, lengths_to_offsets([3, 0, 4]), **options)


def test_the_problem_of_a_call(spy):
    call(causal=True, window=(3, 5), max_kv_len=5)
    problem, options = spy.calls[0]
    assert (problem.batch, problem.heads_q, problem.heads_kv, problem.group) == (3, 6, 2, 3)
    assert (problem.head_dim, problem.head_dim_v, problem.total_q, problem.total_kv) == (16, 24, 4, 7)
    assert (problem.window_left, problem.window_right, problem.max_kv_len) == (3, 0, 5)
    assert problem.broadcast_q and problem.scale == 0.25 and problem.dtype == torch.float32
    assert options == {"schedule": None, "step": None}


@pytest.mark.parametrize(
    "window, sides",
    [
        ((None, None), (-1, -1)),
        ((-1, -1), (-1, -1)),
        ((6, 3), (6, 3)),
        ((7, 4), (-1, -1)),
        ((2**40, 0), (-1, 0)),
    ],
)
def test_a_window_past_every_key_is_unbounded(spy, window, sides):
    call(window=window)
    assert (spy.calls[0][0].window_left, spy.calls[0][0].window_right) == sides


def test_steps_reach_the_backend(spy, monkeypatch):
    """By name or as an object, each in its own direction; the other direction chooses for itself."""

    def named(name, arch, direction):
        return Step(name, "", "", arch, direction, "", tiling=dict)

    steps = {
        way: [named(name, "hopper", way) for name in names]
        for way, names in (("forward", ("plain", "balanced")), ("backward", ("plain", "staged")))
    }

    def find(arch, direction, step):
        if isinstance(step, str):
            return next(known for known in steps[direction] if known.name == step)
        if (step.arch, step.direction) != (arch, direction):
            raise TypeError(f"step: expected one of {arch} {direction}")
        return step

    from jfa import steps as module

    monkeypatch.setattr(module, "ladder", lambda arch, direction: steps[direction])
    monkeypatch.setattr(module, "find", find)
    own = named("plain", "hopper", "forward")
    cases = [
        ("plain", steps["forward"][0], steps["backward"][0]),
        ("staged", None, steps["backward"][1]),
        (own, own, None),
        (steps["backward"][1], None, steps["backward"][1]),
        (None, None, None),
    ]
    for step, forward, backward in cases:
        spy.calls.clear()
        call(step=step).sum().backward()
        assert [options["step"] for _, options in spy.calls] == [forward, backward]
    with pytest.raises(
        ValueError, match="step: expected one of plain, balanced, staged on hopper, got 'other'"
    ):
        call(step="other")
    with pytest.raises(TypeError, match="step: expected one of hopper forward"):
        call(step=named("plain", "blackwell", "forward"))


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_backends_without_steps_refuse_one(backend):
    need(SimpleNamespace(backend=backend, device="cpu"))
    with pytest.raises(ValueError, match=f'step: expected None with backend="{backend}"'):
        call(step="balanced", backend=backend)


def test_a_schedule_reaches_the_backend(spy):
    """It crosses the operator as tensors and arrives as the object it was, in both directions."""
    from jfa.schedule import make_schedule

    schedule = make_schedule((4, 7), lengths_to_offsets([3, 0, 4]), None, 64, 64)
    call(schedule=schedule).sum().backward()
    assert len(spy.calls) == 2
    for _, options in spy.calls:
        arrived = options["schedule"]
        assert type(arrived) is type(schedule)
        for a, b in zip(arrived.tensors(), schedule.tensors()):
            assert torch.equal(a, b)


# ------------------------------------------------------------------------------------------------- bad input


def arguments(**changes):
    q, k, v = torch.ones(4, 6, 16), torch.ones(7, 2, 16), torch.ones(7, 2, 24)
    return {"q": q, "k": k, "v": v, "kv_offsets": torch.tensor([0, 3, 7]), **changes}


BAD = [
    ({"q": [[1.0]]}, TypeError, "q: expected a torch.Tensor, got list"),
    ({"v": None}, TypeError, "v: expected a torch.Tensor, got NoneType"),
    (
        {"q": torch.ones(2, 4, 6, 16)},
        ValueError,
        r"q: expected three dimensions \(rows, Hq, D\), got shape \(2, 4, 6, 16\)",
    ),
    ({"k": torch.ones(7, 16)}, ValueError, r"k: expected three dimensions .* got shape \(7, 16\)"),
    ({"v": torch.ones(7)}, ValueError, r"v: expected three dimensions .* got shape \(7,\)"),
    (
        {"q": torch.ones(4, 6, 0), "k": torch.ones(7, 2, 0)},
        ValueError,
        r"q: expected one head and one column .* \(4, 6, 0\)",
    ),
    (
        {"k": torch.ones(7, 0, 16), "v": torch.ones(7, 0, 24)},
        ValueError,
        r"k: expected one head .* got \(7, 0, 16\)",
    ),
    ({"k": torch.ones(7, 2, 8)}, ValueError, "k: expected the head dimension of q, 16, got 8"),
    ({"v": torch.ones(6, 2, 24)}, ValueError, r"v: expected \(T, Hkv\) = \(7, 2\) like k, got \(6, 2\)"),
    ({"v": torch.ones(7, 1, 24)}, ValueError, r"v: expected \(T, Hkv\) = \(7, 2\) like k, got \(7, 1\)"),
    (
        {"q": torch.ones(4, 5, 16)},
        ValueError,
        "q: expected a number of heads that is a multiple of the 2 heads .* got 5",
    ),
    (
        {"k": torch.ones(7, 2, 16).half()},
        TypeError,
        "q, k, v: expected one dtype .* got q torch.float32, k torch.float16",
    ),
    (
        {x: torch.ones(4, 2, 16, dtype=torch.int32) for x in "qkv"},
        TypeError,
        "expected one dtype .* got q torch.int32",
    ),
    ({"k": torch.ones(7, 2, 16, device="meta")}, ValueError, "k: expected to be on cpu like q, got meta"),
    (
        {"q_offsets": torch.tensor([0, 4])},
        ValueError,
        "q_offsets: expected as many sequences as kv_offsets has, 2, got 1",
    ),
    (
        {"q_offsets": torch.tensor([0, 2, 9])},
        ValueError,
        r"q_offsets: expected to end within the 4 packed rows, got .* 9",
    ),
    ({"q_offsets": torch.tensor([0.0, 2, 4])}, TypeError, "q_offsets: expected dtype .* got torch.float32"),
    ({"window": 3}, ValueError, r"window: expected \(left, right\), got 3"),
    ({"window": (1, 2, 3)}, ValueError, r"window: expected \(left, right\), got \(1, 2, 3\)"),
    ({"window": (1.5, None)}, TypeError, "window: expected int or None as its left side, got float"),
    (
        {"window": (None, -2)},
        ValueError,
        "window: expected a number of keys as its right side, None or -1, got -2",
    ),
    ({"scale": "big"}, TypeError, "scale: expected a float or None, got str"),
    ({"scale": True}, TypeError, "scale: expected a float or None, got bool"),
    ({"scale": math.nan}, ValueError, "scale: expected a finite number, got nan"),
    ({"scale": math.inf}, ValueError, "scale: expected a finite number, got inf"),
    ({"max_kv_len": 3.0}, TypeError, "max_kv_len: expected an int or None, got float"),
    ({"max_kv_len": -1}, ValueError, "max_kv_len: expected 0 or more rows, got -1"),
    (
        {"max_kv_len": 3},
        ValueError,
        "max_kv_len: expected an upper bound of all lengths, got 3 while sequence 1",
    ),
    (
        {"backend": "cuda"},
        ValueError,
        "backend: expected one of auto, reference, triton, hopper, blackwell, got 'cuda'",
    ),
    ({"schedule": [1, 2]}, TypeError, "schedule: expected a jfa.schedule.Schedule or None, got list"),
    ({"step": 3}, TypeError, "step: expected a name, a step or None, got int"),
    ({"kv_offsets": None}, TypeError, "kv_offsets: expected a torch.Tensor of int32 or int64, got NoneType"),
]


@pytest.mark.parametrize(
    "changes, error, message", BAD, ids=[f"{n:02}-{'-'.join(c[0])}" for n, c in enumerate(BAD)]
)
@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_bad_input(changes, error, message, backend):
    """The error names the argument, what was expected and what came."""
    need(SimpleNamespace(backend=backend, device="cpu"))
    with pytest.raises(error, match=message):
        jfa.jagged_flash_attention(**arguments(**{"backend": backend, **changes}))


def test_bad_nested_input():
    k = torch.nested.nested_tensor([torch.ones(3, 2, 16), torch.ones(4, 2, 16)], layout=torch.jagged)
    other = torch.nested.nested_tensor([torch.ones(4, 2, 16), torch.ones(3, 2, 16)], layout=torch.jagged)
    q, offsets = torch.ones(4, 6, 16), torch.tensor([0, 3, 7])
    with pytest.raises(TypeError, match="k and v: expected both or neither nested"):
        jfa.jagged_flash_attention(q, k, torch.ones(7, 2, 16))
    with pytest.raises(
        ValueError, match="kv_offsets: expected None, because the nested k and v bring their own"
    ):
        jfa.jagged_flash_attention(q, k, k, offsets)
    with pytest.raises(ValueError, match="v: expected sequences of the lengths that the nested k has"):
        jfa.jagged_flash_attention(q, k, other)


def test_bad_values_pass_unread_when_not_checked(spy):
    """check=False looks at shapes alone, as a GPU call does by default; the caller answers for the values."""
    q, k, v = torch.ones(4, 6, 16), torch.ones(7, 2, 16), torch.ones(7, 2, 24)
    jfa.jagged_flash_attention(q, k, v, torch.tensor([3, 99]), check=False)
    assert len(spy.calls) == 1
    with pytest.raises(ValueError):
        jfa.jagged_flash_attention(q, k, v, torch.tensor([3, 99]))
    assert len(spy.calls) == 1


def test_signature_of_the_design():
    """The arguments of the design, in its order; what is added comes last and has a default."""
    import inspect

    names = list(inspect.signature(attention.jagged_flash_attention).parameters)
    assert names[:15] == [
        "q", "k", "v", "kv_offsets", "q_offsets", "scale", "causal", "window", "return_lse", "deterministic",
        "max_kv_len", "schedule", "backend", "step", "check",
    ]  # fmt: skip


# ------------------------------------------------------------------- what a second pair of eyes found


def _small(backend_dim=64):
    draw = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(n, 1, backend_dim, generator=draw).bfloat16() for n in (5, 200, 200))
    return q, k, v, jfa.jagged.lengths_to_offsets([70, 130])


@pytest.mark.parametrize(
    "options, error, words",
    [
        ({"causal": "no"}, TypeError, "causal: expected True or False"),
        ({"return_lse": 1}, TypeError, "return_lse: expected True or False"),
        ({"deterministic": "no"}, TypeError, "deterministic: expected True or False"),
        ({"check": "yes"}, TypeError, "check: expected True, False or None"),
        ({"scale": 10**400}, ValueError, "scale: expected a finite number"),
        ({"step": Path("peeled")}, TypeError, "step: expected a name, a step or None"),
    ],
    ids=str,
)
def test_options_of_a_wrong_kind_are_named(options, error, words):
    with pytest.raises(error, match=words):
        jfa.jagged_flash_attention(*_small(), **options)


def test_numbers_past_any_length_mean_unbounded():
    q, k, v, offsets = _small()
    wanted = jfa.jagged_flash_attention(q, k, v, offsets)
    for options in ({"window": (2**70, 2**70)}, {"max_kv_len": 2**70}, {"window": (-1, -1)}):
        assert torch.equal(jfa.jagged_flash_attention(q, k, v, offsets, **options), wanted)
    exact, _ = jfa.reference.attention(q, k, v, offsets, window=(-1, -1))
    torch.testing.assert_close(exact.bfloat16(), wanted, rtol=2**-7, atol=2**-9)


@pytest.mark.parametrize("backend", ["reference", "triton", "hopper", "blackwell"])
@pytest.mark.parametrize("what", ["other lengths", "other batch", "other rows of q", "packed"])
def test_a_schedule_of_another_call_is_refused(backend, what):
    q, k, v, offsets = _small()
    lengths = jfa.jagged.lengths_to_offsets
    schedule = {
        "other lengths": lambda: make_schedule((5, 200), lengths([130, 70])),
        "other batch": lambda: make_schedule((5, 200), lengths([200])),
        "other rows of q": lambda: make_schedule((300, 200), offsets),
        "packed": lambda: make_schedule((5, 200), offsets, lengths([2, 3])),
    }[what]()
    with pytest.raises(ValueError, match="schedule: expected one made"):
        jfa.jagged_flash_attention(q, k, v, offsets, backend=backend, schedule=schedule)


@pytest.mark.parametrize("backend", ["reference", "triton", "hopper", "blackwell"])
def test_a_scale_too_small_for_float32_is_zero(backend):
    q, k, v, offsets = _small()
    out = jfa.jagged_flash_attention(q, k, v, offsets, backend=backend, scale=1e-300)
    means = torch.stack([v[:70].float().mean(0), v[70:].float().mean(0)])[:, None]
    torch.testing.assert_close(out.float(), means.expand_as(out), rtol=2**-7, atol=2**-7)
    for scale in (1e39, -3e38):
        with pytest.raises(ValueError, match="scale: expected a number that float32 holds, times log2"):
            jfa.jagged_flash_attention(q, k, v, offsets, backend=backend, scale=scale)


@pytest.mark.parametrize("backend", ["reference", "triton", "hopper", "blackwell"])
@pytest.mark.parametrize("packed", [False, True])
def test_what_comes_in_at_a_row_without_keys_counts_for_nothing(packed, backend):
    """Merging parts of attention by their lse gives NaN there: -inf minus -inf."""
    draw = torch.Generator().manual_seed(0)
    rows = 16 if packed else 8
    q, k, v = (torch.randn(n, 1, 64, generator=draw).to(torch.bfloat16) for n in (rows, 9, 9))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    offsets = torch.tensor([0, 4, 9])
    q_offsets = torch.tensor([0, 8, 16]) if packed else None
    out, lse = jfa.jagged_flash_attention(
        *leaves, offsets, q_offsets, causal=True, backend=backend, return_lse=True
    )
    unseen = lse.mT == -torch.inf
    assert 0 < unseen.sum() < unseen.numel()
    clean = torch.randn(out.shape, generator=draw).to(out.dtype).masked_fill(unseen[..., None], 0)
    dirty = clean.masked_fill(unseen[..., None], float("nan"))
    for a, b in zip(*(torch.autograd.grad(out, leaves, dout, retain_graph=True) for dout in (clean, dirty))):
        assert torch.equal(a, b)


def test_forward_mode_is_refused_and_not_zero():
    q, k, v = (torch.randn(rows, 1, 4, dtype=torch.float64) for rows in (2, 5, 5))
    offsets = torch.tensor([0, 5])
    for x in range(3):
        primals = [q, k, v]

        def attend(one, x=x, primals=primals):
            return jfa.jagged_flash_attention(*primals[:x], one, *primals[x + 1 :], offsets)

        with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
            torch.func.jvp(attend, (primals[x],), (torch.ones_like(primals[x]),))
        attend(primals[x])


def test_forward_mode_through_the_backward_pass_is_refused_too():
    q, k, v = (torch.randn(rows, 1, 4, dtype=torch.float64, requires_grad=True) for rows in (2, 5, 5))
    out = jfa.jagged_flash_attention(q, k, v, torch.tensor([0, 5]))
    with torch.autograd.forward_ad.dual_level():
        weight = torch.autograd.forward_ad.make_dual(torch.ones_like(out), torch.ones_like(out))
        with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
            torch.autograd.grad((out * weight).sum(), q)


def test_reverse_mode_transforms_are_refused_by_name():
    q, k, v = (torch.randn(rows, 1, 4, dtype=torch.float64) for rows in (2, 5, 5))
    with pytest.raises(NotImplementedError, match="does not work under torch.func"):
        torch.func.grad(lambda q: jfa.jagged_flash_attention(q, k, v, torch.tensor([0, 5])).sum())(q)


def test_an_lse_that_nobody_differentiates_costs_no_gradient(spy, monkeypatch):
    given = []
    monkeypatch.setattr(
        spy, "backward", lambda problem, dout, dlse, q, k, v, *_, **__: given.append(dlse) or (q, k, v)
    )
    call(return_lse=True)[0].sum().backward()
    assert given == [None]


def test_float64_keeps_a_scale_that_float32_would_not():
    q, k, v = (1e25 * torch.randn(rows, 1, 4, dtype=torch.float64) for rows in (2, 5, 5))
    offsets = torch.tensor([0, 5])
    out = jfa.jagged_flash_attention(q, k, v, offsets, scale=1e-50)
    wanted = torch.softmax(torch.einsum("mhd,nhd->hmn", q, k) * 1e-50, 2)
    torch.testing.assert_close(out[0], torch.einsum("hmn,nhd->mhd", wanted, v))
    assert jfa.jagged_flash_attention(q / 1e25, k / 1e65, v, offsets, scale=1e39).isfinite().all()
    for scale in (math.inf, math.nan):
        with pytest.raises(ValueError, match="scale: expected a finite number"):
            jfa.jagged_flash_attention(q, k, v, offsets, scale=scale)


def test_modules_of_steps_and_schedules_are_found_in_the_package():
    assert jfa.steps.find("hopper", "forward", "staged").name == "staged"
    assert jfa.schedule.make_schedule is make_schedule
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = jfa.nothing


def test_meta_tensors_with_gradients_and_a_named_step():
    q, k, v = (torch.randn(rows, 2, 64, dtype=torch.bfloat16, device="meta") for rows in (4, 9, 9))
    q.requires_grad_()
    offsets = torch.tensor([0, 9], device="meta")
    out = jfa.jagged_flash_attention(q, k, v, offsets, backend="hopper", step="staged")
    assert out.is_meta and out.shape == (1, 4, 2, 64)


@pytest.mark.parametrize("backend", ["reference", "triton", "hopper", "blackwell"])
def test_nan_in_a_key_reaches_the_gradients_of_its_sequence_alone(backend):
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(rows, 1, 64, generator=draw).bfloat16() for rows in (4, 5, 5))
    k[1, 0, 0] = math.nan
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = jfa.jagged_flash_attention(*leaves, torch.tensor([0, 2, 5]), backend=backend)
    dq, dk, dv = torch.autograd.grad(out.sum(), leaves)
    assert dq.isnan().all() and dk[:2].isnan().all() and dv[:2].isnan().all()
    assert not (dk[2:].isnan().any() or dv[2:].isnan().any())
