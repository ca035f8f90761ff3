"""Samples of single instructions: which role they belong to, and what they wait for."""

import pandas
import pytest

from jfa.lab import counters, drawings_profile, figures, waits
from jfa.lab.targets import Target

REASONS = ("barrier", "long_sb", "selected", "wait")
HEADER = ["Address", "Source", "# Samples", *(f"stall_{name}" for name in REASONS), "stall_wait (Not Issued)"]

# (machine code, samples by reason): two consumers, a loader, warps without a role that park, loops behind.
CONSUMER = [
    ("  SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R2", {"selected": 1}),
    ("  ULEA UR8, UR9, UR7, 0xe", {"wait": 2}),
    ("  USHF.R.U32.HI UR8, URZ, 0x4, UR8", {}),
    ("  UMOV UR9, 0x40000040", {}),
    ("  ULOP3.LUT UR8, UR8, 0x3fff, URZ, 0xc0, !UPT", {}),
    ("@!P0  BRA 0x1600", {"long_sb": 5}),  # waits for what the try-wait found
    ("  HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], RZ, !UPT, gsb0", {"wait": 3}),
    ("  WARPGROUP.DEPBAR.LE gsb0, 0x0", {"barrier": 7}),
    ("  LDG.E R4, desc[UR22][R6.64]", {}),
    ("  SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR4], RZ", {}),
    ("  IADD3 R4, R4, R5, RZ", {"long_sb": 4}),  # an arrival is no wait
    ("  BAR.SYNC.DEFER_BLOCKING 0x0, 0x80", {}),
    ("  FMUL R24, R24, R8", {"barrier": 2, "selected": 6}),
    ("  SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R2", {}),
    ("  MEMBAR.ALL.CTA", {}),
    ("  FENCE.VIEW.ASYNC.S", {"long_sb": 8}),  # though a try-wait is near
    ("  BAR.SYNC.DEFER_BLOCKING 0x1", {}),
    ("  NOP", {"barrier": 1}),  # a consumer that is done
]
LOADER = [
    ("  SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R2", {}),
    ("@!P0  BRA 0x1f00", {"long_sb": 9}),
    ("@UP0  UTMALDG.4D [UR8], [UR16]", {"selected": 1}),
    ("  BAR.SYNC.DEFER_BLOCKING 0x1", {}),
    ("  NOP", {"barrier": 11}),  # a loader that is done
]
PARKED = [
    ("  BAR.SYNC.DEFER_BLOCKING 0x1", {}),
    ("  BAR.SYNC.DEFER_BLOCKING 0x1", {}),
    ("  NOP", {"barrier": 20}),
    ("  EXIT", {}),
]
FIRST = [("  USETMAXREG 0xe8", {}), ("  BAR.SYNC.DEFER_BLOCKING 0x1", {}), ("  NOP", {})]
BACK = len(FIRST) + 3  # where a consumer goes on after its retries
RETRY = [
    ("  SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R2", {"long_sb": 13}),
    ("@!P0  BRA 0x{self:x}", {}),
    ("  BRA 0x{back:x}", {"long_sb": 1}),
]
CODE = FIRST + CONSUMER + CONSUMER + LOADER + PARKED
CODE += [(text.format(self=0x1000 + 16 * len(CODE), back=0x1000 + 16 * BACK), found) for text, found in RETRY]


def printed(*kernels):
    def line(cells):
        return ",".join(f'"{cell}"' for cell in cells)

    lines = ["==PROF== Connected"]
    for name, code in kernels:
        lines += [line(["Kernel Name", name]) + ",", line(HEADER)]
        for place, (sass, found) in enumerate(code):
            counts = [found.get(reason, 0) for reason in REASONS]
            lines.append(line([hex(0x1000 + 16 * place), sass, sum(counts), *counts, 0]))
    return "\n".join(lines)


MARK = ("void at::cuda::<unnamed>::spin_kernel(long, bool)", [("  EXIT", {"wait": 1})])


