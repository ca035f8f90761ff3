"""Compile reports: right numbers, every silent trap named, nothing of the process disturbed."""

import pytest
import torch

triton = pytest.importorskip("triton")
pytest.importorskip("triton.language.extra.tlx", reason="needs fbtriton (Linux only)")

import triton.language as tl  # noqa: E402
import triton.language.extra.tlx as tlx  # noqa: E402
from triton.runtime import driver  # noqa: E402
from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: E402

from jfa.lab import offline, toolchain  # noqa: E402
from jfa.lab.report import (  # noqa: E402
    CompileError,
    Report,
    ToolMissing,
    capture_launches,
    compare,
    compile_report,
    make_signature,
)


def needs(*tools):
    missing = [tool for tool in tools if toolchain.locate(tool) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed here: {', '.join(missing)}")


full_toolchain = needs("ptxas", "ptxas-blackwell", "nvdisasm")


@triton.jit
def double(x):
    return x * 2


@triton.jit
def triple(x):
    return x * 3


@triton.aggregate
class Slots:
    tiles: tlx.buffered_tensor
    fulls: tlx.mbarrier

    @triton.constexpr_function
    def __init__(self, tiles, fulls):
        self.tiles = tiles
        self.fulls = fulls

    @triton.jit
    def fill(self, i, desc, row, BYTES: tl.constexpr):
        tlx.barrier_expect_bytes(self.fulls[i], BYTES)
        tlx.async_descriptor_load(desc, self.tiles[i], [row, 0], self.fulls[i])


@triton.jit
def scale_kernel(x, out, n, ROLE: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, ROLE(tl.load(x + at, at < n)), at < n)


@triton.jit
def wide_dot(a_desc, b_desc, out, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, COUNT: tl.constexpr):
    """COUNT accumulators of BM by BN in tensor memory, one MMA each; BN * COUNT columns in all."""
    slots = Slots(tlx.local_alloc((BM, BK), tl.bfloat16, 2), tlx.alloc_barriers(2))
    done = tlx.alloc_barriers(1)
    acc = tlx.local_alloc((BM, BN), tl.float32, COUNT, tlx.storage_kind.tmem)
    slots.fill(0, a_desc, 0, BM * BK * 2)
    slots.fill(1, b_desc, 0, BN * BK * 2)
    tlx.barrier_wait(slots.fulls[0], 0)
    tlx.barrier_wait(slots.fulls[1], 0)
    for i in tl.static_range(COUNT):
        tlx.async_dot(
            slots.tiles[0], tlx.local_trans(slots.tiles[1]), acc[i], use_acc=False, mBarriers=[done[0]]
        )
        tlx.barrier_wait(done[0], i % 2)
    rows = tl.arange(0, BM)[:, None] * BN + tl.arange(0, BN)[None, :]
    for i in tl.static_range(COUNT):
        tl.store(out + i * BM * BN + rows, tlx.local_load(acc[i]))


@triton.jit
def pair_dot(a_desc, b_desc, out, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    slots = Slots(tlx.local_alloc((BM, BK), tl.bfloat16, 2), tlx.alloc_barriers(2))
    done = tlx.alloc_barriers(1)
    acc = tlx.local_alloc((BM, BN), tl.float32, 1, tlx.storage_kind.tmem)
    slots.fill(0, a_desc, 0, BM * BK * 2)
    slots.fill(1, b_desc, 0, BN * BK)
    b = tlx.local_slice(slots.tiles[1], [0, 0], [BN // 2, BK])
    tlx.async_dot(
        slots.tiles[0], tlx.local_trans(b), acc[0], use_acc=False, mBarriers=[done[0]], two_ctas=True
    )
    tlx.barrier_wait(done[0], 0)
    rows = tl.arange(0, BM)[:, None] * BN + tl.arange(0, BN)[None, :]
    tl.store(out + rows, tlx.local_load(acc[0]))


@triton.jit
def hopper_dot(a_desc, out, USE_ACC: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr):
    slots = Slots(tlx.local_alloc((BM, BK), tl.bfloat16, 1), tlx.alloc_barriers(1))
    slots.fill(0, a_desc, 0, BM * BK * 2)
    tlx.barrier_wait(slots.fulls[0], 0)
    acc = tl.zeros((BM, BM), tl.float32)
    if USE_ACC is None:
        acc = tlx.async_dot(slots.tiles[0], tlx.local_trans(slots.tiles[0]), acc)
    else:
        acc = tlx.async_dot(slots.tiles[0], tlx.local_trans(slots.tiles[0]), acc, use_acc=USE_ACC)
    acc = tlx.async_dot_wait(0, acc)
    tl.store(out + tl.arange(0, BM)[:, None] * BM + tl.arange(0, BM)[None, :], acc)


@triton.jit
def tasks(out, n, REGISTERS: tl.constexpr, REPLICATE: tl.constexpr):
    bars = tlx.alloc_barriers(1)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            tlx.barrier_arrive(bars[0])
        with tlx.async_task(num_warps=4, registers=REGISTERS, replicate=REPLICATE):
            me: tl.constexpr = tlx.async_task_replica_id()
            tlx.barrier_wait(bars[0], 0)
            at = me * 128 + tl.arange(0, 128)
            tl.store(out + at, at, at < n)


@triton.jit
def spilling(x, out, SIZE: tl.constexpr):
    row = tl.arange(0, SIZE)
    value = tl.load(x + row[:, None] * SIZE + row[None, :])
    total = tl.zeros((SIZE, SIZE), tl.float32)
    for i in range(4):
        total += value * tl.sum(value, 0)[None, :] + i
        value += tl.cumsum(total, 1)
    tl.store(out + row[:, None] * SIZE + row[None, :], total + value)


SCALE = ({"x": "*fp32", "out": "*fp32", "n": "i32"}, {"ROLE": double, "BLOCK": 256})
TILE = "tensordesc<bf16[128,64]>"
DOT = {"a_desc": TILE, "b_desc": TILE, "out": "*fp32"}


@full_toolchain
@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
def test_plain_kernel_is_sound_on_both_targets(arch):
    report = compile_report(scale_kernel, *SCALE, arch).check()
    assert (report.kernel, report.arch, report.warps) == ("scale_kernel", arch, 4)
    assert 8 <= report.registers <= 64
    assert report.opcodes["LDG"] and report.opcodes["STG"] and not report.opcodes["HGMMA"]
    assert report.instructions == sum(report.opcodes.values()) > 16
    assert "EXIT" in report.text("sass") and ".visible .entry scale_kernel" in report.text("ptx")


@full_toolchain
def test_tensor_memory_and_its_limit():
    sound = compile_report(wide_dot, DOT, {"BM": 128, "BN": 128, "BK": 64, "COUNT": 2}, "sm_100")
    assert sound.problems() == []
    assert sound.tmem_columns == 256 and sound.opcodes["UTCMMA"] == 8 and sound.opcodes["UTMALDG"] == 2
    large = compile_report(wide_dot, DOT, {"BM": 128, "BN": 128, "BK": 64, "COUNT": 5}, "sm_100")
    assert any("tensor-memory columns" in text for text in large.problems())
    assert large.instructions < 32 < sound.instructions
    with pytest.raises(AssertionError, match="stub"):
        large.check()


@full_toolchain
def test_shared_memory_limit():
    @triton.jit
    def hoard(desc, out, COUNT: tl.constexpr):
        slots = Slots(tlx.local_alloc((128, 64), tl.bfloat16, COUNT), tlx.alloc_barriers(COUNT))
        for i in tl.static_range(COUNT):
            slots.fill(i, desc, 0, 128 * 64 * 2)
            tlx.barrier_wait(slots.fulls[i], 0)
            tl.store(
                out + i + tl.arange(0, 64)[None, :] + tl.arange(0, 128)[:, None],
                tlx.local_load(slots.tiles[i]),
            )

    fits, spoils = (
        compile_report(hoard, {"desc": TILE, "out": "*bf16"}, {"COUNT": count}, "sm_90") for count in (2, 16)
    )
    assert not any("shared" in text for text in fits.problems())
    assert spoils.shared_bytes > 232448 and any("cannot launch" in text for text in spoils.problems())


@full_toolchain
def test_registers_that_are_dropped_without_a_word():
    signature = {"out": "*i32", "n": "i32"}
    granted = compile_report(tasks, signature, {"REGISTERS": 160, "REPLICATE": 2}, "sm_90")
    assert granted.problems() == []
    assert granted.requested_registers == (160, 160) and ("inc", 160) in granted.setmaxnreg
    dropped = compile_report(tasks, signature, {"REGISTERS": 232, "REPLICATE": 3}, "sm_90")
    assert dropped.setmaxnreg == () and any("got none" in text for text in dropped.problems())


@full_toolchain
def test_two_cta_mma_needs_a_cluster():
    constants = {"BM": 128, "BN": 128, "BK": 64}
    alone = compile_report(pair_dot, DOT, constants, "sm_100")
    assert alone.opcodes["UTCMMA_2CTA"] and any("without a cluster" in text for text in alone.problems())
    paired = compile_report(pair_dot, DOT, constants, "sm_100", ctas_per_cga=(2, 1, 1))
    assert paired.cluster == (2, 1, 1) and paired.problems() == []


@full_toolchain
def test_arguments_that_hopper_drops():
    signature = {"a_desc": TILE, "out": "*fp32"}
    shape = {"BM": 128, "BK": 64}
    assert compile_report(hopper_dot, signature, {"USE_ACC": None, **shape}, "sm_90").check().opcodes["HGMMA"]
    wrong = compile_report(hopper_dot, signature, {"USE_ACC": False, **shape}, "sm_90")
    assert any("ignores use_acc" in text for text in wrong.problems())
    assert tlx.async_dot.__module__ == "triton.language.extra.tlx.mma_ops" and "watched" not in repr(
        tlx.async_dot
    )


@full_toolchain
def test_spills_are_true_bytes_and_can_be_allowed():
    report = compile_report(spilling, {"x": "*fp32", "out": "*fp32"}, {"SIZE": 64}, "sm_90", maxnreg=32)
    assert report.spill_store_bytes > 0 and report.opcodes["STL"] > 0
    assert any("spills" in text for text in report.problems())
    assert report.check(allow_spills=True) is report


def test_serialization_notes_and_counts_of_a_log():
    log = (
        "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized\n"
        "ptxas info    : Function properties for k\n    56 bytes stack frame, 40 bytes spill stores, "
        "44 bytes spill loads\nptxas info    : Used 168 registers, used 3 barriers, 56 bytes cumulative stack"
    )
    found = toolchain.parse_assembler_log(log)
    assert (found["registers"], found["barriers"], found["stack_bytes"]) == (168, 3, 56)
    assert (found["spill_store_bytes"], found["spill_load_bytes"]) == (40, 44)
    assert "C7510" in found["warnings"][0]


def sound_report(**changes):
    fields = dict(
        kernel="k", arch="sm_90", warps=4, shared_bytes=0, tmem_columns=0, cluster=(1, 1, 1),
        global_scratch_bytes=0, setmaxnreg=(), requested_registers=(), ptx_instructions=100, uses_cluster=(),
        layout_conversions=0, traps=(), seconds=0.0, registers=32, spill_store_bytes=0, spill_load_bytes=0,
        instructions=200, counts={"HGMMA.64x128x16": 4, "LDS.128": 2, "LDSM.16": 3},
    )  # fmt: skip
    return Report(**{**fields, **changes})


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"warnings": ("info (C7512) serialized",)}, "C7512"),
        ({"instructions": 16}, "stub"),
        ({"warps": 40}, "40 warps"),
        ({"registers": 255, "warps": 12}, "register file"),
        ({"uses_cluster": ("multicast",)}, "multicast without a cluster"),
        ({"spill_load_bytes": 4}, "spills"),
        ({"traps": ("dropped",)}, "dropped"),
        ({"missing": ("nvdisasm",)}, "not known: nvdisasm"),
    ],
)
def test_every_problem_stops_check(changes, words):
    sound_report().check()
    with pytest.raises(AssertionError, match=words):
        sound_report(**changes).check()


