"""TMA descriptors that end where a sequence ends.

Packed tensors put the next sequence right behind this one, so a tile at the end of a sequence would read
and write its neighbour's rows. A ragged descriptor lets the TMA unit do the clipping: two extra leading
dimensions address the sequence's end, and the row dimension is declared 2**30 rows long, so that row
``2**30 - length + i`` of it is row ``i`` of the sequence and everything past the length is out of bounds.
The three large products cancel modulo 2**64, which is how wide the unit's address arithmetic is. Loads past
the end give zeros, stores and reduce-adds past it are dropped, and a tile costs what it costs with a plain
descriptor.

Idea: Triton's tools/ragged_tma.py. Limits: at most 2**30 packed rows, row strides of whole 16 bytes.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

SPAN = tl.constexpr(1 << 30)


def ragged_descriptor(rows: torch.Tensor, block_rows: int, block_columns: int) -> TensorDescriptor:
    """Describe packed rows (T, columns) so that boxes (block_rows, block_columns) stop at a sequence's end.

    The box has two leading ones, (1, 1, block_rows, block_columns), and fills a two-dimensional buffer.
    Raises ValueError when the rows cannot be addressed by TMA.
    """
    row_stride, column_stride = rows.stride()
    if column_stride != 1 or (row_stride * rows.element_size()) % 16 != 0 or rows.data_ptr() % 16 != 0:
        raise ValueError(
            "rows must be 16-byte aligned with a unit column stride and a row stride of whole 16 bytes; "
            f"got strides {tuple(rows.stride())} of {rows.dtype}"
        )
    if rows.shape[0] > 1 << 30:
        raise ValueError(f"rows must be at most 2**30, got {rows.shape[0]}")
    if block_rows & (block_rows - 1) or block_columns & (block_columns - 1):
        raise ValueError(f"boxes must have powers of two as sides, got {block_rows} x {block_columns}")
    # The constructor would look at all of this again, which takes nine times as long as everything here.
    descriptor = object.__new__(TensorDescriptor)
    descriptor.base = rows
    descriptor.shape = [0x7FFF0000, 0x7FFF0000, 1 << 30, rows.shape[1]]
    descriptor.strides = [(1 << 34) - row_stride, row_stride, row_stride, 1]
    descriptor.block_shape = [1, 1, block_rows, block_columns]
    descriptor.padding = "zero"
    descriptor.round_f32_to_tf32 = False
    return descriptor


@triton.jit
def ragged_row(end, length, row):
    """Leading coordinates of row ``row`` of the sequence of ``length`` rows that ends at ``end``."""
    return SPAN, end, SPAN - length + row
