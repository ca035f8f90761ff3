"""The arithmetic of the targets on rows whose answers are known; figures and tables made of such rows."""

import pytest

from jfa.lab import cases, derived, figures, measure, readme, recorded, results, tables

MEMORY = "peak extra memory of a training step with"
WHERE = {"timer": "cuda-graph", "gpu": "H200", "date": "2026-12-01", "commit": "abc", "power_w": 600.0}


def row(case, direction, name, ms, scope="call", roof=800.0, work=1.04e12):
    facts = {"direction": direction, "scope": scope, "impl": name.partition(":")[0], "name": name}
    tflops = work / ms / 1e9
    return (
        case.columns()
        | facts
        | WHERE
        | {"ms_p50": ms, "tflops": tflops, "roof_tflops": roof, "step": "", "budget_share": 0.5}
    )


def full(slow=1.0, date="2026-12-01"):
    """Every suite: ours 2 ms (so 520 of 800 TFLOPS), FA4 5 ms, 4.5 ms with q expanded, the least 2.4 ms."""
    found = []
    for suite in ("jagged", "histories", "dense", "packed"):
        for case in cases.SUITES[suite]():
            for direction in results.DIRECTIONS:
                theirs = 5.0
                if (case.M, case.N, case.density, direction) == (512, 4096, 1.0, "backward"):
                    theirs = 2.4  # density 1 counts for the least ratio, not for the mean
                found.append(row(case, direction, "jfa", 2.0 * slow))
                found.append(row(case, direction, "fa4", theirs))
                found.append(row(case, direction, "fa4", 4.5, scope="kernel"))
                found.append(row(case, direction, "jfa:peeled", 1.96 * slow))
                found.append(row(case, direction, "jfa:dynamic", 3.0))
            if suite == "dense":
                found.append(row(case, "forward", "cudnn", 1.9))
            found.append(row(case, "", "jfa", 0.012 if case.N < 4096 else 0.02, scope="schedule"))
    failed = row(cases.dense_cases()[0], "forward", "flex", 1.0)
    failed |= {"ms_p50": "", "tflops": "", "timer": "", "error": "Lost: no answer"}
    return [one | {"date": date} for one in [*found, failed]]


def memory():
    return [
        {"suite": "jagged", "impl": "jfa", "share_of_kv": 0.004},
        {"suite": "histories", "impl": "jfa", "share_of_kv": 0.012},
        {"suite": "jagged", "impl": "fa4", "share_of_kv": 0.6},
        {"suite": "dense", "impl": "jfa", "share_of_kv": 0.009},
    ]


def test_every_target_has_its_value():
    found = {target.name: target for target in results.targets(full(), memory())}
    values = [
        ("jagged forward over FA4, geometric mean", 2.5, True, 36),
        ("jagged forward over FA4 with q expanded beforehand, geometric mean", 2.25, True, 36),
        ("jagged backward over FA4, geometric mean", 2.5, True, 36),
        ("jagged forward over FA4, least of all shapes", 2.5, True, 48),
        ("jagged backward over FA4, least of all shapes", 1.2, True, 48),
        ("jagged forward, share of the roofline, geometric mean", 0.65, False, 36),
        ("jagged backward, share of the roofline, geometric mean", 0.65, False, 36),
        ("histories forward over FA4, least of all shapes", 2.5, True, 2),
        ("histories backward over FA4, least of all shapes", 2.5, True, 2),
        ("dense and packed forward over FA4, least of all shapes", 2.5, True, 8),
        ("dense and packed forward over cuDNN, least of all shapes", 0.95, False, 4),
        ("dense and packed backward over FA4, least of all shapes", 2.5, True, 8),
        (f"{MEMORY} a shared query, of K and V, most of all shapes", 1.2, False, 2),
        (f"{MEMORY} packed queries, of K and V, most of all shapes", 0.9, True, 1),
        ("the dispatcher's step behind the best one, most of all shapes", 100 * (2 / 1.96 - 1), True, 116),
        ("making a schedule of 768 sequences, most of all shapes", 12.0, True, 39),
        ("share of its error budget that a measured call of ours used, most of all", 0.5, True, 348),
    ]
    assert len(found) == len(values)
    for name, value, reached, shapes in values:
        target = found[name]
        assert target.found == pytest.approx(value, rel=1e-6), name
        assert (target.reached, target.shapes) == (reached, shapes), name
    assert "N=4096, density 1" in found["jagged backward over FA4, least of all shapes"].note
    assert "least 0.4 %, FA4 60 to 60 %" in found[values[12][0]].note


