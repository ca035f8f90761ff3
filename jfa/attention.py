"""The public function: it validates, then calls one PyTorch operator that runs the chosen backend."""

import math
import weakref

import torch
from torch.autograd import forward_ad

from jfa import backends, jagged, validation
from jfa.kernels.problem import Problem
from jfa.kernels.step import Step

LOG2_E = math.log2(math.e)


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
    (float64 for float64), and differentiable. Gradients are first-order and reverse-mode only; the kernels
    make them from a float32 lse: logits beyond 1e5 cost them a percent and more, beyond 1e7 they can be
    anything. ``torch.func.grad`` and ``vjp`` are refused.

    ``scale``: default D ** -0.5. ``window``: (left, right) keys around the aligned one, both included,
    None (or -1) unbounded; the last query row is aligned with the last key. ``causal`` is right = 0. A
    row that sees no key gives out 0, lse -inf and zero gradients. Rows past the last offset are never
    read; their gradients are 0, and with packed Q their out is 0 and lse -inf. Launches take their sizes
    from shapes, so a captured CUDA graph stays right for any lengths. ``max_kv_len``: an upper bound of
    all lengths; a longer sequence is an error where values are checked, and nothing else depends on it.
    ``deterministic``: the same bits for dq in every run; ``torch.use_deterministic_algorithms`` asks for
    it too. ``schedule``: a ``jfa.schedule.Schedule``. ``step``: a step of the course, by name or as an
    object; a name stands for both directions where both ladders have it, an object for its own, and the
    other direction chooses for itself. If gradients are wanted and the backward step that is named cannot
    run the call ("stationary" takes a shared query block, as many heads of q as of k, and no window), or
    adds dq in no fixed order although ``deterministic`` asks for one, that is an error here and not only
    in the backward pass (``torch.compile`` meets it there). ``backend``: one of ``jfa.backends.NAMES``;
    kernels run CPU tensors in the emulator. ``check``: read the offsets' values and refuse bad ones; None
    does so on a CPU only, as a GPU must be waited for. Meta tensors give meta tensors, by shapes alone.

    Raises TypeError and ValueError that name the argument, what was expected and what came, and RuntimeError
    when the backend cannot run on this machine or a second derivative is asked for (NotImplementedError for
    a forward-mode one). Defined by
    ``jfa.reference.attention``; notebook 01_jagged_batches explains it.
    """
    q, k, v, kv_offsets, q_offsets = validation.unpack(q, k, v, kv_offsets, q_offsets, check)
    q, k, v = validation.autocast(q, k, v)
    validation.check_tensors(q, k, v, kv_offsets, q_offsets)
    validation.check_switches(causal=causal, return_lse=return_lse, deterministic=deterministic)
    left, right = validation.check_window(window)
    if causal:
        right = 0
    scale, max_kv_len = validation.check_options(scale, max_kv_len, backend, schedule, step, check)
    options = (scale, left, right, max_kv_len, backend, _step_key(step), deterministic, check)
    if schedule is None:
        out, lse = torch.ops.jfa.forward(q, k, v, kv_offsets, q_offsets, *options)
    else:
        lists = schedule.tensors()
        out, lse = torch.ops.jfa.forward_scheduled(q, k, v, kv_offsets, q_offsets, *options, lists)
    return (out, lse) if return_lse else out


# ------------------------------------------------------------------------------------------------- the step

_STEPS: weakref.WeakValueDictionary[str, Step] = weakref.WeakValueDictionary()  # kept by who uses them
_COMPILED: list[Step] = []  # what a compiled graph knows by its key only, so nobody else may keep it


def _step_key(step) -> str | None:
    """What an operator can carry of a step: its name, or for an object the key it is found under here."""
    if step is None or isinstance(step, str):
        return step
    return _pin(step) if torch.compiler.is_compiling() else _keep(step)


def _keep(step) -> str:
    key = f"{step.name}#{id(step)}"
    _STEPS[key] = step
    return key


def _pin(step) -> str:
    _COMPILED.append(step)
    return _keep(step)


# Constant for torch.compile, which would otherwise fill the registry after the operator has looked there.
# torch.compiler.assume_constant_result does just this, but importing it would import the whole compiler.
_pin._dynamo_marked_constant = True


def _find_step(key: str | None, backend: str, direction: str):
    """The step of a key for one direction, or None (the backend's own choice) when it is one of the other."""
    if key is None:
        return None
    if backend not in backends.ARCHITECTURES:
        name = key.partition("#")[0]  # of an object
        raise ValueError(
            f'step: expected None with backend="{backend}" (given or by "auto"), which has no steps, got '
            f'{name!r}; backend="hopper" and "blackwell" have some'
        )
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
    if not math.isfinite(scale):
        raise ValueError(f"scale: expected a finite number, got {scale}")
    if q.dtype != torch.float64:  # a kernel gets scale * log2(e) as a float32
        scale = 0.0 if abs(scale) < 2**-149 else scale
        if abs(scale) * LOG2_E >= 2.0**128:
            raise ValueError(f"scale: expected a number that float32 holds, times log2(e) too, got {scale}")
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


def _contiguous(kv_offsets, q_offsets):
    """Offsets as kernels read them: one behind the other."""
    return kv_offsets.contiguous(), None if q_offsets is None else q_offsets.contiguous()


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
    kv_offsets, q_offsets = _contiguous(kv_offsets, q_offsets)
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
    kv_offsets, q_offsets = _contiguous(kv_offsets, q_offsets)
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


def _check_backward(q, k, v, kv_offsets, q_offsets, options) -> None:
    """Raise ValueError now, rather than in the backward pass, if the named step cannot run this call's."""
    scale, left, right, max_kv_len, backend, step, deterministic = options
    if step is None or getattr(_STEPS.get(step), "direction", None) == "forward":
        return
    if type(q) not in (torch.Tensor, torch.nn.Parameter) or q.is_meta:  # which is only being traced
        return
    problem = _problem(q, k, v, kv_offsets, q_offsets, scale, left, right, max_kv_len)
    name = backends.select(backend, problem, q.device)
    step = _find_step(step, name, "backward")
    limit = getattr(backends.module(name), "backward_supports", None)
    if step is None or limit is None:
        return
    deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
    reason = limit(problem, step, deterministic=deterministic)
    if reason is not None:
        raise ValueError(f'backend="{name}" cannot run the backward pass of this call: {reason}')


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


class _Differentiable(torch.autograd.Function):
    """A forward operator with what its backward needs; the schedule's tensors come last, if they came along.

    torch.library.register_autograd would do the same for any operator, and looks through the whole schema in
    every call for it: a third of the time that a small call takes on the host.
    """

    @staticmethod
    def forward(ctx, run, q, k, v, kv_offsets, q_offsets, *options):
        options, (_, *lists) = options[:7], options[7:]  # after check
        _check_backward(q, k, v, kv_offsets, q_offsets, options)
        out, lse = run()
        ctx.options, ctx.step = options, _STEPS.get(options[5])  # kept until the backward pass asks for it
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, out, lse, kv_offsets, q_offsets, *(lists[0] if lists else ()))
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse):
        q, k, v, out, lse, kv_offsets, q_offsets, *lists = ctx.saved_tensors
        needs = list(ctx.needs_input_grad[1:4])
        unused = [None] * (len(ctx.needs_input_grad) - 4)  # of the arguments after q, k and v
        if (dout is None and dlse is None) or not any(needs):
            return None, None, None, None, *unused
        if dout is None:
            dout = torch.zeros_like(out)
        grads = torch.ops.jfa.backward(
            dout, dlse, q, k, v, out, lse, kv_offsets, q_offsets, *ctx.options, needs, lists
        )
        return None, *(grad if need else None for grad, need in zip(grads, needs, strict=True)), *unused


