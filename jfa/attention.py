"""The public function: it validates, then calls one PyTorch operator that runs the chosen backend."""

import torch

from jfa import backends, jagged
from jfa.kernels.problem import Problem

LARGEST = 1 << 62  # of an int that an operator can carry; more keys than that exist nowhere
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def jagged_flash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kv_offsets: torch.Tensor | None = None,
    q_offsets: torch.Tensor | None = None,
    *,
    scale: float | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] = (None, None),
    return_lse: bool = False,
    deterministic: bool = False,
    max_kv_len: int | None = None,
    schedule=None,
    backend: str = "auto",
    step=None,
    check: bool | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention of each sequence of a jagged batch over its own keys and values.

    Broadcast-Q (no ``q_offsets``): q (M, Hq, D) is shared by all B sequences; returns out (B, M, Hq, Dv) and,
    with ``return_lse``, lse (B, Hq, M). Packed Q: q (Tq, Hq, D); returns out (Tq, Hq, Dv), lse (Hq, Tq).
    k (T, Hkv, D) and v (T, Hkv, Dv) are packed, or ``torch.nested`` jagged tensors that bring the offsets
    along. Offsets (B + 1,) are int32 or int64. Query heads share KV heads in contiguous groups: Hq is a
    multiple of Hkv. bfloat16 and float16 on every backend, float32 (IEEE, no TF32) on reference and
    triton, float64 on reference; under autocast q, k and v are cast as in
    ``scaled_dot_product_attention``. out has the dtype of q; lse is the natural logarithm, float32
    (float64 for float64), and differentiable. Gradients are first-order only.

    ``scale``: default D ** -0.5. ``window``: (left, right) keys around the aligned one, both included,
    None (or -1) unbounded; the last query row is aligned with the last key. ``causal`` is right = 0. A
    row that sees no key gives out 0, lse -inf and zero gradients. Rows past the last offset are never
    read; their gradients are 0, and with packed Q their out is 0 and lse -inf. ``max_kv_len``: an upper
    bound of all lengths. It lets a GPU launch without reading the offsets (a CUDA graph that is captured
    with it stays right for any lengths up to it); a longer sequence is an error when checked.
    ``deterministic``: the same bits for dq in every run; ``torch.use_deterministic_algorithms`` asks for
    it too. ``schedule``: a ``jfa.schedule.Schedule``. ``step``: a step of the course, by name or as an
    object. ``backend``: one of ``jfa.backends.NAMES``; kernels run CPU tensors in the emulator.
    ``check``: read the offsets' values and refuse bad ones; None does so on a CPU only, as a GPU must be
    waited for.

    Raises TypeError and ValueError that name the argument, what was expected and what came, and RuntimeError
    when the backend cannot run on this machine or a second derivative is asked for. Defined by
    ``jfa.reference.attention``; notebook 01_jagged_batches explains it.
    """
    q, k, v, kv_offsets, q_offsets = _unpack(q, k, v, kv_offsets, q_offsets, check)
    q, k, v = _autocast(q, k, v)
    _check_tensors(q, k, v, kv_offsets, q_offsets)
    _check_switches(causal=causal, return_lse=return_lse, deterministic=deterministic)
    left, right = _check_window(window)
    if causal:
        right = 0
    max_kv_len = _check_options(scale, max_kv_len, backend, schedule, step, check)
    options = (scale, left, right, max_kv_len, backend, _step_key(step), bool(deterministic), check)
    if schedule is None:
        out, lse = torch.ops.jfa.forward(q, k, v, kv_offsets, q_offsets, *options)
    else:
        lists = schedule.tensors()
        out, lse = torch.ops.jfa.forward_scheduled(q, k, v, kv_offsets, q_offsets, *options, lists)
    return (out, lse) if return_lse else out


# ---------------------------------------------------------------------------------------------- validation


def _unpack(q, k, v, kv_offsets, q_offsets, check):
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


def _autocast(q, k, v):
    device = q.device.type
    if not torch.is_autocast_enabled(device):
        return q, k, v
    dtype = torch.get_autocast_dtype(device)
    cast = [x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in (q, k, v)]
    return cast[0], cast[1], cast[2]


def _check_tensors(q, k, v, kv_offsets, q_offsets) -> None:
    for name, tensor, shape in (("q", q, "rows, Hq, D"), ("k", k, "T, Hkv, D"), ("v", v, "T, Hkv, Dv")):
        if tensor.dim() != 3:
            raise ValueError(f"{name}: expected three dimensions ({shape}), got shape {tuple(tensor.shape)}")
        if tensor.shape[1] == 0 or tensor.shape[2] == 0:
            raise ValueError(f"{name}: expected one head and one column at least, got {tuple(tensor.shape)}")
        if tensor.device != q.device:
            raise ValueError(f"{name}: expected to be on {q.device} like q, got {tensor.device}")
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
    jagged.check_offsets_form(kv_offsets, name="kv_offsets", device=q.device)
    if q_offsets is None:
        return
    jagged.check_offsets_form(q_offsets, name="q_offsets", device=q.device)
    if q_offsets.shape[0] != kv_offsets.shape[0]:
        raise ValueError(
            f"q_offsets: expected as many sequences as kv_offsets has, {kv_offsets.shape[0] - 1}, "
            f"got {q_offsets.shape[0] - 1}"
        )


def _check_window(window) -> tuple[int, int]:
    """(left, right) with -1 for unbounded."""
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise ValueError(f"window: expected (left, right), got {window!r}")
    sides = []
    for name, side in (("left", window[0]), ("right", window[1])):
        if side is None:
            side = -1
        if isinstance(side, bool) or not isinstance(side, (int, torch.SymInt)):
            raise TypeError(f"window: expected int or None as its {name} side, got {type(side).__name__}")
        if side < -1:
            raise ValueError(f"window: expected a number of keys as its {name} side, None or -1, got {side}")
        sides.append(min(side, LARGEST) if isinstance(side, int) else side)
    return sides[0], sides[1]


def _check_switches(**switches) -> None:
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name}: expected True or False, got {value!r}")


def _check_options(scale, max_kv_len, backend, schedule, step, check) -> int | None:
    """Raises for what no kernel could use; gives max_kv_len, held to what an operator can carry."""
    if scale is not None:
        if isinstance(scale, bool) or not isinstance(scale, (int, float, torch.SymInt, torch.SymFloat)):
            raise TypeError(f"scale: expected a float or None, got {type(scale).__name__}")
        if isinstance(scale, int) and abs(scale) > LARGEST:
            raise ValueError("scale: expected a finite number, got an int of more than 62 bits")
    if max_kv_len is not None:
        if isinstance(max_kv_len, bool) or not isinstance(max_kv_len, (int, torch.SymInt)):
            raise TypeError(f"max_kv_len: expected an int or None, got {type(max_kv_len).__name__}")
        if max_kv_len < 0:
            raise ValueError(f"max_kv_len: expected 0 or more rows, got {max_kv_len}")
    if backend not in backends.NAMES:
        raise ValueError(f"backend: expected one of {', '.join(backends.NAMES)}, got {backend!r}")
    if schedule is not None and not hasattr(schedule, "tensors"):
        raise TypeError(f"schedule: expected a jfa.schedule.Schedule or None, got {type(schedule).__name__}")
    if not (step is None or isinstance(step, str) or hasattr(step, "direction")):
        raise TypeError(f"step: expected a name, a step or None, got {type(step).__name__}")
    if not (check is None or isinstance(check, bool)):
        raise TypeError(f"check: expected True, False or None, got {check!r}")
    return min(max_kv_len, LARGEST) if isinstance(max_kv_len, int) else max_kv_len


_STEPS: dict[str, object] = {}


def _step_key(step) -> str | None:
    """What an operator can carry of a step: its name, or for an object the key it is kept under here."""
    return step if step is None or isinstance(step, str) else _keep(step)


def _keep(step) -> str:
    key = f"{step.name}#{id(step)}"
    _STEPS[key] = step
    return key


# Constant for torch.compile, which would otherwise fill the registry after the operator has looked there.
# torch.compiler.assume_constant_result does just this, but importing it would import the whole compiler.
_keep._dynamo_marked_constant = True


def _find_step(key: str | None, backend: str, direction: str):
    """The step of a key for one direction, or None (the backend's own choice) when it is one of the other."""
    if key is None:
        return None
    if backend not in backends.ARCHITECTURES:
        raise ValueError(f'step: expected None with backend="{backend}", which has no steps, got {key!r}')
    from jfa import steps

    step = _STEPS.get(key, key)
    other = "backward" if direction == "forward" else "forward"
    if isinstance(step, str):
        names = {way: [known.name for known in steps.ladder(backend, way)] for way in (direction, other)}
        if step not in names[direction] + names[other]:
            known = ", ".join(dict.fromkeys(names["forward"] + names["backward"]))
            raise ValueError(f"step: expected one of {known} on {backend}, got {step!r}")
        return steps.find(backend, direction, step) if step in names[direction] else None
    if (step.arch, step.direction) == (backend, other):
        return None
    return steps.find(backend, direction, step)


# ----------------------------------------------------------------------------------------------- operators

OPTIONS = (
    "Tensor kv_offsets, Tensor? q_offsets, float? scale, SymInt window_left, "
    "SymInt window_right, SymInt? max_kv_len, str backend, str? step, bool deterministic"
)
LIBRARY = torch.library.Library("jfa", "DEF")
# Two forwards, because a list of tensors makes autograd's bookkeeping of a call twice as expensive.
for _name, _more in (("forward", ""), ("forward_scheduled", ", Tensor[] schedule")):
    LIBRARY.define(
        f"{_name}(Tensor q, Tensor k, Tensor v, {OPTIONS}, bool? check{_more}) -> (Tensor, Tensor)",
        tags=(torch.Tag.pt2_compliant_tag,),
    )
LIBRARY.define(
    "backward(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"{OPTIONS}, bool[] needs, Tensor[] schedule) -> (Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _problem(q, k, v, kv_offsets, q_offsets, scale, left, right, max_kv_len) -> Problem:
    scale = q.shape[2] ** -0.5 if scale is None else float(scale)
    scale = 0.0 if abs(scale) < 2**-149 else scale  # as in float32, which is what a kernel gets
    if not abs(scale) < 2.0**128:
        raise ValueError(f"scale: expected a finite number, got {scale}")
    return Problem(
        batch=kv_offsets.shape[0] - 1,
        heads_q=q.shape[1],
        heads_kv=k.shape[1],
        head_dim=q.shape[2],
        head_dim_v=v.shape[2],
        total_q=q.shape[0],
        total_kv=k.shape[0],
        broadcast_q=q_offsets is None,
        scale=scale,
        # A side that reaches past every key is unbounded; so kernels never add a huge window to an index.
        window_left=-1 if left >= k.shape[0] else left,
        window_right=-1 if right >= q.shape[0] > 0 else right,
        max_kv_len=max_kv_len,
        dtype=q.dtype,
        device_type=q.device.type,
    )


def _schedule(tensors, problem, kv_offsets, q_offsets, check):
    if not tensors:
        return None
    from jfa.schedule import Schedule

    schedule = Schedule.from_tensors(tensors)
    schedule.check(problem, kv_offsets, q_offsets, values=check)
    return schedule


def _forward(
    q,
    k,
    v,
    kv_offsets,
    q_offsets,
    scale,
    left,
    right,
    max_kv_len,
    backend,
    step,
    deterministic,
    check,
    lists=(),
):
    if check is None:
        check = q.device.type == "cpu"
    if check:
        jagged.check_offsets_values(kv_offsets, k.shape[0], name="kv_offsets", max_len=max_kv_len)
        if q_offsets is not None:
            jagged.check_offsets_values(q_offsets, q.shape[0], name="q_offsets")
    problem = _problem(q, k, v, kv_offsets, q_offsets, scale, left, right, max_kv_len)
    name = backends.select(backend, problem, q.device)
    schedule = _schedule(lists, problem, kv_offsets, q_offsets, check)
    options = {"schedule": schedule, "step": _find_step(step, name, "forward")}
    with backends.running(name, q.device):
        return backends.module(name).forward(problem, q, k, v, kv_offsets, q_offsets, **options)


def _backward(
    dout,
    dlse,
    q,
    k,
    v,
    out,
    lse,
    kv_offsets,
    q_offsets,
    scale,
    left,
    right,
    max_kv_len,
    backend,
    step,
    deterministic,
    needs,
    lists,
):
    problem = _problem(q, k, v, kv_offsets, q_offsets, scale, left, right, max_kv_len)
    name = backends.select(backend, problem, q.device)
    options = {
        "schedule": _schedule(lists, problem, kv_offsets, q_offsets, False),
        "step": _find_step(step, name, "backward"),
        "deterministic": deterministic or torch.are_deterministic_algorithms_enabled(),
        "needs": tuple(needs),
    }
    with backends.running(name, q.device):
        grads = backends.module(name).backward(
            problem, dout, dlse, q, k, v, out, lse, kv_offsets, q_offsets, **options
        )
    return tuple(
        grad if need else x.new_empty(0) for grad, x, need in zip(grads, (q, k, v), needs, strict=True)
    )


def _forward_fake(q, k, v, kv_offsets, q_offsets, *rest):
    # From shapes alone: a result made "like" a strided input would get strides that no kernel returns.
    shape, lse = (q.shape[0], q.shape[1], v.shape[2]), (q.shape[1], q.shape[0])
    if q_offsets is None:
        batch = kv_offsets.shape[0] - 1
        shape, lse = (batch, *shape), (batch, *lse)
    statistics = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty(shape), q.new_empty(lse, dtype=statistics)


def _backward_fake(dout, dlse, q, k, v, *rest):
    needs = rest[-2]
    return tuple(x.new_empty(x.shape if need else (0,)) for x, need in zip((q, k, v), needs, strict=True))


def _save(ctx, inputs, output):
    q, k, v, kv_offsets, q_offsets, *options = inputs
    options, (_, *lists) = options[:7], options[7:]  # after check, the schedule's tensors, if it came along
    ctx.options, ctx.scheduled = options, bool(lists)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, *output, kv_offsets, q_offsets, *(lists[0] if lists else ()))


def _gradients(ctx, dout, dlse):
    q, k, v, out, lse, kv_offsets, q_offsets, *lists = ctx.saved_tensors
    rest = 10 * [None] + ([[None] * len(lists)] if ctx.scheduled else [])  # of the arguments after q, k and v
    needs = list(ctx.needs_input_grad[:3])
    if (dout is None and dlse is None) or not any(needs):
        return None, None, None, *rest
    if dout is None:
        dout = torch.zeros_like(out)
    grads = torch.ops.jfa.backward(
        dout, dlse, q, k, v, out, lse, kv_offsets, q_offsets, *ctx.options, needs, lists
    )
    return *(grad if need else None for grad, need in zip(grads, needs, strict=True)), *rest


def _refuse(ctx, *grads):
    raise RuntimeError("jagged_flash_attention has first derivatives only; a second one was asked for")


for _name, _real, _fake, _derivative, _setup in (
    ("forward", _forward, _forward_fake, _gradients, _save),
    ("forward_scheduled", _forward, _forward_fake, _gradients, _save),
    ("backward", _backward, _backward_fake, _refuse, None),
):
    torch.library.impl(f"jfa::{_name}", "default", _real, lib=LIBRARY)
    torch.library.register_fake(f"jfa::{_name}", _fake, lib=LIBRARY)
    torch.library.register_autograd(f"jfa::{_name}", _derivative, setup_context=_setup, lib=LIBRARY)
