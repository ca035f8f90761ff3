"""A role defined in a notebook cell is run by the kernel, and so is its next version."""

import nbclient
import nbformat
import pytest

SETUP = """
import dataclasses, torch, triton
import triton.language as tl
import jfa
from jfa import steps
torch.manual_seed(0)
q, k, v = (torch.randn(n, 2, 64).bfloat16() for n in (70, 200, 200))
offsets = torch.tensor([0, 130, 135, 200])
final = steps.find(ARCH, "forward")
def run(role):
    step = dataclasses.replace(final, ROLE=role)
    return jfa.jagged_flash_attention(q, k, v, offsets, backend=ARCH, step=step).float()
means = torch.stack([v[a:b].float().mean(0) for a, b in ((0, 130), (130, 135), (135, 200))])[:, None]
exact = jfa.jagged_flash_attention(q, k, v, offsets, backend="reference").float()
"""
HOPPER = """
@triton.jit
def mine(scores, top, scale, GUARD: tl.constexpr):
    scores = tl.where(scores > -float("inf"), scores * FACTOR, scores)
    new = tl.maximum(top, tl.max(scores, 1) * scale)
    base = tl.where(new == -float("inf"), 0.0, new)
    weights = tl.math.exp2(scores * scale - base[:, None])
    return weights, new, tl.math.exp2(top - base), tl.sum(weights, 1)
found = run(mine)
"""
CHECK_MEANS = "torch.testing.assert_close(found, means.expand_as(found), rtol=2**-7, atol=2**-7)"
CHECK_EXACT = "torch.testing.assert_close(found, exact, rtol=2**-6, atol=2**-6)"


def execute(cells):
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    nbclient.NotebookClient(notebook, timeout=200, kernel_name="python3").execute()


@pytest.mark.timeout(240)
def test_a_role_from_a_cell_takes_effect_and_so_does_its_next_version():
    setup = SETUP.replace("ARCH", '"hopper"').replace("ROLE", "softmax")
    ignore_scores, as_usual = (HOPPER.replace("FACTOR", factor) for factor in ("0.0", "1.0"))
    execute([setup, ignore_scores, CHECK_MEANS, as_usual, CHECK_EXACT, ignore_scores, CHECK_MEANS])


@pytest.mark.timeout(240)
def test_a_wrong_role_is_seen():
    """The check above can fail: a cell whose role ignores the scores does not give exact attention."""
    setup = SETUP.replace("ARCH", '"hopper"').replace("ROLE", "softmax")
    with pytest.raises(nbclient.exceptions.CellExecutionError, match="not close"):
        execute([setup, HOPPER.replace("FACTOR", "0.0"), CHECK_EXACT])
