"""Leave one stage of a kernel out and time the rest: what the kernel would gain if the stage were free.

    python -m jfa.lab.ablation --output figures/10_ablation.csv        (on an H200)

The answers of such a kernel are wrong by design; only its time is of interest. A stage is left out by
editing the text of the step's roles: the edited module is written to a folder of temporary files and
imported, and the step takes its roles from there. So an edit reaches the functions that a role calls. What
writes is not taken out but aimed behind the end of its sequence, where TMA drops it: the instruction stays,
the traffic goes.
"""

import argparse
import dataclasses
import hashlib
import importlib.util
import math
import os
import re
import sys
import tempfile
from pathlib import Path

from jfa.lab import argtypes, measure
from jfa.lab.targets import BASELINE, Target, compile_all, prepare, step_of

SPREAD = 64  # tiles that all loads of keys go round when "keys from memory" is left out: they stay in L2

# (direction, stationary backward or not) -> stage -> edits (pattern, instead). Every pattern must be found.
FORWARD = {
    "exponentials": [(r"tl\.math\.exp2\((scores \* scale - base\[:, None\])\)", r"(\1)")],
    "masks": [(r"tl\.where\(work\.seen\([^\n]*\), scores, -float\(\"inf\"\)\)", "scores")],
    "softmax": [
        (r"group\.SOFTMAX\([^\n]*nothing, scale, True\)", "scores, nothing, nothing, nothing"),
        (r"group\.SOFTMAX\([^\n]*state\.top, scale, MASK\)", "scores, state.top, state.top, state.total"),
    ],
    "writing O": [(r"(ragged_row\(work\.out_end\(tile\), tile\.q_len, )[^\n]*\)", r"\1tile.q_len)")],
    "keys from memory": [
        (
            r"(\w\.fill\(item \+ j, desc_[kv], )tile\.kv_end, tile\.kv_len, row",
            r"\1((item + j + t) % SPREAD + 1) * work.BLOCK_N, work.BLOCK_N, 0",
        ),
        (
            r"(\w\.fill\(item, desc_[kv], )tile\.kv_end, tile\.kv_len, row",
            r"\1((item + t) % SPREAD + 1) * work.BLOCK_N, work.BLOCK_N, 0",
        ),
    ],
}
KEYS_BACKWARD = {
    "exponentials": [(r"tl\.math\.exp2\((s \* scale_log2 - log2_lse\[None, :\])\)", r"(\1)")],
    "masks": [(r"tl\.where\(keys\.seen\([^\n]*\), p, 0\.0\)", "p")],
    "adding dQ": [(r"(ragged_row\(tile\.q_end, tile\.q_len, )block \* keys\.BLOCK_M\)", r"\1tile.q_len)")],
    "writing dK, dV": [
        (r"(ragged_row\(tile\.kv_end, tile\.kv_len, )tile\.key \+ keys\.mine \+ mine\)", r"\1tile.kv_len)")
    ],
}
STATIONARY_BACKWARD = {
    "exponentials": [(r"tl\.math\.exp2\((s \* scale_log2 - log2_lse\[:, None\])\)", r"(\1)")],
    "masks": [(r"p = tl\.where\(\(tl\.arange\(0, share\.BLOCK_N\) < left\)[^\n]*\)", "pass")],
    "writing dK, dV": [
        (
            r"ragged_row\((tile\.)?end, (?:tile\.)?length, (?:tile\.)?key\)",
            r"ragged_row(\1end, \1length, \1length)",
        )
    ],
    "keys from memory": [
        (
            r"(bring_keys\(share, buffers\.[kv], n, [kv], )tile\)",
            r"\1KeyTile(tile.sequence, 0 * n, ((n + share.begin) % SPREAD + 1) * share.BLOCK_N, "
            r"0 * n + share.BLOCK_N))",
        )
    ],
}
ALL = "all of these"


def edits_of(step) -> dict[str, list]:
    """Stage -> edits for a Hopper step; the last entry, ALL, leaves every stage out at once."""
    if step.direction == "forward":
        found = FORWARD
    else:
        found = STATIONARY_BACKWARD if step.name == "stationary" else KEYS_BACKWARD
    every = [
        edit
        for name, edits in found.items()
        if name != "exponentials" or "softmax" not in found
        for edit in edits
    ]
    return {**found, ALL: every}


def rewritten(module, text: str):
    """The module with another text, imported from a file whose name is the digest of the text."""
    name = f"jfa_edited_{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    if name not in sys.modules:
        folder = Path(tempfile.gettempdir()) / f"jfa-edited-{os.getuid()}"
        folder.mkdir(exist_ok=True)
        path = folder / f"{name}.py"
        partial = folder / f"{name}.{os.getpid()}"
        partial.write_text(text)
        partial.replace(path)
        spec = importlib.util.spec_from_file_location(name, path)
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def imported(module: str, name: str) -> tuple[str, str, int]:
    """The edit that makes a function known in the text of the forward kernel."""
    return r"from jfa\.kernels\.parts import LN2, [^\n]*\n", rf"\g<0>from {module} import {name}\n", 1


