"""The pinned tools of the course: what should be installed, what is, and whether TLX is the `triton` on top.

fbtriton (Triton with TLX) and the triton that torch's CUDA wheels depend on install the same module, and pip
has no order between the two. So `make` installs torch first and fbtriton last, over it, and asserts that TLX
imports:

    python -m jfa.lab.pins             print the versions and assert
    python -m jfa.lab.pins --install   put fbtriton on top if it is not there, then assert
"""

import argparse
import importlib.metadata
import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SHOWN = ("torch", "fbtriton", "numpy", "matplotlib", "seaborn", "jupyterlab", "papermill", "pytest", "ruff")


def requirements(extra: str) -> list[str]:
    """Return the requirement lines of one extra of pyproject.toml ("course" or "tlx"), in their order."""
    with open(ROOT / "pyproject.toml", "rb") as handle:
        return tomllib.load(handle)["project"]["optional-dependencies"][extra]


def version_of(name: str) -> str | None:
    """Return the installed version of a distribution, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def pinned_version(requirement: str) -> str:
    """Return the version of an exact requirement such as ``fbtriton==3.7.4; sys_platform == 'linux'``."""
    found = re.match(r"[A-Za-z0-9_.-]+==([^;\s]+)", requirement)
    if found is None:
        raise ValueError(f"{requirement!r} is not an exact pin")
    return found.group(1)


def overwritten() -> list[str]:
    """Return the files of fbtriton that another package has replaced or removed (by size), [] if none."""
    wrong = []
    for entry in importlib.metadata.files("fbtriton") or []:
        path = Path(entry.locate())
        if entry.size is not None and (not path.exists() or path.stat().st_size != entry.size):
            wrong.append(str(entry))
    return wrong


def problem() -> str | None:
    """Return what keeps this environment from compiling TLX kernels, or None if nothing does."""
    wanted = pinned_version(requirements("tlx")[0])
    found = version_of("fbtriton")
    if found != wanted:
        return f"fbtriton {wanted} is wanted, {found or 'none'} is installed"
    if wrong := overwritten():
        return f"another package replaced {len(wrong)} files of fbtriton, {wrong[0]} among them"
    code = "import triton.language.extra.tlx"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if run.returncode != 0:
        return f"`{code}` fails: {(run.stderr.strip().splitlines() or ['no message'])[-1]}"
    return None


def install() -> None:
    """Put fbtriton over whatever owns the module `triton`; nothing happens when it is on top already."""
    if problem() is not None:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--force-reinstall", "--no-deps"]
        subprocess.run([*command, *requirements("tlx")], check=True)


def main() -> int:
    """Print the versions, install if asked; return 1 when TLX does not import where it should."""
    about = "Check, or with --install complete, the pinned tools."
    parser = argparse.ArgumentParser(prog="python -m jfa.lab.pins", description=about)
    parser.add_argument("--install", action="store_true", help="put fbtriton over torch's triton")
    options = parser.parse_args()
    if not sys.platform.startswith("linux"):
        print("fbtriton has wheels for Linux only: here kernels run in the emulator and none is compiled.")
        return 0
    if options.install:
        install()
    print(f"Python {sys.version.split()[0]}, " + ", ".join(f"{name} {version_of(name)}" for name in SHOWN))
    found = problem()
    print(f"TLX is missing: {found}." if found else "TLX imports.")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
