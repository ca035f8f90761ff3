"""The error budget: it accepts right answers in every precision and refuses every wrong one."""

import math

import numpy as np
import pytest
import torch

import jfa
from jfa import jagged, reference
from jfa.lab import answers, check

LENGTHS = [3, 0, 65, 1, 129, 64]
MASKS = {"none": {}, "causal": {"causal": True}, "window": {"window": (20, 3)}}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def draw(dtype, packed=False, lengths=LENGTHS, rows=19, slack=2, seed=0):
    """q, k, v, kv_offsets, q_offsets with NaN in the rows past the end."""
    rng = torch.Generator().manual_seed(seed)
    kv = jagged.lengths_to_offsets(lengths)
    q_offsets = jagged.lengths_to_offsets([(7 * n + 3) % 40 for n in lengths]) if packed else None
    total = int(kv[-1])
    q = torch.randn(int(q_offsets[-1]) if packed else rows, 4, 32, generator=rng).to(dtype)
    k = torch.randn(total + slack, 2, 32, generator=rng).to(dtype)
    v = torch.randn(total + slack, 2, 24, generator=rng).to(dtype)
    k[total:] = v[total:] = math.nan
    return q, k, v, kv, q_offsets


def exact_results(wanted):
    """The exact answer in the dtypes of a real call."""
    return {name: x.to(wanted.low[name].dtype) for name, x in wanted.exact.items()}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("packed", [False, True], ids=["broadcast", "packed"])
