"""The emulated triton.language, executed from @triton.jit kernels and compared with numpy and torch."""

import math

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice
from triton.tools.tensor_descriptor import TensorDescriptor

import jfa.emulator as emulator
from jfa.lab.offline import CompileError
from jfa.lab.report import compile_report

SIZE = 64


def launch(kernel, grid, *args, **kwargs):
    """Run a kernel, expect no finding, and give the report back."""
    with emulator.emulate(seed=1) as e:
        kernel[grid](*args, **kwargs)
    assert not e.errors(), e.errors()
    return e.reports[-1]


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


# -- loads, stores, masks, block pointers
@triton.jit
def masked_copy(x, out, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + offsets, mask=offsets < n, other=-7.0)
    tl.store(out + offsets, value * 2)
    tl.store(out + tl.num_programs(0) * BLOCK, tl.num_programs(0).to(tl.float32))


def test_masks_others_and_program_ids():
    x, out = normal(100), torch.zeros(129)
    launch(masked_copy, (4,), x, out, 100, BLOCK=32)
    assert torch.equal(out[:100], x * 2) and (out[100:128] == -14).all() and out[128] == 4


def test_an_access_past_the_end_is_a_finding():
    with pytest.raises(emulator.EmulationError), emulator.emulate() as e:
        masked_copy[(4,)](normal(100), torch.zeros(129), 128, BLOCK=32)
    finding = e.reports[0].errors()[0]
    assert finding.kind == "out of bounds" and "access to x" in finding.message and finding.line is not None


@triton.jit
def block_pointers(x, out, rows, cols, BLOCK: tl.constexpr):
    source = tl.make_block_ptr(x, (rows, cols), (cols, 1), (0, 0), (BLOCK, BLOCK), (1, 0))
    target = tl.make_block_ptr(out, (BLOCK, 2 * BLOCK), (2 * BLOCK, 1), (0, 0), (BLOCK, BLOCK), (1, 0))
    for _ in range(2):
        tl.store(target, tl.load(source, boundary_check=(0, 1), padding_option="zero"), boundary_check=(0, 1))
        source = tl.advance(source, (0, BLOCK))
        target = tl.advance(target, (0, BLOCK))


def test_block_pointers_pad_and_advance():
    x, out = normal(13, 27), torch.full((16, 32), 9.0)
    launch(block_pointers, (1,), x, out, 13, 27, BLOCK=16)
    expected = torch.zeros(16, 32)
    expected[:13, :27] = x
    assert torch.equal(out, expected)


@triton.jit
def device_descriptors(x, out, total, rows, cols, BLOCK: tl.constexpr):
    source = tl.make_tensor_descriptor(x, [rows, cols], [cols, 1], [BLOCK, BLOCK])
    target = tl.make_tensor_descriptor(out, [rows, cols], [cols, 1], [BLOCK, BLOCK])
    sums = tl.make_tensor_descriptor(total, [rows, cols], [cols, 1], [BLOCK, BLOCK])
    row = tl.program_id(0) * BLOCK
    tile = source.load([row, 0])
    target.store([row, 0], tile + 1)
    sums.atomic_add([row, 0], tile)
    tl.store_tensor_descriptor(target, [row, BLOCK], tl.load_tensor_descriptor(source, [row - 3, BLOCK]))


def test_descriptors_made_in_the_kernel():
    x, out, total = normal(24, 32), torch.full((24, 32), 5.0), torch.ones(24, 32)
    launch(device_descriptors, (2,), x, out, total, 24, 32, BLOCK=16)
    shifted = torch.zeros(24, 16)
    shifted[3:] = x[:21, 16:]
    assert torch.equal(out[:, :16], x[:, :16] + 1) and torch.equal(out[:, 16:], shifted)
    expected = torch.ones(24, 32)
    expected[:, :16] += x[:, :16]
    assert torch.equal(total, expected)


@triton.jit
def ragged_copy(source, target, end, length, ROWS: tl.constexpr):
    for start in range(0, length, ROWS):
        at = [1 << 30, end, (1 << 30) - length + start, 0]
        target.store(at, source.load(at))
        target.atomic_add(at, source.load(at))


