"""jfa.jagged: offsets, their checks, the length generators, and the bridge to torch.nested."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jfa import jagged

ROOT = Path(__file__).resolve().parent.parent


# ------------------------------------------------------------------------------------- offsets and lengths


@given(st.lists(st.integers(0, 1000), max_size=20), st.sampled_from([torch.int32, torch.int64]))
@settings(max_examples=50, deadline=None)
def test_offsets_and_lengths_are_inverse(lengths, dtype):
    offsets = jagged.lengths_to_offsets(lengths, dtype)
    assert offsets.dtype == dtype and offsets.tolist() == [sum(lengths[:b]) for b in range(len(lengths) + 1)]
    assert jagged.offsets_to_lengths(offsets).tolist() == lengths
    assert torch.equal(jagged.lengths_to_offsets(torch.tensor(lengths, dtype=torch.int64), dtype), offsets)
    jagged.check_offsets(offsets, sum(lengths), max_len=max(lengths, default=0))


def test_lengths_of_narrow_types_do_not_overflow():
    lengths = torch.full((300,), 120, dtype=torch.int8)
    assert jagged.lengths_to_offsets(lengths)[-1] == 36_000


@pytest.mark.parametrize(
    "lengths, dtype, error, message",
    [
        ([3, -1], torch.int32, ValueError, "lengths: expected no negative length, got -1"),
        ([2**30, 2**30], torch.int32, ValueError, "their sum 2147483648 does not fit torch.int32"),
        ([[1, 2]], torch.int32, ValueError, r"lengths: expected one dimension .* got shape \(1, 2\)"),
        ([1.0], torch.int32, TypeError, "lengths: expected integers, got dtype torch.float32"),
        ([True], torch.int32, TypeError, "lengths: expected integers, got dtype torch.bool"),
        ([1], torch.int16, TypeError, "dtype: expected torch.int32 or torch.int64, got torch.int16"),
        ([2**62, 2**62], torch.int64, ValueError, "their sum 9223372036854775808 does not fit torch.int64"),
        ([2**63 - 1, 2**63 - 1, 3], torch.int64, ValueError, "does not fit torch.int64"),
        (None, torch.int32, TypeError, "lengths: expected a list or a tensor of integers, got None"),
        ("abc", torch.int32, TypeError, "lengths: expected a list or a tensor of integers, got 'abc'"),
    ],
)
def test_bad_lengths(lengths, dtype, error, message):
    with pytest.raises(error, match=message):
        jagged.lengths_to_offsets(lengths, dtype)


def test_a_sum_beyond_int32_fits_int64():
    assert jagged.lengths_to_offsets([2**30, 2**30], torch.int64)[-1] == 2**31


@pytest.mark.parametrize(
    "offsets, options, error, message",
    [
        ([0, 1], {}, TypeError, "kv_offsets: expected a torch.Tensor of int32 or int64, got list"),
        (torch.tensor([0, 1], dtype=torch.int16), {}, TypeError, "kv_offsets: .* got torch.int16"),
        (torch.tensor([[0, 1]]), {}, ValueError, r"kv_offsets: .* got shape \(1, 2\)"),
        (torch.tensor(0), {}, ValueError, r"kv_offsets: .* got shape \(\)"),
        (torch.zeros(0, dtype=torch.int64), {}, ValueError, "kv_offsets: .* got none"),
        (
            torch.tensor([0, 1]),
            {"device": "meta"},
            ValueError,
            "kv_offsets: expected to be on meta.* got cpu",
        ),
        (
            torch.tensor([2, 3]),
            {"name": "mine"},
            ValueError,
            r"mine: expected to start at 0, got mine\[0\] = 2",
        ),
        (torch.tensor([0, 4, 3, 9]), {}, ValueError, r"kv_offsets\[1\] = 4 before kv_offsets\[2\] = 3"),
        (torch.tensor([0, 12]), {}, ValueError, r"within the 10 packed rows, got kv_offsets\[-1\] = 12"),
        (
            torch.tensor([0, 3, 9]),
            {"max_len": 5},
            ValueError,
            "max_kv_len: .* got 5 while sequence 1 .* has 6 rows",
        ),
    ],
)
def test_bad_offsets(offsets, options, error, message):
    with pytest.raises(error, match=message):
        jagged.check_offsets(offsets, 10, **options)


def test_decreasing_offsets_near_the_int32_limit():
    offsets = torch.tensor([0, 2**31 - 1, -(2**31) + 5], dtype=torch.int32)
    with pytest.raises(ValueError, match="never to decrease"):
        jagged.check_offsets(offsets, 2**31)
    wraps = torch.tensor([0, 2**63 - 1, -2, 9])  # each difference looks like an increase
    with pytest.raises(ValueError, match="never to decrease"):
        jagged.check_offsets(wraps, 9)


def test_lengths_are_on_the_cpu_whatever_the_default_device_is():
    torch.set_default_device("meta")
    try:
        made = [jagged.density_lengths(3, 9, 0.5), jagged.equal_lengths(3, 9), jagged.history_lengths()]
    finally:
        torch.set_default_device(None)
    assert [x.device.type for x in made] == ["cpu"] * 3


@pytest.mark.parametrize("arguments", [(2, 1.5), (True, 3), (2.0, 3)])
def test_counts_are_whole_numbers(arguments):
    with pytest.raises(TypeError, match="expected an int, got"):
        jagged.equal_lengths(*arguments)


def test_values_are_read_only_when_asked():
    wrong = torch.tensor([7, 3])
    jagged.check_offsets(wrong, 1, check=False)
    with pytest.raises(ValueError):
        jagged.check_offsets(wrong, 1)
    # A tensor without values stands for one whose values would have to be waited for.
    jagged.check_offsets(torch.zeros(3, dtype=torch.int32, device="meta"), 0)
    jagged.offsets_to_lengths(torch.zeros(3, dtype=torch.int32, device="meta"))
    jagged.lengths_to_offsets(torch.zeros(3, dtype=torch.int32, device="meta"))


@pytest.mark.gpu
def test_no_synchronization_on_a_gpu():
    lengths = torch.tensor([3, 2], device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        offsets = jagged.lengths_to_offsets(lengths)
        jagged.offsets_to_lengths(offsets)
        jagged.check_offsets(offsets, 1)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    with pytest.raises(ValueError, match="within the 1 packed rows"):
        jagged.check_offsets(offsets, 1, check=True)


# ------------------------------------------------------------------------------------------------ generators


@pytest.mark.parametrize(
    "density, low, high",
    [(1.0, 40, 40), (0.95, 36, 40), (0.75, 20, 40), (0.55, 4, 40), (0.5, 0, 40), (0.3, 0, 24), (0.05, 0, 4)],
)
def test_density_rule(density, low, high):
    """1: all equal; from 0.5: uniform in [(2s - 1) max, max]; below: in [0, 2s max]; ends included."""
    lengths = jagged.density_lengths(20_000, 40, density, seed=3)
    assert lengths.dtype == torch.int64 and lengths.shape == (20_000,)
    assert (int(lengths.min()), int(lengths.max())) == (low, high)
    assert abs(float(lengths.double().mean()) - (low + high) / 2) < 0.01 * 40
    counts = torch.bincount(lengths)[low:].double()
    assert float((counts - counts.mean()).abs().max()) < 6 * float(counts.mean()) ** 0.5


def test_density_of_real_shapes():
    """The mean is the density times the maximum, which is why the number is called so."""
    for density in (0.1, 0.25, 0.5, 0.7, 0.9, 1.0):
        lengths = jagged.density_lengths(4096, 1024, density)
        assert abs(float(lengths.double().mean()) / 1024 - density) < 0.01


@pytest.mark.parametrize("density", [0.0, -0.1, 1.01, float("nan")])
def test_bad_density(density):
    with pytest.raises(ValueError, match="density: expected a number above 0 and at most 1, got"):
        jagged.density_lengths(3, 10, density)


def test_generators_are_seeded():
    torch.manual_seed(1)
    first = jagged.density_lengths(50, 100, 0.6, seed=5), jagged.giant_lengths(50, 9, 500, seed=5)
    state = torch.get_rng_state()
    torch.manual_seed(2)
    again = jagged.density_lengths(50, 100, 0.6, seed=5), jagged.giant_lengths(50, 9, 500, seed=5)
    other = jagged.density_lengths(50, 100, 0.6, seed=6), jagged.giant_lengths(50, 9, 500, seed=6)
    for a, b, c in zip(first, again, other):
        assert torch.equal(a, b) and not torch.equal(a, c)
    torch.set_rng_state(state)


def test_one_giant():
    places = set()
    for seed in range(20):
        lengths = jagged.giant_lengths(7, 9, 500, seed=seed)
        assert lengths.shape == (7,) and int((lengths == 500).sum()) == 1
        assert 1 <= int(lengths.min()) and int(lengths.topk(2).values[1]) <= 9
        places.add(int(lengths.argmax()))
    assert len(places) > 3
    assert jagged.giant_lengths(1, 9, 500).tolist() == [500]
    with pytest.raises(ValueError, match="short < giant"):
        jagged.giant_lengths(3, 9, 9)


def test_equal_and_empty():
    assert jagged.equal_lengths(3, 5).tolist() == [5, 5, 5]
    assert jagged.empty_lengths(2).tolist() == [0, 0]
    assert jagged.empty_lengths(0).tolist() == []
    with pytest.raises(ValueError, match="batch: expected 0 or more, got -1"):
        jagged.equal_lengths(-1, 5)


def test_real_histories():
    lengths = jagged.history_lengths()
    assert lengths.shape == (943,) and lengths.dtype == torch.int64
    assert int(lengths.sum()) == 100_000
    assert (int(lengths.min()), int(lengths.max())) == (20, 737)
    assert lengths[:4].tolist() == [272, 62, 54, 24]


@pytest.mark.parametrize("folder", ["notebooks", "tests", "/"])
def test_histories_are_found_from_anywhere(folder):
    program = "import jfa; print(len(jfa.jagged.history_lengths()))"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT / folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout == "943\n", done.stderr


def test_missing_histories(monkeypatch, tmp_path):
    monkeypatch.setattr(jagged, "__file__", str(tmp_path / "site-packages" / "jfa" / "jagged.py"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match="run from inside a checkout"):
        jagged.history_lengths()
    monkeypatch.chdir(ROOT / "notebooks")  # an installed package, but the reader stands in a checkout
    assert len(jagged.history_lengths()) == 943


# -------------------------------------------------------------------------------------------- torch.nested


def nested(*lengths):
    rows = [torch.randn(n, 2, 4) for n in lengths]
    return rows, torch.nested.nested_tensor(rows, layout=torch.jagged, requires_grad=True)


def test_from_nested():
    rows, tensor = nested(3, 0, 5)
    values, offsets = jagged.from_nested(tensor)
    assert offsets.tolist() == [0, 3, 3, 8]
    assert torch.equal(values, torch.cat(rows))
    values.sum().backward()
    assert torch.equal(tensor.grad.values(), torch.ones(8, 2, 4))


def test_from_nested_with_heads_first():
    """The form that scaled_dot_product_attention takes, (B, heads, length, columns)."""
    rows, tensor = nested(3, 0, 5)
    values, offsets = jagged.from_nested(tensor.transpose(1, 2))
    assert torch.equal(values, torch.cat(rows)) and offsets.tolist() == [0, 3, 3, 8]


def test_to_nested_and_back():
    values, offsets = torch.randn(8, 2, 4, requires_grad=True), jagged.lengths_to_offsets([3, 0, 5])
    tensor = jagged.to_nested(values, offsets)
    assert [x.shape[0] for x in tensor.unbind()] == [3, 0, 5]
    back, same_offsets = jagged.from_nested(tensor)
    assert torch.equal(back, values) and same_offsets is offsets
    back.square().sum().backward()
    assert torch.equal(values.grad, 2 * values)


@pytest.mark.parametrize(
    "tensor, error, message",
    [
        (
            torch.randn(3, 4),
            TypeError,
            "nested: expected a torch.nested tensor with layout torch.jagged, got torch.str",
        ),
        (
            torch.nested.nested_tensor([torch.randn(2, 3)]),
            TypeError,
            "layout torch.jagged, got torch.strided",
        ),
        ([1, 2], TypeError, "layout torch.jagged, got list"),
    ],
    ids=["dense", "strided", "list"],
)
def test_bad_nested(tensor, error, message):
    with pytest.raises(error, match=message):
        jagged.from_nested(tensor)


def test_nested_with_holes():
    tensor = torch.nested.narrow(
        torch.randn(2, 6, 4), 1, torch.tensor([0, 1]), torch.tensor([3, 2]), torch.jagged
    )
    with pytest.raises(ValueError, match=r"no holes between the sequences; call .contiguous\(\)"):
        jagged.from_nested(tensor)
    values, offsets = jagged.from_nested(tensor.contiguous())
    assert offsets.tolist() == [0, 3, 5] and values.shape == (5, 4)


def test_to_nested_checks_offsets():
    with pytest.raises(
        ValueError, match=r"offsets: expected to end within the 8 packed rows, got offsets\[-1\] = 9"
    ):
        jagged.to_nested(torch.randn(8, 2), torch.tensor([0, 9]))
