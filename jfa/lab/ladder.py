"""The ladder as a table: what each step changes, what the compiler makes of it, and how fast it is.

``python -m jfa.lab.ladder forward`` (or backward) compiles every step for both targets and runs it in the
emulator. On an H200 it also measures the Hopper steps over jagged shapes and, with ``--output``, writes the
rows with their provenance.
"""

import argparse
import dataclasses
import functools
import importlib
import sys

import torch

from jfa import jagged, steps
from jfa.kernels.problem import Problem
from jfa.lab import argtypes, cases, check, measure, source
from jfa.lab.launches import capture_launches
from jfa.schedule import make_schedule

TARGETS = {"hopper": "sm_90", "blackwell": "sm_100"}
INSTRUCTIONS = {
    "hopper": ("HGMMA", "UTMALDG", "UTMASTG", "UTMAREDG", "USETMAXREG"),
    "blackwell": ("UTCMMA", "UTMALDG", "UTMASTG", "UTMAREDG", "LDTM", "UGETNEXTWORKID"),
}
BASELINE = "baseline"  # where both ladders begin: the kernel that the compiler schedules
ONE_QUERY_TILE = "dynamic, one Q tile"  # no step: `dynamic` with the tiling of the step before
LENGTHS = (0, 1, 127, 128, 129, 300, 63)  # what the emulator runs


def module_of(arch: str):
    """The launch module of "hopper" or "blackwell"."""
    return importlib.import_module(f"jfa.kernels.{arch}.launch")


def problem_of(lengths, query_len: int, heads: int, dim: int, dtype=torch.bfloat16, device="cpu") -> Problem:
    """A broadcast-Q problem over these lengths without windows."""
    return Problem(
        batch=len(lengths),
        heads_q=heads,
        heads_kv=heads,
        head_dim=dim,
        head_dim_v=dim,
        total_q=query_len,
        total_kv=int(sum(lengths)),
        broadcast_q=True,
        scale=dim**-0.5,
        dtype=dtype,
        device_type=device,
    )


def tensors_of(problem: Problem, lengths, seed: int = 0):
    """q, k, v and offsets of a problem, on the CPU."""
    draw = torch.Generator().manual_seed(seed)
    shapes = [(problem.total_q, problem.heads_q), *2 * [(problem.total_kv, problem.heads_kv)]]
    q, k, v = (torch.randn(*shape, problem.head_dim, generator=draw).to(problem.dtype) for shape in shapes)
    return q, k, v, jagged.lengths_to_offsets(list(lengths))


def run_step(step, problem: Problem, q, k, v, offsets, dout=None, schedule=None):
    """Run one step on its backend: (out, lse), or with ``dout`` the gradients as well."""
    module = module_of(step.arch)
    if step.direction == "forward":
        return module.forward(problem, q, k, v, offsets, None, step=step, schedule=schedule)
    from jfa import reference

    out, lse = reference.attention(q, k, v, offsets, None, scale=problem.scale)
    args = (problem, dout, None, q, k, v, out.to(q.dtype), lse.float(), offsets, None)
    return module.backward(*args, step=step, schedule=schedule)


def compiled(step):
    """Compile report of the step's main kernel for a production shape (M = 128, H = 4, D = 128, bf16)."""
    lengths = [512, 300, 40, 777]
    problem = problem_of(lengths, 128, 4, 128)
    q, k, v, offsets = tensors_of(problem, lengths)
    dout = torch.zeros(problem.out_shape, dtype=problem.dtype)
    with capture_launches() as launches:
        run_step(step, problem, q, k, v, offsets, dout)
    main = [launch for launch in launches if launch.name == "kernel"]
    return (main or launches)[-1].report(TARGETS[step.arch])


def emulated(step, policy: str = "random", seed: int = 0) -> str:
    """Verdict of one run in the emulator: findings, and the worst error as a share of its budget."""
    from jfa import emulator

    problem = problem_of(LENGTHS, 128, 2, 64)
    q, k, v, offsets = tensors_of(problem, LENGTHS)
    wanted = check.expected(q, k, v, offsets, gradients=step.direction == "backward", through_lse=False)
    with emulator.emulate(arch=TARGETS[step.arch], policy=policy, seed=seed) as machine:
        results = run_step(step, problem, q, k, v, offsets, wanted.inputs.dout)
    names = ("out", "lse") if step.direction == "forward" else ("dq", "dk", "dv")
    worst = wanted.check(dict(zip(names, results, strict=True))).worst.ratio
    findings = sum(len(report.errors()) for report in machine.reports)
    verdict = "ok" if findings == 0 and worst <= 1 else "FAILS"
    return f"{verdict}: {findings} findings, {worst:.2f} of the error budget"


