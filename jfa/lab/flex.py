"""FlexAttention on a jagged batch as a peer: document ids as its mask, a block mask from the offsets.

It is compiled by PyTorch's inductor, which wants PyTorch's own Triton: `jfa.lab.child` runs it in a process
that sees that one. Scope "call" makes the block mask from the offsets, "kernel" has it made beforehand.
"""

import functools
from dataclasses import dataclass

import torch

from jfa.lab.cases import Inputs
from jfa.lab.peers import Run, Unsupported, expanded_query, leaves_of, query_offsets, run_of

BLOCK = 128  # rows of a block of the mask, both ways
COMPILED_SHAPES = 64  # before dynamo gives up and runs unfused


@dataclass
class Blocks:
    """Which key blocks each block of query rows meets: ``partial`` under the mask, ``full`` without it.

    Counts are (1, 1, query blocks), indices (1, 1, query blocks, key blocks), int32; entries past a row's
    count mean nothing.
    """

    partial_count: torch.Tensor
    partial: torch.Tensor
    full_count: torch.Tensor
    full: torch.Tensor


def documents(offsets: torch.Tensor, rows: int) -> torch.Tensor:
    """Which sequence each packed row belongs to, (rows,)."""
    places = torch.arange(rows, device=offsets.device, dtype=offsets.dtype)
    return torch.searchsorted(offsets[1:], places, right=True)


def key_blocks(q_documents, kv_offsets, q_rows: int, kv_rows: int, causal: bool) -> Blocks:
    """The blocks of packed queries against packed keys; never waits for the device.

    The keys of a block of query rows are one range of packed rows, from the first key of its first sequence
    to the last key of its last one; with ``causal`` (self-attention) to its own last row.
    """
    device = kv_offsets.device
    count_q, count_kv = -(-q_rows // BLOCK), -(-kv_rows // BLOCK)
    first = torch.arange(count_q, device=device) * BLOCK
    last = (first + BLOCK - 1).clamp(max=q_rows - 1)
    one, other = q_documents[first], q_documents[last]
    low, high = kv_offsets[one].long(), kv_offsets[other + 1].long()
    whole_high = torch.minimum(high, first + 1) if causal else high
    high = torch.minimum(high, last + 1) if causal else high
    start, stop = low // BLOCK, torch.where(high > low, (high + BLOCK - 1) // BLOCK, low // BLOCK)
    full_start, full_stop = (low + BLOCK - 1) // BLOCK, whole_high // BLOCK
    within = (one == other) & (first + BLOCK <= q_rows) & (full_stop > full_start)
    full_start = torch.where(within, full_start, stop)
    full_stop = torch.where(within, full_stop, stop)
    turn = torch.arange(count_kv, device=device)
    before = (full_start - start)[:, None]
    partial = torch.where(turn < before, start[:, None] + turn, full_stop[:, None] + turn - before)
    full = full_start[:, None] + turn
    full_count = full_stop - full_start

    def shaped(x):
        return x.clamp(0, max(count_kv - 1, 0)).int()[None, None]

    counts = ((stop - start - full_count).int()[None, None], full_count.int()[None, None])
    return Blocks(counts[0], shaped(partial), counts[1], shaped(full))


def block_mask(inputs: Inputs):
    """FlexAttention's BlockMask of a case: a query row sees the keys of its own sequence."""
    from torch.nn.attention.flex_attention import BlockMask

    case = inputs.case
    shared = inputs.q_offsets is None
    if case.window is not None or (case.causal and shared):
        raise Unsupported("no window here, and a causal mask on self-attention alone")
    q_rows, kv_rows = query_rows(inputs), inputs.k.shape[0]
    of_key = documents(inputs.kv_offsets, kv_rows)
    of_query = documents(query_offsets(inputs), q_rows) if shared else of_key

    def same_document(b, h, row, key):
        return of_query[row] == of_key[key]

    def same_document_before(b, h, row, key):
        return (of_query[row] == of_key[key]) & (key <= row)

    blocks = key_blocks(of_query, inputs.kv_offsets, q_rows, kv_rows, case.causal)
    return BlockMask.from_kv_blocks(
        blocks.partial_count,
        blocks.partial,
        blocks.full_count,
        blocks.full,
        BLOCK_SIZE=BLOCK,
        mask_mod=same_document_before if case.causal else same_document,
        seq_lengths=(q_rows, kv_rows),
    )


def query_rows(inputs: Inputs) -> int:
    """Packed query rows of a case."""
    return inputs.q.shape[0] * (inputs.case.B if inputs.q_offsets is None else 1)


@functools.cache
def compiled():
    """flex_attention, compiled for each shape it meets."""
    import torch._dynamo
    import torch._functorch.config
    from torch.nn.attention.flex_attention import flex_attention

    torch._functorch.config.donated_buffer = False  # a backward pass is run again and again
    for name in ("recompile_limit", "cache_size_limit"):
        if hasattr(torch._dynamo.config, name):
            setattr(torch._dynamo.config, name, COMPILED_SHAPES)
    return torch.compile(flex_attention, dynamic=False)


def flex(inputs: Inputs, scope: str, function=None) -> Run:
    """FlexAttention over packed rows; ``function`` stands in for the compiled one."""
    function = function or compiled()
    case = inputs.case
    leaves = q, k, v = leaves_of(inputs, scope)
    ready = block_mask(inputs) if scope == "kernel" else None

    def attend():
        query = expanded_query(inputs, q) if scope == "call" else q
        mask = ready or block_mask(inputs)
        heads = (x.transpose(0, 1)[None] for x in (query, k, v))
        out = function(*heads, block_mask=mask, enable_gqa=case.Hq != case.Hkv)
        return out[0].transpose(0, 1)

    shape = inputs.dout.shape
    return run_of(attend, leaves, inputs.dout.flatten(0, -3), result=lambda out: out.reshape(shape))
