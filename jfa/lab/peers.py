"""Other people's attention behind one face, to be timed beside ours on the same tensors.

Every peer takes the `Inputs` of a case and returns callables. ``scope`` "call" is what a user would have
to write, with the shared query expanded over the batch and its gradient summed; "kernel" leaves that out by
expanding beforehand. A peer that cannot run a case raises `Unsupported` with the reason.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from jfa.lab.cases import Inputs


class Unsupported(Exception):
    """A peer cannot run this case; the message says why."""


@dataclass
class Run:
    """A peer prepared for one case: ``forward()`` gives out, ``backward()`` gives (dq, dk, dv)."""

    forward: Callable[[], torch.Tensor]
    backward: Callable[[], tuple]


def expanded_query(inputs: Inputs) -> torch.Tensor:
    """The query in packed form (Tq, Hq, D): repeated for every sequence when it is shared."""
    if inputs.q_offsets is not None:
        return inputs.q
    case = inputs.case
    return inputs.q.expand(case.B, *inputs.q.shape).reshape(case.B * case.M, case.Hq, case.D)


def query_offsets(inputs: Inputs) -> torch.Tensor:
    """Offsets of the packed query, int32 on the device of q."""
    if inputs.q_offsets is not None:
        return inputs.q_offsets
    case = inputs.case
    return torch.arange(0, (case.B + 1) * case.M, case.M, dtype=torch.int32, device=inputs.q.device)


def _varlen_run(inputs: Inputs, scope: str, attend) -> Run:
    """Wrap a varlen function attend(q, k, v) over packed tensors."""
    shared = inputs.q_offsets is None
    k = inputs.k.detach().requires_grad_()
    v = inputs.v.detach().requires_grad_()
    if scope == "call":
        q = inputs.q.detach().requires_grad_()
    else:
        q = expanded_query(inputs).detach().contiguous().requires_grad_()
    shape = inputs.dout.shape

    def forward():
        case = inputs.case
        query = q
        if scope == "call" and shared:
            query = q.expand(case.B, *q.shape).reshape(case.B * case.M, case.Hq, case.D)
        return attend(query, k, v)

    with torch.no_grad():
        _require_shape(forward(), inputs)
    graph = forward()
    dout = inputs.dout.reshape(graph.shape)

    def backward():
        return torch.autograd.grad(graph, (q, k, v), dout, retain_graph=True)

    return Run(lambda: forward().view(shape), backward)


def _require_shape(out: torch.Tensor, inputs: Inputs) -> None:
    if out.numel() != inputs.dout.numel():
        raise Unsupported(f"output has shape {tuple(out.shape)}")


def fa4(inputs: Inputs, scope: str) -> Run:
    """FlashAttention-4 (package flash-attn-4), its varlen entry point."""
    from flash_attn.cute import flash_attn_varlen_func

    case = inputs.case
    cu_q = query_offsets(inputs)
    longest_q = int(inputs.query_lengths.max())
    window = (None, None) if case.window is None else case.window

    def attend(q, k, v):
        out = flash_attn_varlen_func(
            q,
            k,
            v,
            cu_seqlens_q=cu_q,
            cu_seqlens_k=inputs.kv_offsets,
            max_seqlen_q=longest_q,
            max_seqlen_k=inputs.max_kv_len,
            causal=case.causal,
            window_size=window,
        )
        return out[0] if isinstance(out, tuple) else out

    return _varlen_run(inputs, scope, attend)


def torch_varlen(inputs: Inputs, scope: str) -> Run:
    """PyTorch's own varlen attention (torch.nn.attention.varlen)."""
    from torch.nn.attention.varlen import varlen_attn

    case = inputs.case
    if case.Hq != case.Hkv or case.window is not None:
        raise Unsupported("equal head counts and no window only")
    cu_q = query_offsets(inputs)
    longest_q = int(inputs.query_lengths.max())

    def attend(q, k, v):
        if case.causal:
            return varlen_attn(q, k, v, cu_q, inputs.kv_offsets, longest_q, inputs.max_kv_len, is_causal=True)
        return varlen_attn(q, k, v, cu_q, inputs.kv_offsets, longest_q, inputs.max_kv_len)

    return _varlen_run(inputs, scope, attend)