def test_each_sample_has_an_owner_and_a_reason():
    (kernel,) = waits.instructions(printed(("kernel", CODE)))
    assert kernel["kernel"] == "kernel" and len(kernel["code"]) == len(CODE)
    found = {key: count for key, count in waits.samples(kernel["code"]).items() if count}
    assert found == {
        (waits.CONSUMERS, waits.ISSUE): 2 * (1 + 6),
        (waits.CONSUMERS, waits.OWN): 2 * (2 + 3),
        (waits.CONSUMERS, waits.ARRIVAL): 2 * 5 + 13 + 1,  # and its retries, behind the exit
        (waits.CONSUMERS, waits.PRODUCT): 2 * 7,
        (waits.CONSUMERS, waits.MEMORY): 2 * 4,
        (waits.CONSUMERS, waits.OTHERS): 2 * (2 + 1),
        (waits.CONSUMERS, waits.FENCE): 2 * 8,
        (waits.HELPERS, waits.ARRIVAL): 9,
        (waits.HELPERS, waits.ISSUE): 1,
        (waits.HELPERS, waits.OTHERS): 11,
        (waits.NOBODY, waits.OTHERS): 20,
    }
    assert sum(found.values()) == sum(sum(samples.values()) for _, samples in CODE)


def test_code_without_those_parts_is_refused():
    for code in (
        CONSUMER + PARKED,
        [line for line in CODE if "HGMMA" not in line[0]],
        FIRST + LOADER + PARKED,
    ):
        (kernel,) = waits.instructions(printed(("kernel", code)))
        with pytest.raises(ValueError, match="two consumers"):
            waits.samples(kernel["code"])


def test_rows_belong_to_their_targets():
    chosen = [Target("forward", "staged", M=128), Target("forward", "staged", M=256)]
    text = printed(("kernel", CODE), MARK, ("kernel", CODE), MARK)
    rows = waits.rows_of(text, chosen)
    assert len(rows) == 2 * len(waits.WHO) * len(waits.WHY)
    assert {row["M"] for row in rows} == {128, 256}
    assert sum(row["share"] for row in rows if row["M"] == 128) == pytest.approx(1)
    table = waits.table(pandas.DataFrame(rows))
    first = table.loc["forward", "M=128", "staged"]
    counted = sum(sum(samples.values()) for _, samples in CODE)
    assert first[waits.NOBODY] == pytest.approx(20 / counted)
    assert first[waits.PRODUCT] == pytest.approx(14 / (counted - 20 - 21))
    assert first[list(waits.WHY)].sum() == pytest.approx(1)
    assert "M=256" in waits.show(table)


def test_what_is_no_such_page_is_refused():
    with pytest.raises(ValueError, match="--page source"):
        waits.instructions("==ERROR== nothing was profiled")
    with pytest.raises(ValueError, match="expected 2 targets"):
        waits.rows_of(printed(("kernel", CODE), MARK), [Target("forward", "staged")] * 2)


def test_ncu_samples_the_program_of_this_module():
    line = waits.command("x.ncu-rep")
    assert line[-4:] == ["python", "-m", "jfa.lab.waits", "run"] and "SourceCounters" in line
    assert "--metrics" not in line


def test_without_ncu_it_says_so(monkeypatch):
    monkeypatch.setattr(counters.shutil, "which", lambda name: None)
    with pytest.raises(RuntimeError, match="Nsight Compute"):
        waits.record()


def test_the_recording_covers_what_is_counted_and_adds_up():
    rows = figures.read("10_waits")
    table = waits.table(rows)
    counted = drawings_profile.missed(figures.read("10_counters"))
    lines = drawings_profile.by_pass(counted)[["direction", "case", "step"]].itertuples(
        index=False, name=None
    )
    assert set(table.index) == set(lines)
    whole = rows.groupby(["direction", "suite", "M", "N", "step"])["share"].sum()
    assert whole.to_numpy() == pytest.approx(1, abs=1e-3)
    # Of twelve warps three have no role forward, two backward, where a writer comes in; more are starting.
    idle = table[waits.NOBODY]
    assert idle["forward"].between(3 / 12, 3 / 12 + 0.02).all()
    assert idle["backward"].between(2 / 12, 2 / 12 + 0.04).all()
    text = drawings_profile.limits_text(counted, rows)
    assert text.count(waits.PRODUCT) >= 4 and waits.OWN not in text
