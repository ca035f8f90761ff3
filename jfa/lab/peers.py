"""Other people's attention behind one face, to be timed beside ours on the same tensors.

Every peer takes the `Inputs` of a case and returns callables. ``scope`` "call" is what a user would have
to write, with the shared query expanded over the batch and its gradient summed; "kernel" leaves that out by
expanding beforehand. A peer that cannot run a case raises `Unsupported` with the reason.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from jfa.lab.cases import Inputs


class Unsupported(Exception):
    """A peer cannot run this case; the message says why."""


@dataclass
class Run:
    """A peer prepared for one case.

    ``forward()`` gives out, ``backward()`` and ``both()`` give (dq, dk, dv), the former of a forward pass
    that ran before; ``result()`` and ``gradients()`` are out and the latter in the layout of `Inputs`.
    ``steps`` names what ran by direction.
    """

    forward: Callable[[], torch.Tensor]
    backward: Callable[[], tuple]
    both: Callable[[], tuple]
    result: Callable[[], torch.Tensor]
    gradients: Callable[[], tuple]
    steps: dict[str, str] = field(default_factory=dict)


def run_of(
    attend: Callable[[], torch.Tensor], leaves, dout: torch.Tensor, finish=None, result=None, gradients=tuple
) -> Run:
    """A Run of ``attend()``, differentiable in ``leaves``; ``finish`` is what a forward pass does besides.

    ``result`` and ``gradients`` bring out and (dq, dk, dv) into the layout of `Inputs`.
    """
    finish = finish or (lambda out: out)
    result = result or (lambda out: out)
    graph = attend()
    if graph.shape != dout.shape:
        raise Unsupported(f"output has shape {tuple(graph.shape)}")
    return Run(
        forward=lambda: finish(attend()),
        backward=(backward := lambda: torch.autograd.grad(graph, leaves, dout, retain_graph=True)),
        both=lambda: torch.autograd.grad(attend(), leaves, dout),
        result=lambda: result(attend()),
        gradients=lambda: gradients(backward()),
    )


def expanded_query(inputs: Inputs, q: torch.Tensor | None = None) -> torch.Tensor:
    """The query in packed form (Tq, Hq, D): repeated for every sequence when it is shared."""
    q = inputs.q if q is None else q
    if inputs.q_offsets is not None:
        return q
    case = inputs.case
    return q.expand(case.B, *q.shape).reshape(case.B * case.M, case.Hq, case.D)


def query_offsets(inputs: Inputs) -> torch.Tensor:
    """Offsets of the packed query, int32 on the device of q."""
    if inputs.q_offsets is not None:
        return inputs.q_offsets
    case = inputs.case
    return torch.arange(0, (case.B + 1) * case.M, case.M, dtype=torch.int32, device=inputs.q.device)


def leaves_of(inputs: Inputs, scope: str) -> list[torch.Tensor]:
    """q, k and v that ask for gradients; in scope "kernel" q is expanded beforehand."""
    q = inputs.q if scope == "call" else expanded_query(inputs).contiguous()
    return [x.detach().requires_grad_() for x in (q, inputs.k, inputs.v)]


def _varlen_run(inputs: Inputs, scope: str, function) -> Run:
    """Wrap a varlen function(q, k, v) over packed tensors."""
    leaves = q, k, v = leaves_of(inputs, scope)

    def attend():
        return function(expanded_query(inputs, q) if scope == "call" else q, k, v)

    shape = inputs.dout.shape
    return run_of(attend, leaves, inputs.dout.flatten(0, -3), result=lambda out: out.view(shape))


def fa4(inputs: Inputs, scope: str) -> Run:
    """FlashAttention-4 (package flash-attn-4): its varlen entry point, for dense shapes the plain one."""
    from flash_attn.cute import flash_attn_func, flash_attn_varlen_func

    case = inputs.case
    cu_q = query_offsets(inputs)
    longest_q = int(inputs.query_lengths.max())
    window = (None, None) if case.window is None else case.window

    def attend(q, k, v):
        if case.suite == "dense":
            q, k, v = (x.unflatten(0, (case.B, case.N)) for x in (q, k, v))
            out = flash_attn_func(q, k, v, causal=case.causal, window_size=window)
            return (out[0] if isinstance(out, tuple) else out).flatten(0, 1)
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

    options = {}
    if case.causal:  # how it is said has changed between releases
        known = inspect.signature(varlen_attn).parameters
        options = {"is_causal": True} if "is_causal" in known else {"window_size": (-1, 0)}

    def attend(q, k, v):
        offsets = (cu_q, inputs.kv_offsets, longest_q, inputs.max_kv_len)
        return varlen_attn(q, k, v, *offsets, **options)

    return _varlen_run(inputs, scope, attend)


@dataclass
class _Padding:
    """How packed rows (T, H, D) become (B, H, N, D) and back; a batch without padding only changes shape."""

    longest: int
    batch: int
    index: torch.Tensor  # (B, N): the packed row of every slot
    valid: torch.Tensor  # (B, N): whether the slot holds a row
    slots: torch.Tensor  # (T,): the slot of every packed row
    full: bool

    @classmethod
    def of(cls, inputs: Inputs) -> "_Padding":
        longest = inputs.max_kv_len
        slots = torch.arange(longest, device=inputs.q.device)
        valid = slots[None, :] < inputs.lengths.to(inputs.q.device)[:, None]
        index = inputs.kv_offsets[:-1].long()[:, None] + slots[None, :]
        index = index.clamp_(max=max(inputs.k.shape[0] - 1, 0))
        places = valid.flatten().nonzero()[:, 0]
        return cls(longest, len(valid), index, valid, places, bool(valid.all()))

    def pad(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.unflatten(0, (self.batch, self.longest)) if self.full else x[self.index]
        return rows.transpose(1, 2)

    def unpad(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.transpose(1, 2).flatten(0, 1)
        return rows if self.full else rows[self.slots]


def cudnn(inputs: Inputs, scope: str) -> Run:
    """cuDNN through scaled_dot_product_attention on padded tensors; padding is hidden by a boolean mask.

    Scope "call" includes padding k and v; "kernel" pads beforehand. A batch without padding needs neither
    copies nor a mask.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    case = inputs.case
    if case.window is not None:
        raise Unsupported("no window")
    padding = _Padding.of(inputs)
    if case.causal and not padding.full:
        raise Unsupported("a causal mask and a padding mask together")
    bytes_needed = 2 * padding.valid.numel() * case.Hkv * case.D * 2
    if bytes_needed > 40e9:
        raise Unsupported(f"padded K and V take {bytes_needed / 1e9:.0f} GB")
    mask = None if padding.full else padding.valid[:, None, None, :]
    packed = inputs.q_offsets is not None

    def padded_query(q):
        return padding.pad(q) if packed else q.transpose(0, 1).expand(case.B, case.Hq, case.M, case.D)

    leaves = [x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    if scope == "kernel":
        ready = (padded_query(inputs.q), padding.pad(inputs.k), padding.pad(inputs.v))
        leaves = [x.detach().contiguous().requires_grad_() for x in ready]

    def attend():
        q, k, v = leaves
        if scope == "call":
            q, k, v = padded_query(q), padding.pad(k), padding.pad(v)
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=case.causal, enable_gqa=case.Hq != case.Hkv
            )

    def packed_rows(out):
        return padding.unpad(out) if packed else out.transpose(1, 2)

    def packed_gradients(found):
        dq, dk, dv = found
        return packed_rows(dq), padding.unpad(dk), padding.unpad(dv)

    dout = inputs.dout.transpose(1, 2)
    if packed:
        dout = padding.pad(inputs.dout) * padding.valid[:, None, :, None]
    if scope == "call":
        return run_of(attend, leaves, dout, finish=packed_rows, result=packed_rows)
    return run_of(attend, leaves, dout, result=packed_rows, gradients=packed_gradients)


def jfa(inputs: Inputs, scope: str) -> Run:
    """Ours, with the backend and steps that it chooses itself."""
    from jfa.lab import ours

    return ours.prepare(inputs, scope)


def jfa_baseline(inputs: Inputs, scope: str) -> Run:
    """Our compiler-scheduled baseline."""
    from jfa.lab import ours

    return ours.prepare(inputs, scope, backend="triton")


PEERS = {
    "jfa": jfa,
    "jfa_baseline": jfa_baseline,
    "fa4": fa4,
    "torch_varlen": torch_varlen,
    "cudnn": cudnn,
}
REMOTE = ("flex",)  # peers that run in a child process
