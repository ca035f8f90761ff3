"""Inline PTX: arithmetic against numpy, memory order reaches the machine, the unknown is a finding."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

import jfa.emulator as emulator
from jfa.emulator import dtypes as D
from jfa.emulator import ptx, ptx_order
from jfa.emulator import tl_ops as emulated
from jfa.emulator.context import CTX, UnknownConstruct
from jfa.emulator.tile import Tensor

F32 = np.random.default_rng(0).standard_normal((3, 64)).astype(np.float32)


def run(asm, constraints, *arrays, out=np.float32, pack=1):
    outs = list(out) if isinstance(out, tuple) else [out]
    result = ptx.run(asm, constraints, list(arrays), outs, arrays[0].shape, pack)
    return tuple(result) if isinstance(out, tuple) else result[0]


PACKED = """
{
    .reg .b64 ra, rb, rc, rd;
    mov.b64 ra, { $2, $3 };
    mov.b64 rb, { $4, $5 };
    mov.b64 rc, { $6, $7 };
    OP;
    mov.b64 { $0, $1 }, rd;
}
"""


@pytest.mark.parametrize(
    "op, expected",
    [
        ("add.f32x2 rd, ra, rb", lambda a, b, c: a + b),
        ("sub.f32x2 rd, ra, rb", lambda a, b, c: a - b),
        ("mul.f32x2 rd, ra, rb", lambda a, b, c: a * b),
        ("fma.rn.f32x2 rd, ra, rb, rc", lambda a, b, c: (a.astype(np.float64) * b + c).astype(np.float32)),
    ],
)
def test_pairs_of_floats(op, expected):
    got = run(PACKED.replace("OP", op), "=r,=r,r,r,r,r,r,r", *F32, pack=2)
    assert np.array_equal(got, expected(*F32))


@pytest.mark.parametrize(
    "asm, expected",
    [
        ("ex2.approx.ftz.f32 $0, $1;", np.exp2),
        ("lg2.approx.f32 $0, $1;", np.log2),
        ("tanh.approx.f32 $0, $1;", np.tanh),
        ("rcp.approx.f32 $0, $1;", lambda v: 1 / v),
        ("neg.f32 $0, $1;", lambda v: -v),
        ("abs.f32 $0, $1;", np.abs),
        ("add.rm.ftz.f32 $0, $1, 0f3F800000;", None),
        ("cvt.rmi.f32.f32 $0, $1;", np.floor),
        ("mul.sat.f32 $0, $1, 0f40000000;", lambda v: np.clip(v * 2, 0, 1)),
    ],
)
def test_floats(asm, expected):
    x = np.abs(F32[0]) if "lg2" in asm else F32[0]
    got = run(asm, "=f,f", x)
    if expected is None:  # rounded down: the largest float32 not above the exact sum
        exact = x.astype(np.float64) + 1
        assert (got <= exact).all() and (np.nextafter(got, np.float32(np.inf)) > exact).all()
    else:
        assert np.array_equal(got, expected(x))


def test_fma_rounds_once():
    """The product lies halfway between two float32 values; what is added decides, however small it is."""
    a = np.array([1 + 2.0**-12], np.float32)
    for sign, expected in ((1, 1 + 2.0**-11 + 2.0**-23), (-1, 1 + 2.0**-11)):
        tiny = np.array([sign * 2.0**-54], np.float32)
        assert float(run("fma.rn.f32 $0, $1, $1, $2;", "=f,f,f", a, tiny)[0]) == expected


def test_packs_of_narrow_floats():
    x = (F32[0] * 200).astype(np.float32)
    fp8 = (
        "{ .reg .b16 lo, hi; cvt.rn.satfinite.e4m3x2.f32 lo, $2, $1; cvt.rn.satfinite.e4m3x2.f32 hi, $4, $3; "
    )
    fp8 += "mov.b32 $0, {lo, hi}; }"
    got = run(fp8, "=r,f,f,f,f", x, out=D.float8e4nv.store, pack=4)
    clipped = torch.from_numpy(np.clip(x, -448, 448)).to(torch.float8_e4m3fn).float().numpy()
    assert np.array_equal(got.astype(np.float32), clipped)
    for name, dtype, reference in (
        ("bf16x2", D.bfloat16, torch.bfloat16),
        ("f16x2", D.float16, torch.float16),
    ):
        got = run(f"cvt.rn.{name}.f32 $0, $2, $1;", "=r,f,f", x, out=dtype.store, pack=2)
        assert np.array_equal(got.astype(np.float32), torch.from_numpy(x).to(reference).float().numpy())


def test_power_of_two_scales():
    x = np.array([1.0, 1.5, 2.0, 0.75, 2.0**-127, 0.0], np.float32)
    asm = "{ .reg .b16 p; cvt.rp.satfinite.ue8m0x2.f32 p, 0f00000000, $1; cvt.u32.u16 $0, p; "
    asm += "and.b32 $0, $0, 0xFF; }"
    assert run(asm, "=r,f", x, out=np.uint32).tolist() == [127, 128, 128, 127, 0, 0]


def test_integers():
    rng = np.random.default_rng(1)
    a = rng.integers(0, 2**32, 64, dtype=np.uint32)
    b = rng.integers(1, 2**32, 64, dtype=np.uint32)
    signed = a.view(np.int32)

    def word(asm, *arrays):
        return run(asm, "=r" + ",r" * len(arrays), *arrays, out=np.uint32)

    assert np.array_equal(word("add.u32 $0, $1, $2;", a, b), a + b)
    assert np.array_equal(word("mul.lo.u32 $0, $1, $2;", a, b), a * b)
    assert np.array_equal(
        word("mul.hi.u32 $0, $1, $2;", a, b), (a.astype(np.uint64) * b >> np.uint64(32)).astype(np.uint32)
    )
    assert np.array_equal(word("shr.s32 $0, $1, 40;", a).view(np.int32), signed >> 31)
    assert np.array_equal(word("shl.b32 $0, $1, 32;", a), np.zeros_like(a))
    assert np.array_equal(
        word("min.s32 $0, $1, $2;", a, b).view(np.int32), np.minimum(signed, b.view(np.int32))
    )
    assert np.array_equal(
        word("lop3.b32 $0, $1, $2, 0xFF00FF00, 0xf8;", a, b), a | (b & np.uint32(0xFF00FF00))
    )
    assert np.array_equal(word("bfe.u32 $0, $1, 4, 8;", a), (a >> np.uint32(4)) & np.uint32(255))
    assert np.array_equal(word("popc.b32 $0, $1;", a), np.array([int(v).bit_count() for v in a], np.uint32))
    assert np.array_equal(
        word("clz.b32 $0, $1;", a), np.array([32 - int(v).bit_length() for v in a], np.uint32)
    )
    assert np.array_equal(word("prmt.b32 $0, $1, $2, 0x0123;", a, b), a.byteswap())
    asm = "{ .reg .pred p; setp.lt.s32 p, $1, 0; selp.b32 $0, 1, 2, p; @p add.u32 $0, $0, 10; }"
    assert np.array_equal(word(asm, a), np.where(signed < 0, 11, 2).astype(np.uint32))


def test_warp_votes_over_32_lanes():
    x = np.arange(64, dtype=np.uint32)
    asm = "{ .reg .pred p; setp.ge.u32 p, $1, 40; vote.sync.ballot.b32 $0, p, 0xFFFFFFFF; }"
    got = run(asm, "=r,r", x, out=np.uint32)
    assert (got[:32] == 0).all() and (got[32:] == (2**32 - 2**8)).all()
    any_ = (
        "{ .reg .pred p; setp.eq.u32 p, $1, 7; vote.sync.any.pred p, p, 0xFFFFFFFF; selp.b32 $0, 1, 0, p; }"
    )
    assert run(any_, "=r,r", x, out=np.uint32).tolist() == [1] * 32 + [0] * 32


def test_the_lanes_of_a_block_are_its_rows():
    """A thread holds a row after a load from tensor memory, so a warp reduces 32 rows, column by column."""
    block = np.random.default_rng(1).standard_normal((64, 4)).astype(np.float32)
    asm = "redux.sync.max.f32 $0, $1, 0xFFFFFFFF;"
    got = emulated.inline_asm_elementwise(asm, "=f,f", [Tensor(block, D.float32)], D.float32, True, 1)
    expected = block.reshape(2, 32, 4).max(1, keepdims=True).repeat(32, 1).reshape(64, 4)
    assert np.array_equal(got.d, expected)


def test_bytes_are_permuted():
    asm = "{ .reg .b32 a<2>; prmt.b32 a0, 0, $2, 0x5746; and.b32 $0, a0, 0x7f007f00; shr.b32 $1, a0, 1; }"
    x = np.array([0x04030201], np.uint32)
    first, second = ptx.run(asm, "=r,=r,r", [x], [np.uint32, np.uint32], (1,), 1)
    permuted = 0x02040103
    assert first.tolist() == [permuted & 0x7F007F00] and second.tolist() == [permuted >> 1]


ORDER = [
    ("cp.async.bulk.wait_group 0;", ("bulk_wait", 0, False)),
    ("cp.async.bulk.wait_group.read 2;", ("bulk_wait", 2, True)),
    ("cp.async.bulk.commit_group;", ("bulk_commit",)),
    ("cp.async.wait_group 1;", ("cp_async_wait", 1)),
    ("cp.async.commit_group;", ("cp_async_commit",)),
    ("fence.acq_rel.gpu;", ("fence", "gpu")),
    ("fence.acq_rel.cluster;", ("fence", "cluster")),
    ("fence.sc.sys;", ("fence", "sys")),
    ("membar.gl;", ("fence", "gpu")),
    ("membar.cta;", ("fence", "cta")),
    ("fence.proxy.async;", ("proxy_fence", "all")),
    ("fence.proxy.async.shared::cta;", ("proxy_fence", "shared::cta")),
    ("fence.proxy.async.global;", ("proxy_fence", "global")),
]


@pytest.mark.parametrize("text, call", ORDER, ids=[t for t, _ in ORDER])
def test_ordering_instructions_reach_the_machine(text, call, monkeypatch):
    calls = []
    monkeypatch.setattr(type(CTX), "ordering", lambda self, *args: calls.append(args))
    zero = Tensor(np.int32(0), D.int32)
    out = emulated.inline_asm_elementwise(
        text + " mov.b32 $0, $1;", "=r,r", [zero], dtype=D.int32, is_pure=False, pack=1
    )
    assert calls == [call]
    assert out.shape == () and int(out) == 0


@pytest.mark.parametrize(
    "text", ["fence.proxy.nothing;", "cp.async.bulk.wait_group %r1;", "fence.acq_rel.moon;"]
)
def test_ordering_instructions_that_do_not_exist_are_refused(text):
    with pytest.raises(UnknownConstruct):
        ptx_order.execute(ptx.parse(text)[0])


@triton.jit
def strange_kernel(out):
    tl.store(out, 1)
    value = tl.inline_asm_elementwise(
        "frobnicate.f32 $0, $1;",
        "=f,f",
        [tl.full([4], 1.0, tl.float32)],
        dtype=tl.float32,
        is_pure=True,
        pack=1,
    )
    tl.store(out + tl.arange(0, 4), value)


def test_an_unknown_instruction_is_a_finding_with_its_line():
    out = torch.zeros(4)
    with pytest.raises(emulator.EmulationError) as caught, emulator.emulate() as e:
        strange_kernel[(1,)](out)
    finding = e.reports[0].errors()[0]
    first = strange_kernel.fn.__code__.co_firstlineno
    assert "frobnicate.f32" in finding.message and "frobnicate.f32" in str(caught.value)
    assert first < finding.line <= first + 5


@triton.jit
def pure_order_kernel(out):
    zero = tl.program_id(0) * 0
    zero = tl.inline_asm_elementwise(
        "cp.async.bulk.wait_group.read 0; mov.b32 $0, $1;",
        "=r,r",
        [zero],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
    zero = tl.inline_asm_elementwise(
        "fence.acq_rel.gpu; mov.b32 $0, $1;", "=r,r", [zero], dtype=tl.int32, is_pure=False, pack=1
    )
    tl.store(out, zero + 5)


def test_scalars_pass_through_ordering_instructions_in_a_kernel():
    out = torch.zeros(1, dtype=torch.int32)
    with emulator.emulate() as e:
        pure_order_kernel[(1,)](out)
    assert out.item() == 5 and not e.errors()
