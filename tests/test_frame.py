"""The frame: pins that cannot drift, make targets that are documented, CI that does what README says."""

import importlib.metadata
import os
import re
import stat
import subprocess
import types
from pathlib import Path

import pytest

from jfa.lab import pins as pinned

ROOT = Path(__file__).resolve().parents[1]


def conda_pins() -> list[str]:
    """Return the lines of environment.yml's pip block."""
    lines = (ROOT / "environment.yml").read_text().splitlines()
    block = lines[lines.index("  - pip:") + 1 :]
    assert all(line.startswith("      - ") for line in block), block
    return [line.removeprefix("      - ") for line in block]


def test_environment_yml_and_pyproject_pin_the_same_versions():
    assert conda_pins() == pinned.requirements("course") + pinned.requirements("tlx")


def test_every_pin_is_exact_and_fbtriton_comes_last():
    pins = conda_pins()
    assert all(pinned.pinned_version(pin) for pin in pins)
    assert pins[-1] == "fbtriton==3.7.4; sys_platform == 'linux'"
    assert "torch==2.13.0" in pins
    with pytest.raises(ValueError, match="not an exact pin"):
        pinned.pinned_version("torch>=2.11")


def test_the_python_of_environment_yml_is_one_that_jfa_supports():
    python = re.search(r"python=3\.(\d+)", (ROOT / "environment.yml").read_text())
    assert int(python.group(1)) in (11, 12, 13)
    assert 'requires-python = ">=3.11,<3.14"' in (ROOT / "pyproject.toml").read_text()


def test_make_help_lists_every_target():
    text = (ROOT / "Makefile").read_text()
    targets = re.search(r"^\.PHONY: (.*)$", text, re.MULTILINE).group(1).split()
    command = ["make", "--no-print-directory", "help"]  # this test may itself run under make
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert [line.split()[1] for line in shown.splitlines()] == [
        name for name in re.findall(r"^([a-z]+):", text, re.M)
    ]
    assert sorted(targets) == sorted(line.split()[1] for line in shown.splitlines())
    assert {"test", "lab", "figures", "help"} <= set(targets)


def make(tmp_path, python: str) -> subprocess.CompletedProcess:
    """Let make build an environment in a folder that does not exist with the given interpreter."""
    command = ["make", "install", f"VENV={tmp_path / 'venv'}", f"PYTHON={python}"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def fake_python(path: Path, body: str) -> str:
    """Write an executable that stands in for a python3."""
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_a_python_without_ensurepip_is_told_what_to_install(tmp_path):
    python = fake_python(tmp_path / "python3", 'case "$2" in *ensurepip*) exit 1;; esac; exit 0')
    run = make(tmp_path, python)
    assert run.returncode != 0
    assert "apt-get install python3-venv" in run.stdout


def test_a_python_of_the_wrong_version_is_refused(tmp_path):
    run = make(tmp_path, fake_python(tmp_path / "python3", "exit 1"))
    assert run.returncode != 0
    assert "needs Python 3.11, 3.12 or 3.13" in run.stdout


def test_ci_runs_make_test():
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert script.read_text().splitlines()[-1] == "exec make test"
    assert "make test" in (ROOT / "README.md").read_text()


def test_a_triton_installed_over_fbtriton_is_noticed(tmp_path, monkeypatch):
    (tmp_path / "whole.py").write_text("12345")
    (tmp_path / "replaced.py").write_text("123")

    def entry(name):
        return types.SimpleNamespace(size=5, locate=lambda: tmp_path / name)

    entries = [entry("whole.py"), entry("replaced.py"), entry("removed.py")]
    monkeypatch.setattr(importlib.metadata, "files", lambda name: entries)
    monkeypatch.setattr(pinned, "version_of", lambda name: "3.7.4")
    assert len(pinned.overwritten()) == 2
    assert "another package replaced 2 files of fbtriton" in pinned.problem()
    monkeypatch.setattr(pinned, "version_of", lambda name: None)
    assert "fbtriton 3.7.4 is wanted, none is installed" in pinned.problem()