def test_tables_and_groups():
    report = sound_report()
    assert (report.opcodes["HGMMA"], report.opcodes["LDS"], report.opcodes["LDSM"]) == (4, 2, 3)
    assert report.opcodes["UTMALDG"] == 0
    table = compare({"first": report, "second": sound_report(warps=8)})
    assert [row["step"] for row in table.rows] == ["first", "second"]
    assert str(table).splitlines()[0].startswith("step") and "<table>" in table._repr_html_()
    assert "| registers | 32 |" in report.table() and "registers" in str(report)


@needs("ptxas")
def test_without_disassembler_the_report_says_so(monkeypatch, tmp_path):
    monkeypatch.setenv("JFA_CACHE", str(tmp_path))
    have = toolchain.locate
    monkeypatch.setattr(toolchain, "locate", lambda name: have(name) if name == "ptxas" else None)
    report = compile_report(scale_kernel, *SCALE, "sm_90")
    assert report.registers and report.counts is None and "nvdisasm" in report.missing[0]
    assert "?" in str(report) and report.problems() == []
    with pytest.raises(ToolMissing, match="nvdisasm"):
        report.opcodes["LDG"]
    with pytest.raises(AssertionError, match="not known"):
        report.check()
    with pytest.raises(ToolMissing, match="ptxas-blackwell"):
        compile_report(scale_kernel, *SCALE, "sm_100")


