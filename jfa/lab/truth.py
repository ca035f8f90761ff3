"""What a benchmarked call should have given, in float32 on the same device, and how far off it may be."""

import torch

from jfa.lab.cases import Inputs

SCORES = 1 << 28  # float32 scores that a chunk of sequences may have: 1 GiB, a dozen times
MEASURED = 64  # sequences that a budget is measured on


def expected(inputs: Inputs) -> dict[str, torch.Tensor]:
    """out, dq, dk and dv in float32 (IEEE products), computed on padded chunks of sequences."""
    results = {
        "out": torch.zeros(inputs.dout.shape, device=inputs.q.device),
        "dq": torch.zeros(inputs.q.shape, device=inputs.q.device),
        "dk": torch.zeros(inputs.k.shape, device=inputs.q.device),
        "dv": torch.zeros(inputs.v.shape, device=inputs.q.device),
    }
    order = inputs.lengths.argsort(descending=True)  # equal lengths together: little padding
    while len(order):
        fit = _fitting(inputs, int(inputs.lengths[order[0]]))
        _scatter(inputs, order[:fit], results)
        order = order[fit:]
    return results


def budgets(inputs: Inputs) -> dict[str, float]:
    """What each of out, dq, dk and dv may differ by, relative to its norm; {} for a batch without keys.

    Twice what PyTorch's own computation in the inputs' dtype differs from float32, plus one rounding of the
    result, on a chunk of the batch's sequences, short and long ones.
    """
    order = inputs.lengths.argsort()
    order = order[inputs.lengths[order] > 0]
    if not len(order):
        return {}
    fit = min(_fitting(inputs, int(inputs.lengths.max())), MEASURED, len(order))
    chunk = order[torch.linspace(0, len(order) - 1, fit).long()]
    exact, real, _ = _answers(inputs, chunk, torch.float32)
    low, _, _ = _answers(inputs, chunk, inputs.q.dtype)
    shared = inputs.q_offsets is None
    allowed = {}
    for name, wanted in exact.items():
        found = low[name].float()
        if name in ("dk", "dv") or not shared:
            wanted, found = wanted[real], found[real]
        elif name == "dq":
            wanted, found = wanted.sum(0), found.sum(0)
        rounded = wanted.to(inputs.q.dtype)
        allowed[name] = 2 * relative_error(found, wanted) + relative_error(rounded, wanted)
    return allowed


def _fitting(inputs, longest: int) -> int:
    """Sequences of a length whose scores fit into `SCORES`."""
    rows = inputs.case.M if inputs.q_offsets is None else longest
    return max(SCORES // max(rows * longest * inputs.case.Hq, 1), 1)


def _answers(inputs, chunk, dtype):
    """Padded out, dq, dk and dv of some sequences, which slots hold a row, and their packed rows.

    dk and dv are summed over the query heads of a group; dq of a shared query is not summed over sequences.
    """
    case, device = inputs.case, inputs.q.device
    lengths = inputs.lengths[chunk].to(device)
    slots = torch.arange(int(inputs.lengths[chunk].max()), device=device)
    real = slots < lengths[:, None]
    starts = inputs.kv_offsets[:-1].long()[chunk.to(device)]
    rows = (starts[:, None] + slots).clamp_(max=inputs.k.shape[0] - 1)
    group = case.Hq // case.Hkv
    k, v = (x[rows].to(dtype).repeat_interleave(group, 2).requires_grad_() for x in (inputs.k, inputs.v))
    if inputs.q_offsets is None:
        q = inputs.q.to(dtype).expand(len(chunk), *inputs.q.shape).clone().requires_grad_()
        dout = inputs.dout[chunk.to(device)].to(dtype)
        offset = lengths[:, None] - case.M + torch.arange(case.M, device=device)
    else:
        q = inputs.q[rows].to(dtype).requires_grad_()
        dout = inputs.dout[rows].to(dtype) * real[:, :, None, None]
        offset = slots.expand(len(chunk), -1)
    scores = torch.einsum("bmhd,bnhd->bhmn", q, k) * case.D**-0.5
    seen = _seen(case, slots, real, offset)
    weights = torch.where(seen[:, None], scores, -torch.inf).softmax(-1)
    weights = torch.where(seen[:, None], weights, 0)  # a row that sees nothing
    out = torch.einsum("bhmn,bnhd->bmhd", weights, v)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), dout)
    dk, dv = (x.unflatten(2, (case.Hkv, group)).sum(3) for x in (dk, dv))
    return {"out": out.detach(), "dq": dq, "dk": dk, "dv": dv}, real, rows


def _scatter(inputs, chunk, results) -> None:
    """Write the answers of some sequences where they belong."""
    if int(inputs.lengths[chunk].max()) == 0:
        return
    found, real, rows = _answers(inputs, chunk, torch.float32)
    packed = rows[real]
    for name in ("dk", "dv") if inputs.q_offsets is None else found:
        results[name][packed] = found[name][real]
    if inputs.q_offsets is None:
        results["out"][chunk.to(rows.device)] = found["out"]
        results["dq"] += found["dq"].sum(0)


def _seen(case, slots, real, offset):
    """Which key every query row sees, (sequences, rows, keys); ``offset``: the key a row is aligned with."""
    seen = real[:, None, :].expand(-1, offset.shape[1], -1)
    left, right = (None, None) if case.window is None else case.window
    if case.causal:
        right = 0
    if right is not None:
        seen = seen & (slots <= offset[:, :, None] + right)
    if left is not None:
        seen = seen & (slots >= offset[:, :, None] - left)
    return seen


def relative_error(found, wanted: torch.Tensor) -> float:
    """Norm of the difference over the norm of what was wanted."""
    return float((found.detach().float() - wanted).norm() / wanted.norm().clamp_min(1e-30))


def errors(run, wanted: dict[str, torch.Tensor], allowed: dict[str, float]) -> dict[str, dict[str, float]]:
    """Largest relative error of each direction (of out; of dq, dk and dv), and largest share of its budget.

    {"rel_error": {"forward": ..., "backward": ..., "both": ...}, "budget_share": ...}. dq of a query that was
    expanded over the sequences is summed over them first; nan where a peer's tensors have another layout.
    """
    found = {"out": relative_error(run.result().reshape(wanted["out"].shape), wanted["out"])}
    for name, x in zip(("dq", "dk", "dv"), run.gradients(), strict=True):
        if name == "dq" and x.numel() == wanted["out"].numel() != wanted["dq"].numel():
            x = x.reshape(wanted["out"].shape).float().sum(0)
        if x.shape == wanted[name].shape:
            found[name] = relative_error(x, wanted[name])
    names = {"forward": ("out",), "backward": ("dq", "dk", "dv"), "both": tuple(found)}
    shares = {name: error / allowed[name] for name, error in found.items() if allowed.get(name)}
    return {
        column: {
            way: max((of[n] for n in some if n in of), default=float("nan")) for way, some in names.items()
        }
        for column, of in (("rel_error", found), ("budget_share", shares))
    }