def test_ragged_descriptors_clip_at_the_end_of_a_sequence():
    """A stride that wraps 64-bit addresses clips at any row: tails read zeros and are not written."""

    def ragged(t, rows):
        stride = t.stride(0)
        shape = [0x7FFF0000, 0x7FFF0000, 2**30, t.shape[1]]
        return TensorDescriptor(t, shape, [2**34 - stride, stride, stride, 1], [1, 1, rows, t.shape[1]])

    x, out = normal(50, 16), torch.zeros(50, 16)
    launch(ragged_copy, (1,), ragged(x, 8), ragged(out, 8), 30, 21, ROWS=8)
    expected = torch.zeros(50, 16)
    expected[9:30] = 2 * x[9:30]
    assert torch.equal(out, expected)


@triton.jit
def gather_scatter(source, target, index, COUNT: tl.constexpr):
    rows = tl.load(index + tl.arange(0, COUNT))
    target.scatter(source.gather(rows, 8), tl.arange(0, COUNT), 0)


def test_rows_are_gathered_and_scattered():
    x, out = normal(32, 16), torch.zeros(8, 8)
    index = torch.tensor([5, 31, 0, 7, 7, 12, 40, 2], dtype=torch.int32)
    source = TensorDescriptor.from_tensor(x, [1, 8])
    launch(gather_scatter, (1,), source, TensorDescriptor.from_tensor(out, [1, 8]), index, COUNT=8)
    expected = torch.stack([x[i, 8:] if i < 32 else torch.zeros(8) for i in index.tolist()])
    assert torch.equal(out, expected)


@triton.jit
def padded_load(source, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i[:, None] * N + i[None, :], source.load([-2, 3]))


@pytest.mark.parametrize("padding, fill", [("zero", 0.0), ("nan", math.nan)])
def test_descriptors_fill_what_lies_outside(padding, fill):
    x, out = normal(10, 16), torch.ones(16, 16)
    launch(padded_load, (1,), TensorDescriptor.from_tensor(x, [16, 16], padding), out, N=16)
    expected = torch.full((16, 16), fill)
    expected[2:12, :13] = x[:, 3:]
    torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)


@triton.jit
def scalar_stores(x, out, small, n, large, flag, N: tl.constexpr):
    lanes = tl.arange(0, N)
    value = tl.load(x).to(tl.float32)
    tl.store(out, value * 0.3)
    tl.store(small, value * 0.3)
    tl.atomic_add(out + 1, 0.5)
    if flag:
        tl.store(out + 2, 7)
    tl.store(out + 3, tl.load(small).to(tl.float32))
    tl.store(out + 4, tl.load(x + 100, mask=n > 100, other=3.0))
    tl.store((out + 5).to(tl.pointer_type(tl.uint16)), 0x3F80)
    tl.store((out + 6).to(tl.int64).to(tl.pointer_type(tl.bfloat16)), 2.5)
    tl.store(out + 7, (large >> 40).to(tl.float32))
    tl.store(out + 8 + lanes, value)
    tl.atomic_add(out + 16 + lanes, 0.5)
    tl.store(out + 24 + lanes, tl.load(small + lanes).to(tl.bfloat16).to(tl.float8e5).to(tl.bfloat16))


def test_narrow_scalars_pointer_casts_and_host_arguments():
    x, out, small = (
        torch.ones(8).bfloat16(),
        torch.zeros(32).bfloat16(),
        torch.zeros(8).to(torch.float8_e4m3fn),
    )
    launch(scalar_stores, (1,), x, out, small, 5, 3 * 2**40, True, N=8)
    assert out[:8].tolist() == [0.30078125, 0.5, 7, 0.3125, 3, 1, 2.5, 3]
    assert (out[8:16] == 1).all() and (out[16:24] == 0.5).all()
    assert out[24:].tolist() == [0.3125] + [0] * 7 and small[0].float() == 0.3125


# -- atomics
@triton.jit
def atomics(counters, floats, out, KIND: tl.constexpr):
    pid = tl.program_id(0)
    lanes = tl.arange(0, 4)
    if KIND == "add":
        old = tl.atomic_add(counters, 3, sem="relaxed")
        tl.atomic_add(floats + lanes, lanes.to(tl.float32), mask=lanes != 2)
        tl.store(out + pid, old)
    elif KIND == "ties":
        old = tl.atomic_add(counters + lanes * 0, lanes + 1, sem="acq_rel", scope="gpu")
        tl.store(out + lanes, old)
    elif KIND == "extremes":
        tl.atomic_max(counters, pid)
        tl.atomic_min(counters + 1, pid)
        tl.atomic_max(floats, pid * 0.5 - 1.0)
        tl.atomic_min(floats + 1, pid * 0.5 - 1.0)
    elif KIND == "bits":
        tl.atomic_or(counters, 1 << pid)
        tl.atomic_and(counters + 1, ~(1 << pid))
        tl.atomic_xor(counters + 2, pid)
        tl.store(out + pid, tl.atomic_xchg(counters + 3, pid + 10))
    elif KIND == "lock":
        while tl.atomic_cas(counters, 0, 1, sem="acquire") == 1:
            pass
        tl.store(counters + 1, tl.load(counters + 1) * 2 + 1)
        tl.atomic_xchg(counters, 0, sem="release")


