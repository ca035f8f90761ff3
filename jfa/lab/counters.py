"""What the hardware counted while a kernel ran: Nsight Compute (ncu) on the steps of the Hopper ladders.

    python -m jfa.lab.counters command              the ncu command line, as notebook 10 shows it
    python -m jfa.lab.counters run                  the program that ncu watches: every target once
    python -m jfa.lab.counters record --output figures/10_counters.csv    all of it, on an H200 with ncu

The program marks the launches that matter by cudaProfilerStart and Stop, and ends each target with a kernel
that only waits, so that the launches of one target can be told from those of the next.
"""

import argparse
import csv
import io
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable
from pathlib import Path

from jfa.lab import measure
from jfa.lab.cases import shape_text
from jfa.lab.targets import BASELINE, Target, compile_all, prepare

QUERIES = (128, 256)
KERNELS = ("kernel", "forward_kernel", "dkdv_kernel", "dq_kernel")
MARK = "spin_kernel"  # torch.cuda._sleep
# Column of the CSV -> (metric, unit of the column in units of the metric).
COUNTERS = {
    "duration_us": ("gpu__time_duration.sum", 1e3),
    "sm_clock_mhz": ("smsp__cycles_elapsed.avg.per_second", 1e6),
    "tensor_busy": ("sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed", 100),
    "issue_busy": ("smsp__issue_active.avg.pct_of_peak_sustained_elapsed", 100),
    "xu_busy": ("sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_elapsed", 100),
    "dram_busy": ("dram__throughput.avg.pct_of_peak_sustained_elapsed", 100),
    "l2_busy": ("lts__throughput.avg.pct_of_peak_sustained_elapsed", 100),
    "dram_read_mb": ("dram__bytes_read.sum", 1e6),
    "dram_write_mb": ("dram__bytes_write.sum", 1e6),
    "l2_read_sectors": ("lts__t_sectors_op_read.sum", 1),
    "l2_write_sectors": ("lts__t_sectors_op_write.sum", 1),
    "l2_red_sectors": ("lts__t_sectors_op_red.sum", 1),
    "sm_received_mb": ("l1tex__m_xbar2l1tex_read_bytes.sum", 1e6),
    "shared_wavefronts": ("l1tex__data_pipe_lsu_wavefronts_mem_shared.sum", 1),
    "local_load_sectors": ("l1tex__t_sectors_pipe_lsu_mem_local_op_ld.sum", 1),
    "local_store_sectors": ("l1tex__t_sectors_pipe_lsu_mem_local_op_st.sum", 1),
    "instructions": ("smsp__inst_executed.sum", 1),
    "registers": ("launch__registers_per_thread", 1),
}
# Why a warp did not issue: warps in that state, a scheduler and issued instruction.
STALLS = (
    "long_scoreboard",
    "short_scoreboard",
    "barrier",
    "gmma",
    "wait",
    "math_pipe_throttle",
    "mio_throttle",
    "lg_throttle",
    "not_selected",
    "selected",
    "no_instruction",
    "branch_resolving",
    "dispatch_stall",
    "membar",
    "sleeping",
    "misc",
)
COUNTERS |= {
    f"stall_{name}": (f"smsp__average_warps_issue_stalled_{name}_per_issue_active.ratio", 1)
    for name in STALLS
}


# Shapes on which a target of speed was missed, and what a call gets there. The last backward shape has two:
# a call gets `ds_buffered`, and `peeled` is counted beside it.
MISSED = (
    Target("forward", "staged", M=128, N=512, density=0.1),
    Target("backward", "stationary", M=128, N=512, density=0.1),
    Target("forward", "staged", M=1024, N=1024, density=1.0, B=192, suite="dense"),
    Target("backward", "peeled", M=1024, N=1024, density=1.0, B=192, suite="dense"),
    Target("backward", "ds_buffered", M=1024, N=1024, density=1.0, B=192, suite="dense"),
)

# What a call gets on the shape of all steps, and what missed a target.
LAST = {"forward": "staged", "backward": "stationary"}
CALLED = (*(Target(way, step, M=M) for M in (128, 256) for way, step in LAST.items()), *MISSED)


