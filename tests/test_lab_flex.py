"""FlexAttention's block mask from the offsets is the one that PyTorch finds; the peer computes attention."""

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from jfa.lab import cases, flex, truth
from jfa.lab.peers import Unsupported

CASES = [
    cases.Case("jagged", 64, 300, 0.5, B=5, Hq=2, Hkv=2, D=64),
    cases.Case("jagged", 200, 300, 0.5, B=5, Hq=2, Hkv=1, D=64),
    cases.Case("packed", 0, 400, 0.7, B=4, Hq=1, Hkv=1, D=64, causal=True),
    cases.Case("packed", 0, 400, 0.7, B=4, Hq=1, Hkv=1, D=64),
    cases.Case("dense", 256, 256, 1.0, B=3, Hq=1, Hkv=1, D=64),
]


def named(case):
    return f"{case.suite}-{case.M}-{int(case.causal)}"


def ordered(counts, indices):
    """The blocks of every row, as sorted lists."""
    return [sorted(row[:count].tolist()) for count, row in zip(counts[0, 0], indices[0, 0], strict=True)]


@pytest.mark.parametrize("case", CASES, ids=named)
def test_the_block_mask_is_the_one_that_every_element_gives(case):
    inputs = cases.make_inputs(case, "cpu")
    mask = flex.block_mask(inputs)
    rows = (flex.query_rows(inputs), inputs.k.shape[0])
    wanted = create_block_mask(mask.mask_mod, 1, 1, *rows, device="cpu", BLOCK_SIZE=flex.BLOCK)
    for side in ("kv", "full_kv", "q", "full_q"):
        found, known = (
            ordered(getattr(one, f"{side}_num_blocks"), getattr(one, f"{side}_indices"))
            for one in (mask, wanted)
        )
        assert found == known, side


def unfused(q, k, v, block_mask, enable_gqa):
    """What FlexAttention means, written out; its own backward pass needs a GPU."""
    assert enable_gqa == (q.shape[1] != k.shape[1])
    group = q.shape[1] // k.shape[1]
    row, key = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
    seen = block_mask.mask_mod(0, 0, row, key)
    k, v = (x.repeat_interleave(group, 1).float() for x in (k, v))
    scores = torch.where(seen, q.float() @ k.mT * q.shape[3] ** -0.5, -torch.inf)
    return (scores.softmax(-1).nan_to_num(0) @ v).to(q.dtype)


@pytest.mark.parametrize("case", CASES, ids=named)
@pytest.mark.parametrize("scope", ["call", "kernel"])
def test_the_peer_computes_attention(case, scope):
    inputs = cases.make_inputs(case, "cpu")
    run = flex.flex(inputs, scope, unfused)
    assert run.forward().shape == inputs.dout.flatten(0, -3).shape
    found = truth.errors(run, truth.expected(inputs), truth.budgets(inputs))
    assert max(found["budget_share"].values()) < 1 and found["rel_error"]["backward"] > 0


def test_the_library_agrees_on_a_forward_pass():
    inputs = cases.make_inputs(CASES[0], "cpu")
    with torch.no_grad():
        q, k, v = (x.transpose(0, 1)[None] for x in (flex.expanded_query(inputs), inputs.k, inputs.v))
        mask = flex.block_mask(inputs)
        theirs = flex_attention(q, k, v, block_mask=mask)
        ours = unfused(q, k, v, mask, False)
    torch.testing.assert_close(theirs.float(), ours.float(), atol=0.02, rtol=0.02)


def test_what_it_cannot_do_is_said():
    case = cases.Case("jagged", 64, 100, 0.5, B=2, Hq=1, Hkv=1, D=64, window=(256, 0))
    with pytest.raises(Unsupported, match="no window"):
        flex.block_mask(cases.make_inputs(case, "cpu"))
