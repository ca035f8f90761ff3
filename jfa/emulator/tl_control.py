"""Loops, compile-time checks, hints and debugging of the emulated triton.language.

Options of loops and hints steer the compiler's schedule; they are accepted and have no effect here, except
that tl.assume is checked. A loop may take a bounded number of turns (see machine.py): one that never ends, or
whose bound is garbage, is an error at its line.
"""

import builtins

import numpy as np

from . import dtypes as D
from .context import CTX
from .errors import EndlessError
from .tile import Tensor, as_tensor
from .tile_typing import KernelTypeError, promote_integers

__all__ = [
    "assume",
    "condition",
    "debug_barrier",
    "device_assert",
    "device_print",
    "max_constancy",
    "max_contiguous",
    "multiple_of",
    "range",
    "static_assert",
    "static_print",
    "static_range",
]


def check_turns(turns):
    """Refuses a counted loop (a range of Python integers) that is longer than the launch allows."""
    machine = CTX.machine
    if machine is not None and turns[machine.loop_turns :]:
        raise EndlessError(
            f"a loop from {turns.start} to {turns.stop} in steps of {turns.step} "
            f"takes more than {machine.loop_turns} turns"
        )


def while_turns():
    """What the rewritten source calls at every turn of one execution of a while loop."""
    machine = CTX.machine
    limit = None if machine is None else machine.loop_turns
    turns = 0

    def turn():
        nonlocal turns
        turns += 1
        if turns == limit:
            raise EndlessError(f"a while loop takes more than {limit} turns: does it end?")

    return turn


class range:
    """tl.range: the loop variable is an integer tile of the bounds' common type (Python numbers: int32)."""

    def __init__(
        self,
        arg1,
        arg2=None,
        step=None,
        num_stages=None,
        loop_unroll_factor=None,
        disallow_acc_multi_buffer=False,
        flatten=False,
        warp_specialize=False,
        multi_cta=False,
        disable_licm=False,
        data_partition_factor=None,
        merge_epilogue=False,
        merge_epilogue_to_computation=False,
        merge_correction=False,
        separate_epilogue_store=False,
        tmem_alloc_algo=None,
        smem_alloc_algo=None,
        smem_budget=None,
        smem_circular_reuse=None,
    ):
        self.bounds = (0, arg1) if arg2 is None else (arg1, arg2)
        self.step = 1 if step is None else step

    def __iter__(self):
        low, high = self.bounds
        step = int(self.step)
        turns = builtins.range(int(low), int(high), step)
        check_turns(turns)
        dtype = D.int32
        for value in (low, high, self.step):
            dtype = promote_integers(dtype, as_tensor(value).dtype)
        payload = dtype.payload.type
        for i in turns:
            yield Tensor(payload(i), dtype)


class static_range:
    """tl.static_range: an unrolled loop over Python integers."""

    def __init__(self, arg1, arg2=None, step=None):
        low, high = (0, arg1) if arg2 is None else (arg1, arg2)
        for value in (low, high, step):
            if isinstance(value, Tensor):
                raise KernelTypeError("static_range's arguments must be tl.constexpr")
        self.values = builtins.range(low, high, 1 if step is None else step)
        check_turns(self.values)

    def __iter__(self):
        return iter(self.values)


class condition:
    """tl.condition: the condition of a while loop with compiler options."""

    def __init__(self, arg1, disable_licm=False):
        self.value = arg1

    def __bool__(self):
        return bool(self.value)


# -- hints and debugging
def static_assert(cond, msg=""):
    if not cond:
        raise KernelTypeError(f"static_assert failed: {msg}")


def static_print(*values, sep=" ", end="\n", file=None, flush=False):
    print(*values, sep=sep, end=end, file=file, flush=flush)


def device_print(prefix, *args, hex=False):
    """Print the block's values once, with the CTA; the GPU prints one line a thread."""
    shown = [a.d if isinstance(a, Tensor) else a for a in args]
    machine = CTX.machine
    where_ = f"pid {machine.cur.cta.pid} " if machine is not None and machine.cur is not None else ""
    print(f"{where_}{prefix}", *shown)


def device_assert(cond, msg="", mask=None):
    holds = as_tensor(cond).d != 0
    if mask is not None:
        holds = holds | (as_tensor(mask).d == 0)
    if not np.all(holds):
        raise AssertionError(f"device_assert failed: {msg}")


def assume(cond):
    """A promise to the compiler; here it is checked, for a broken promise is a fault of the kernel."""
    if isinstance(cond, Tensor) and not np.all(cond.d) and CTX.machine is not None:
        CTX.machine.violation("broken assumption", "tl.assume of a condition that does not hold")


def debug_barrier():
    pass


def multiple_of(input, values):
    return input


def max_contiguous(input, values):
    return input


def max_constancy(input, values):
    return input


def carried_types(names_before, carried):
    """A check of a loop: called with the names after its first turn, it raises where a type has changed.

    The compiler gives a name that a loop carries one type, and refuses a body that leaves it with another.
    Numbers are left out, since they take the type of what they meet.
    """
    known = [(name, names_before[name]) for name in carried if isinstance(names_before.get(name), Tensor)]
    before = [(name, value.dtype, tuple(value.shape)) for name, value in known]

    def check(names):
        for name, dtype, shape in before:
            value = names.get(name)
            if isinstance(value, Tensor) and (value.dtype, tuple(value.shape)) != (dtype, shape):
                raise KernelTypeError(
                    f"{name} is {dtype} of shape {list(shape)} before a loop and {value.dtype} of shape "
                    f"{list(value.shape)} after its first turn: a loop carries one type"
                )

    return check if before else None