def test_generic_answer_in_float64_is_the_definition(packed, mask):
    wanted = check.expected(*draw(torch.float32, packed), **MASKS[mask])
    found = answers.compute(wanted.inputs, torch.float64)
    for name in check.QUANTITIES:
        torch.testing.assert_close(found[name], wanted.exact[name], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("packed", [False, True], ids=["broadcast", "packed"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_right_answers_pass_and_wrong_ones_fail(dtype, packed, mask):
    wanted = check.expected(*draw(DTYPES[dtype], packed), **MASKS[mask])
    table = wanted.check(exact_results(wanted)).check()
    assert [row.quantity for row in table.rows] == list(check.QUANTITIES) and table.worst.ratio <= 1
    # the low-precision answer itself lies inside twice its error
    wanted.check(wanted.low).check()
    refused = {name: quantities for name, quantities, _ in check.must_fail(wanted)}
    assert set(refused) == {"zeros", "shifted diagonal", "dropped tail", "swapped sequences"}
    for quantities in refused.values():
        assert {"out", "dk"} <= set(quantities)
    assert set(refused["zeros"]) == set(check.QUANTITIES)


def test_one_bad_sequence_among_good_ones_fails():
    wanted = check.expected(*draw(torch.bfloat16, lengths=[1, 2, 400, 3]))
    found = exact_results(wanted)
    found["out"][2] += 0.02 * wanted.exact["out"][2].std().to(torch.bfloat16)
    table = wanted.check(found)
    assert not table.passed and table["out"].where == "sequence 2"


@pytest.mark.parametrize("name", check.QUANTITIES)
def test_errors_beyond_the_budget_fail_and_within_it_pass(name):
    wanted = check.expected(*draw(torch.float32))
    signs = torch.randint(0, 2, wanted.exact[name].shape, generator=torch.Generator().manual_seed(1)) * 2 - 1
    error = (wanted.low[name].double() - wanted.exact[name]).nan_to_num(0)
    for factor, passed in ((1.5, True), (8, False)):
        found = exact_results(wanted)
        found[name] = (wanted.exact[name] + factor * error.abs() * signs).float()
        assert wanted.check(found)[name].passed == passed


@pytest.mark.parametrize("name", check.QUANTITIES)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_values_that_are_no_numbers_fail(name, value):
    wanted = check.expected(*draw(torch.bfloat16))
    found = exact_results(wanted)
    found[name].view(-1)[5] = value
    table = wanted.check(found)
    assert not table[name].passed and table[name].note
    with pytest.raises(AssertionError, match=name):
        table.check()


def test_nan_on_both_sides_is_no_agreement():
    q, k, v, kv, _ = draw(torch.float32)
    k[4] = math.nan
    wanted = check.expected(q, k, v, kv)
    table = wanted.check(exact_results(wanted))
    assert not table.passed and "exact" in table["out"].note


def test_rows_that_must_be_exactly_zero():
    wanted = check.expected(*draw(torch.bfloat16, packed=True), causal=True)
    blind = torch.isneginf(wanted.exact["lse"]).nonzero()[0]
    tiny = 1e-30
    for name, at in (
        ("dk", -1),
        ("dv", (-1, 0, 3)),
        ("out", (blind[1], blind[0])),
        ("dq", (blind[1], blind[0])),
    ):
        found = exact_results(wanted)
        found[name][at] = tiny
        assert "exactly 0" in wanted.check(found)[name].note
    found = exact_results(wanted)
    found["lse"][tuple(blind)] = -1e30
    assert "-inf" in wanted.check(found)["lse"].note


def test_missing_gradients_wrong_shapes_and_names():
    wanted = check.expected(*draw(torch.bfloat16))
    assert not wanted.check({"dq": None}).passed
    assert not wanted.check({}).passed
    with pytest.raises(ValueError, match="out: expected shape"):
        wanted.check({"out": wanted.exact["out"][:2]})
    with pytest.raises(ValueError, match="got dw"):
        wanted.check({"dw": wanted.exact["out"]})


@pytest.mark.parametrize("packed", [False, True], ids=["broadcast", "packed"])
def test_any_callable_with_the_public_signature(packed):
    given = []

    def public(q, k, v, kv_offsets, q_offsets=None, *, return_lse=False, backend="auto", **rule):
        given.append((return_lse, backend))
        return reference.attention(q, k, v, kv_offsets, q_offsets, **rule)

    inputs = draw(torch.bfloat16, packed)
    check.check_attention(public, *inputs, causal=True, options={"backend": "triton"}).check()
    assert given == [(True, "triton")]
    check.check_attention(reference.attention, *inputs, window=(5, 0)).check()
    table = check.check_attention(reference.attention, *inputs, gradients=False)
    assert [row.quantity for row in table.rows] == ["out", "lse"] and table.passed


def test_a_callable_with_a_small_mistake_fails():
    def two_percent_off(
        q, k, v, kv_offsets, q_offsets=None, *, scale=None, causal=False, window=(None, None)
    ):
        scale = q.shape[2] ** -0.5 * 1.02
        return reference.attention(q, k, v, kv_offsets, q_offsets, scale=scale, causal=causal, window=window)

    assert not check.check_attention(two_percent_off, *draw(torch.bfloat16)).passed


def test_empty_batches_have_nothing_to_get_wrong():
    wanted = check.expected(*draw(torch.bfloat16, lengths=[0, 0]))
    wanted.check(exact_results(wanted)).check()
    assert [name for name, _, _ in check.must_fail(wanted)] == ["zeros"]  # its lse is 0 and not -inf


def test_given_gradients_are_used():
    inputs = draw(torch.float32)
    plain = check.expected(*inputs, through_lse=False)
    assert plain.inputs.dlse is None
    twice = check.expected(*inputs, dout=2 * plain.inputs.dout, through_lse=False)
    torch.testing.assert_close(twice.exact["dk"], 2 * plain.exact["dk"])
    through = check.expected(*inputs, dout=plain.inputs.dout)
    assert not torch.allclose(through.exact["dk"], plain.exact["dk"])


def test_tables_print():
    wanted = check.expected(*draw(torch.bfloat16))
    table = wanted.check(exact_results(wanted))
    head, *lines = str(table).splitlines()
    assert head.split()[:4] == ["quantity", "error", "budget", "ratio"] and len(lines) == 5
    assert table._repr_html_().count("<tr>") == 6


@pytest.mark.parametrize("length", [6, 128, 257])
def test_one_value_of_lse_is_no_lottery(length):
    """Equal scores: lse is log n alone, which PyTorch hits by luck; a unit more is no mistake, two are."""
    draw = torch.Generator().manual_seed(length)
    q, k, v = (torch.randn(n, 1, 64, generator=draw).bfloat16() for n in (5, length, length))
    wanted = check.expected(q, k, v, jagged.lengths_to_offsets([length]), scale=0.0, gradients=False)
    lse = wanted.exact["lse"].float()
    unit = torch.nextafter(lse, torch.tensor(torch.inf)) - lse
    assert wanted.check({"lse": lse + unit}).passed and wanted.check({"lse": lse - unit}).passed
    assert (
        not wanted.check({"lse": lse + 2 * unit}).passed and not wanted.check({"lse": lse - 2 * unit}).passed
    )
    for backend in ("triton", "blackwell"):
        wanted.check(check.results_of(jfa.jagged_flash_attention, wanted.inputs, backend=backend)).check()


def test_float32_with_large_scores_is_within_the_budget():
    """Backward recomputes exp(s - lse): its s must be the forward's to the last bit."""
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(n, 2, 128, generator=draw) for n in (33, 195, 195))
    offsets = jagged.lengths_to_offsets([130, 0, 1, 64])
    options = {"backend": "triton"}
    check.check_attention(jfa.jagged_flash_attention, q, k, v, offsets, scale=1.0, options=options).check()


def test_claims_hold_or_raise_and_are_counted(capsys):
    before, failed = (len(check.claims()[how]) for how in ("held", "failed"))
    check.claim("two is more than one", 2 > 1)
    check.claim("arrays count", np.array([3.0]).max() == 3)
    check.claim("tensors count", torch.ones(1).all())
    assert capsys.readouterr().out.splitlines()[0] == "claim holds: two is more than one"
    with pytest.raises(check.ClaimError, match="one is more"):
        check.claim("one is more than two", 1 > 2)
    with pytest.raises(TypeError, match="bool"):
        check.claim("not a condition", "text")
    with pytest.raises(TypeError, match="text first"):
        check.claim(1 > 2, "swapped")
    assert len(check.claims()["held"]) == before + 3
    assert check.claims()["held"][before] == "two is more than one"
    assert check.claims()["failed"][failed:] == ["one is more than two", "not a condition", "False"]