def rows(direction: str, arch: str) -> list[dict]:
    """The table of one ladder, a dict a step."""
    found = []
    before = None
    for step in steps.ladder(arch, direction):
        report = compiled(step)
        counts = report.opcodes.groups() if report.counts is not None else {}
        found.append(
            {
                "step": step.name,
                "changed lines": "-" if before is None else source.changed_lines(before, step),
                "registers": report.registers,
                "setmaxnreg": "/".join(str(n) for n in sorted({n for _, n in report.setmaxnreg})),
                "spill bytes": f"{report.spill_store_bytes}/{report.spill_load_bytes}",
                "shared bytes": report.shared_bytes,
                "TMEM columns": report.tmem_columns,
                "instructions": report.instructions,
                **{name: counts.get(name, 0) for name in INSTRUCTIONS[arch]},
                "problems": len(report.problems(allow_spills=True)),
                "emulator": emulated(step),
            }
        )
        before = step
    return found


def show(table: list[dict]) -> str:
    """The rows as aligned text."""
    if not table:
        return "no steps"
    lines = [list(table[0])] + [[str(value) for value in row.values()] for row in table]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths)) for line in lines)


# ------------------------------------------------------------------------------------------------- on a GPU


def variants(direction: str) -> dict:
    """The Hopper steps by name."""
    return {step.name: step for step in steps.ladder("hopper", direction)}


def timed(direction: str) -> dict:
    """What the course measures: the baseline (no step: None), the steps, and `ONE_QUERY_TILE` (forward).

    That one separates what `dynamic` changes: tiles handed out at run time, and a second Q tile.
    """
    ladder = variants(direction)
    if direction == "forward":
        tiling = ladder["balanced"].tiling
        ladder |= {ONE_QUERY_TILE: dataclasses.replace(ladder["dynamic"], tiling=tiling)}
    return {BASELINE: None} | ladder


def experiments() -> dict:
    """Variants of the last forward steps, each with one thing changed."""
    from jfa.kernels import parts
    from jfa.lab import folded, late

    ladder = variants("forward")
    peeled, staged, stationary = (ladder[name] for name in ("peeled", "staged", "stationary"))

    def tiled(step, long=None, short=None, **numbers):
        """``long``, ``short``: depths of the rings of Q, K and V with blocks of 128 and of 64 keys."""

        def tiling(problem):
            sizes = step.tiling(problem) | numbers
            depths = short if sizes["BLOCK_N"] == 64 else long
            return sizes | dict(zip(("Q_DEPTH", "K_DEPTH", "V_DEPTH"), depths or ()))

        return dataclasses.replace(step, tiling=tiling)

    static = {"draw": parts.boustrophedon, "publish": parts.stay_silent, "hear": parts.boustrophedon}
    sums = dataclasses.replace(staged, attend=folded.attend)
    held = late.waiting(staged)
    return {
        "peeled": peeled,
        "peeled no turns": tiled(peeled, PINGPONG=False),
        "peeled BN64": tiled(peeled, short=(2, 5, 5), BLOCK_N=64),
        "peeled natural": dataclasses.replace(peeled, order="natural"),
        "staged": staged,
        "staged no turns": tiled(staged, PINGPONG=False),
        "staged folded": sums,
        "staged late wait": held,
        "staged late wait no turns": tiled(held, PINGPONG=False),
        "staged Q1 more K": tiled(staged, (1, 3, 2), (1, 5, 5)),
        "staged Q1 more V": tiled(staged, (1, 2, 3), (1, 4, 6)),
        "staged zigzag": dataclasses.replace(staged, **static),
        "stationary": stationary,
        "stationary no turns": tiled(stationary, PINGPONG=False),
        "stationary Q2": tiled(stationary, (2, 2, 2), (2, 4, 4)),
    }