@needs("ptxas")
def test_cache_goes_by_content(monkeypatch, tmp_path):
    monkeypatch.setenv("JFA_CACHE", str(tmp_path))
    runs = []
    real = offline._compile
    monkeypatch.setattr(offline, "_compile", lambda *a: runs.append(a) or real(*a))
    types, constants = SCALE
    first = compile_report(scale_kernel, types, constants, "sm_90")
    assert compile_report(scale_kernel, types, constants, "sm_90") == first and len(runs) == 1
    compile_report(scale_kernel, types, {**constants, "ROLE": triple}, "sm_90")
    compile_report(scale_kernel, types, {**constants, "BLOCK": 512}, "sm_90")
    compile_report(scale_kernel, types, constants, "sm_90", num_warps=8)
    assert len(runs) == 4


@triton.jit
def helped(x):
    return helper(x)


@triton.jit
def helper(x):
    return x + 1


@needs("ptxas", "nvdisasm")
def test_a_helper_that_is_defined_anew_takes_effect(monkeypatch, tmp_path):
    monkeypatch.setenv("JFA_CACHE", str(tmp_path))
    constants = {"ROLE": helped, "BLOCK": 256}
    before = compile_report(scale_kernel, SCALE[0], constants, "sm_90")

    @triton.jit
    def helper(x):
        return tl.exp2(x)

    monkeypatch.setitem(helped.fn.__globals__, "helper", helper)
    after = compile_report(scale_kernel, SCALE[0], constants, "sm_90")
    assert after.opcodes["MUFU_EX2"] > 0 == before.opcodes["MUFU_EX2"]


