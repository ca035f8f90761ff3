"""The ladder: every step of the course as data, by architecture and direction.

``FORWARD["hopper"]`` is the list of steps of the Hopper forward kernel in the order of the course; likewise
``FORWARD["blackwell"]`` and ``BACKWARD``. An entry names its roles (jit functions) and its tiling;
``dataclasses.replace(step, softmax=mine)`` is a step with another role, ready to be run:
``jfa.jagged_flash_attention(..., backend="hopper", step=mine)``.
"""

import copyreg
import pickle

from jfa.kernels.blackwell import ladder as blackwell
from jfa.kernels.hopper import ladder as hopper
from jfa.kernels.step import Step

FORWARD: dict[str, list[Step]] = {"hopper": hopper.FORWARD, "blackwell": blackwell.FORWARD}
BACKWARD: dict[str, list[Step]] = {"hopper": hopper.BACKWARD, "blackwell": blackwell.BACKWARD}


def ladder(arch: str, direction: str) -> list[Step]:
    """The steps of "hopper" or "blackwell", "forward" or "backward", in the order of the course."""
    ladders = {"forward": FORWARD, "backward": BACKWARD}
    if direction not in ladders:
        raise ValueError(f"direction: expected forward or backward, got {direction!r}")
    if arch not in ladders[direction]:
        raise ValueError(f"arch: expected one of {', '.join(ladders[direction])}, got {arch!r}")
    return ladders[direction][arch]


def find(arch: str, direction: str, step: Step | str | None = None) -> Step:
    """The step of that name; None is the last one of the ladder, and a Step is returned as it is.

    Raises ValueError for an unknown name, and TypeError for a step of another kernel.
    """
    steps = ladder(arch, direction)
    if isinstance(step, Step):
        if (step.arch, step.direction) != (arch, direction):
            raise TypeError(f"step: expected one of {arch} {direction}, got {step.arch} {step.direction}")
        kinds = dict.fromkeys(type(known) for known in steps)
        if not isinstance(step, tuple(kinds)):
            names = " or ".join(kind.__name__ for kind in kinds)
            raise TypeError(f"step: expected a {names} for {arch} {direction}, got {type(step).__name__}")
        return step
    if step is None and steps:
        return steps[-1]
    for known in steps:
        if known.name == step:
            return known
    names = ", ".join(known.name for known in steps)
    raise ValueError(f"step: expected one of {names} for {arch} {direction}, got {step!r}")


def _reduce(step: Step):
    """A step of a ladder travels by its name; one of your own has functions that cannot travel."""
    if step not in ladder(step.arch, step.direction):
        raise pickle.PicklingError(
            f"step {step.name!r}: expected one of jfa.steps, only those can be pickled"
        )
    return find, (step.arch, step.direction, step.name)


for _kind in {type(step) for way in (FORWARD, BACKWARD) for steps in way.values() for step in steps}:
    copyreg.pickle(_kind, _reduce)