def _padding_index(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Index (B, N) of every padded slot's packed row, and the mask of slots that hold a row."""
    longest = inputs.max_kv_len
    slots = torch.arange(longest, device=inputs.q.device)
    valid = slots[None, :] < inputs.lengths.to(inputs.q.device)[:, None]
    index = inputs.kv_offsets[:-1].long()[:, None] + slots[None, :]
    return index.clamp_(max=max(inputs.k.shape[0] - 1, 0)), valid


def cudnn(inputs: Inputs, scope: str) -> Run:
    """cuDNN through scaled_dot_product_attention on padded tensors; padding is hidden by a boolean mask.

    Scope "call" includes padding k and v; "kernel" pads beforehand. A batch without padding needs no mask.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    case = inputs.case
    if case.window is not None:
        raise Unsupported("no window")
    index, valid = _padding_index(inputs)
    full = bool(valid.all())
    if case.causal and not full:
        raise Unsupported("a causal mask and a padding mask together")
    bytes_needed = 2 * valid.numel() * case.Hkv * case.D * 2
    if bytes_needed > 40e9:
        raise Unsupported(f"padded K and V take {bytes_needed / 1e9:.0f} GB")
    mask = None if full else valid[:, None, None, :]
    grouped = case.Hq != case.Hkv

    def pad(x):
        return x[index].transpose(1, 2)

    leaves = [x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    if scope == "kernel":
        q = pad(inputs.q) if inputs.q_offsets is not None else _shared(inputs.q, case)
        leaves = [x.detach().contiguous().requires_grad_() for x in (q, pad(inputs.k), pad(inputs.v))]

    def forward():
        q, k, v = leaves
        if scope == "call":
            q = pad(q) if inputs.q_offsets is not None else _shared(q, case)
            k, v = pad(k), pad(v)
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=case.causal, enable_gqa=grouped
            )

    def unpad(out):
        out = out.transpose(1, 2)
        return out[valid] if inputs.q_offsets is not None else out

    graph = forward()
    if inputs.q_offsets is not None:
        dout = inputs.dout[index] * valid[:, :, None, None]
    else:
        dout = inputs.dout
    dout = dout.transpose(1, 2).to(graph.dtype)

    def backward():
        return torch.autograd.grad(graph, leaves, dout, retain_graph=True)

    def finished():
        out = forward()
        return unpad(out) if scope == "call" else out

    return Run(finished, backward)


def _shared(q: torch.Tensor, case) -> torch.Tensor:
    return q.transpose(0, 1).expand(case.B, case.Hq, case.M, case.D)


def jfa_backend(backend: str, step=None) -> Callable[[Inputs, str], Run]:
    """One of our own backends as a peer; scope "kernel" reuses a schedule made beforehand."""

    def prepare(inputs: Inputs, scope: str) -> Run:
        import jfa

        case = inputs.case
        q, k, v = (x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
        options = {"causal": case.causal, "backend": backend, "step": step}
        if case.window is not None:
            options["window"] = case.window
        if scope == "kernel" and backend != "triton":  # the baseline finds its tiles by itself
            from jfa.schedule import make_schedule

            rows = (q.shape[0], k.shape[0])
            options["schedule"] = make_schedule(rows, inputs.kv_offsets, inputs.q_offsets)

        def forward():
            return jfa.jagged_flash_attention(q, k, v, inputs.kv_offsets, inputs.q_offsets, **options)

        graph = forward()

        def backward():
            return torch.autograd.grad(graph, (q, k, v), inputs.dout, retain_graph=True)

        return Run(forward, backward)

    return prepare


PEERS = {
    "jfa": jfa_backend("auto"),
    "jfa_baseline": jfa_backend("triton"),
    "fa4": fa4,
    "torch_varlen": torch_varlen,
    "cudnn": cudnn,
}
