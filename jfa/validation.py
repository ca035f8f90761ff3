"""What ``jagged_flash_attention`` asks of its arguments, before any operator sees them; reads no value."""

import numbers

import torch

from jfa import backends, jagged
from jfa.kernels.step import Step

LARGEST = 1 << 62  # of an int that an operator can carry; more keys than that exist nowhere
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def unpack(q, k, v, kv_offsets, q_offsets, check):
    """Plain tensors and offsets, whether or not nested tensors came."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name}: expected a torch.Tensor, got {type(tensor).__name__}")
    if k.is_nested != v.is_nested:
        raise TypeError(f"k and v: expected both or neither nested, got k.is_nested = {k.is_nested} alone")
    if k.is_nested:
        if kv_offsets is not None:
            raise ValueError("kv_offsets: expected None, because the nested k and v bring their own")
        k, kv_offsets = jagged.from_nested(k)
        v, v_offsets = jagged.from_nested(v)
        if v_offsets is not kv_offsets:
            if check is None:
                check = k.device.type == "cpu" and not torch.compiler.is_compiling()
            if v_offsets.shape != kv_offsets.shape or (check and not torch.equal(v_offsets, kv_offsets)):
                raise ValueError("v: expected sequences of the lengths that the nested k has, got others")
    if q.is_nested:
        if q_offsets is not None:
            raise ValueError("q_offsets: expected None, because the nested q brings its own")
        q, q_offsets = jagged.from_nested(q)
    return q, k, v, kv_offsets, q_offsets


def autocast(q, k, v):
    """q, k and v in the dtype that autocast asks for, if it is on; meta tensors know no autocast."""
    device = q.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return q, k, v
    dtype = torch.get_autocast_dtype(device)
    cast = [x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in (q, k, v)]
    return cast[0], cast[1], cast[2]


def check_tensors(q, k, v, kv_offsets, q_offsets) -> None:
    """Layouts, ranks, devices, dtypes and shapes that belong together."""
    device = q.device
    for name, tensor, shape in (("q", q, "rows, Hq, D"), ("k", k, "T, Hkv, D"), ("v", v, "T, Hkv, Dv")):
        if tensor.layout != torch.strided:
            raise TypeError(f"{name}: expected a dense tensor (torch.strided), got layout {tensor.layout}")
        if tensor.dim() != 3:
            raise ValueError(f"{name}: expected three dimensions ({shape}), got shape {tuple(tensor.shape)}")
        if tensor.shape[1] == 0 or tensor.shape[2] == 0:
            raise ValueError(f"{name}: expected one head and one column at least, got {tuple(tensor.shape)}")
        if tensor.device != device:
            raise ValueError(f"{name}: expected to be on {device} like q, got {tensor.device}")
    if q.dtype not in DTYPES or k.dtype != q.dtype or v.dtype != q.dtype:
        raise TypeError(
            "q, k, v: expected one dtype of bfloat16, float16, float32 and float64 for all three, "
            f"got q {q.dtype}, k {k.dtype}, v {v.dtype}"
        )
    if k.shape[2] != q.shape[2]:
        raise ValueError(f"k: expected the head dimension of q, {q.shape[2]}, got {k.shape[2]}")
    if v.shape[0] != k.shape[0] or v.shape[1] != k.shape[1]:
        raise ValueError(f"v: expected (T, Hkv) = {tuple(k.shape[:2])} like k, got {tuple(v.shape[:2])}")
    if q.shape[1] % k.shape[1] != 0:
        raise ValueError(
            f"q: expected a number of heads that is a multiple of the {k.shape[1]} heads of k and v, "
            f"got {q.shape[1]}"
        )
    jagged.check_offsets_form(kv_offsets, name="kv_offsets", device=device)
    if q_offsets is None:
        return
    jagged.check_offsets_form(q_offsets, name="q_offsets", device=device)
    if q_offsets.shape[0] != kv_offsets.shape[0]:
        raise ValueError(
            f"q_offsets: expected as many sequences as kv_offsets has, {kv_offsets.shape[0] - 1}, "
            f"got {q_offsets.shape[0] - 1}"
        )


def check_window(window) -> tuple[int, int]:
    """(left, right) with -1 for unbounded."""
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise ValueError(f"window: expected (left, right), got {window!r}")
    sides = []
    for name, side in (("left", window[0]), ("right", window[1])):
        count = -1 if side is None else _whole(side)
        if count is None:
            raise TypeError(f"window: expected int or None as its {name} side, got {type(side).__name__}")
        if count < -1:
            raise ValueError(f"window: expected a number of keys as its {name} side, None or -1, got {count}")
        sides.append(min(count, LARGEST) if isinstance(count, int) else count)
    return sides[0], sides[1]


def check_switches(**switches) -> None:
    """Each is True or False."""
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name}: expected True or False, got {value!r}")


def check_options(scale, max_kv_len, backend, schedule, step, check):
    """Raises for what no kernel could use; gives scale and max_kv_len, held to what an operator can carry."""
    if scale is not None:
        scale = _real(scale)
    if max_kv_len is not None:
        bound = _whole(max_kv_len)
        if bound is None:
            raise TypeError(f"max_kv_len: expected an int or None, got {type(max_kv_len).__name__}")
        if bound < 0:
            raise ValueError(f"max_kv_len: expected 0 or more rows, got {bound}")
        max_kv_len = min(bound, LARGEST) if isinstance(bound, int) else bound
    if backend not in backends.NAMES:
        raise ValueError(f"backend: expected one of {', '.join(backends.NAMES)}, got {backend!r}")
    if schedule is not None and not callable(getattr(schedule, "tensors", None)):
        raise TypeError(f"schedule: expected a jfa.schedule.Schedule or None, got {type(schedule).__name__}")
    if not (step is None or isinstance(step, (str, Step))):
        raise TypeError(f"step: expected a name, a step or None, got {type(step).__name__}")
    if not (check is None or isinstance(check, bool)):
        raise TypeError(f"check: expected True, False or None, got {check!r}")
    return scale, max_kv_len


def _whole(value):
    """An int of a whole number (also NumPy's), or None of anything else; a bool is no number here."""
    if isinstance(value, (int, torch.SymInt)):
        return None if isinstance(value, bool) else value
    return int(value) if isinstance(value, numbers.Integral) else None


def _real(scale):
    if isinstance(scale, (float, torch.SymInt, torch.SymFloat)):
        return scale
    if isinstance(scale, bool) or not isinstance(scale, numbers.Real):
        raise TypeError(f"scale: expected a float or None, got {type(scale).__name__}")
    if isinstance(scale, int) and abs(scale) > LARGEST:
        raise ValueError("scale: expected a finite number, got an int of more than 62 bits")
    return float(scale)