@needs("ptxas")
def test_process_is_left_as_it_was(monkeypatch, tmp_path):
    monkeypatch.setenv("JFA_CACHE", str(tmp_path))

    class Other:
        pass

    before, cache = driver._active, triton.knobs.cache.dir
    mine = Other()
    try:
        driver.set_active(mine)
        compile_report(scale_kernel, *SCALE, "sm_90")
        assert driver.active is mine
        with pytest.raises(CompileError, match="sm_90"):
            compile_report(scale_kernel, {"x": "fp32", "out": "*fp32", "n": "i32"}, SCALE[1], "sm_90")
        assert driver.active is mine
        with capture_launches() as launches:
            scale_kernel[(1,)](*(torch.zeros(4),) * 2, 4, double, 256)
        assert driver.active is mine and len(launches) == 1
    finally:
        driver._active = before
    assert triton.knobs.cache.dir == cache and not triton.knobs.compilation.always_compile


def test_wrong_requests_are_named():
    with pytest.raises(ValueError, match="sm_80"):
        compile_report(scale_kernel, *SCALE, "sm_80")
    with pytest.raises(TypeError, match="missing arguments.*BLOCK"):
        compile_report(scale_kernel, SCALE[0], {"ROLE": double}, "sm_90")
    with pytest.raises(TypeError, match="num_wraps"):
        compile_report(scale_kernel, *SCALE, "sm_90", num_wraps=4)
    with pytest.raises(TypeError, match="jit"):
        compile_report(lambda: None, *SCALE, "sm_90")


