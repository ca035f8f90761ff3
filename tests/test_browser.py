"""The course as a reader opens it: a headless Chromium runs the first notebook in JupyterLab, top to bottom.

Needs the extra ``browser`` (playwright) and a Chromium, the system's or that of ``playwright install``;
skipped, with the reason in pytest's summary, where either is missing.
"""

import contextlib
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from jfa.lab import notebooks

NAME = "00_map"
SYSTEM = ("chromium", "chromium-browser", "google-chrome")
SECONDS = 240


def missing() -> str | None:
    """Why no browser can be opened here, or None."""
    if importlib.util.find_spec("playwright") is None:
        return "playwright is not installed: pip install 'jfa[browser]'"
    if any(map(shutil.which, SYSTEM)):
        return None
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        if Path(playwright.chromium.executable_path).exists():
            return None
    return "no Chromium: neither the system's nor that of `playwright install chromium`"


REASON = missing()


def free_port() -> int:
    """A TCP port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def lab(tmp_path):
    """JupyterLab's address; it serves a copy of the notebook without outputs, every cell kept in the page."""
    folder = tmp_path / "notebooks"
    folder.mkdir()
    notebook = notebooks.read(notebooks.FOLDER / f"{NAME}.ipynb")
    for cell in notebooks.code_cells(notebook):
        cell.outputs, cell.execution_count = [], None
    notebooks.nbformat.write(notebook, folder / f"{NAME}.ipynb")
    settings = tmp_path / "settings" / "@jupyterlab" / "notebook-extension"
    settings.mkdir(parents=True)
    (settings / "tracker.jupyterlab-settings").write_text('{"windowingMode": "none"}')
    places = {
        "JUPYTERLAB_SETTINGS_DIR": settings.parents[1],
        "JUPYTERLAB_WORKSPACES_DIR": tmp_path / "workspaces",
    }
    places |= {f"JUPYTER_{kind}_DIR": tmp_path / kind.lower() for kind in ("CONFIG", "RUNTIME")}
    environment = {**os.environ, **{name: str(path) for name, path in places.items()}, "MPLBACKEND": ""}
    environment.pop("MPLBACKEND")  # the kernel's own, which shows figures inline
    port = free_port()
    command = [sys.executable, "-m", "jupyter", "lab", "--no-browser", "--allow-root", f"--port={port}"]
    command += ["--ip=127.0.0.1", "--IdentityProvider.token=", f"--notebook-dir={folder}"]
    log = open(tmp_path / "lab.log", "w")
    server = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        yield await_server(f"http://127.0.0.1:{port}", server, tmp_path / "lab.log")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        log.close()


def await_server(address, server, log) -> str:
    """The address once the server answers; RuntimeError with its log if it ends or takes too long."""
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline and server.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{address}/api", timeout=5):
            return address
        time.sleep(0.3)
    raise RuntimeError(f"JupyterLab did not start:\n{log.read_text()[-2000:]}")


@contextlib.contextmanager
def chromium():
    """A page of a headless Chromium."""
    from playwright.sync_api import sync_playwright

    system = next(filter(None, map(shutil.which, SYSTEM)), None)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=system, args=["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"]
        )
        try:
            yield browser.new_page(viewport={"width": 1280, "height": 1600})
        finally:
            browser.close()


PROMPTS = """
  () => [...document.querySelectorAll('.jp-CodeCell .jp-InputArea-prompt')].map(p => p.innerText.trim())
"""
# The picture that follows the heading of the ladder, else the notebook's last picture.
LADDER = """() => {
  const cells = [...document.querySelectorAll('.jp-Notebook .jp-Cell')];
  const titles = cells.map(cell => [...cell.querySelectorAll('h2')].map(title => title.innerText).join());
  const heading = titles.findIndex(title => title.startsWith('The ladder'));
  const pictures = cells.map((cell, i) => [i, cell.querySelector('.jp-OutputArea-output img')]);
  const there = pictures.filter(([, picture]) => picture);
  const found = (there.find(([i]) => i > heading) || there[there.length - 1])[1];
  found.id = 'the-ladder';
  return found.naturalWidth;
}"""
WRONG = ", ".join(f'[data-mime-type="application/vnd.jupyter.{kind}"]' for kind in ("error", "stderr"))


def executed(page, count: int) -> bool:
    """Whether every code cell has run."""
    prompts = page.evaluate(PROMPTS)
    return prompts == [f"[{n}]:" for n in range(1, count + 1)]


@pytest.mark.timeout(SECONDS + 120)
@pytest.mark.skipif(REASON is not None, reason=REASON or "")
def test_a_reader_opens_the_map_and_runs_it(lab, tmp_path):
    from matplotlib import image

    count = len(notebooks.code_cells(notebooks.read(notebooks.FOLDER / f"{NAME}.ipynb")))
    with chromium() as page:
        page.goto(f"{lab}/lab/tree/{NAME}.ipynb?reset", wait_until="domcontentloaded", timeout=90_000)
        page.wait_for_selector(".jp-Notebook .jp-CodeCell", timeout=90_000)
        assert not executed(page, count)
        page.get_by_text("Python 3 (ipykernel) | Idle").wait_for(timeout=90_000)  # before, a run goes nowhere
        page.get_by_role("menuitem", name="Run", exact=True).click()
        page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
        deadline = time.monotonic() + SECONDS
        while not executed(page, count) and time.monotonic() < deadline:
            assert page.locator(WRONG).all_inner_texts() == []
            time.sleep(0.5)
        assert executed(page, count), page.evaluate(PROMPTS)
        assert page.locator(WRONG).all_inner_texts() == []
        assert "claim holds" in page.locator(".jp-Notebook").inner_text()
        assert page.evaluate(LADDER) > 300
        page.locator("#the-ladder").screenshot(path=tmp_path / "ladder.png")
    picture = image.imread(tmp_path / "ladder.png")[..., :3]
    assert min(picture.shape[:2]) > 150
    assert len({tuple(color) for color in (picture[::4, ::4] * 255).astype(int).reshape(-1, 3).tolist()}) > 10
