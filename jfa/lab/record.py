"""Record what the figures show, on this GPU: every measuring command of the lab in order, each with a limit.

    python -m jfa.lab.record FOLDER                  all stages, about 19 minutes on an H200
    python -m jfa.lab.record FOLDER --only ladders   some stages
    python -m jfa.lab.record FOLDER --dry-run        print the commands

FOLDER gets CSVs with the names that they have in figures/, and a log a command. To show them, copy the CSVs
there and run ``python -m jfa.lab.results --derive``, ``make figures`` and ``make readme``.
"""

import argparse
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

SUITES = ("jagged", "histories", "extra", "dense", "packed")
MORE = ("cudnn", "torch_varlen", "jfa_baseline", "flex")
NAMED = (
    *("forward:staged", "forward:stationary"),
    *("backward:peeled", "backward:ds_buffered", "backward:stationary"),
)
OUTPUTS = ("09_results", "04_steps", "05_steps", "05_reduction", "10_counters", "10_ablation")
OUTPUTS += ("09_reach", "10_waits", "10_stamps", "10_rounds", "10_neighbours", "10_clocks", "09_host")
ALONE = ("--alone", "--rounds", "2", "--settle-ms", "800", "--sample-ms", "100", "--scope", "call")


def stages(folder: Path, workers: int) -> dict[str, list[tuple[list[str], int]]]:
    """The commands by stage: module and arguments, and the seconds that each may take."""
    bench = ["jfa.lab.bench", "--suite", *SUITES, "--impl", "jfa", "fa4", "--more", *MORE]
    bench += ["--steps", *NAMED, "--rounds", "4", "--sample-ms", "8"]
    steps = ["jfa.lab.bench", "--suite", "jagged", "--few", "--impl", "jfa", "jfa_baseline", "--steps", "all"]
    alone = ["jfa.lab.bench", *ALONE, "--direction", "forward", "backward"]
    jagged = ["--suite", "jagged", "--M", "128", "512", "--N", "512", "4096", "--density", "0.1", "0.9"]
    jagged += ["--impl", "jfa", "fa4"]
    dense = ["--suite", "dense", "--impl", "jfa", "fa4", "cudnn"]
    host = ["jfa.lab.bench", "--suite", "host", "--impl", "jfa", "fa4", "torch_varlen", "jfa_baseline"]
    host += ["--scope", "call", "--rounds", "31", "--sample-ms", "20", "--settle-ms", "20"]
    output = {name: ["--output", str(folder / f"{name}.csv")] for name in OUTPUTS}
    memory = ["--memory", str(folder / "09_memory.csv")]
    compiled = ["--compile", str(workers)]
    return {
        "bench": [
            ([*bench, *compiled], 180),  # no kernel is compiled while others are timed
            ([*bench, "--case-limit-s", "60", *output["09_results"], *memory], 600),
            ([*host, "--host", *output["09_host"]], 120),
            ([*host, *output["09_host"]], 120),
        ],
        "ladders": [
            ([*steps, "--scope", "kernel", *compiled], 120),
            (["jfa.lab.ladder", "forward", "--only", "times", *output["04_steps"]], 180),
            (["jfa.lab.ladder", "backward", "--only", "times", *output["05_steps"]], 180),
        ],
        "reduction": [(["jfa.lab.reduction", *output["05_reduction"]], 120)],
        "profile": [
            (["jfa.lab.counters", "record", "--workers", str(workers), *output["10_counters"]], 180),
            (["jfa.lab.ablation", "--workers", str(workers), *output["10_ablation"]], 180),
            (["jfa.lab.waits", "record", *output["10_waits"]], 120),
            (["jfa.lab.stamps", *output["10_stamps"]], 120),
            (["jfa.lab.reach", *output["09_reach"]], 150),
            (["jfa.lab.rounds", *output["10_rounds"]], 60),
            (["jfa.lab.neighbours", *output["10_neighbours"]], 60),
            ([*alone, *jagged, *output["10_clocks"]], 180),
            ([*alone, *dense, *output["10_clocks"]], 120),
        ],
    }


def run(command: list[str], limit: int, log: Path) -> str:
    """Run one command, its output in a log; returns what went wrong, "" if nothing."""
    environment = os.environ | {"FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1"}
    with log.open("w") as file:
        try:
            done = subprocess.run(
                [sys.executable, "-m", *command],
                stdout=file, stderr=subprocess.STDOUT, timeout=limit, env=environment, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return f"ended after {limit} s; rows so far are kept"
    return f"exit status {done.returncode}, see {log}" if done.returncode else ""


def main(arguments: list[str] | None = None) -> int:
    """Run the chosen stages one after the other; 1 if a command failed."""
    parser = argparse.ArgumentParser(prog="python -m jfa.lab.record", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where CSVs and logs go; it is made if it is not there")
    parser.add_argument("--only", nargs="+", choices=list(stages(Path(), 1)))
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes that compile")
    parser.add_argument("--dry-run", action="store_true", help="print the commands, run none")
    options = parser.parse_args(arguments)
    chosen = stages(options.folder, options.workers)
    commands = [command for name in options.only or chosen for command in chosen[name]]
    if options.dry_run:
        print("\n".join(shlex.join(["python", "-m", *command]) for command, _ in commands))
        return 0
    import torch

    if not torch.cuda.is_available():
        parser.error("no CUDA device: there is nothing to measure here")
    options.folder.mkdir(parents=True, exist_ok=True)
    failed = 0
    for number, (command, limit) in enumerate(commands):
        start = time.monotonic()
        name = command[0].rpartition(".")[2]
        problem = run(command, limit, options.folder / f"{number:02d}_{name}.log")
        failed += bool(problem)
        print(f"{name}: {time.monotonic() - start:.0f} s {problem}".rstrip(), flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
