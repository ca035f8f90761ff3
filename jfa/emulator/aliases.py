"""Accept the real keyword names for emulated functions that use shorter parameter names internally."""
import functools
import inspect
from . import tl_ops as lang, tlx_ops as tlxops

TLX = dict(assert_same_layout='lhs rhs', async_remote_shmem_store='dst src', async_store='dst_global_ptr src_smem size',
           clc_consumer='context', clc_producer='context', get_fp8_format_name='dtype', local_load='src', local_reinterpret='src',
           local_reshape='src', local_slice='buffer', local_store='dst src', local_trans='input',
           local_view='local_allocated_buffers buffer_idx', remote_shmem_store='dst src',
           remote_view='local_allocated_buffer remote_cta_rank', require_layout='x layout', size_of='dtype',
           subslice='local_allocated_buffer', tcgen05_commit='mBarrier')

def _wrap(f, real):
    mine = [p.name for p in inspect.signature(f).parameters.values() if p.kind == p.POSITIONAL_OR_KEYWORD]
    ren = {r: m for r, m in zip(real.split(), mine) if r != m}
    @functools.wraps(f)
    def g(*a, **k):
        if k: k = {ren.get(n, n): v for n, v in k.items()}
        return f(*a, **k)
    return g


for table, mod in ((TLX, tlxops),):
    for n, real in table.items(): setattr(mod, n, _wrap(getattr(mod, n), real))
