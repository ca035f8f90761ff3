"""One synchronization edge taken out of a kernel, and what the emulator says then."""

import contextlib
from dataclasses import dataclass

from jfa.kernels.step import Step

LENGTHS = (640, 0, 300)  # more blocks of keys than a ring has slots, and several tiles for each CTA
POLICIES = ("eager", "lazy", "random")


@dataclass(frozen=True)
class Verdict:
    """What runs of a step showed: ``kind`` ("ok", "deadlock", the first finding's kind, "wrong numbers").

    ``message`` in one sentence or more; ``policy`` under which it showed, "" for none.
    """

    kind: str
    message: str = ""
    policy: str = ""

    def __str__(self):
        if self.policy:
            return f"{self.kind}, {self.policy} policy: {self.message}"
        return f"{self.kind}, but with a warning: {self.message}" if self.message else self.kind


@contextlib.contextmanager
def without(function, statement: str, instead: str = "pass"):
    """While active, the emulator runs a jit function with one statement replaced; the file stays as it is.

    ``statement`` must stand exactly once in the function's source, else ValueError. A GPU or the compiler
    sees nothing of this.
    """
    from jfa import emulator

    def patch(source):
        if source.count(statement) != 1:
            raise ValueError(f"expected {statement!r} once in the source, found {source.count(statement)}")
        return source.replace(statement, instead)

    with emulator.mutated(function, patch):
        yield


def verdict(
    step: Step,
    lengths=LENGTHS,
    heads: int = 4,
    policies=POLICIES,
    head_dim: int = 64,
    queries: int = 128,
) -> Verdict:
    """Run a step in the emulator under each policy until something is wrong; "ok" may carry a warning."""
    from jfa import emulator
    from jfa.lab import check, ladder

    backward = step.direction == "backward"
    names = ("dq", "dk", "dv") if backward else ("out", "lse")
    problem = ladder.problem_of(lengths, queries, heads, head_dim)
    tensors = ladder.tensors_of(problem, lengths)
    wanted = check.expected(*tensors, gradients=backward, through_lse=False)
    warned = ""
    for policy in policies:
        with emulator.emulate(policy=policy) as machine:
            try:
                results = ladder.run_step(step, problem, *tensors, wanted.inputs.dout if backward else None)
            except emulator.DeadlockError as error:
                return Verdict("deadlock", str(error), policy)
        if errors := machine.errors():
            return Verdict(errors[0].kind, errors[0].message, policy)
        if not wanted.check(dict(zip(names, results, strict=True))).passed:
            return Verdict("wrong numbers", f"{', '.join(names)}: outside the error budget", policy)
        warnings = [warning for report in machine.reports for warning in report.warnings()]
        warned = warned or (warnings[0].message if warnings else "")
    return Verdict("ok", warned)
