"""MXFP8: e4m3 values that share a power of two in blocks of 32, as Blackwell's tensor cores take them."""

from dataclasses import dataclass

import torch

BLOCK = 32
LARGEST = 448.0  # of e4m3


@dataclass(frozen=True)
class Quantized:
    """values (rows, columns) float8_e4m3fn; scales (rows, columns / 32) uint8, exponents of two plus 127."""

    values: torch.Tensor
    scales: torch.Tensor


def quantize(x):
    """A (rows, columns) tensor in MXFP8; blocks lie along the columns, scales are rounded up."""
    rows, columns = x.shape
    blocks = x.float().reshape(rows, columns // BLOCK, BLOCK)
    top = blocks.abs().amax(-1).clamp_min(2.0**-120)
    exponents = torch.ceil(torch.log2(top / LARGEST)).clamp(-127, 127)
    values = (blocks * torch.exp2(-exponents)[..., None]).reshape(rows, columns)
    return Quantized(values.to(torch.float8_e4m3fn), (exponents + 127).to(torch.uint8))


def dequantized(x):
    """The float32 values of a Quantized."""
    return x.values.float() * torch.exp2(x.scales.float() - 127).repeat_interleave(BLOCK, 1)


def tile_scales(scales):
    """Scales (rows, blocks) in the tiles that the tensor core reads: (1, rows / 128, blocks / 4, 2, 256)."""
    rows, blocks = scales.shape
    tiles = scales.view(rows // 128, 4, 32, blocks // 4, 4).permute(0, 3, 2, 1, 4)
    return tiles.reshape(1, rows // 128, blocks // 4, 2, 256).contiguous()
