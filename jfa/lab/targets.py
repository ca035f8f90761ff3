"""What a profiler is pointed at: one pass of one step on one shape, made ready to run."""

import concurrent.futures
import dataclasses
import functools
import multiprocessing

import torch

from jfa import steps
from jfa.lab import cases, ladder
from jfa.lab.cases import shape_text

BASELINE = "baseline"


@dataclasses.dataclass(frozen=True)
class Target:
    """One pass of a Hopper step (or of the baseline) on one shape.

    ``step`` is a name of the ladder, ``M``, ``N``, ``density``, ``B``, ``D`` and ``suite`` ("jagged", "dense"
    or "packed") are a case's, ``left_out`` names an entry of `jfa.lab.ablation.edits_of` ("" for the whole
    kernel).
    """

    direction: str
    step: str
    M: int = 128
    N: int = 1024
    density: float = 0.5
    B: int = 768
    D: int = 128
    left_out: str = ""
    suite: str = "jagged"

    @property
    def case(self) -> cases.Case:
        """The shape."""
        return cases.Case(self.suite, self.M, self.N, self.density, B=self.B, D=self.D)

    def columns(self) -> dict:
        """The columns of a row that say what ran."""
        impl = "jfa_baseline" if self.step == BASELINE else "jfa"
        return {
            **self.case.columns(),
            "direction": self.direction,
            "scope": "kernel",
            "impl": impl,
            "step": self.step,
        }


@functools.lru_cache(maxsize=2)
def _inputs(case: cases.Case, device: str):
    inputs = cases.make_inputs(case, device)
    lengths = case.lengths().tolist()
    problem = ladder.problem_of(lengths, inputs.q.shape[0], case.Hq, case.D, inputs.q.dtype, device)
    problem = dataclasses.replace(problem, broadcast_q=inputs.q_offsets is None)
    args = (problem, inputs.q, inputs.k, inputs.v, inputs.kv_offsets, inputs.q_offsets)
    return inputs, problem, args


@functools.lru_cache(maxsize=2)
def _passed_forward(case: cases.Case, device: str):
    """out and lse of a case, by the last forward step."""
    return ladder.module_of("hopper").forward(*_inputs(case, device)[2])


def case_text(row) -> str:
    """A short name of a row's shape; the query rows alone on the shape on which all steps were counted."""
    main = Target("forward", "staged")
    here = (row["suite"], row["N"], row["density"]) == (main.case.suite, main.N, main.density)
    return f"M={row['M']}" if here else shape_text(row)


def step_of(target: Target):
    """The Step that a target runs, with its edits made; None for the baseline."""
    if target.step == BASELINE:
        return None
    step = steps.find("hopper", target.direction, target.step)
    if target.left_out:
        from jfa.lab import ablation

        tiles = int(target.case.lengths().sum()) // 128
        return ablation.without(step, target.left_out, max(1, min(ablation.SPREAD, tiles)))
    return step


def prepare(target: Target, device: str = "cuda"):
    """A function that runs the target once, tile lists made beforehand; it returns what the pass returns.

    On the CPU it must be called within `jfa.emulator.emulate`.
    """
    step = step_of(target)
    inputs, problem, args = _inputs(target.case, device)
    if step is None:
        from jfa.kernels import baseline as module

        options = {}
    else:
        module = ladder.module_of("hopper")
        options = {"step": step, "schedule": ladder.schedule_of(step, problem, inputs)}
    if target.direction == "backward":
        out, lse = _passed_forward(target.case, device)
        args = (problem, inputs.dout, None, *args[1:4], out, lse, *args[4:])
    return functools.partial(getattr(module, target.direction), *args, **options)


def _compile(target: Target) -> str:
    """Run a target once in a process of its own; returns what went wrong, "" if nothing."""
    try:
        prepare(target)()
        torch.cuda.synchronize()
    except Exception as error:
        return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:160]}"
    return ""


def compile_all(targets, workers: int, seconds: float = 90) -> dict[Target, str]:
    """Fill Triton's cache by running every target once, several at a time; the problems by target."""
    spawn = multiprocessing.get_context("spawn")
    found = {}
    with concurrent.futures.ProcessPoolExecutor(workers, mp_context=spawn) as pool:
        futures = {pool.submit(_compile, target): target for target in targets}
        for future in concurrent.futures.as_completed(futures, timeout=seconds):
            found[futures[future]] = future.result()
    return {target: problem for target, problem in found.items() if problem}