def measured(direction: str, shapes: list[cases.Case], chosen: dict, rounds: int = 9):
    """Yield a row for every shape, step and scope ("kernel": schedule given, "call": made in the call).

    ``chosen``: steps by name; BASELINE among them is the compiler-scheduled kernel, which takes no schedule:
    it has the scope "call" alone.
    """
    from jfa.kernels import baseline

    module = module_of("hopper")
    for case in shapes:
        inputs = cases.make_inputs(case)
        lengths = case.lengths().tolist()
        problem = problem_of(lengths, case.M, case.Hq, case.D, inputs.q.dtype, "cuda")
        args = (problem, inputs.q, inputs.k, inputs.v, inputs.kv_offsets, None)
        run = module.forward
        if direction == "backward":
            out, lse = module.forward(*args)
            args = (problem, inputs.dout, None, *args[1:4], out, lse, *args[4:])
            run = module.backward
        work = case.work(direction)
        calls = {}
        for name, step in chosen.items():
            if name == BASELINE:
                calls[f"call:{name}"] = functools.partial(getattr(baseline, direction), *args)
                continue
            schedule = schedule_of(step, problem, inputs)
            for scope, given in (("kernel", schedule), ("call", None)):
                calls[f"{scope}:{name}"] = functools.partial(run, *args, step=step, schedule=given)
        sizes = {"sample_ms": 8.0, "settle_ms": measure.SETTLE_MS}
        for row in measure.interleave(calls, rounds, **sizes, graph=True, keep_going=True):
            scope, name = row.pop("name").split(":")
            impl = "jfa_baseline" if name == BASELINE else "jfa"
            columns = {**case.columns(), "direction": direction, "scope": scope, "impl": impl, "step": name}
            yield columns | measure.add_work(row, work)
        torch.cuda.empty_cache()


def schedule_of(step, problem, inputs):
    """The tile lists that the step would make for itself."""
    sizes = step.tiling(problem)
    block_m = sizes.get("BLOCK_M", 128) if step.direction == "forward" else 128
    options = {"order": step.order, "pruned": step.pruned}
    return make_schedule(problem, inputs.kv_offsets, inputs.q_offsets, block_m, sizes["BLOCK_N"], **options)


SHAPES = [cases.jagged_case(*shape) for shape in cases.FEW]


def live_text(direction: str, names, shapes: list[cases.Case], rounds: int) -> str:
    """Measure named entries of `timed` on the current GPU; a line a shape, scope and step, then where."""
    import pandas

    from jfa.lab import recorded

    ladder = timed(direction)
    found = list(measured(direction, shapes, {name: ladder[name] for name in names}, rounds))
    lines = ["measured live, schedule given (kernel) or made in the call"]
    for row in found:
        shape = f"M {row['M']} N {row['N']} density {row['density']:g}"
        result = row.get("error") or f"{row['ms_p50']:.3f} ms, {row['tflops']:.0f} TFLOPS"
        lines.append(f"{shape}  {row['scope']:<6} {row['step']:<17} {result}")
    where = recorded.provenance_lines(pandas.DataFrame(found))
    return "\n".join([*lines, *(f"measured on {line}" for line in where)])


def main(arguments: list[str] | None = None) -> int:
    """Print the tables; on a GPU measure as well."""
    parser = argparse.ArgumentParser(prog="python -m jfa.lab.ladder", description=__doc__)
    parser.add_argument("direction", choices=("forward", "backward"))
    parser.add_argument("--output", help="CSV file for the measured rows")
    parser.add_argument("--rounds", type=argtypes.count, default=9)
    parser.add_argument("--experiments", action="store_true", help="variants of the last steps instead")
    parser.add_argument("--only", choices=("table", "times"), help="one half of the work")
    chosen = parser.parse_args(arguments)
    if chosen.only == "times" and not torch.cuda.is_available():
        parser.error("no CUDA device: there is nothing to measure here")
    if chosen.only != "times":
        for arch in TARGETS:
            print(f"{chosen.direction} on {arch} ({TARGETS[arch]})")
            print(show(rows(chosen.direction, arch)), flush=True)
    if chosen.only == "table" or not torch.cuda.is_available():
        return 0
    compared = experiments() if chosen.experiments else timed(chosen.direction)
    for row in measured(chosen.direction, SHAPES, compared, chosen.rounds):
        if chosen.output:  # at once: a run that is cut short keeps what it has
            measure.write_rows(chosen.output, [row], append=True)
        print(
            f"M={row['M']:<4} N={row['N']:<5} density {row['density']:<4} {row['scope']:<7}{row['step']:<24}"
            f"{row.get('ms_p50', 0) * 1e3:9.1f} us {row.get('tflops', 0):7.0f} TFLOPS {row['error']}",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