def targets(queries=QUERIES, names=None) -> list[Target]:
    """Baseline and steps of both ladders on one jagged shape, then ``MISSED``; of all, those in ``names``."""
    passes = {
        "forward": (BASELINE, "warp_specialized", "peeled", "staged", "stationary"),
        "backward": (BASELINE, "warp_specialized", "peeled", "two_cta", "stationary"),
    }
    found = [Target(way, step, M=M) for M in queries for way, steps in passes.items() for step in steps]
    return [target for target in (*found, *MISSED) if names is None or target.step in names]


def known(metrics, said: str) -> list[str]:
    """The metrics whose base name occurs in what ``ncu --query-metrics`` printed; those of the launch always.

    All of them where it printed nothing.
    """
    names = {line.split()[0] for line in said.splitlines() if line[:1].isalpha()}
    if not any(name.startswith("sm__") for name in names):
        return list(metrics)
    return [metric for metric in metrics if metric.startswith("launch__") or metric.split(".")[0] in names]


def command(metrics, report: str, arguments=(), program: str = "jfa.lab.counters") -> list[str]:
    """The ncu command line: counters of the kernels between cudaProfilerStart and Stop, clocks left alone.

    Without ``metrics`` (None): stall samples of every instruction instead.
    """
    names = "|".join((*KERNELS, MARK))
    return [
        "ncu",
        *("--clock-control", "none"),
        *("--profile-from-start", "off"),
        *("--kernel-name", f"regex:^({names})$"),
        *(("--metrics", ",".join(metrics)) if metrics is not None else ("--section", "SourceCounters")),
        *("--force-overwrite", "--export", report),
        *("python", "-m", program, "run", *arguments),
    ]


def command_text(metrics, report: str) -> str:
    """The words of `command` in lines of at most 100 characters."""
    words = " ".join(command(metrics, report))
    return textwrap.fill(words, 100, subsequent_indent="    ", break_on_hyphens=False)


def asked(queries=None, names=None) -> tuple[str, ...]:
    """The arguments by which the program that ncu watches gets the `targets` of its parent."""
    rows = ("--M", *map(str, queries)) if queries else ()
    return rows + (("--step", *names) if names else ())


def short_name(name: str) -> str:
    """A kernel's name without its namespace and its parameters."""
    return name.split("(")[0].split("::")[-1].strip()


def rows_of(text: str) -> list[dict]:
    """Launches from the CSV that ``ncu --import REPORT --csv --page raw --print-units base`` prints.

    Each is a dict of kernel and the columns of ``COUNTERS`` that were counted. Raises ValueError for a text
    without a header.
    """
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        raise ValueError('expected the CSV of ncu --page raw, found no line that begins with "ID"')
    table = list(csv.DictReader(io.StringIO("\n".join(lines[start:]))))
    found = []
    for line in table[1:]:  # the first line holds the units
        row = {"kernel": short_name(line["Kernel Name"])}
        for column, (metric, unit) in COUNTERS.items():
            try:
                row[column] = float(line[metric].replace(",", "")) / unit
            except (KeyError, ValueError):
                row[column] = ""
        found.append(row)
    return found


def by_target(rows: list[dict], chosen: list[Target]) -> list[dict]:
    """Rows with the columns of their target; the mark ends a target. ValueError if the counts differ."""
    found, place = [], 0
    for row in rows:
        if row["kernel"].startswith(MARK):
            place += 1
        elif place < len(chosen):
            found.append({**chosen[place].columns(), **row})
    if place != len(chosen):
        raise ValueError(f"expected {len(chosen)} targets, the profile holds {place}")
    return found


def run(chosen: list[Target]) -> None:
    """Run every target once between cudaProfilerStart and Stop, after runs that nobody counts."""
    import torch

    runtime = torch.cuda.cudart()
    for target in chosen:
        function = prepare(target)
        for _ in range(3):
            function()
        torch.cuda.synchronize()
        runtime.cudaProfilerStart()
        function()
        torch.cuda._sleep(1000)
        torch.cuda.synchronize()
        runtime.cudaProfilerStop()


