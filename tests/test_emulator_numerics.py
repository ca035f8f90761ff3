"""Rounding and typing of the emulated language against torch and against Triton's own rules."""

import numpy as np
import pytest
import torch

from jfa.emulator import dtypes as D
from jfa.emulator import dtypes_rounding as R
from jfa.emulator import tile_typing as typing
from jfa.emulator import tl_dot
from jfa.emulator.tile import Tensor, as_tensor

TORCH = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8e4nv": torch.float8_e4m3fn,
    "fp8e5": torch.float8_e5m2,
}
NARROW = list(TORCH)


def patterns(dtype):
    count = 2 ** (8 * dtype.itemsize)
    return np.arange(count, dtype=np.uint32).astype(f"u{dtype.itemsize}")


def torch_values(name, bits):
    signed = bits.view(np.int16 if bits.itemsize == 2 else np.int8)
    return torch.from_numpy(signed.copy()).view(TORCH[name]).float().numpy()


def same(a, b):
    """Equal bit for bit where not NaN, and NaN in the same places (so -0 is not 0)."""
    a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
    nan = np.isnan(a)
    return np.array_equal(nan, np.isnan(b)) and np.array_equal(
        a[~nan].view(np.uint32), b[~nan].view(np.uint32)
    )


@pytest.mark.parametrize("name", NARROW)
def test_every_pattern_is_read_as_torch_reads_it(name):
    dtype = D.by_name(name)
    bits = patterns(dtype)
    assert same(R.from_store(dtype, bits.view(dtype.store)), torch_values(name, bits))


@pytest.mark.parametrize("name", NARROW)
def test_every_pattern_survives_a_load_and_a_store(name):
    dtype = D.by_name(name)
    bits = patterns(dtype)
    values = R.from_store(dtype, bits.view(dtype.store))
    back = R.bits_of(dtype, values)
    number = ~np.isnan(values)
    assert np.array_equal(back[number], bits[number])
    assert np.isnan(R.from_store(dtype, back[~number].view(dtype.store))).all()
    finite = np.isfinite(values)  # rounding saturates an fp8 infinity
    assert np.array_equal(R.bits_of(dtype, R.round_to(dtype, values))[finite], bits[finite])


def neighbours(name):
    """Every finite pattern, the tie to the next one, and one float32 step beside each of them."""
    dtype = D.by_name(name)
    values = R.from_store(dtype, patterns(dtype).view(dtype.store))
    values = np.unique(values[np.isfinite(values)]).astype(np.float64)
    ties = ((values[1:] + values[:-1]) / 2).astype(np.float32)
    points = np.concatenate([values.astype(np.float32), ties])
    return np.concatenate(
        [points, np.nextafter(points, np.float32(-np.inf)), np.nextafter(points, np.float32(np.inf))]
    )


@pytest.mark.parametrize("name", NARROW)
def test_ties_and_their_neighbours_round_as_torch_rounds(name):
    dtype = D.by_name(name)
    x = neighbours(name)
    x = x[np.isfinite(x)]
    if dtype.bits == 8:
        x = x[np.abs(x) <= R.FP8_LIMIT[name]]
    assert len(x) > 600
    assert same(R.round_to(dtype, x), torch.from_numpy(x).to(TORCH[name]).float().numpy())


@pytest.mark.parametrize("name", NARROW)
def test_random_bits_round_as_torch_rounds(name):
    dtype = D.by_name(name)
    generator = np.random.default_rng(0)
    raw = generator.integers(0, 2**32, 400_000, dtype=np.uint32).view(np.float32)
    small = np.exp2(generator.uniform(-30, 18, 400_000)).astype(np.float32) * generator.choice(
        [-1, 1], 400_000
    )
    x = np.concatenate([raw, small.astype(np.float32)])
    if dtype.bits == 8:
        x = x[np.abs(x) <= R.FP8_LIMIT[name]]
    assert same(R.round_to(dtype, x), torch.from_numpy(x).to(TORCH[name]).float().numpy())


def test_overflow_of_16_bits_gives_infinity():
    for name, above, below in (("fp16", 65520.0, 65519.996), ("bf16", 3.3961776e38, 3.3961774e38)):
        dtype = D.by_name(name)
        x = np.array([above, -above, below, np.inf, -np.inf], np.float32)
        got = R.round_to(dtype, x)
        assert got[0] == np.inf and got[1] == -np.inf and np.isfinite(got[2])
        assert same(got, torch.from_numpy(x).to(TORCH[name]).float().numpy())


@pytest.mark.parametrize("name, limit", [("fp8e4nv", 448.0), ("fp8e5", 57344.0)])
def test_fp8_saturates_as_the_satfinite_conversion_does(name, limit):
    dtype = D.by_name(name)
    got = R.round_to(dtype, np.array([limit * 2, -limit * 2, np.inf, -np.inf, 1e38, np.nan], np.float32))
    assert got[:5].tolist() == [limit, -limit, limit, -limit, limit]
    assert np.isnan(got[5])