def test_without_rows_nothing_is_claimed():
    for target in results.targets([]):
        assert target.found is None and target.reached is None
        assert str(target).startswith(results.NOTHING)
    assert results.load("09_nothing") == []
    assert tables.tuning_table([]).startswith(results.NOTHING)
    assert results.NOTHING in derived.spread_text(full(), [])


def test_failed_and_named_rows_do_not_count_as_ours():
    found = results.Measured.of(full())
    case = cases.dense_cases()[0]
    assert found.time(case, "forward", "flex") is None
    assert found.time(case, "forward") == 2.0 and found.time(case, "forward", "jfa:peeled") == 1.96


def test_rows_survive_the_file(tmp_path, capsys):
    path = measure.write_rows(tmp_path / "09_results.csv", full())
    known = [str(target) for target in results.targets(full())]
    assert [str(target) for target in results.targets(measure.read_rows(path))] == known
    memory_path = measure.write_rows(tmp_path / "09_memory.csv", memory())
    assert results.main([str(path), str(memory_path)]) == 0
    assert "reached           jagged forward over FA4, geometric mean: 2.5" in capsys.readouterr().out


def test_a_file_that_holds_no_results_is_refused(tmp_path, capsys):
    folder = results.FOLDER
    rows, bytes_of = folder / "09_results.csv", folder / "09_memory.csv"
    binary = tmp_path / "binary.csv"
    binary.write_bytes(b"\xff\xfe\x00")
    for bad in ([tmp_path / "none.csv"], [tmp_path], [bytes_of], [binary], [rows, tmp_path / "none.csv"]):
        with pytest.raises(SystemExit):
            results.main([str(path) for path in bad])
        assert f"{bad[-1]}: " in capsys.readouterr().err


def test_the_ratio_alone_stands_beside_both_ways_in_turn():
    said = derived.alone_text(full(1.25)[:8], full(), full(1 / 1.25))
    assert "at 2 shapes and passes, ours are 2.00 times" in said
    assert "run 2.50, in short samples 3.12 times" in said
    assert derived.alone_text([], full(), full()) == derived.alone_text(full(), full(), []) == ""


def test_targets_as_a_table_say_what_the_lines_say():
    rows = full()
    head, _, *lines = tables.targets_table(rows, memory()).splitlines()
    assert head.startswith("| target | wanted | measured |")
    for line, target in zip(lines, results.targets(rows, memory()), strict=True):
        assert target.name in line and target.wanted in line
        assert ("reached" in line, "missed" in line) == (target.reached is True, target.reached is False)
    assert all(f"| {results.NOTHING} |  |" in line for line in tables.targets_table([]).splitlines()[2:])


def test_what_an_eager_call_costs_the_host():
    case = cases.host_cases()[0]
    took = {"jfa": (0.2, 0.4, 1), "fa4": (0.1, 0.25, 0.5), "jfa_baseline": (0.3, None, 1)}
    rows = [
        {
            **case.columns(),
            "direction": way,
            "scope": "call",
            "impl": name,
            "name": name,
            "timer": "host-clock",
        }
        | {"ms_p50": ms}
        for name, times in took.items()
        for way, ms in zip((*results.DIRECTIONS, "both"), times, strict=True)
    ]
    lines = readme.host_table(rows).splitlines()
    assert len(lines) == 2 + 3 and len({line.count("|") for line in lines}) == 1
    assert lines[2] == "| ours | 200 | 400 | 1000 |  |  |  |  |  |"
    assert lines[4] == "| our baseline | 300 |  | 1000 |  |  |  |  |  |"
    graphs = [row | {"timer": "cuda-graph", "ms_p50": row["ms_p50"] and row["ms_p50"] / 10} for row in rows]
    thread = [row | {"name": f"{row['name']}:one_thread"} for row in rows if row["direction"] == "both"]
    thread = [row | {"ms_p50": row["ms_p50"] / 2} for row in thread]
    *_, second, _ = readme.host_table([*graphs, *rows, *thread]).splitlines()
    assert second == "| FlashAttention-4 | 100 | 250 | 500 |  | 250 | 10 | 25 | 50 |"
    kernels = [row | {"scope": "kernel", "ms_p50": 7} for row in rows]
    assert readme.host_table([*kernels, *rows]) == readme.host_table(rows)
    assert readme.host_table(graphs) == readme.host_table([]) == ""


def test_a_word_where_a_number_belongs_is_named(tmp_path, capsys):
    rows = [one | {"ms_p50": "fast"} if one["impl"] == "jfa" else one for one in full()]
    path = measure.write_rows(tmp_path / "09_results.csv", rows)
    with pytest.raises(SystemExit):
        results.main([str(path)])
    said = capsys.readouterr().err
    assert str(path) in said and "'fast'" in said