def edited(step, edits):
    """The step with edits (pattern, instead) made in the text of its roles' modules.

    ValueError where a pattern is in none of them, or, for an edit with a third entry, not as often as that.
    """
    roles = step.roles()
    names = {role.fn.__module__ for role in roles.values()}
    texts = {name: Path(sys.modules[name].__file__).read_text() for name in sorted(names)}
    before = dict(texts)
    for pattern, instead, *wanted in edits:
        count = 0
        for name in texts:
            texts[name], more = re.subn(pattern, instead, texts[name])
            count += more
        if not count:
            raise ValueError(f"{step.name}: nothing like {pattern!r} in {', '.join(texts)}")
        if wanted and count != wanted[0]:
            raise ValueError(f"{step.name}: expected {pattern!r} {wanted[0]} times, found it {count} times")
    changed = {
        name: rewritten(sys.modules[name], text) for name, text in texts.items() if text != before[name]
    }
    swapped = {
        field: getattr(changed[role.fn.__module__], role.fn.__name__)
        for field, role in roles.items()
        if role.fn.__module__ in changed
    }
    return dataclasses.replace(step, **swapped)


def without(step, stage: str, spread: int = SPREAD):
    """The step without one of its stages; ValueError where an edit's pattern is not in the roles' modules.

    ``spread``: tiles of keys that the batch has at least, which all loads go round where keys stay in L2.
    """
    known = edits_of(step)
    if stage not in known:
        raise ValueError(f"stage: expected one of {', '.join(known)}, got {stage!r}")
    return edited(step, [(pattern, text.replace("SPREAD", str(spread))) for pattern, text in known[stage]])


# ------------------------------------------------------------------------------------------------- on a GPU


PASSES = (("forward", "staged"), ("backward", "peeled"), ("backward", "stationary"))


def targets(queries=(128, 256), passes=PASSES) -> list[Target]:
    """Every ablation of some steps (direction, name) on the profiled shape, the whole kernel first."""
    found = []
    for direction, step in passes:
        for M in queries:
            whole = Target(direction, step, M=M)
            stages = ("", *edits_of(step_of(whole)))
            found += [dataclasses.replace(whole, left_out=stage) for stage in stages]
    return found


def difference(found, wanted) -> float:
    """Largest norm of a difference over the norm of the baseline's result, inf for NaN; lse is left out."""
    pairs = list(zip(found, wanted))[: 1 if len(wanted) == 2 else 3]
    norms = [float((a.float() - b.float()).norm() / b.float().norm()) for a, b in pairs]
    return max(norm if norm == norm else math.inf for norm in norms)


def measured(chosen: list[Target], rounds: int = 9, sample_ms: float = 5.0):
    """Yield a row a target; targets that differ only in what is left out are timed in turn."""
    groups: dict = {}
    for target in chosen:
        groups.setdefault(dataclasses.replace(target, left_out=""), []).append(target)
    for whole, members in groups.items():
        case = whole.case
        work = case.work(whole.direction)
        wanted = prepare(dataclasses.replace(whole, step=BASELINE))()
        functions, problems, differ = {}, {}, {}
        for target in members:
            try:
                functions[target.left_out] = prepare(target)
                differ[target.left_out] = difference(functions[target.left_out](), wanted)
            except (ValueError, RuntimeError) as error:
                problems[target.left_out] = f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"
                functions.pop(target.left_out, None)
        options = {"sample_ms": sample_ms, "settle_ms": measure.SETTLE_MS, "warmup_ms": 20}
        for row in measure.interleave(functions, rounds, graph=True, keep_going=True, **options):
            stage = row.pop("name")
            columns = {**whole.columns(), "left_out": stage, "rel_error": differ[stage]}
            yield columns | measure.add_work(row, work)
        for stage, problem in problems.items():
            yield {**whole.columns(), "left_out": stage, "error": problem, **measure.provenance()}


def show(row: dict) -> str:
    """A measured row as a line."""
    what = (
        f"{row['direction']:<8} {row['step']:<11} M={row['M']:<3} without {row['left_out'] or 'nothing':<17}"
    )
    return f"{what} " + (row["error"] or f"{1e3 * row['ms_p50']:8.1f} us")


def main(arguments: list[str] | None = None) -> int:
    """Measure every ablation and write the rows as they come."""
    import torch

    parser = argparse.ArgumentParser(prog="python -m jfa.lab.ablation", description=__doc__.splitlines()[0])
    parser.add_argument("--output", help="CSV to write; rows are appended")
    parser.add_argument("--rounds", type=argtypes.count, default=9)
    parser.add_argument("--workers", type=int, default=0, help="processes that compile beforehand")
    parser.add_argument("--M", nargs="+", type=int, default=[128, 256])
    parser.add_argument("--direction", nargs="+", choices=("forward", "backward"))
    parser.add_argument("--step", nargs="+", help="only these steps")
    options = parser.parse_args(arguments)
    ways, names = (
        options.direction or [way for way, _ in PASSES],
        options.step or [name for _, name in PASSES],
    )
    passes = [(way, name) for way, name in PASSES if way in ways and name in names]
    if not passes or set(names) - {name for _, name in PASSES}:
        there = ", ".join(f"{way} {name}" for way, name in PASSES)
        parser.error(f"--direction, --step: expected some of {there}")
    if not torch.cuda.is_available():
        parser.error("no CUDA device: there is nothing to measure here")
    chosen = targets(options.M, passes)
    if options.workers:
        wholes = [dataclasses.replace(target, step=BASELINE) for target in chosen if not target.left_out]
        for target, problem in compile_all([*wholes, *chosen], options.workers).items():
            print(f"{target}: {problem}", flush=True)
    for row in measured(chosen, options.rounds):
        if options.output:
            measure.write_rows(options.output, [row], append=True)
        print(show(row), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
