"""A step of the course as data: the roles of a kernel, its tile configuration, its order of tiles.

An optimization is ``dataclasses.replace(step, role=another_role)``; so is an experiment in a notebook cell.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar

from jfa.kernels.problem import Problem


@dataclasses.dataclass(frozen=True)
class Step:
    """One rung of a ladder; the subclasses name the roles that a kernel of theirs casts.

    ``idea`` says in a sentence what is new against the step before. ``arch`` is "hopper" or "blackwell",
    ``direction`` "forward" or "backward". ``order`` ("natural" or "sorted" by descending work) and ``pruned``
    (tiles without keys leave the list) describe the tile list that the kernel walks. ``tiling`` gives the
    kernel's numbers (BLOCK_M, BLOCK_N, ring depths, registers) for a problem, from its shapes alone.

    A step is whole from the start: TypeError for a role that is no ``triton.jit`` function or is missing
    (``OPTIONAL`` ones may be None), or a ``tiling`` that is no function; ValueError for an unknown ``order``.
    """

    OPTIONAL: ClassVar[tuple[str, ...]] = ()  # roles that a kernel can do without

    name: str
    title: str
    idea: str
    arch: str
    direction: str
    notebook: str
    order: str = "natural"
    pruned: bool = False
    tiling: Callable[[Problem], dict[str, int]] | None = None

    def __post_init__(self):
        for name in _role_names(type(self)):
            role = getattr(self, name)
            if not _is_jit(role) and not (role is None and name in self.OPTIONAL):
                got = "None" if role is None else f"{type(role).__name__} {getattr(role, '__name__', role)}"
                raise TypeError(f"step {self.name!r}: expected a triton.jit function as {name}, got {got}")
        if not callable(self.tiling):
            raise TypeError(
                f"step {self.name!r}: expected a function of a Problem as tiling, got {self.tiling!r}"
            )
        if self.order not in ("natural", "sorted"):
            raise ValueError(f"step {self.name!r}: expected order natural or sorted, got {self.order!r}")

    def __copy__(self):
        return self

    def __deepcopy__(self, memo):
        return self  # frozen, and so are the functions in it: a copied module has the same step

    def roles(self) -> dict[str, Any]:
        """The jit functions of this step by field name, in the order of the fields."""
        cast = ((name, getattr(self, name)) for name in _role_names(type(self)))
        return {name: role for name, role in cast if role is not None}

    def constexprs(self, problem: Problem) -> dict[str, Any]:
        """What the kernel is compiled with: every role under its name in capitals, and the tiling."""
        return self._constants | self.tiling(problem)

    @functools.cached_property
    def _constants(self) -> dict[str, Any]:
        return {name.upper(): role for name, role in self.roles().items()}


@functools.cache
def _role_names(kind: type) -> tuple[str, ...]:
    """The fields of a class of steps that name a role: those that are declared as ``Any = None``."""
    return tuple(field.name for field in dataclasses.fields(kind) if field.type in (Any, "Any"))


def _is_jit(value: Any) -> bool:
    """Whether a value is a jit function; what wraps one (autotune, heuristics) has no place in a step."""
    return hasattr(value, "fn") and not hasattr(value.fn, "fn")


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
    """Roles of jfa.kernels.blackwell.forward.kernel: three warp groups and three or four single warps."""

    OPTIONAL = ("draw",)

    load: Any = None  # TMA loads of Q, K and V
    mma: Any = None  # both matrix products of every block
    softmax: Any = None  # a softmax group's loop over its tiles
    walk: Any = None  # a softmax group's way through the blocks of one tile
    weigh: Any = None  # scores of one block -> weights, maximum and sum
    correction: Any = None  # rescaling and epilogue
    rescale: Any = None  # accumulator times the factor of one block
    store: Any = None  # TMA stores of O
    draw: Any = None  # the deal's producer, a warp of its own; None when every role can compute the deal
    hear: Any = None  # the deal, everybody's side: which item comes next
    fresh: Any = None  # whether a tile needs its queries loaded
    overlap: bool = False  # whether the epilogue runs during the next tile's main loop

    def constexprs(self, problem: Problem, block_m: int | None = None) -> dict[str, Any]:
        """As for every step; ``block_m``: query rows of a tile in a schedule that is given."""
        return {"DRAW": None} | self._constants | self.tiling(problem, block_m, self.overlap)


@dataclasses.dataclass(frozen=True)
class HopperBackward(Step):
    """Roles of jfa.kernels.hopper.backward.kernel: a loader warp, two compute warp groups, a writer warp."""

    load: Any = None  # the loader's loop: K and V of every tile, then its rows
    load_rows: Any = None  # TMA loads of one block of Q and dO with their statistics
    compute: Any = None  # the loop of a compute group over its tiles
    walk: Any = None  # one tile's walk over the blocks of query rows
    multiply: Any = None  # one block of query rows: dV, dK and a part of dQ
    store: Any = None  # epilogue of one tile: dK and dV
    reduce: Any = None  # writer: adds dQ to global memory
    settle: Any = None  # writer: when a staging tile of dQ may be reused
    items: Any = None  # the list: how many items there are
    count: Any = None  # the list: key tiles of an item
    tile: Any = None  # the list: the i-th of them
    draw: Any = None  # the deal, loader's side: which item comes next
    publish: Any = None  # the deal, loader -> the others
    hear: Any = None  # the deal, their side


@dataclasses.dataclass(frozen=True)
class HopperStationary(Step):
    """Roles of jfa.kernels.hopper.backward_stationary.kernel: two groups with dQ in registers, two warps."""

    load: Any = None  # TMA loads of Q once, K and V of every tile, dO and its statistics of every sequence
    accumulate: Any = None  # the loop of a group over its tiles
    score: Any = None  # P and dS of one tile
    write: Any = None  # writer: dK and dV of every tile, in turn with the CTAs of the other query rows
    flush: Any = None  # the finished dQ


@dataclasses.dataclass(frozen=True)
class BlackwellBackward(Step):
    """Roles of jfa.kernels.blackwell.backward.kernel: two single warps and three warp groups."""

    OPTIONAL = ("relay", "draw")

    load: Any = None  # the loader's loop over tiles and turns
    load_rows: Any = None  # TMA loads of one turn: Q, dO, row statistics; with a tile's first turn K and V
    mma: Any = None  # the five matrix products of every turn
    gather: Any = None  # before dQ: dS of all keys is in shared memory
    relay: Any = None  # in a pair: the second CTA's word to the first that its dS is there; else None
    compute: Any = None  # a compute group's loop over its tiles
    walk: Any = None  # one tile's walk over the blocks of query rows
    weigh: Any = None  # one block: S -> P, dP -> dS
    share: Any = None  # dS into shared memory
    reduce: Any = None  # the loop of the group that empties tensor memory
    drain: Any = None  # dQ of one turn: tensor memory -> staging -> added to global memory
    store: Any = None  # epilogue of one tile: dK and dV
    items: Any = None  # the list: how many items there are
    count: Any = None  # the list: key tiles of an item
    tile: Any = None  # the list: the i-th of them
    draw: Any = None  # the deal's producer, a warp of its own; None when every role can compute the deal
    hear: Any = None  # the deal, everybody's side: which item comes next


@dataclasses.dataclass(frozen=True)
class BlackwellStationary(Step):
    """Roles of jfa.kernels.blackwell.backward_stationary.kernel, whose dQ stays in tensor memory."""

    load: Any = None  # TMA loads of Q once, K and V of every tile, dO and its statistics of every sequence
    mma: Any = None  # the five matrix products of every tile
    compute: Any = None  # a compute group's loop over its tiles
    weigh: Any = None  # one tile: S -> P, dP -> dS
    share: Any = None  # dS into shared memory
    store: Any = None  # dK and dV of every tile, at the end dQ