@triton.autotune([triton.Config({"BLOCK": size}, num_warps=size // 64) for size in (128, 256)], key=["n"])
@triton.heuristics({"EVEN": lambda args: args["n"] % args["BLOCK"] == 0})
@triton.jit
def tuned(x, out, n, one, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at) + one, EVEN or at < n)


def test_capture_records_what_a_launch_would_compile():
    x = torch.zeros(512, dtype=torch.bfloat16)
    with capture_launches() as launches:
        tuned[lambda meta: (triton.cdiv(meta["n"], meta["BLOCK"]),)](x, x, 512, 1)
        desc = TensorDescriptor.from_tensor(torch.zeros(256, 64, dtype=torch.bfloat16), [128, 64])
        hopper_dot[(3, 2)](desc, x, USE_ACC=None, BM=128, BK=64, num_warps=8)
    first, second = launches
    assert first.name == "tuned" and first.grid == (4, 1, 1) and first.arguments["EVEN"]
    assert first.options["num_warps"] == 2 and first.arguments["BLOCK"] == 128
    assert second.grid == (3, 2, 1) and second.options == {"num_warps": 8}
    signature, constants = make_signature(hopper_dot, desc, x, None, 128, BK=64)
    assert signature == {"a_desc": "tensordesc<bf16[128, 64]>", "out": "*bf16"}
    assert constants == {"USE_ACC": None, "BM": 128, "BK": 64}
    assert make_signature(tuned, x, x, 512, 1)[1]["one"] == 1


@needs("ptxas")
def test_launch_arguments_compile_as_a_launch():
    x = torch.zeros(512)
    with capture_launches() as launches:
        scale_kernel[(2,)](x, x, 512, double, BLOCK=256, num_warps=2)
    report = launches[0].report("sm_90")
    assert report.warps == 2 and report.registers
    assert report == compile_report(scale_kernel, args=(x, x, 512, double, 256), num_warps=2, arch="sm_90")


def test_capture_wins_over_the_emulator():
    emulator = pytest.importorskip("jfa.emulator")
    x, out = torch.arange(4.0), torch.zeros(4)
    with capture_launches() as launches, emulator.emulate():
        scale_kernel[(1,)](x, out, 4, double, BLOCK=4)
        tuned[(1,)](x, out, 4, 1)
    assert [launch.name for launch in launches] == ["scale_kernel", "tuned"] and not out.any()
    with emulator.emulate():
        scale_kernel[(1,)](x, out, 4, double, BLOCK=4)
    assert out.tolist() == [0, 2, 4, 6]


def test_capture_ends_with_its_block():
    kind = triton.runtime.JITFunction
    before = kind.run, kind.__getitem__, "__getitem__" in vars(kind)
    with pytest.raises(KeyError):
        with capture_launches():
            raise KeyError
    assert (kind.run, kind.__getitem__, "__getitem__" in vars(kind)) == before


WIDTH = tl.constexpr(128)


@triton.jit
def _wide(x):
    i = tl.arange(0, WIDTH)
    tl.store(x + i, tl.load(x + i) + 1)


@triton.jit
def _widely(x):
    _wide(x)


@pytest.mark.parametrize("kernel", [_wide, _widely], ids=["own", "reached"])
def test_a_constant_bound_anew_gives_a_new_report(kernel, monkeypatch):
    def width():
        return compile_report(kernel, {"x": "*fp32"}, {}, "sm_90").text("ttir").count("128xf32")

    assert width() > 0
    monkeypatch.setitem(globals(), "WIDTH", tl.constexpr(4096))
    assert width() == 0
