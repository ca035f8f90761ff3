"""tl.inline_asm_elementwise: hands columns of registers to the PTX interpreter."""

import re

import numpy as np

from . import dtypes_rounding as R
from . import ptx
from .context import CTX
from .tile import Tensor, as_tensor

WARP_WIDE = re.compile(r"\b(?:redux|vote|shfl|match|elect|activemask)\b")


def _bits(block):
    return R.to_store(block.dtype, np.ascontiguousarray(block.d)).reshape(block.shape)


def inline_asm_elementwise(asm, constraints, args, dtype, is_pure, pack):
    """Runs PTX on every element. Warp-wide instructions take 32 consecutive rows of a block for the lanes of
    a warp (the layout of a load from tensor memory), or 32 consecutive elements of a vector.
    """
    blocks = [as_tensor(a) for a in args]
    shape = np.broadcast_shapes(*[b.shape for b in blocks]) if blocks else ()
    count = int(np.prod(shape)) if shape else 1
    if count > 1:
        CTX.count("asm", count)
    inputs = [np.broadcast_to(_bits(b), shape) for b in blocks]
    many = isinstance(dtype, (tuple, list))
    dtypes = list(dtype) if many else [dtype]
    by_rows = len(shape) > 1 and shape[0] % 32 == 0 and pack == 1 and WARP_WIDE.search(asm) is not None
    if by_rows:  # a thread holds a row, as after a load from tensor memory
        inputs = [np.moveaxis(x, 0, -1) for x in inputs]
        shape = shape[1:] + shape[:1]
    outputs = ptx.run(asm, constraints, inputs, [d.store for d in dtypes], shape, int(pack))
    if by_rows:
        outputs = [np.moveaxis(x, -1, 0) for x in outputs]
    result = tuple(Tensor(R.from_store(d, o), d) for d, o in zip(dtypes, outputs))
    return result if many else result[0]
