"""The counting, the machine-code reading and the prediction tables that the notebooks rest on."""

import ast
import json
import sys
import types
from pathlib import Path

import pytest

from jfa import jagged
from jfa.lab import course, loops, rates, waste

NOTEBOOKS = Path(__file__).resolve().parents[1] / "notebooks"


def test_padding_and_tiles_count_rows():
    lengths = [1, 4, 0, 3]
    assert waste.padded(lengths) == 8 / 16
    assert waste.tiles(lengths, 2) == [1, 2, 0, 2]
    assert waste.tiled(lengths, 2) == 8 / 10
    assert waste.tiled(lengths, 1) == 1
    assert waste.padded([0, 0]) == waste.tiled([0, 0], 128) == waste.tiled([], 128) == 1


def test_the_real_histories_waste_most_of_a_rectangle():
    lengths = jagged.history_lengths().tolist()
    assert (len(lengths), sum(lengths), max(lengths)) == (943, 100_000, 737)
    assert waste.padded(lengths) == pytest.approx(100_000 / (943 * 737))
    assert waste.padded(lengths) < waste.tiled(lengths, 128) < waste.tiled(lengths, 64) < 1


def test_deals_keep_the_work_and_differ_in_balance():
    work = [8, 1, 1, 1, 1, 1, 1, 1, 1]
    assert waste.deal_fixed(work, 2) == [12, 4]
    assert sorted(waste.deal_free(work, 2)) == [8, 8]
    assert waste.balance([12, 4]) == 8 / 12
    assert waste.balance([8, 8]) == waste.balance([0, 0]) == 1


SASS = """
        /*0000*/                   LDG.E R1, desc[UR4][R2.64] ;
.L_x_1:
        /*0010*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8] ;
        /*0020*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*0030*/                   FMUL R3, R3, R4 ;
        /*0040*/                   MUFU.EX2 R3, R3 ;
        /*0050*/              @!P0 BRA `(.L_x_1) ;
.L_x_2:
        /*0060*/                   MUFU.EX2 R3, R3 ;
        /*0070*/               @P1 BRA `(.L_x_2) ;
        /*0080*/                   EXIT ;
.L_x_3:
        /*0090*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R2 ;
        /*00a0*/                   BRA `(.L_x_1) ;
"""


def test_the_main_loop_is_the_one_with_tensor_cores():
    loop = loops.main_loop(SASS)
    assert [instruction.opcode.split(".")[0] for instruction in loop] == [
        "HGMMA",
        "WARPGROUP",
        "FMUL",
        "MUFU",
        "BRA",
    ]
    assert loops.runs(loop) == [("tensor core", 1), ("wait or barrier", 1), ("exponential", 1)]
    assert loops.kind_of("UTCHMMA") == loops.kind_of("UTCQMMA.2CTA") == "tensor core"
    assert loops.kind_of("LDTM.x64") == "load or store"
    with pytest.raises(ValueError, match="no loop"):
        loops.main_loop(SASS.replace("HGMMA", "FFMA"))


def test_turns_charge_the_slower_of_issue_slots_and_exponentials():
    loop = loops.main_loop(SASS)
    turns = rates.take_turns("sm_90", loop, flops=4096 * 12, warps=8)
    assert (turns.tensor, turns.rest) == (12, 16)  # one exponential of 8 warps: 8 * 32 / 16
    many = [instruction for instruction in loop if instruction.kind == "other arithmetic"] * 50
    assert rates.take_turns("sm_100", many, flops=8192 * 100, warps=8).rest == 2 * 100
    assert rates.take_turns("sm_100", many, flops=8192 * 100, warps=8).busy == 100 / 300


def test_the_scarcest_resource_limits_the_resident_ctas():
    report = types.SimpleNamespace(registers=251, warps=8, shared_bytes=100_000, tmem_columns=0)
    assert rates.resident_ctas(report) == {"registers": 1, "shared memory": 2, "warps": 8}
    report.tmem_columns = 256
    assert rates.resident_ctas(report)["tensor memory"] == 2


def test_predictions_are_stated_before_and_judged_after():
    expect = course.Predictions(within=1.2, share=0.5, ratio=2, sign=1)
    assert "not yet" in str(expect)
    expect.observe("share", 0.45, by="emulator")
    expect.observe("ratio", 3, by="model")
    expect.observe("sign", -1)
    assert [expect.holds(name) for name in ("share", "ratio", "sign")] == [True, False, False]
    head, *lines = str(expect).splitlines()
    assert lines[0].split(maxsplit=4) == ["share", "0.5", "0.45", "yes", "counted in the emulator"]
    assert lines[1].endswith("no           another model, not measured") and lines[2].endswith("no")
    assert head.index("observed by") == lines[0].index("counted")
    with pytest.raises(ValueError, match="by: expected one of measured, data"):
        expect.observe("share", 0.45, by="guess")
    with pytest.raises(KeyError, match="was not predicted"):
        expect.observe("speed", 1)


def test_on_linux_the_pinned_tools_compile():
    assert sys.platform != "linux" or course.compiler_missing() is None


def test_the_setup_line_says_what_is_measured():
    line = course.setup()
    assert ("measures live" in line) == (course.gpu() is not None)
    assert "torch 2." in line


@pytest.mark.parametrize("notebook", sorted(NOTEBOOKS.glob("0[0-5]_*.ipynb")), ids=lambda path: path.stem)
def test_what_is_observed_says_by_what(notebook):
    cells = json.loads(notebook.read_text())["cells"]
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    calls = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)]
    observed = [call for call in calls if getattr(call.func, "attr", "") == "observe"]
    assert observed
    for call in observed:
        assert {"by"} <= {keyword.arg for keyword in call.keywords}, ast.unparse(call)
