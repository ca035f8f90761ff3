"""A step of the course as data: the roles of a kernel, its tile configuration, its order of tiles.

An optimization is ``dataclasses.replace(step, role=another_role)``; so is an experiment in a notebook cell.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from jfa.kernels.problem import Problem


@dataclasses.dataclass(frozen=True)
class Step:
    """One rung of a ladder; the subclasses name the roles that a kernel of theirs casts.

    ``idea`` says in a sentence what is new against the step before. ``arch`` is "hopper" or "blackwell",
    ``direction`` "forward" or "backward". ``order`` ("natural" or "sorted" by descending work) and ``pruned``
    (tiles without keys leave the list) describe the tile list that the kernel walks. ``tiling`` gives the
    kernel's numbers (BLOCK_M, BLOCK_N, ring depths, registers) for a problem, from its shapes alone.
    """

    name: str
    title: str
    idea: str
    arch: str
    direction: str
    notebook: str
    order: str = "natural"
    pruned: bool = False
    tiling: Callable[[Problem], dict[str, int]] | None = None

    def roles(self) -> dict[str, Any]:
        """The jit functions of this step by field name, in the order of the fields."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: value for name, value in values.items() if hasattr(value, "fn")}

    def constexprs(self, problem: Problem) -> dict[str, Any]:
        """What the kernel is compiled with: every role under its name in capitals, and the tiling."""
        return {name.upper(): role for name, role in self.roles().items()} | self.tiling(problem)


@dataclasses.dataclass(frozen=True)
class HopperForward(Step):
    """Roles of jfa.kernels.hopper.forward.kernel: a loader warp and two consumer warp groups."""

    load: Any = None  # TMA loads of Q, K and V
    consume: Any = None  # the loop of a consumer over its tiles
    attend: Any = None  # one tile's walk over its key blocks
    softmax: Any = None  # scores of one block -> weights, maximum, rescale factor, row sum
    finish: Any = None  # epilogue of one tile
    draw: Any = None  # the deal, loader's side: which item comes next
    publish: Any = None  # the deal, loader -> consumers
    hear: Any = None  # the deal, consumers' side
    fresh: Any = None  # whether a tile needs its queries loaded


@dataclasses.dataclass(frozen=True)
class BlackwellForward(Step):
    """Roles of jfa.kernels.blackwell.forward.kernel."""

    load: Any = None
    mma: Any = None
    softmax: Any = None
    correction: Any = None
    store: Any = None
    draw: Any = None
    publish: Any = None
    hear: Any = None
    fresh: Any = None


@dataclasses.dataclass(frozen=True)
class HopperBackward(Step):
    """Roles of jfa.kernels.hopper.backward.kernel."""

    load: Any = None
    compute: Any = None
    reduce: Any = None
    store: Any = None
    draw: Any = None
    publish: Any = None
    hear: Any = None


@dataclasses.dataclass(frozen=True)
class BlackwellBackward(Step):
    """Roles of jfa.kernels.blackwell.backward.kernel."""

    load: Any = None
    mma: Any = None
    compute: Any = None
    reduce: Any = None
    store: Any = None
    draw: Any = None
    publish: Any = None
    hear: Any = None
