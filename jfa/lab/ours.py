"""Our own attention as a peer of the benchmark: which step ran, any step by name, schedules beforehand."""

import contextlib
import functools

import torch

from jfa.lab.cases import Inputs
from jfa.lab.peers import Run, run_of

DIRECTIONS = ("forward", "backward")
IN_A_ROW = 8  # schedules that one timed call makes: a single one is shorter than the launch of its graph


@contextlib.contextmanager
def watched_steps():
    """Collect which steps are launched meanwhile: a dict direction -> (step, problem)."""
    from jfa.kernels import step as steps

    seen, originals = {}, {}
    kinds = [kind for kind in (steps.Step, *steps.Step.__subclasses__()) if "constexprs" in vars(kind)]

    def watching(original):
        @functools.wraps(original)
        def constexprs(self, problem, *args, **kwargs):
            seen[self.direction] = (self, problem)
            return original(self, problem, *args, **kwargs)

        return constexprs

    for kind in kinds:
        originals[kind] = kind.constexprs
        kind.constexprs = watching(kind.constexprs)
    try:
        yield seen
    finally:
        for kind, original in originals.items():
            kind.constexprs = original


def schedule_for(step, problem, inputs: Inputs, block_m: int = 128):
    """The tile lists that a step makes for itself when it is given none."""
    from jfa.schedule import make_schedule

    sizes = step.tiling(problem)
    rows = (inputs.q.shape[0], inputs.k.shape[0])
    options = {"order": step.order, "pruned": step.pruned}
    tiles = (sizes.get("BLOCK_M", block_m) if step.direction == "forward" else block_m, sizes["BLOCK_N"])
    return make_schedule(rows, inputs.kv_offsets, inputs.q_offsets, *tiles, **options)


def prepare(inputs: Inputs, scope: str, backend: str = "auto", step=None) -> Run:
    """Our own call as a `Run`; ``step`` (a Step) sets that of its direction, the other chooses its own.

    Scope "kernel" hands over schedules that were made beforehand, one for each direction, each as its step
    would make it; the baseline finds its tiles by itself.
    """
    import jfa

    case = inputs.case
    leaves = [x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    options = {"causal": case.causal, "backend": backend, "step": step}
    if case.window is not None:
        options["window"] = case.window

    def attend(schedule=None):
        offsets = (inputs.kv_offsets, inputs.q_offsets)
        return jfa.jagged_flash_attention(*leaves, *offsets, schedule=schedule, **options)

    with watched_steps() as seen:
        torch.autograd.grad(attend(), leaves, inputs.dout)
    schedules = dict.fromkeys(DIRECTIONS)
    if scope == "kernel":
        sizes = {"block_m": 128}
        if "forward" in seen:
            sizes["block_m"] = seen["forward"][0].tiling(seen["forward"][1]).get("BLOCK_M", 128)
        schedules |= {way: schedule_for(*facts, inputs, **sizes) for way, facts in seen.items()}
    run = run_of(functools.partial(attend, schedules["forward"]), leaves, inputs.dout)
    if schedules["backward"] is not None:
        graph = attend(schedules["backward"])
        run.backward = lambda: torch.autograd.grad(graph, leaves, inputs.dout, retain_graph=True)
        run.gradients = run.backward
    run.steps = {way: found.name for way, (found, _) in seen.items()}
    run.steps["both"] = "+".join(dict.fromkeys(run.steps.values()))
    return run


def schedule_maker(inputs: Inputs):
    """A function that makes `IN_A_ROW` schedules as our forward step does; None where no step runs."""
    import jfa

    case = inputs.case
    options = {} if case.window is None else {"window": case.window}
    with watched_steps() as seen, torch.no_grad():
        offsets = (inputs.kv_offsets, inputs.q_offsets)
        jfa.jagged_flash_attention(inputs.q, inputs.k, inputs.v, *offsets, causal=case.causal, **options)
    if "forward" not in seen:
        return None
    return lambda: [schedule_for(*seen["forward"], inputs) for _ in range(IN_A_ROW)]


def named_step(name: str):
    """The Hopper step of "forward:NAME" or "backward:NAME"; ValueError for another word."""
    from jfa import steps

    direction, _, name = name.partition(":")
    return steps.find("hopper", direction, name)


def all_steps() -> list[str]:
    """Every Hopper step as "direction:name"."""
    from jfa import steps

    return [f"{way}:{step.name}" for way in DIRECTIONS for step in steps.ladder("hopper", way)]