@pytest.mark.parametrize("policy", ["eager", "lazy", "random"])
@pytest.mark.parametrize("kind", ["add", "ties", "extremes", "bits", "lock"])
def test_atomics(kind, policy):
    counters = torch.tensor([0, 2**30, 0, 7], dtype=torch.int32)
    floats, out = torch.zeros(4), torch.zeros(8, dtype=torch.int32)
    if kind == "extremes":
        counters[0] = -1
    grid = 1 if kind == "ties" else 8
    with emulator.emulate(policy=policy, seed=3) as e:
        if kind == "lock":
            counters[1] = 0
        atomics[(grid,)](counters, floats, out, KIND=kind)
    assert not e.errors(), e.errors()
    if kind == "add":
        assert counters[0] == 24 and floats.tolist() == [0, 8, 0, 24]
        assert sorted(out.tolist()) == [0, 3, 6, 9, 12, 15, 18, 21]
    elif kind == "ties":
        assert out[:4].tolist() == [0, 1, 3, 6] and counters[0] == 10
    elif kind == "extremes":
        assert counters[:2].tolist() == [7, 0] and floats[:2].tolist() == [2.5, -1.0]
    elif kind == "bits":
        assert counters[0] == 255 and counters[1] == 2**30 and counters[2] == 0
        assert sorted([*out.tolist(), int(counters[3])]) == sorted([7, *range(10, 18)])
    else:
        assert counters[:2].tolist() == [0, 255]