def test_a_step_measured_by_name_stands_for_the_call_that_takes_it():
    case = cases.Case("jagged", 128, 1024, 0.5, 768)
    rows = [row(case, "forward", "jfa", 2.2) | {"step": "peeled"}, row(case, "forward", "jfa:peeled", 2.0)]
    key = (case, "forward")
    assert results.Measured.of(rows).behind_best() == {key: 1.0}
    rows.append(row(case, "forward", "jfa:staged", 1.6))
    assert results.Measured.of(rows).behind_best() == {key: 1.25}
    rows[0]["step"] = "dynamic"  # not measured by name: the call speaks for itself
    assert results.Measured.of(rows).behind_best() == {key: pytest.approx(2.2 / 1.6)}


def test_the_table_has_a_line_for_each_group_and_pass():
    lines = readme.table(readme.lines_of(results.Measured.of(full()))).splitlines()
    assert len(lines) == 2 + 2 * len(readme.GROUPS)
    assert "| jagged, all three | forward | 36 | 520 | 0.65 | 2.50 | 2.50 |  |" in lines
    assert "| dense | forward | 4 | 520 | 0.65 | 2.50 | 2.50 | 0.95 |" in lines
    assert "PyTorch" not in lines[0]  # a peer that no line has
    assert all(line.count("|") == lines[0].count("|") for line in lines)


def test_the_readme_tells_results_targets_and_where(monkeypatch):
    monkeypatch.setattr(results, "load", lambda name: memory() if name == results.MEMORY else [])
    text = readme.text(full())
    assert readme.text([]) == ""
    met = [target.reached for target in results.targets(full(), memory())]
    assert met.count(False) and met.count(True)
    assert f"{met.count(True)} of our own {len(met) - met.count(None)} targets are reached" in text
    assert "It leads on no line of the table." in text
    assert "H200, driver unknown" in text and "commit abc" in text and "change to the last" not in text
    found = {results.MEMORY: memory(), results.EARLIER: full(1.1)}
    monkeypatch.setattr(results, "load", lambda name: found.get(name, []))
    text = readme.text(full())
    last, first = (line for line in text.splitlines() if line.startswith("| 2026-12-01, abc"))
    assert "the table" in last and last.endswith("|  |  |  |") and results.EARLIER in first
    assert first.endswith("| -9.1 % (-9.1 %) | +0.0 % (+0.0 %) | +10.0 % (+10.0 %) |")


def test_the_share_of_the_roofline_by_another_rate(monkeypatch):
    found = results.Measured.of(full())
    shapes = found.cases(results.averaged)
    own, halved = (found.shares(shapes, "forward", rate) for rate in (790e12, 395e12))
    bound = [case.work("forward").bound == "compute" for case in shapes]
    slower = [two / one for one, two, limited in zip(own, halved, bound) if limited]
    assert slower and slower == pytest.approx([2] * len(slower))
    rates = [
        {"name": "product", "way": way, "rate": rate} for way, rate in (("rested", 800), ("settled", 700))
    ]
    monkeypatch.setattr(results, "load", lambda name: rates if name == results.REACH else [])
    assert "reaches 800 TFLOPS" in readme.kept(found) and ", 700 ([rows]" in readme.kept(found)
    assert "on the 36 jagged shapes is forward 0." in readme.kept(found)
    monkeypatch.setattr(results, "load", lambda name: [])
    assert readme.kept(found) == ""


def test_rows_of_another_run_are_marked_and_no_second_measurement():
    packed = set(cases.SUITES["packed"]())
    mixed = [one | ({"commit": "old"} if cases.Case.of(one) in packed else {}) for one in full()]
    lines = [line["shapes"] for line in readme.lines_of(results.Measured.of(mixed))]
    assert lines[-2:] == ["packed self-attention (run of old)"] * 2 and not any(
        "old" in x for x in lines[:-2]
    )
    dense, *_ = (line for line in tables.other_table(mixed, "forward").splitlines() if "dense" in line)
    *_, last, told = tables.other_table(mixed, "forward").splitlines()
    assert "*" not in dense and told == "* of the run of old"
    assert tables.other_table(full(), "forward").count("*") == 0
    earlier = [one | {"commit": "old"} for one in full(1.1)]
    copied = [one for one in earlier if cases.Case.of(one) in packed]
    again = [one for one in full() if cases.Case.of(one) not in packed] + copied
    assert len(derived.spread_rows(earlier, full())) - len(derived.spread_rows(earlier, again)) == 2 * len(
        packed
    )


