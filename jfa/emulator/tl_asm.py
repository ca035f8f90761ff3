"""tl.inline_asm_elementwise: hands columns of registers to the PTX interpreter."""

import numpy as np

from . import dtypes_rounding as R
from . import ptx
from .context import CTX
from .tile import Tensor, as_tensor


def _bits(block):
    return R.to_store(block.dtype, np.ascontiguousarray(block.d)).reshape(block.shape)


def inline_asm_elementwise(asm, constraints, args, dtype, is_pure, pack):
    blocks = [as_tensor(a) for a in args]
    shape = np.broadcast_shapes(*[b.shape for b in blocks]) if blocks else ()
    count = int(np.prod(shape)) if shape else 1
    if count > 1:
        CTX.count("asm", count)
    inputs = [np.broadcast_to(_bits(b), shape) for b in blocks]
    many = isinstance(dtype, (tuple, list))
    dtypes = list(dtype) if many else [dtype]
    outputs = ptx.run(asm, constraints, inputs, [d.store for d in dtypes], shape, int(pack))
    result = tuple(Tensor(R.from_store(d, o), d) for d, o in zip(dtypes, outputs))
    return result if many else result[0]
