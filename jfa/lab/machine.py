"""Which machine and which versions a number comes from, and how fast the GPU's clock ran meanwhile."""

import functools
import importlib.metadata
import os
import shutil
import statistics
import subprocess
import threading
import time
from pathlib import Path

PROVENANCE = (
    "gpu",
    "sm_count",
    "driver",
    "cuda",
    "torch",
    "fbtriton",
    "commit",
    "power_limit_w",
    "sm_clock_mhz",
    "power_w",
    "temperature_c",
    "date",
)


def _said(*command):
    """Output of a command, stripped, or "" where it is missing or fails."""
    if shutil.which(command[0]) is None:
        return ""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _version(package):
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def commit():
    """``JFA_COMMIT`` if it is set, for a copy of a checkout; else its short commit, "+" if files differ."""
    if os.environ.get("JFA_COMMIT"):
        return os.environ["JFA_COMMIT"]
    here = str(Path(__file__).resolve().parents[2])
    name = _said("git", "-C", here, "rev-parse", "--short=10", "HEAD")
    if not name:
        return "unknown"
    changed = _said(
        "git", "-C", here, "status", "--porcelain", "--untracked-files=no", "--", "jfa", "notebooks"
    )
    return name + ("+" if changed else "")


def _smi(fields, device, *more):
    """The nvidia-smi command that prints ``fields`` of a torch device as bare CSV."""
    import torch

    uuid = str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))
    name = f"GPU-{uuid.removeprefix('GPU-')}" if uuid else str(device)
    query = f"--query-gpu={','.join(fields)}"
    return ["nvidia-smi", "-i", name, query, "--format=csv,noheader,nounits", *more]


def number(text):
    """A float, or "" for what nvidia-smi does not know ("[N/A]")."""
    try:
        return float(text)
    except ValueError:
        return ""


@functools.cache
def _fixed(device):
    """The part of the provenance that does not change while a process runs."""
    import torch

    row = dict.fromkeys(PROVENANCE, "")
    row |= {
        "torch": torch.__version__,
        "fbtriton": _version("fbtriton"),
        "commit": commit(),
        "gpu": "none (CPU)",
    }
    if not torch.cuda.is_available():
        return row
    properties = torch.cuda.get_device_properties(device)
    row |= {"gpu": properties.name, "sm_count": properties.multi_processor_count, "cuda": torch.version.cuda}
    told = _said(*_smi(("driver_version", "power.limit"), device)).split(", ")
    if len(told) == 2:
        row |= {"driver": told[0], "power_limit_w": number(told[1])}
    return row


def provenance(monitor=None, since=0.0):
    """Where a number comes from, as a dict by ``PROVENANCE``; unknown entries are "".

    A `Monitor` fills clock (MHz), power (W) and temperature (C) with its medians ``since`` a time.
    """
    import torch

    device = torch.cuda.current_device() if torch.cuda.is_available() else None
    row = dict(_fixed(device), date=time.strftime("%Y-%m-%d"))
    return row | (monitor.medians(since) if monitor is not None else {})


class Monitor:
    """Watches the current GPU's SM clock, power and temperature while its block runs, ten times a second.

    A context manager; without nvidia-smi it sees nothing and says so by "" in ``medians``. One can watch a
    whole program, because nvidia-smi takes seconds to start: `wait` until it sees, then ask ``medians`` for
    what came since.
    """

    fields = {"sm_clock_mhz": "clocks.sm", "power_w": "power.draw", "temperature_c": "temperature.gpu"}

    def __init__(self, milliseconds=100):
        self.milliseconds = milliseconds
        self.samples = []
        self.times = []  # of the samples, by time.monotonic
        self._process = self._thread = None

    def __enter__(self):
        import torch

        if torch.cuda.is_available() and shutil.which("nvidia-smi"):
            command = _smi(self.fields.values(), torch.cuda.current_device(), "-lms", str(self.milliseconds))
            self._process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
            self._thread = threading.Thread(target=self._listen, daemon=True)
            self._thread.start()
        return self

    def _listen(self):
        for line in self._process.stdout:
            values = [number(part.strip()) for part in line.split(",")]
            if len(values) == len(self.fields):
                self.times.append(time.monotonic())
                self.samples.append(values)

    def wait(self, seconds=5.0):
        """Wait until the first sample is there, at most so long; no wait where there will be none."""
        deadline = time.monotonic() + seconds
        while self._process is not None and not self.samples and time.monotonic() < deadline:
            time.sleep(0.05)

    def __exit__(self, *error):
        if self._process is not None:
            self.wait()  # a run shorter than nvidia-smi's start
            self._process.terminate()
            self._process.wait()
            self._thread.join()
            self._process.stdout.close()

    def medians(self, since=0.0):
        """Median of what was seen since a time (time.monotonic), by column; "" for what was not.

        Where nothing came since, the last sample before it.
        """
        samples = list(self.samples)
        late = [sample for sample, at in zip(samples, self.times) if at >= since]
        samples = late or samples[-1:]
        columns = zip(*samples) if samples else ((),) * len(self.fields)
        known = ([value for value in column if value != ""] for column in columns)
        return {name: statistics.median(seen) if seen else "" for name, seen in zip(self.fields, known)}
