"""What a benchmarked call should have given, in float32 on the same device, and how far it is from that."""

import torch

from jfa.lab.cases import Inputs

SCORES = 1 << 28  # float32 scores that a chunk of sequences may have: 1 GiB, a dozen times


def expected(inputs: Inputs) -> dict[str, torch.Tensor]:
    """out, dq, dk and dv in float32 (IEEE products), computed on padded chunks of sequences."""
    results = {
        "out": torch.zeros(inputs.dout.shape, device=inputs.q.device),
        "dq": torch.zeros(inputs.q.shape, device=inputs.q.device),
        "dk": torch.zeros(inputs.k.shape, device=inputs.q.device),
        "dv": torch.zeros(inputs.v.shape, device=inputs.q.device),
    }
    starts = inputs.kv_offsets[:-1].long()
    order = inputs.lengths.argsort(descending=True)  # equal lengths together: little padding
    while len(order):
        longest = int(inputs.lengths[order[0]])
        rows = inputs.case.M if inputs.q_offsets is None else longest
        fit = max(SCORES // max(rows * longest * inputs.case.Hq, 1), 1)
        _expect_chunk(inputs, order[:fit].to(starts.device), longest, starts, results)
        order = order[fit:]
    return results


def _expect_chunk(inputs, chunk, longest, starts, results) -> None:
    case, device = inputs.case, inputs.q.device
    if longest == 0:
        return
    lengths = inputs.lengths.to(device)[chunk]
    slots = torch.arange(longest, device=device)
    real = slots < lengths[:, None]
    rows = (starts[chunk, None] + slots).clamp_(max=inputs.k.shape[0] - 1)
    group = case.Hq // case.Hkv
    shared = inputs.q_offsets is None
    k, v = (x[rows].float().repeat_interleave(group, 2).requires_grad_() for x in (inputs.k, inputs.v))
    if shared:
        q = inputs.q.float().expand(len(chunk), *inputs.q.shape).clone().requires_grad_()
        dout = inputs.dout[chunk].float()
        offset = lengths[:, None] - case.M + torch.arange(case.M, device=device)
    else:
        q = inputs.q[rows].float().requires_grad_()
        dout = inputs.dout[rows].float() * real[:, :, None, None]
        offset = slots.expand(len(chunk), -1)
    scores = torch.einsum("bmhd,bnhd->bhmn", q, k) * case.D**-0.5
    seen = _seen(case, slots, real, offset)
    weights = torch.where(seen[:, None], scores, -torch.inf).softmax(-1)
    weights = torch.where(seen[:, None], weights, 0)  # a row that sees nothing
    out = torch.einsum("bhmn,bnhd->bmhd", weights, v)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), dout)
    packed = rows[real]
    for name, x in (("dk", dk), ("dv", dv)):
        results[name][packed] = x[real].unflatten(1, (case.Hkv, group)).sum(2)
    if shared:
        results["out"][chunk] = out.detach()
        results["dq"] += dq.sum(0)
    else:
        results["out"][packed] = out.detach()[real]
        results["dq"][packed] = dq[real]


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


def errors(run, wanted: dict[str, torch.Tensor]) -> dict[str, float]:
    """Largest relative error of each direction: of out, and of dq, dk and dv.

    dq of a query that was expanded over the sequences is summed over them first; nan where a peer's tensors
    have another layout altogether.
    """
    forward = relative_error(run.result().reshape(wanted["out"].shape), wanted["out"])
    backward = []
    for name, x in zip(("dq", "dk", "dv"), run.backward(), strict=True):
        if name == "dq" and x.numel() == wanted["out"].numel() != wanted["dq"].numel():
            x = x.reshape(wanted["out"].shape).float().sum(0)
        if x.shape == wanted[name].shape:
            backward.append(relative_error(x, wanted[name]))
    worst = max(backward, default=float("nan"))
    return {"forward": forward, "backward": worst, "both": max(forward, worst)}