class _DifferentiableOnce(torch.autograd.Function):
    """The backward operator where its results could be differentiated, which is refused when it is done."""

    @staticmethod
    def forward(ctx, run, *arguments):
        return run()

    @staticmethod
    def backward(ctx, *grads):
        raise RuntimeError("jagged_flash_attention has first derivatives only; a second one was asked for")


def _make_differentiable(name: str, function, count: int) -> None:
    """Put an autograd function around an operator whose first ``count`` arguments may want derivatives."""
    op = getattr(torch.ops.jfa, name).default

    def call(keyset, *arguments):
        def run():
            with torch._C._AutoDispatchBelowAutograd():
                return op.redispatch(keyset & torch._C._after_autograd_keyset, *arguments)

        tensors = [x for x in arguments[:count] if x is not None]
        dual = forward_ad._current_level >= 0  # cheaper than to ask the tensors
        if dual and any(forward_ad.unpack_dual(x).tangent is not None for x in tensors):
            raise NotImplementedError(
                "jagged_flash_attention has no forward-mode derivative; use reverse mode"
            )
        if torch._C._are_functorch_transforms_active():
            raise NotImplementedError(
                "jagged_flash_attention does not work under torch.func; use torch.autograd.grad or backward"
            )
        if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
            return function.apply(run, *arguments)
        return run()

    LIBRARY.impl(name, call, "Autograd", with_keyset=True)


for _name, _real, _fake in (
    ("forward", _forward, _forward_fake),
    ("forward_scheduled", _forward, _forward_fake),
    ("backward", _backward, _backward_fake),
):
    torch.library.impl(f"jfa::{_name}", "default", _real, lib=LIBRARY)
    torch.library.register_fake(f"jfa::{_name}", _fake, lib=LIBRARY)
_make_differentiable("forward", _Differentiable, 3)
_make_differentiable("forward_scheduled", _Differentiable, 3)
_make_differentiable("backward", _DifferentiableOnce, 7)
