"""Launches that do not ask Triton again which binary they need.

Triton finds the binary of a launch by a text that spells out every compile-time constant: with the roles of
a step among them that takes much of the host's time for a call. Here the first launch of a kind goes through
Triton, and what it compiled is kept under a key that tells apart at least what Triton tells apart: the dtype
and the alignment of pointers, the dtype and the box of descriptors, ints by width and divisibility, constants
by value or, if they are functions or other objects, by identity. An argument of another type, a call that
`torch.compile` traces, and whoever replaces a kernel's ``run`` (the emulator, `jfa.lab.launches`) or hooks
into launches or stages have every launch go through Triton. (Triton's own shortcut, ``c_cache``, made these
launches no faster without its C dispatcher, which is off by default.)

What changes after a kernel's first launch is not looked at again: its global variables, and what else Triton
reads then, in TRITON_* variables, in its knobs (debug, instrumentation), on the kernel.
"""

from typing import Any, NamedTuple

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

PLAIN = frozenset({int, float, bool, str, tuple, type(None)})  # constants that a key holds by value
SIMPLE = frozenset({float, bool, type(None)})  # arguments that Triton compiles for by their type alone


class Kept(NamedTuple):
    """What one kind of launch runs: its binary, and values for the parameters behind the positional ones."""

    binary: Any
    rest: tuple
    alive: tuple  # the objects whose identity is in the key


_KEPT: dict[tuple, Kept] = {}


def launch(kernel, grid: tuple[int, ...], *arguments, **constants) -> None:
    """Do ``kernel[grid](*arguments, **constants)``; raises what Triton raises.

    ``arguments``: values for the kernel's first parameters. ``constants``: its constexprs, compile options.
    """
    if torch.compiler.is_dynamo_compiling() or not _unwatched(kernel):
        kernel[grid](*arguments, **constants)
        return
    driver = triton.runtime.driver.active
    device = driver.get_current_device()
    key = key_of(kernel, device, arguments, constants)
    kept = _KEPT.get(key)
    if kept is None:
        binary = kernel[grid](*arguments, **constants)
        if key is not None and binary is not None:  # None: a hook kept Triton from compiling
            rest = [constants.get(one.name, one.default) for one in kernel.params[len(arguments) :]]
            _KEPT[key] = Kept(binary, tuple(rest), (kernel, *constants.values()))
        return
    place = (*grid, 1, 1)[:3]
    binary, stream = kept.binary, driver.get_current_stream(device)
    how = (stream, binary.function, binary.packed_metadata, None, None, None)  # the last three: no hooks
    binary.run(*place, *how, *arguments, *kept.rest)


def key_of(kernel, device: int, arguments: tuple, constants: dict) -> tuple | None:
    """What tells apart launches that need different binaries, now and then some that do not; or no key."""
    kinds = [_kind(x) for x in arguments]
    if None in kinds:
        return None
    values = [x if type(x) in PLAIN else id(x) for x in constants.values()]
    return (id(kernel), device, *constants, *values, *kinds)


def _kind(x):
    """What Triton compiles for in one argument; None where that is not known here."""
    if isinstance(x, torch.Tensor):
        return x.dtype, x.data_ptr() % 16 == 0
    kind = type(x)
    if kind is int:
        return (x % 16 == 0, -(2**31) <= x < 2**31, x < 2**63) if x != 1 else 1
    if kind is TensorDescriptor:
        return "box", x.base.dtype, *x.block_shape
    return kind if kind in SIMPLE else None


def _unwatched(kernel) -> bool:
    """Whether a launch would go through Triton alone: nobody replaced `run`, no hook wants to know."""
    run = getattr(kernel, "run", None)
    if getattr(run, "__globals__", {}).get("__name__") != "triton.runtime.jit" or kernel.pre_run_hooks:
        return False
    hooks = triton.knobs.runtime
    return not (hooks.launch_enter_hook or hooks.launch_exit_hook or hooks.add_stages_inspection_hook)