def test_nan_stays_nan_and_never_turns_into_infinity():
    payloads = np.array([0x7F800001, 0xFF800001, 0x7FC00000, 0x7FFFFFFF, 0x7F80FFFF], np.uint32).view(
        np.float32
    )
    for name in NARROW:
        dtype = D.by_name(name)
        stored = R.to_store(dtype, R.round_to(dtype, payloads))
        assert np.isnan(R.from_store(dtype, stored)).all(), name


def test_scalars_round_like_blocks():
    values = np.array([0.1, 1 / 3, 65520, 3e38, 2.0**-25, -7.7], np.float32)
    for name in NARROW:
        dtype = D.by_name(name)
        block = R.round_to(dtype, values)
        assert [float(R.round_to(dtype, v)) for v in values] == block.tolist()


def test_rounding_toward_zero_never_grows():
    x = np.random.default_rng(1).standard_normal(20_000).astype(np.float32)
    for name in NARROW:
        dtype = D.by_name(name)
        down = R.truncate_to(dtype, x)
        assert (np.abs(down) <= np.abs(x)).all()
        assert same(R.round_to(dtype, down), down)
        up = R.from_store(dtype, (R.bits_of(dtype, down) + 1).astype(f"u{dtype.itemsize}").view(dtype.store))
        assert (np.abs(up) > np.abs(x)).all()


def test_tf32_keeps_ten_bits():
    x = np.random.default_rng(2).standard_normal(10_000).astype(np.float32)
    cut, rounded = R.truncate_tf32(x), R.round_tf32(x)
    for y in (cut, rounded):
        assert not (y.view(np.uint32) & 0x1FFF).any()
    assert (np.abs(cut) <= np.abs(x)).all()
    assert (np.abs(rounded - x) <= np.abs(x) * 2.0**-11).all()
    tie = np.array([1 + 2.0**-11, 1 + 3 * 2.0**-11], np.float32)
    assert R.round_tf32(tie).tolist() == [1 + 2.0**-10, 1 + 2 * 2.0**-10]  # ties away from zero


def test_float_to_integer_truncates_and_saturates():
    x = np.array([2.9, -2.9, 3e9, -3e9, np.nan, np.inf, 2147483520.0], np.float32)
    assert R.float_to_int(D.int32, x).tolist() == [2, -2, 2**31 - 1, -(2**31), 0, 2**31 - 1, 2147483520]
    assert R.float_to_int(D.uint32, x).tolist() == [2, 0, 3_000_000_000, 0, 0, 2**32 - 1, 2147483520]
    assert R.float_to_int(D.int64, x)[2] == 3_000_000_000


# -- typing
def triton_semantic():
    semantic = pytest.importorskip("triton.language.semantic", reason="Triton is not installed")
    return semantic.TritonSemantic.__new__(semantic.TritonSemantic)


def triton_dtype(name):
    import triton.language as tl

    names = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "fp64": "float64"}
    names.update(fp8e4nv="float8e4nv", fp8e5="float8e5")
    return getattr(tl, names.get(name, name))


def test_two_tiles_promote_as_triton_promotes_all_450_pairs():
    semantic = triton_semantic()
    checked = 0
    for a in D.ORDERED:
        for b in D.ORDERED:
            for division in (False, True):
                args = (triton_dtype(a.name), False, triton_dtype(b.name), False, division)
                try:
                    expected = semantic.computation_type_impl(*args).name
                except TypeError:
                    expected = "refused"
                try:
                    got = typing.promote(a, b, division).name
                except typing.KernelTypeError:
                    got = "refused"
                assert got == expected, (a, b, division)
                checked += 1
    assert checked == 450


def test_a_tile_and_a_number_promote_as_triton_promotes():
    semantic = triton_semantic()
    for dtype in D.ORDERED:
        for value in (True, 1, 2**31, 2**40, 0.5, 1e300):
            for division in (False, True):
                weak = semantic.to_tensor_type(value)
                try:
                    expected = semantic.computation_type_impl(
                        weak, True, triton_dtype(dtype.name), False, division
                    )
                    if expected.is_int() and not (
                        expected.get_int_min_value() <= value <= expected.get_int_max_value()
                    ):
                        raise TypeError
                    expected = expected.name
                except TypeError:
                    expected = "refused"
                try:
                    got = typing.promote_number(dtype, value, division).name
                except typing.KernelTypeError:
                    got = "refused"
                assert got == expected, (dtype, value, division)


INTEGERS = [D.int8, D.int16, D.int32, D.int64, D.uint8, D.uint16, D.uint32, D.uint64]


