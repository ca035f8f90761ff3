"""The command that records everything: its commands are real, and it says what failed."""

import importlib
import shlex
import sys

import pytest
import torch

from jfa.lab import figures, record


def commands(tmp_path):
    return [command for stage in record.stages(tmp_path, 2).values() for command, _ in stage]


def test_every_command_is_one_that_its_module_takes(tmp_path, capsys):
    if torch.cuda.is_available():
        pytest.skip("without a CUDA device each command ends behind its parser")
    for module, *arguments in commands(tmp_path):
        with pytest.raises(SystemExit):
            importlib.import_module(module).main(arguments)
        assert "no CUDA device" in capsys.readouterr().err, module


@pytest.mark.parametrize(
    ("module", "given", "said"),
    [
        ("ablation", "--step nope", "expected some of forward staged, backward peeled"),
        ("ablation", "--direction forward --step peeled", "expected some of forward staged"),
        ("ablation", "--rounds 0", "--rounds: expected at least 1"),
        ("rounds", "--samples 0 --output never.csv", "--samples: expected at least 1, got 0"),
        ("neighbours", "--repeats 0 --output never.csv", "--repeats: expected at least 1, got 0"),
        ("reduction", "--rounds 0", "--rounds: expected at least 1, got 0"),
        ("ladder", "forward --rounds 0", "--rounds: expected at least 1, got 0"),
        ("child", "anything", "unrecognized arguments: anything"),
        ("pins", "anything", "unrecognized arguments: anything"),
        ("figures", "--readme 00_waste", "--readme draws nothing: leave out the names"),
    ],
)
def test_a_command_line_refuses_what_it_would_ignore(module, given, said, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["", *given.split()])
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(f"jfa.lab.{module}").main()
    told = capsys.readouterr().err
    assert ended.value.code == 2 and said in told
    assert told.startswith(f"usage: python -m jfa.lab.{module} ")


def test_what_it_writes_is_what_figures_are_drawn_from(tmp_path):
    written = {word for command in commands(tmp_path) for word in command if word.endswith(".csv")}
    names = {name.rpartition("/")[2] for name in written}
    assert names == {f"{name}.csv" for name in (*record.OUTPUTS, "09_memory")}
    assert all((figures.FOLDER / name).exists() for name in names)


def test_it_prints_its_commands(tmp_path, capsys):
    assert record.main([str(tmp_path / "new"), "--only", "profile", "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [shlex.split(line)[2] for line in lines] == [
        "jfa.lab.counters",
        "jfa.lab.ablation",
        "jfa.lab.waits",
        "jfa.lab.stamps",
        "jfa.lab.reach",
        "jfa.lab.rounds",
        "jfa.lab.neighbours",
        "jfa.lab.bench",
        "jfa.lab.bench",
    ]
    assert not (tmp_path / "new").exists()
    if not torch.cuda.is_available():
        with pytest.raises(SystemExit):
            record.main([str(tmp_path)])
        assert "no CUDA device" in capsys.readouterr().err


def test_a_failure_and_a_limit_are_told(tmp_path, monkeypatch, capsys):
    plan = [(["json.tool", "--help"], 20), (["json.tool", "no such file"], 20), (["http.server", "0"], 1)]
    monkeypatch.setattr(record, "stages", lambda folder, workers: {"profile": plan})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert record.main([str(tmp_path), "--only", "profile"]) == 1
    first, second, third = capsys.readouterr().out.splitlines()
    assert first.startswith("tool: ") and first.endswith(" s")
    assert "exit status" in second and "ended after 1 s" in third
    assert "usage" in (tmp_path / "00_tool.log").read_text()
