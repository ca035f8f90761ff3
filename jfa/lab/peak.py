"""The memory that a training step needs beyond what it gives: its peak on a GPU, less its results."""

import gc

import torch

from jfa.lab.cases import Inputs
from jfa.lab.peers import Run


def granted_bytes(inputs: Inputs) -> int:
    """Bytes that every training step holds at its end: out, lse, delta and the three gradients."""
    out = inputs.dout.numel() * inputs.dout.element_size()
    rows = inputs.dout.numel() // inputs.case.D  # of all heads: one lse and one delta each, float32
    gradients = sum(x.numel() * x.element_size() for x in (inputs.q, inputs.k, inputs.v))
    return out + 2 * 4 * rows + gradients


def kv_bytes(inputs: Inputs) -> int:
    """Bytes of K and V."""
    return sum(x.numel() * x.element_size() for x in (inputs.k, inputs.v))


def extra_bytes(run: Run, inputs: Inputs) -> int:
    """Peak bytes of one forward and backward pass of scope "call", beyond its inputs and `granted_bytes`."""
    run.both()  # whatever is allocated once and kept
    gc.collect()  # else what earlier cases left would be freed in between and lower the peak
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run.both()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before - granted_bytes(inputs)


def row(run: Run, inputs: Inputs, impl: str) -> dict:
    """The columns of one measurement: bytes, and their share of K and V."""
    extra, whole = extra_bytes(run, inputs), kv_bytes(inputs)
    sizes = {"peak_extra_bytes": extra, "kv_bytes": whole, "share_of_kv": extra / max(whole, 1)}
    return inputs.case.columns() | {"impl": impl, "direction": "both", "scope": "call"} | sizes