def test_the_log_of_tuning_is_a_table():
    log = {"idea": "a|b", "why": "w", "predicted_percent": 5, "measured_percent": -1.5, "shapes": "8"}
    log |= {"verdict": "dropped", "limit": "power", "source": ""}
    other = log | {"predicted_percent": "", "measured_percent": "-2 to +7", "limit": ""}
    title, _, first, second = tables.tuning_table([log, other]).splitlines()
    assert title == "| idea | why | predicted | measured | shapes | verdict | what limits |"
    assert first == "| a/b | w | +5 % | -1.5 % | 8 | dropped | power |"
    assert second == "| a/b | w |  | -2 to +7 % | 8 | dropped |  |"


def steps(direction, names):
    found = []
    for index, name in enumerate(names):
        for case in cases.jagged_cases()[:3]:
            found.append(row(case, direction, "jfa", 4.0 - index) | {"step": name})
            found.append(row(case, direction, "jfa", 1.0, scope="kernel") | {"step": name})
    return found


def test_derived_tables_say_where_they_come_from(tmp_path, monkeypatch):
    assert set(derived.write_all(tmp_path)) == {
        f"{name}: {results.NOTHING}"
        for name in ("02_baseline", "08_steps", "09_roofline", "09_ladder", "09_dense", "09_spread")
    }
    measure.write_rows(tmp_path / "09_results_earlier.csv", full(1 / 1.1, "2026-11-30"))
    measure.write_rows(tmp_path / "09_results.csv", full())
    measure.write_rows(
        tmp_path / "04_steps.csv",
        steps("forward", ["warp_specialized", "balanced", "dynamic", "dynamic, one Q tile"]),
    )
    measure.write_rows(tmp_path / "05_steps.csv", steps("backward", ["warp_specialized", "balanced"]))
    assert derived.write_all(tmp_path)[2] == f"09_roofline: {2 * (48 + 2 + 4 + 4)} rows"
    roof = results.load("09_roofline", tmp_path)
    assert all(line["share"] == 0.65 and line["gpu"] == "H200" for line in roof)
    assert {line["limit"] for line in roof} == {"memory", "compute"}
    ladder = {(line["direction"], line["step"]): line for line in results.load("09_ladder", tmp_path)}
    assert ladder["forward", "dynamic"]["tflops"] == 520 and ladder["backward", "balanced"]["shapes"] == 3
    assert len(ladder) == 5
    peers = {line["impl"] for line in results.load("09_dense", tmp_path)}
    assert peers == {"jfa", "fa4", "cudnn"}
    spread = results.load("09_spread", tmp_path)
    assert derived.changes(spread, "ms") == pytest.approx((0.1, 0.1), abs=1e-5)
    assert "our times changed by +10.0 %" in derived.spread_text(full(), full(1.1))
    monkeypatch.setattr(figures, "FOLDER", tmp_path)
    names = [name for name, figure in figures.REGISTRY.items() if figure.draw.startswith("drawings_results:")]
    for name in names:
        picture = figures.save(name, tmp_path).read_text()
        assert figures.drawn_from(picture) == figures.digest(name)
    assert len(names) == 5


def test_derived_tables_are_up_to_date(tmp_path):
    for name, rows in derived.tables().items():
        path = figures.path_of(name)
        assert path.exists() == bool(rows)
        if rows:
            assert path.read_bytes() == measure.write_rows(tmp_path / f"{name}.csv", rows).read_bytes()


def test_steps_by_name_stay_out_of_the_summary(tmp_path):
    measure.write_rows(tmp_path / "09_results.csv", full())
    lines = recorded.summary(recorded.measured("09_results", tmp_path))
    ours = [line for line in lines if line["peer"] == "jfa" and line["suite"] == "jagged"]
    assert {(line["scope"], line["direction"]) for line in ours} == {
        ("call", "forward"),
        ("call", "backward"),
    }
    assert all(line["tflops"] == pytest.approx(520) for line in ours)


def test_a_case_in_words():
    assert results.described(cases.history_cases()[0]).startswith("histories M=128, N=")
    assert "density" not in results.described(cases.history_cases()[0])
    assert results.described(cases.packed_cases()[1]) == "packed N=1024, density 0.5, causal"


def test_the_baseline_stands_beside_everybody_who_ran_where_it_did(tmp_path):
    rows = derived.baseline_rows(results.load(results.RESULTS))
    by_shape = {}
    for line in rows:
        by_shape.setdefault((line["M"], line["N"], line["density"], line["direction"]), set()).add(
            line["impl"]
        )
    assert len(by_shape) == 16
    assert all({"jfa_baseline", "jfa", "fa4"} <= names for names in by_shape.values())