def _told(line: list[str], seconds: float) -> str:
    try:
        done = subprocess.run(line, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        print(" ".join(line[:3]), f"took more than {seconds} s", flush=True)
        return ""
    if done.returncode:
        print(" ".join(line[:3]), "failed:", (done.stdout + done.stderr)[-2000:], flush=True)
    return done.stdout


def need_ncu() -> None:
    """RuntimeError where there is no ncu."""
    if shutil.which("ncu") is None:
        raise RuntimeError("ncu (Nsight Compute) is not on the PATH")


def profiled(page: str, line: Callable[[str], list[str]], seconds: float, raw: str | None = None) -> str:
    """What ncu prints of a page of the report that a command makes; ``raw`` keeps it in a file.

    ``line``: a `command` that lacks its report. Raises as `need_ncu`.
    """
    need_ncu()
    with tempfile.TemporaryDirectory() as folder:
        report = str(Path(folder) / "report.ncu-rep")
        words = line(report)
        words[words.index("python")] = sys.executable
        _told(words, seconds)
        text = _told(["ncu", "--import", report, "--csv", "--print-units", "base", "--page", page], 60)
    if raw:
        Path(raw).write_text(text)
    return text


def record(chosen: list[Target], arguments=(), raw: str | None = None, seconds: float = 90) -> list[dict]:
    """Profile the targets by ncu and return a row a launch, with the provenance.

    ``raw`` keeps ncu's own CSV. Raises RuntimeError where there is no ncu, ValueError for an empty profile.
    """
    import torch

    need_ncu()
    chip = "gh100" if torch.cuda.get_device_capability() == (9, 0) else "gb100"
    wanted = [metric for metric, _ in COUNTERS.values()]
    metrics = known(wanted, _told(["ncu", "--query-metrics", "--chip", chip], 30))
    if missing := sorted(set(wanted) - set(metrics)):
        print("metrics that this chip lacks:", ", ".join(missing), flush=True)
    text = profiled("raw", lambda report: command(metrics, report, arguments), seconds, raw)
    where = measure.provenance()
    return [{**where, **row} for row in by_target(rows_of(text), chosen)]


def show(row: dict) -> str:
    """A launch as a line."""

    def share(column):
        return "   -" if row[column] == "" else f"{100 * row[column]:3.0f}%"

    what = f"{row['direction']:<8} {shape_text(row):<14} {row['step']:<16} {row['kernel']:<14}"
    busy = "  ".join(f"{name} {share(f'{name}_busy')}" for name in ("tensor", "issue", "xu", "dram", "l2"))
    return f"{what} {row['duration_us'] or 0:7.1f} us  {busy}  local {row['local_load_sectors']}"


def main(arguments: list[str] | None = None) -> int:
    """Run the command line above; return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m jfa.lab.counters", description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("command", "run", "record"))
    parser.add_argument("--output", help="CSV to write")
    parser.add_argument("--raw", help="file for ncu's own CSV")
    parser.add_argument("--workers", type=int, default=0, help="processes that compile beforehand")
    parser.add_argument("--M", nargs="+", type=int, help=f"rows of queries (default: {QUERIES})")
    parser.add_argument("--step", nargs="+", help="only these steps")
    options = parser.parse_args(arguments)
    chosen, arguments = targets(options.M or QUERIES, options.step), asked(options.M, options.step)
    if not chosen:
        parser.error(f"--step: expected names of {sorted({target.step for target in targets()})}")
    if options.what == "command":
        metrics = [metric for metric, _ in COUNTERS.values()]
        print(" ".join(command(metrics, "counters.ncu-rep", arguments)))
        return 0
    import torch

    if not torch.cuda.is_available():
        parser.error("no CUDA device: there is nothing to count here")
    if options.what == "run":
        run(chosen)
        return 0
    if options.workers:
        for target, problem in compile_all(chosen, options.workers).items():
            print(f"{target}: {problem}", flush=True)
    try:
        rows = record(chosen, arguments, options.raw)
    except (RuntimeError, ValueError) as error:
        parser.error(str(error))
    for row in rows:
        print(show(row), flush=True)
    if options.output:
        measure.write_rows(options.output, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
