"""Solutions to the exercises of notebook 00_map; run it from anywhere, the tests do."""

import torch
import triton
import triton.language as tl

import jfa
from jfa import emulator
from jfa.kernels import baseline_parts
from jfa.lab import dealing, waste

lengths = jfa.jagged.history_lengths().tolist()

# 1. Padding of the 100 longest histories alone: still most of the rectangle, because the longest stands out.
longest = sorted(lengths, reverse=True)[:100]
print(f"1. useful share of the 100 longest, padded: {waste.padded(longest):.2f}")
assert waste.padded(lengths) < waste.padded(longest) < 0.5

# 2. In descending order both deals get better: the small tiles come last and fill what the large ones left.
work = [count + dealing.TILE_COST for count in waste.tiles(lengths, 128) for _ in range(4)]
ordered = sorted(work, reverse=True)
for deal in (waste.deal_fixed, waste.deal_free):
    before, after = waste.balance(deal(work, waste.H200_SMS)), waste.balance(deal(ordered, waste.H200_SMS))
    print(f"2. {deal.__name__}: {before:.2f} in natural order, {after:.2f} in descending order")
    assert after > before


# 3. exp in place of powers of two: the unit of the scores becomes the natural one, nothing else changes.
@triton.jit
def softmax_step_e(s, unit, row_max, row_sum, PRECISION: tl.constexpr):
    new_max = tl.maximum(row_max, tl.max(s, 1) * unit)
    shift = tl.where(new_max == float("-inf"), 0.0, new_max)
    p = tl.exp(tl.fma(s, unit, -shift[:, None]))
    alpha = tl.exp(row_max - shift)
    return p, alpha, new_max, row_sum * alpha + tl.sum(p, 1)


@triton.jit
def softmax_kernel(scores, out, unit, STEP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Softmax of one tile by one step; STEP is the role."""
    at = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    row_max = tl.full([ROWS], float("-inf"), tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    p, alpha, row_max, row_sum = STEP(tl.load(scores + at), unit, row_max, row_sum, "tf32")
    tl.store(out + at, p / row_sum[:, None])


scores = torch.randn(16, 32, generator=torch.Generator().manual_seed(0))
for step, unit in ((softmax_step_e, 1.0), (baseline_parts.softmax_step, 1.4426950408889634)):
    out = torch.empty_like(scores)
    with emulator.emulate():
        softmax_kernel[(1,)](scores, out, unit, STEP=step, ROWS=16, COLUMNS=32)
    error = (out - torch.softmax(scores, 1)).abs().max().item()
    print(f"3. {step.__name__}: largest error {error:.1e}")
    assert error < 1e-6