# -- shapes
@triton.jit
def shapes(x, out, SIDE: tl.constexpr):
    i = tl.arange(0, SIDE)
    tile = tl.load(x + i[:, None] * SIDE + i[None, :])
    flipped = tl.flip(tl.trans(tile), 1)
    tl.store(out + i[:, None] * SIDE + i[None, :], flipped)
    left, right = tl.reshape(tile, (SIDE, SIDE // 2, 2)).split()
    joined = tl.join(left, right).reshape(SIDE * SIDE)
    tl.store(out + SIDE * SIDE + tl.arange(0, SIDE * SIDE), joined)
    row = tl.load(x + i)
    pairs = tl.interleave(row, row + 1)
    tl.store(out + 2 * SIDE * SIDE + tl.arange(0, 2 * SIDE), pairs)
    both = tl.cat(row, row * 2, can_reorder=True)
    tl.store(out + 2 * SIDE * SIDE + 2 * SIDE + tl.arange(0, 2 * SIDE), both)
    cube = tl.permute(tl.broadcast_to(tile[:, :, None], (SIDE, SIDE, 2)), (2, 0, 1))
    tl.store(out + 3 * SIDE * SIDE + tl.arange(0, SIDE), tl.sum(tl.sum(cube, 2), 0))
    reverse = SIDE - 1 - i
    tl.store(out + 3 * SIDE * SIDE + SIDE + i, tl.gather(row, reverse, 0))
    tl.store(out + 3 * SIDE * SIDE + 2 * SIDE + i, tl.expand_dims(row, 0).ravel())


def test_shapes():
    n = 8
    x, out = normal(n, n), torch.zeros(4 * n * n)
    launch(shapes, (1,), x, out, SIDE=n)
    square = n * n
    assert torch.equal(out[:square].view(n, n), x.T.flip(1))
    assert torch.equal(out[square : 2 * square].view(n, n), x)
    assert torch.equal(out[2 * square : 2 * square + 2 * n], torch.stack([x[0], x[0] + 1], 1).flatten())
    assert torch.equal(out[2 * square + 2 * n : 2 * square + 4 * n], torch.cat([x[0], x[0] * 2]))
    torch.testing.assert_close(out[3 * square : 3 * square + n], 2 * x.sum(1))
    assert torch.equal(out[3 * square + n : 3 * square + 2 * n], x[0].flip(0))
    assert torch.equal(out[3 * square + 2 * n : 3 * square + 3 * n], x[0])


# -- reductions, scans, sorting
@triton.jit
def product(a, b):
    return a * b


@triton.jit
def larger(value_a, index_a, value_b, index_b):
    if value_a > value_b or (value_a == value_b and index_a < index_b):
        return value_a, index_a
    else:
        return value_b, index_b


@triton.jit
def reductions(x, k, out, ints, SIDE: tl.constexpr):
    i = tl.arange(0, SIDE)
    tile = tl.load(x + i[:, None] * SIDE + i[None, :])
    whole = tl.load(k + i)
    tl.store(out + i, tl.max(tile, 1))
    tl.store(out + SIDE + i, tl.min(tile, axis=0))
    tl.store(out + 2 * SIDE + i, tl.sum(tile, 0))
    tl.store(out + 3 * SIDE + i, tl.reduce(tile, 1, product))
    tl.store(out + 4 * SIDE + i, tl.cumsum(tl.load(x + i), 0))
    tl.store(out + 5 * SIDE + i, tl.associative_scan(tl.load(x + i), 0, product, reverse=True))
    tl.store(out + 6 * SIDE + i, tl.sort(tl.load(x + i), descending=True))
    tl.store(out + 7 * SIDE + i, tl.softmax(tl.load(x + i)))
    tl.store(out + 8 * SIDE + i, tl.cumprod(tl.load(x + i), 0))
    tl.store(ints + i, tl.argmax(tile, 1))
    value, index = tl.max(tile, 1, return_indices=True)
    tl.store(ints + SIDE + i, tl.argmin(tile, axis=1) * 100 + index)
    pair = tl.reduce((tile, tl.broadcast_to(i[None, :], (SIDE, SIDE))), 1, larger)
    tl.store(ints + 2 * SIDE + i, pair[1])
    tl.store(ints + 3 * SIDE + i, tl.histogram(whole, SIDE))
    tl.store(ints + 4 * SIDE, tl.xor_sum(whole))
    tl.store(ints + 4 * SIDE + 1, tl.sum(whole.to(tl.int8)))
    tl.store(ints + 4 * SIDE + 2, tl.reduce_or(whole, 0))
    tl.store(ints + 4 * SIDE + 4 + tl.arange(0, 4), tl.topk(whole, 4))


def test_reductions_scans_and_sorting():
    n = 16
    x = normal(n, n)
    k = torch.randint(0, n, (n,), generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    out, ints = torch.zeros(9, n), torch.zeros(5 * n, dtype=torch.int32)
    launch(reductions, (1,), x, k, out, ints, SIDE=n)
    close = torch.testing.assert_close
    assert torch.equal(out[0], x.max(1).values) and torch.equal(out[1], x.min(0).values)
    close(out[2], x.sum(0))
    close(out[3], x.prod(1))
    close(out[4], x[0].cumsum(0))
    close(out[5], x[0].flip(0).cumprod(0).flip(0))
    assert torch.equal(out[6], x[0].sort(descending=True).values)
    close(out[7], x[0].softmax(0))
    close(out[8], x[0].cumprod(0))
    ints = ints.view(5, n)
    assert torch.equal(ints[0], x.argmax(1).int()) and torch.equal(ints[2], x.argmax(1).int())
    assert torch.equal(ints[1], (x.argmin(1) * 100 + x.argmax(1)).int())
    assert torch.equal(ints[3], torch.bincount(k, minlength=n).int())
    assert ints[4, 0] == np.bitwise_xor.reduce(k.numpy()) and ints[4, 1] == k.sum()
    assert ints[4, 2] == np.bitwise_or.reduce(k.numpy())
    assert torch.equal(ints[4, 4:8], k.sort(descending=True).values[:4])


@triton.jit
def narrow_reductions(x, out, types, N: tl.constexpr):
    tile = tl.load(x + tl.arange(0, N))
    tl.store(out, tl.sum(tile, 0).to(tl.float32))
    tl.store(out + 1, tl.max(tile, 0).to(tl.float32))
    tl.store(types, tl.sum(tile, 0).dtype == tl.float32)
    tl.store(types + 1, tl.max(tile, 0).dtype == tl.float32)


@pytest.mark.parametrize("dtype, sum_is_wide", [(torch.bfloat16, True), (torch.float16, False)])
def test_narrow_types_are_widened_as_the_standard_library_does(dtype, sum_is_wide):
    x, out, types = normal(SIZE, dtype=dtype), torch.zeros(2), torch.zeros(2, dtype=torch.int32)
    launch(narrow_reductions, (1,), x, out, types, N=SIZE)
    assert types.tolist() == [int(sum_is_wide), 1]
    tolerance = 1e-5 if sum_is_wide else 2e-2
    assert abs(out[0] - x.double().sum()) < tolerance * SIZE**0.5 and out[1] == x.float().max()


# -- elementwise mathematics
@triton.jit
def elementwise(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    v = tl.load(x + i)
    p = tl.abs(v) + 0.5
    tl.store(out + 0 * N + i, tl.exp(v))
    tl.store(out + 1 * N + i, tl.exp2(v))
    tl.store(out + 2 * N + i, tl.log(p))
    tl.store(out + 3 * N + i, tl.log2(p))
    tl.store(out + 4 * N + i, tl.sqrt(p))
    tl.store(out + 5 * N + i, tl.rsqrt(p))
    tl.store(out + 6 * N + i, tl.sigmoid(v))
    tl.store(out + 7 * N + i, tl.erf(v))
    tl.store(out + 8 * N + i, tl.floor(v) + tl.ceil(v))
    tl.store(out + 9 * N + i, tl.fma(v, p, v))
    tl.store(out + 10 * N + i, tl.clamp(v, -0.5, 0.5))
    tl.store(out + 11 * N + i, tl.sin(v) * tl.cos(v))
    tl.store(out + 12 * N + i, libdevice.tanh(v))
    tl.store(out + 13 * N + i, libdevice.pow(p, v))
    tl.store(out + 14 * N + i, tl.where(v > 0, v, tl.maximum(v, -1.0)))
    tl.store(out + 15 * N + i, tl.math.div_rn(v, p) + tl.fdiv(v, p))


def test_elementwise_mathematics():
    x, out = normal(SIZE), torch.zeros(16, SIZE)
    launch(elementwise, (1,), x, out, N=SIZE)
    p = x.abs() + 0.5
    expected = [
        x.exp(),
        x.exp2(),
        p.log(),
        p.log2(),
        p.sqrt(),
        p.rsqrt(),
        x.sigmoid(),
        x.erf(),
        x.floor() + x.ceil(),
    ]
    expected += [(x.double() * p + x).float(), x.clamp(-0.5, 0.5), x.sin() * x.cos(), x.tanh(), p**x]
    expected += [torch.where(x > 0, x, x.clamp(min=-1)), 2 * x / p]
    for got, want in zip(out, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=3e-6, atol=1e-6)


@triton.jit
def nan_rules(x, out):
    v = tl.load(x + tl.arange(0, 2))
    tl.store(out + tl.arange(0, 2), tl.maximum(v, 1.0))
    tl.store(out + 2 + tl.arange(0, 2), tl.maximum(v, 1.0, propagate_nan=tl.PropagateNan.ALL))
    tl.store(out + 4, tl.max(v, 0))


def test_nan_is_ignored_by_maximum_unless_asked_for():
    out = torch.zeros(5)
    launch(nan_rules, (1,), torch.tensor([math.nan, 3.0]), out)
    assert out[[0, 1, 3, 4]].tolist() == [1, 3, 3, 3] and math.isnan(out[2])


@triton.jit
def needs_float32(x, out):
    tl.store(out, tl.exp(tl.load(x)))


def test_exp_of_a_narrow_float_is_refused_with_its_line():
    with pytest.raises(emulator.EmulationError), emulator.emulate() as e:
        needs_float32[(1,)](normal(4, dtype=torch.bfloat16), torch.zeros(4))
    finding = e.reports[0].errors()[0]
    assert finding.kind == "illegal kernel" and "exp" in finding.message and finding.line is not None


# -- scalars and control flow
@triton.jit
def scalars(out, n, m, LIMIT: tl.constexpr):
    total = 0
    for i in tl.range(0, n, 1, num_stages=3, flatten=True, warp_specialize=False, loop_unroll_factor=2):
        total += i * m
    for j in tl.static_range(LIMIT):
        total += j
    count = 0
    while count * count < n:
        count += 1
    tl.store(out, total)
    tl.store(out + 1, count)
    tl.store(out + 2, (-7) // m)
    tl.store(out + 3, (m - 10) // 3)
    tl.store(out + 4, (m - 10) % 3)
    tl.store(out + 5, tl.cdiv(n, m))
    tl.store(out + 6, min(n, m) + max(n, m))
    tl.store(out + 7, tl.where(n > m, n, m))
    tl.store(out + 8, (n << 20) * 4096)
    tl.store(out + 9, ((n.to(tl.int64) << 20) * 4096) >> 30)
    tl.assume(n > 0)
    tl.static_assert(LIMIT > 1, "LIMIT")
    tl.device_assert(n > 0, "n")
    a, b = tl.swizzle2d(1, 2, 4, 4, 2)
    tl.store(out + 10, a * 10 + b)
    if n > 5 and not m > 100:
        tl.store(out + 11, 1)


def test_scalars_wrap_truncate_and_loop():
    out = torch.zeros(12, dtype=torch.int32)
    launch(scalars, (1,), out, 9, 4, LIMIT=3)
    # 36 * 4 + 3; -7 // 4 truncates; -6 // 3 and -6 % 3; 9 << 32 wraps to 0 in int32
    assert out.tolist() == [147, 3, -1, -2, 0, 3, 13, 9, 0, 36, 3, 1]


@triton.jit
def broken_promise(out, n):
    tl.assume(n > 100)
    tl.store(out, n)


def test_a_broken_assumption_is_a_finding():
    with emulator.emulate() as e:
        broken_promise[(1,)](torch.zeros(1, dtype=torch.int32), 9)
    assert [f.kind for f in e.errors()] == ["broken assumption"]


@triton.jit
def divisions(out, n):
    tl.store(out, 7 // n)
    tl.store(out + 1, 7 % n)
    tl.store(out + 2 + tl.arange(0, 2), tl.arange(0, 2) // (tl.arange(0, 2) * n))


def test_a_division_by_zero_gives_what_the_gpu_gives_and_a_warning():
    out = torch.zeros(4, dtype=torch.int32)
    report = launch(divisions, (1,), out, 0)
    assert out.tolist() == [-1, 7, -1, -1]
    assert [f.kind for f in report.warnings()] == ["division by zero"] * 2


@triton.jit
def branchy(a, b):
    if a > b:
        return a - b
    else:
        return a * 0.0 + 100.0


@triton.jit
def mapped(x, y, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.map_elementwise(branchy, tl.load(x + i), tl.load(y + i)))


def test_scalar_functions_with_branches_map_over_blocks():
    x, y, out = normal(16), normal(16, seed=1), torch.zeros(16)
    launch(mapped, (1,), x, y, out, N=16)
    assert torch.equal(out, torch.where(x > y, x - y, torch.tensor(100.0)))


# -- matrix products
@triton.jit
def products(a, b, c, out, PRECISION: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    i, j, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    x = tl.load(a + i[:, None] * K + k[None, :])
    y = tl.load(b + k[:, None] * N + j[None, :])
    acc = tl.load(c + i[:, None] * N + j[None, :])
    tl.store(out + i[:, None] * N + j[None, :], tl.dot(x, y, acc, input_precision=PRECISION))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dot_of_narrow_types_accumulates_in_float32(dtype):
    a, b, c = normal(32, 64, dtype=dtype), normal(64, 16, seed=1, dtype=dtype), normal(32, 16, seed=2)
    out = torch.zeros(32, 16)
    launch(products, (1,), a, b, c, out, PRECISION=None, M=32, N=16, K=64)
    torch.testing.assert_close(out, (a.double() @ b.double() + c).float(), rtol=1e-5, atol=1e-5)


def test_dot_precisions_of_float32():
    a, b, c = normal(32, 64), normal(64, 16, seed=1), torch.zeros(32, 16)
    exact = a.double() @ b.double()
    error = {}
    for precision in (None, "tf32", "tf32x3", "ieee"):
        out = torch.zeros(32, 16)
        launch(products, (1,), a, b, c, out, PRECISION=precision, M=32, N=16, K=64)
        error[precision] = (out.double() - exact).abs().max().item()
    assert error[None] == error["tf32"] and 1e-3 < error["tf32"] < 3e-2
    assert error["ieee"] < 1e-5 and error["tf32x3"] < 3e-5
    cut = [(t.view(torch.int32) & ~0x1FFF).view(torch.float32).double() for t in (a, b)]
    assert error["tf32"] == pytest.approx((cut[0] @ cut[1] - exact).abs().max().item(), abs=1e-5)


def test_a_dot_too_small_for_the_tensor_core_is_refused():
    a, b, c = normal(16, 8), normal(8, 16), torch.zeros(16, 16)
    with pytest.raises(emulator.EmulationError, match="at least 16"), emulator.emulate():
        products[(1,)](a, b, c, torch.zeros(16, 16), PRECISION=None, M=16, N=16, K=8)


@triton.jit
def scaled_product(
    a, a_scale, b, b_scale, out, FORMAT: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr
):
    PACK: tl.constexpr = 2 if FORMAT == "e2m1" else 1
    i, j, k, s = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K // PACK), tl.arange(0, K // 32)
    x = tl.load(a + i[:, None] * (K // PACK) + k[None, :])
    y = tl.load(b + j[None, :] * (K // PACK) + k[:, None])
    p = tl.load(a_scale + i[:, None] * (K // 32) + s[None, :])
    q = tl.load(b_scale + j[:, None] * (K // 32) + s[None, :])
    tl.store(out + i[:, None] * N + j[None, :], tl.dot_scaled(x, p, FORMAT, y, q, FORMAT))


FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2", "e2m1"])
def test_scaled_products(fmt):
    m, n, k = 16, 8, 64
    generator = torch.Generator().manual_seed(0)
    p, q = (torch.randint(120, 131, (r, k // 32), generator=generator, dtype=torch.uint8) for r in (m, n))
    if fmt == "e2m1":
        a, b = (torch.randint(0, 256, (r, k // 2), generator=generator, dtype=torch.uint8) for r in (m, n))
        x, y = (torch.stack([FP4[(t & 15).long()], FP4[(t >> 4).long()]], -1).flatten(1) for t in (a, b))
    else:
        kind = torch.float8_e4m3fn if fmt == "e4m3" else torch.float8_e5m2
        a, b = normal(m, k).to(kind), normal(n, k, seed=1).to(kind)
        x, y = a.float(), b.float()
    out = torch.zeros(m, n)
    launch(scaled_product, (1,), a, p, b, q, out, FORMAT=fmt, M=m, N=n, K=k)
    x, y = (t * torch.exp2(s.float() - 127).repeat_interleave(32, 1) for t, s in ((x, p), (y, q)))
    torch.testing.assert_close(out, x @ y.T)


# -- random numbers
@triton.jit
def random_numbers(bits, uniform, gaussian, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(bits + i, tl.randint(7, i))
    tl.store(uniform + i, tl.rand(7, i))
    tl.store(gaussian + i, tl.randn(7, i))


def philox_word(seed, counter):
    """First word of Philox 4x32-10 in plain integers."""
    c, key = [counter, 0, 0, 0], [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ key[0], b & 0xFFFFFFFF, (a >> 32) ^ c[3] ^ key[1], a & 0xFFFFFFFF]
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c[0]


def test_random_numbers_are_philox():
    n = 1024
    bits, uniform, gaussian = torch.zeros(n, dtype=torch.int32), torch.zeros(n), torch.zeros(n)
    launch(random_numbers, (1,), bits, uniform, gaussian, N=n)
    words = [philox_word(7, i) for i in range(n)]
    assert [b % 2**32 for b in bits.tolist()] == words
    assert (uniform >= 0).all() and (uniform < 1).all() and abs(uniform.mean() - 0.5) < 0.03
    assert abs(gaussian.mean()) < 0.1 and abs(gaussian.std() - 1) < 0.1


# -- a plain kernel as people write them: autotuned, pointer based jagged attention
@triton.autotune([triton.Config({"BLOCK_N": n}, num_warps=4) for n in (16, 32)], key=["D"])
@triton.heuristics({"EVEN": lambda args: args["M"] % args["BLOCK_M"] == 0})
@triton.jit
def jagged_attention(
    q,
    k,
    v,
    offsets,
    out,
    scale,
    M,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EVEN: tl.constexpr,
):
    start = tl.load(offsets + tl.program_id(1))
    end = tl.load(offsets + tl.program_id(1) + 1)
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.arange(0, D)
    keep = rows[:, None] < M
    query = tl.load(q + rows[:, None] * D + columns[None, :], mask=keep, other=0.0)
    maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, D], tl.float32)
    for first in tl.range(start, end, BLOCK_N):
        keys = first + tl.arange(0, BLOCK_N)
        there = keys < end
        key = tl.load(k + keys[None, :] * D + columns[:, None], mask=there[None, :], other=0.0)
        scores = tl.where(there[None, :], tl.dot(query, key) * (scale * 1.4426950408889634), float("-inf"))
        larger = tl.maximum(maximum, tl.max(scores, 1))
        p = tl.math.exp2(scores - larger[:, None])
        shrink = tl.math.exp2(maximum - larger)
        value = tl.load(v + keys[:, None] * D + columns[None, :], mask=there[:, None], other=0.0)
        acc = tl.dot(p.to(value.dtype), value, acc * shrink[:, None])
        total = total * shrink + tl.sum(p, 1)
        maximum = larger
    acc = tl.where(total[:, None] > 0, acc / total[:, None], 0.0)
    place = out + (tl.program_id(1) * M + rows[:, None]) * D + columns[None, :]
    if EVEN:
        tl.store(place, acc.to(out.dtype.element_ty))
    else:
        tl.store(place, acc.to(out.dtype.element_ty), mask=keep)


@pytest.mark.parametrize("pick", [0, 1])
def test_an_autotuned_plain_kernel_runs(pick):
    lengths, m, d = [33, 0, 1, 50], 20, 32
    offsets = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    q, k, v = (
        normal(n, d, seed=s, dtype=torch.bfloat16) for s, n in ((0, m), (1, sum(lengths)), (2, sum(lengths)))
    )
    out = torch.zeros(4, m, d, dtype=torch.bfloat16)
    with emulator.emulate(pick=lambda configs: configs[pick]) as e:
        jagged_attention[lambda meta: (triton.cdiv(m, meta["BLOCK_M"]), 4)](
            q, k, v, offsets, out, 0.2, m, D=d, BLOCK_M=16
        )
    assert not e.errors()
    for b, length in enumerate(lengths):
        rows = slice(offsets[b], offsets[b] + length)
        p = (q.float() @ k[rows].float().T * 0.2).softmax(-1)
        expected = p @ v[rows].float() if length else torch.zeros(m, d)
        torch.testing.assert_close(out[b].float(), expected, rtol=2e-2, atol=2e-2)


@triton.jit
def changes_its_type(out, n, SHAPE: tl.constexpr, WHILE: tl.constexpr, STATIC: tl.constexpr):
    at = tl.arange(0, 32)
    total = tl.zeros([32], tl.float16)
    i = 0
    for _ in range(n):
        own = tl.arange(0, 16)  # unknown behind the loop, though Python remembers it
    for _ in range(n):
        own = tl.arange(0, 32)
        total += (own * 0).to(tl.float16)
    if STATIC:
        for k in tl.static_range(2):
            at = tl.arange(0, 16 * (k + 1))
    elif WHILE:
        while i < n:
            if SHAPE:
                at = i + tl.arange(0, 16)
            else:
                total += tl.full([32], 1.0, tl.float32)
            i += 1
    else:
        for k in range(n):
            if SHAPE:
                at = k + tl.arange(0, 16)  # noqa: F841
            else:
                total += tl.full([32], 1.0, tl.float32)
            i += 1
    tl.store(out + tl.arange(0, 32), total.to(tl.float32))


@pytest.mark.parametrize("loop", [False, True], ids=["for", "while"])
def test_a_loop_carries_one_type(loop):
    """The compiler refuses both; here as well, at the loop's line. Unrolled, a name may change."""
    out = torch.zeros(32)
    words = {
        True: r"at is int32 of shape \[32\] before a loop and int32 of shape \[16\] after its first turn",
        False: r"total is fp16 of shape \[32\] before a loop and fp32",
    }
    for shape, message in words.items():
        with emulator.emulate(), pytest.raises(TypeError, match=message):
            changes_its_type[(1,)](out, 3, SHAPE=shape, WHILE=loop, STATIC=False)
        constants = {"SHAPE": shape, "WHILE": loop, "STATIC": False}
        with pytest.raises(CompileError):
            compile_report(changes_its_type, {"out": "*fp32", "n": "i32"}, constants, "sm_90")
    with emulator.emulate() as emulation:
        changes_its_type[(1,)](out, 3, SHAPE=True, WHILE=loop, STATIC=True)
        changes_its_type[(1,)](out, 0, SHAPE=True, WHILE=loop, STATIC=False)
    assert emulation.errors() == []
