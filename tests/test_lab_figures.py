"""Every figure is drawn from the data beside it, and what can be computed anew gives that data."""

import pandas
import pytest

from jfa.lab import figures, recorded

COMPUTED = [name for name, figure in figures.REGISTRY.items() if figure.data]
FROM_LENGTHS = [name for name in COMPUTED if name[:2] in ("00", "01")]  # the others depend on the compiler


def csv_text(name, rows, tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "FOLDER", tmp_path)
    return figures.write(name, rows).read_text()


def test_every_computed_figure_has_data_and_picture():
    assert set(COMPUTED) <= set(figures.with_data())
    assert [name for name in figures.with_data() if not figures.path_of(name, ".svg").exists()] == []


@pytest.mark.parametrize("name", figures.with_data())
def test_the_picture_was_drawn_from_the_data(name):
    assert figures.drawn_from(figures.path_of(name, ".svg").read_text()) == figures.digest(name)


@pytest.mark.parametrize("name", FROM_LENGTHS)
def test_the_data_is_what_the_lengths_give(name, tmp_path, monkeypatch):
    committed = figures.path_of(name).read_text()
    assert csv_text(name, figures.REGISTRY[name].compute(), tmp_path, monkeypatch) == committed


@pytest.mark.parametrize("name", figures.with_data())
def test_redrawing_gives_the_same_bytes(name, tmp_path):
    first = figures.save(name, tmp_path).read_bytes()
    assert figures.save(name, tmp_path).read_bytes() == first
    assert len(first) < 400_000


def measured_rows():
    shape = {
        "suite": "jagged",
        "M": 256,
        "B": 768,
        "Hq": 4,
        "Hkv": 4,
        "D": 128,
        "scope": "call",
        "dtype": "bfloat16",
    }
    where = {
        "gpu": "H200",
        "driver": "1",
        "cuda": "13.0",
        "torch": "2.11",
        "fbtriton": "3.7.4",
        "commit": "abc",
    }
    rows = []
    for direction in ("forward", "backward"):
        for n, slow, fast in ((512, 100.0, 200.0), (1024, 200.0, 800.0)):
            for impl, tflops in (("jfa_baseline", slow), ("fa4", fast)):
                times = {"ms_p20": 0.9, "ms_p50": 1.0, "ms_p80": 1.1, "tflops": tflops, "timer": "cuda-event"}
                row = {
                    **shape,
                    "N": n,
                    "density": 0.5,
                    "direction": direction,
                    "impl": impl,
                    **times,
                    **where,
                }
                rows.append({**row, "power_limit_w": 700.0, "date": "2026-12-01"})
    rows.append(
        {**shape, "N": 512, "density": 0.5, "direction": "forward", "impl": "cudnn", "error": "no window"}
    )
    rows.append(
        {**shape, "N": 512, "density": 0.5, "direction": "forward", "impl": "model", "predicted_ms": 1.0}
    )
    return rows


def written(tmp_path, rows):
    pandas.DataFrame(rows).to_csv(tmp_path / "02_speed.csv", index=False)
    return recorded.measured("02_", tmp_path)


def test_only_measured_rows_count(tmp_path):
    rows = written(tmp_path, measured_rows())
    assert sorted(rows["peer"].unique()) == ["fa4", "jfa_baseline"]
    lines = {(line["direction"], line["peer"]): line for line in recorded.summary(rows)}
    assert lines["forward", "fa4"]["tflops"] == pytest.approx(400)
    assert lines["forward", "fa4"]["ratio"] == pytest.approx(8**0.5)
    assert lines["backward", "jfa_baseline"]["ratio"] == pytest.approx(1)
    assert "H200, driver 1" in recorded.describe(rows)


def test_without_a_recording_nothing_is_claimed(tmp_path):
    rows = recorded.measured("02_", tmp_path)
    assert rows.empty
    assert recorded.table(rows) == recorded.NOTHING
    assert recorded.describe(rows).startswith("not measured")


def test_what_is_measured_live_is_told_with_its_machine():
    row = {
        "direction": "forward",
        "impl": "jfa",
        "ms_p20": 0.9,
        "ms_p50": 1.0,
        "ms_p80": 1.1,
        "tflops": 400.0,
    }
    row |= {"error": "", "gpu": "H200", "commit": "abc", "date": "2026-12-01"}
    missing = {"impl": "fa4", "error": "No module named 'flash_attn'"}
    first, ours, theirs, where = recorded.told_live(iter([row, missing]), recorded.show).splitlines()
    assert (
        first == "measured live" and ours == "forward  jfa            1.000 ms (0.900 to 1.100), 400 TFLOPS"
    )
    assert theirs == "fa4: did not run: No module named 'flash_attn'"
    assert where.startswith("measured on H200") and "commit abc" in where
    assert recorded.told_live([missing], recorded.show).splitlines() == ["measured live", theirs]


def test_live_measurements_are_checked_and_name_what_is_missing():
    rows = recorded.measured_in_turn(True, ("jfa", "fa4"), device="cpu")
    missing, forward, backward = rows
    assert missing["impl"] == "fa4" and "flash_attn" in recorded.show(missing)
    assert (forward["direction"], backward["direction"]) == ("forward", "backward")
    for row in (forward, backward):
        assert row["impl"] == "jfa" and 0 < row["budget_share"] < 1 and row["tflops"] > 0
        assert recorded.show(row).endswith("% of the error budget")


def test_the_readme_says_what_the_data_says(tmp_path):
    text = recorded.README.read_text()
    assert recorded.block(text) == recorded.readme_text()
    copy = tmp_path / "README.md"
    copy.write_text(text)
    rows = written(tmp_path, measured_rows())
    assert "rewritten" in recorded.rewrite(copy, rows)
    assert "| jagged | forward | call | fa4 | 2 | 400 | 2.83 |" in copy.read_text()
    assert "nothing to change" in recorded.rewrite(copy, rows)


def test_a_recorded_baseline_can_be_drawn():
    rows = [row for row in measured_rows() if "tflops" in row]
    assert len(figures.draw("02_baseline", rows).axes) == 2


def test_unknown_figures_are_refused(capsys):
    with pytest.raises(SystemExit):
        figures.main(["99_nothing"])
    with pytest.raises(TypeError, match="recorded on a GPU"):
        figures.REGISTRY["02_baseline"].compute()


@pytest.mark.parametrize("name, column", [("08_steps", "M"), ("10_clocks", "sm_clock_mhz")])
def test_rows_without_a_column_are_named(name, column, tmp_path, monkeypatch, capsys):
    rows = pandas.read_csv(figures.path_of(name)).drop(columns=column)
    monkeypatch.setattr(figures, "FOLDER", tmp_path)
    rows.to_csv(figures.path_of(name), index=False)
    with pytest.raises(SystemExit):
        figures.main([name])
    said = capsys.readouterr().err
    assert f"{name}.csv: not the rows of this figure" in said and column in said
