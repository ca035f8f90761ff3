"""Integer, bit and warp-wide PTX instructions."""

import numpy as np

from .ptx_registers import TYPES, as_unsigned, read, write

COMPARE = dict(lt=np.less, le=np.less_equal, gt=np.greater, ge=np.greater_equal, eq=np.equal, ne=np.not_equal)
COMPARE.update(lo=np.less, ls=np.less_equal, hi=np.greater, hs=np.greater_equal)
SIMPLE = {
    "add": np.add,
    "sub": np.subtract,
    "min": np.minimum,
    "max": np.maximum,
    "not": np.invert,
    "neg": np.negative,
}
SIMPLE.update({"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "abs": np.abs})
LOGIC = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor, "not": np.logical_not}
REDUX = {"add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or}
REDUX["xor"] = np.bitwise_xor


def compute(name, mods, sources, count):
    """The result bits, or None when the instruction is not known."""
    ptype = mods[-1] if mods else ""
    if ptype == "pred" and name in LOGIC:
        return LOGIC[name](*[np.asarray(s).astype(bool) for s in sources])
    if name in ("vote", "redux", "shfl", "activemask", "elect", "match"):
        return _warp(name, mods, sources, count)
    if ptype not in TYPES or ptype[0] == "f":
        return None
    if name == "selp":
        return np.where(
            np.asarray(sources[2]).astype(bool), read(sources[0], ptype), read(sources[1], ptype)
        ).view(TYPES[ptype][0])
    if name in ("shl", "shr"):
        return _shift(name, ptype, sources)
    if name in ("mul", "mad", "mul24", "mad24"):
        return _multiply(name, mods, ptype, sources)
    values = [read(s, ptype) for s in sources]
    if name == "setp":
        return COMPARE[mods[0]](values[0], values[1]) if mods[0] in COMPARE else None
    if name in SIMPLE:
        return write(SIMPLE[name](*values), ptype)
    if name in ("div", "rem"):
        return _divide(name, ptype, values)
    return _bits(name, mods, ptype, values, sources)


def _shift(name, ptype, sources):
    value, amount = read(sources[0], ptype), as_unsigned(sources[1]).astype(np.uint64)
    bits = value.dtype.itemsize * 8
    amount = np.minimum(amount, bits)
    safe = np.minimum(amount, bits - 1).astype(value.dtype)
    if name == "shl":
        return write(np.where(amount < bits, np.left_shift(value, safe), 0), ptype)
    shifted = np.right_shift(value, safe)
    return write(shifted if ptype[0] == "s" else np.where(amount < bits, shifted, 0), ptype)


def _multiply(name, mods, ptype, sources):
    a, b = (read(s, ptype) for s in sources[:2])
    bits = a.dtype.itemsize * 8
    if "wide" in mods:
        wide_type = f"{ptype[0]}{2 * bits}"
        result = a.astype(TYPES[wide_type][1]) * b.astype(TYPES[wide_type][1])
        ptype = wide_type
    elif "hi" in mods:
        product = np.asarray(a, object) * np.asarray(b, object)
        result = (
            np.asarray((product >> bits) % 2**bits)
            .astype(np.uint64)
            .astype(TYPES[ptype][0])
            .view(TYPES[ptype][1])
        )
    else:
        result = a * b
    if name.startswith("mad"):
        result = result + read(sources[2], ptype)
    return write(result, ptype)


def _divide(name, ptype, values):
    a, b = values
    safe = np.where(b == 0, 1, b).astype(a.dtype)
    rest = np.fmod(a, safe)
    quotient = (a - rest) // safe
    ones = np.asarray(-1).astype(a.dtype)
    return write(np.where(b == 0, ones, quotient) if name == "div" else np.where(b == 0, a, rest), ptype)


def _bits(name, mods, ptype, values, sources):
    if name == "popc":
        return np.bitwise_count(as_unsigned(values[0].view(TYPES[ptype][0]))).astype(np.uint32)
    if name in ("clz", "bfind"):
        u = values[0].view(TYPES[ptype][0])
        width = u.dtype.itemsize * 8
        length = np.array([int(v).bit_length() for v in np.ravel(u)], np.int64).reshape(u.shape)
        return (width - length if name == "clz" else length - 1).astype(np.int32).view(np.uint32)
    if name == "brev":
        u = values[0]
        width = u.dtype.itemsize * 8
        flipped = [int(format(int(v), f"0{width}b")[::-1], 2) for v in np.ravel(u)]
        return np.array(flipped, u.dtype).reshape(u.shape)
    if name == "prmt" and len(mods) == 1:
        return _permute_bytes(sources)
    if name == "lop3":
        return _three_input_logic(values)
    if name == "bfe":
        return _extract(ptype, values[0], sources)
    if name == "bfi":
        a, b = (v.astype(np.uint64) for v in values[:2])
        position, length = (as_unsigned(s).astype(np.uint64) & np.uint64(255) for s in sources[2:4])
        mask = ((np.uint64(1) << length) - np.uint64(1)) << position
        return ((b & ~mask) | ((a << position) & mask)).astype(TYPES[ptype][0])
    if name == "cnot":
        return write(values[0] == 0, ptype)
    if name == "sad":
        a, b = values[0].astype(np.int64), values[1].astype(np.int64)
        return write((np.abs(a - b) + values[2]).astype(TYPES[ptype][1]), ptype)
    return None


def _permute_bytes(sources):
    a, b, selector = (as_unsigned(s, np.uint32) for s in sources)
    whole = a.astype(np.uint64) | (b.astype(np.uint64) << np.uint64(32))
    result = np.uint32(0)
    for i in range(4):
        control = (selector >> np.uint32(4 * i)) & np.uint32(15)
        byte = (whole >> ((control & np.uint32(7)).astype(np.uint64) * np.uint64(8))) & np.uint64(255)
        sign = np.where(byte & np.uint64(128), np.uint64(255), np.uint64(0))
        byte = np.where(control & np.uint32(8), sign, byte).astype(np.uint32)
        result = result | (byte << np.uint32(8 * i))
    return result


def _three_input_logic(values):
    a, b, c = values[:3]
    table = int(np.ravel(values[3])[0]) & 255
    result = np.zeros_like(a & b & c)
    for row in range(8):
        if table >> row & 1:
            term = (a if row & 4 else ~a) & (b if row & 2 else ~b) & (c if row & 1 else ~c)
            result = result | term
    return result


def _extract(ptype, value, sources):
    position, length = (as_unsigned(s).astype(np.int64) & 255 for s in sources[1:3])
    width = value.dtype.itemsize * 8
    if ptype[0] != "s":
        mask = (np.uint64(1) << length.astype(np.uint64)) - np.uint64(1)
        return ((value.astype(np.uint64) >> position.astype(np.uint64)) & mask).astype(TYPES[ptype][0])
    up = np.clip(64 - length, 0, 63)
    field = value.astype(np.int64) >> np.minimum(position, width - 1)
    return write(np.where(length == 0, 0, (field << up) >> up).astype(TYPES[ptype][1]), ptype)


def _warp(name, mods, sources, count):
    """Warp-wide instructions over groups of 32 consecutive lanes; a scalar is a warp of equal lanes."""
    if name == "activemask":
        return np.uint32(0xFFFFFFFF)
    if name == "elect":
        return (np.uint32(0), np.arange(count) % 32 == 0)
    width = 32 if count % 32 == 0 else count
    if name == "vote":
        on = np.broadcast_to(np.asarray(sources[0]).astype(bool), (count,)).reshape(-1, width)
        if "ballot" in mods:
            full = np.repeat(on, 32, axis=1) if width == 1 else on
            bits = (
                (full.astype(np.uint64) << np.arange(full.shape[1], dtype=np.uint64)).sum(1).astype(np.uint32)
            )
            return np.repeat(bits, width)
        fn = np.all if "all" in mods else np.any
        return np.repeat(fn(on, axis=1), width)
    if name == "redux":
        how = next((m for m in mods if m in REDUX), None)
        values = np.broadcast_to(read(sources[0], mods[-1]), (count,)).reshape(-1, width)
        return None if how is None else write(np.repeat(REDUX[how].reduce(values, axis=1), width), mods[-1])
    if name == "shfl":
        values = np.broadcast_to(as_unsigned(sources[0], np.uint32), (count,)).reshape(-1, width)
        lane = (
            np.broadcast_to(as_unsigned(sources[1], np.uint32), (count,)).reshape(-1, width).astype(np.int64)
        )
        here = np.arange(width)[None, :]
        target = {"idx": lane, "bfly": here ^ lane, "up": here - lane, "down": here + lane}.get(mods[1])
        if target is None:
            return None
        target = np.where((target >= 0) & (target < width), target, here)
        return np.take_along_axis(values, target, axis=1).reshape(-1)
    return None
