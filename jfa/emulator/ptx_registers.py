"""Registers of the PTX interpreter: untyped columns of bits, read and written as a type."""

import re

import ml_dtypes
import numpy as np

from .context import CTX

TYPES = {f"{k}{b}": (np.dtype(f"u{b // 8}"), np.dtype(f"{k}{b // 8}")) for k in "u" for b in (8, 16, 32, 64)}
TYPES.update({f"s{b}": (np.dtype(f"u{b // 8}"), np.dtype(f"i{b // 8}")) for b in (8, 16, 32, 64)})
TYPES.update({f"b{b}": (np.dtype(f"u{b // 8}"), np.dtype(f"u{b // 8}")) for b in (8, 16, 32, 64)})
TYPES["f16"] = (np.dtype(np.uint16), np.dtype(np.float16))
TYPES["bf16"] = (np.dtype(np.uint16), np.dtype(ml_dtypes.bfloat16))
TYPES["f32"] = (np.dtype(np.uint32), np.dtype(np.float32))
TYPES["f64"] = (np.dtype(np.uint64), np.dtype(np.float64))


class Packed:
    """Registers side by side in one of `bits` bits.

    Lowest first; kept apart until somebody needs the bits.
    """

    def __init__(self, parts, bits):
        self.parts = parts
        self.bits = bits

    def joined(self):
        width = self.bits // len(self.parts)
        wide = np.uint64 if self.bits > 32 else np.uint32
        total = wide(0)
        for i, part in enumerate(self.parts):
            total = total | (as_unsigned(part, wide) << wide(width * i))
        return total


def as_unsigned(value, kind=None):
    """The bits of a register as an unsigned column (of numpy type kind)."""
    if isinstance(value, Packed):
        value = value.joined()
    value = np.asarray(value)
    if value.dtype == np.bool_:
        value = value.astype(np.uint32)
    return value if kind is None or value.dtype == kind else value.astype(kind)


def read(value, ptype):
    """A register as numpy values of a PTX type ('f32', 's32', 'b64', ...)."""
    unsigned, typed = TYPES[ptype]
    return as_unsigned(value, unsigned).view(typed)


def write(values, ptype):
    """numpy values of a PTX type -> register bits."""
    unsigned, typed = TYPES[ptype]
    return np.asarray(values, typed).view(unsigned)


def immediate(token):
    """A literal operand -> bits, or None."""
    if re.fullmatch(r"0[fF][0-9a-fA-F]{8}", token):
        return np.uint32(int(token[2:], 16))
    if re.fullmatch(r"0[dD][0-9a-fA-F]{16}", token):
        return np.uint64(int(token[2:], 16))
    if re.fullmatch(r"-?(0[xX][0-9a-fA-F]+|0[bB][01]+|\d+)[uU]?", token):
        value = int(token.rstrip("uU"), 0)
        if -(2**31) <= value < 2**32:
            return np.uint32(value & 0xFFFFFFFF)
        return np.uint64(value & 0xFFFFFFFFFFFFFFFF)
    if re.fullmatch(r"-?(\d*\.\d+|\d+\.)([eE][-+]?\d+)?", token):
        return np.float32(token).view(np.uint32)
    return None


def special(token):
    """A special register, or None; a task has one lane, so %tid and %laneid are 0."""
    machine = CTX.machine
    if token in ("%clock", "%clock64", "%globaltimer", "%clock_hi"):
        return np.uint64(machine.sequence())
    match = re.fullmatch(r"%(ctaid|nctaid|tid)\.([xyz])", token)
    if match:
        axis = "xyz".index(match[2])
        values = {"ctaid": machine.cur.cta.pid, "nctaid": machine.grid, "tid": (0, 0, 0)}
        return np.uint32(values[match[1]][axis])
    if token in ("%laneid", "%warpid"):
        return np.uint32(0)
    if token == "%cluster_ctarank":
        return np.uint32(machine.cur.cta.rank)
    return None
