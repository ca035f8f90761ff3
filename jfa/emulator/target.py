"""A kernel with inputs and the right answer: what mutation tests and sweeps of clean runs work on."""

import dataclasses
import functools
import importlib
from collections.abc import Callable


@dataclasses.dataclass(frozen=True)
class Target:
    """One kernel under test.

    name: short and unique. make: builds the inputs once and returns a function without arguments that
    launches the kernel (inside an `emulate` of the caller) and returns its error as a share of what is
    allowed: at most 1 if the answer is right. kernel: name of the kernel function whose synchronization is
    mutated, when a run launches several. options: for `emulate` (pick, resident, ...). known: kinds of
    findings that the kernel has as it is, because they are true. fast: part of the short form.
    """

    name: str
    make: Callable[[], Callable[[], float]]
    kernel: str = ""
    options: dict = dataclasses.field(default_factory=dict)
    known: tuple[str, ...] = ()
    fast: bool = False

    @functools.cached_property
    def run(self):
        """The function that `make` returns, made at first use."""
        return self.make()


def load(where):
    """The targets at an import string "package.module:NAME" (a list of Target), by name."""
    module, _, name = where.partition(":")
    found = getattr(importlib.import_module(module), name)
    targets = {target.name: target for target in found}
    if len(targets) != len(found):
        raise ValueError(f"{where}: two targets have the same name")
    return targets