def c_divide(a, b):
    quotient = abs(a) // abs(b)
    return quotient if (a < 0) == (b < 0) else -quotient


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_integer_arithmetic_is_that_of_c(dtype):
    low, high = dtype.get_int_min_value(), dtype.get_int_max_value()
    values = sorted(
        {low, low + 1, -7, -1, 0, 1, 3, 7, 100, high - 1, high} & set(range(low, low + 2))
        | {1, 3, 7, 100, high}
    )
    values += [-7, -1] if low < 0 else []

    def wrapped(value):
        value &= 2**dtype.bits - 1
        return value - 2**dtype.bits if dtype.kind == "i" and value > high else value

    with np.errstate(all="ignore"):
        for a in values:
            for b in values:
                x, y = as_tensor(a, dtype).to(dtype), as_tensor(b, dtype).to(dtype)
                blocks = [Tensor(np.full(4, t.d), dtype) for t in (x, y)]
                for left, right in ((x, y), blocks):
                    assert np.all((left + right).d == wrapped(a + b))
                    assert np.all((left - right).d == wrapped(a - b))
                    assert np.all((left * right).d == wrapped(a * b))
                    if b != 0:
                        assert np.all((left // right).d == wrapped(c_divide(a, b)))
                        assert np.all((left % right).d == wrapped(a - b * c_divide(a, b)))
                    assert (left + right).dtype is dtype


def test_shifts_beyond_the_width():
    for dtype in (D.int32, D.uint32, D.int64):
        minus = as_tensor(-8 if dtype.kind == "i" else 2**31, dtype).to(dtype)
        fill = -1 if dtype.kind == "i" else 0
        assert int(minus << dtype.bits) == 0
        assert int(minus >> dtype.bits) == fill
        assert int(minus >> 1) == (-4 if dtype.kind == "i" else 2**30)
        amounts = Tensor(np.array([0, 1, dtype.bits - 1, dtype.bits], dtype.payload), dtype)
        block = Tensor(np.full(4, minus.d), dtype) >> amounts
        assert block.d.tolist() == [
            int(minus),
            int(minus >> 1),
            fill if dtype.kind == "i" else int(minus >> (dtype.bits - 1)),
            fill,
        ]


def test_single_bits_add_modulo_two():
    yes, no = as_tensor(True), as_tensor(False)
    assert not bool(yes + yes) and bool(yes + no) and bool(yes - no) and bool(yes * yes)
    assert bool(~no) and (yes + yes).dtype is D.int1


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_narrow_arithmetic_rounds_once_after_each_operation(name):
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(4096, generator=generator).to(TORCH[name]) for _ in range(2))
    dtype = D.by_name(name)
    x, y = (Tensor(t.float().numpy(), dtype) for t in (a, b))
    for got, expected in ((x + y, a + b), (x - y, a - b), (x * y, a * b)):
        assert got.dtype is dtype
        assert same(got.d, expected.float().numpy())
    assert (x / y).dtype is D.float32
    assert same((x / y).d, (a.float() / b.float()).numpy())
    tenth = torch.tensor(0.1).to(TORCH[name])
    assert same((x * 0.1).d, (a * tenth).float().numpy())


def test_bitcasts_keep_the_bits():
    x = Tensor(np.array([1.5, -0.0, 3e38], np.float32), D.float32)
    assert x.to(D.int32, bitcast=True).d.view(np.uint32).tolist() == x.d.view(np.uint32).tolist()
    half = as_tensor(1.0, D.float16).to(D.float16)
    assert int(half.to(D.uint16, bitcast=True)) == 0x3C00
    with pytest.raises(typing.KernelTypeError):
        x.to(D.int16, bitcast=True)


def test_float32_products_are_a_chain_of_fmas():
    """From the accumulator on, k in order, one rounding a step; a product and its transpose agree exactly."""
    from fractions import Fraction

    draw = np.random.default_rng(7)
    x, y, acc = (draw.standard_normal(shape).astype(np.float32) for shape in ((16, 80), (80, 32), (16, 32)))
    found = tl_dot.dot(*(Tensor(a, D.float32) for a in (x, y, acc)), input_precision="ieee").d
    assert found.dtype == np.float32
    for i, j in ((0, 0), (3, 17), (15, 31)):
        total = acc[i, j]
        for k in range(80):
            exact = Fraction(float(x[i, k])) * Fraction(float(y[k, j])) + Fraction(float(total))
            total = np.float32(float(exact))
        assert found[i, j] == total
    others = (y.T.copy(), np.asfortranarray(x).T, acc.T.copy())
    turned = tl_dot.dot(*(Tensor(a, D.float32) for a in others), input_precision="ieee")
    assert np.array_equal(turned.d.T, found)
    one, two = (np.full((16, 16), 3e38, np.float32), np.eye(16, dtype=np.float32))
    big = tl_dot.dot(Tensor(one, D.float32), Tensor(2 * two, D.float32), input_precision="ieee")
    assert np.isposinf(big.d).all(), "an overflow is an infinity, and no warning"
