"""Solutions to the exercises of notebook 01_jagged_batches; run it from anywhere, the tests do."""

import torch
from torch.nn.functional import scaled_dot_product_attention

import jfa
from jfa.lab import waste

generator = torch.Generator().manual_seed(0)

# 1. Four batches by length: each is padded to its own longest, only the first to the longest of all.
lengths = sorted(jfa.jagged.history_lengths().tolist(), reverse=True)
size = -(-len(lengths) // 4)
batches = [lengths[start : start + size] for start in range(0, len(lengths), size)]
computed = sum(len(batch) * max(batch) for batch in batches)
print(f"1. useful share: {waste.padded(lengths):.2f} in one batch, {sum(lengths) / computed:.2f} in four")
assert 2 * waste.padded(lengths) < sum(lengths) / computed < 0.7

# 2. Queries without keys: out 0 and lse minus infinity, and the other sequence is as if it were alone.
q = torch.randn(5, 2, 16, generator=generator)
k, v = (torch.randn(3, 2, 16, generator=generator) for _ in range(2))
kv_offsets, q_offsets = torch.tensor([0, 0, 3]), torch.tensor([0, 2, 5])
out, lse = jfa.jagged_flash_attention(q, k, v, kv_offsets, q_offsets, return_lse=True)
alone = jfa.jagged_flash_attention(q[2:], k, v, torch.tensor([0, 3]), torch.tensor([0, 3]))
print("2. lse of the rows without keys:", lse[:, :2].flatten().tolist())
assert (lse[:, :2] == -torch.inf).all() and (out[:2] == 0).all()
assert torch.equal(out[2:], alone)

# 3. window=(2, 0) keeps the aligned key and the two before it; here against a dense mask, in the emulator.
lengths = [4, 0, 9]
offsets = jfa.jagged.lengths_to_offsets(lengths)
q = torch.randn(3, 2, 16, generator=generator)
k, v = (torch.randn(sum(lengths), 2, 16, generator=generator) for _ in range(2))
out = jfa.jagged_flash_attention(q, k, v, offsets, window=(2, 0), backend="triton")
for b, length in enumerate(lengths):
    rows = slice(int(offsets[b]), int(offsets[b + 1]))
    aligned = torch.arange(3)[:, None] + length - 3
    keys = torch.arange(length)[None, :]
    mask = (keys >= aligned - 2) & (keys <= aligned)
    seen = mask.any(1)
    dense = scaled_dot_product_attention(*(x.transpose(0, 1) for x in (q, k[rows], v[rows])), attn_mask=mask)
    error = (dense.transpose(0, 1) - out[b])[seen].abs().max().item() if seen.any() else 0.0
    print(f"3. sequence {b}: largest error {error:.1e}")
    assert error < 1e-5 and (out[b][~seen] == 0).all()
