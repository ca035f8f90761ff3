"""Emulated `triton.language.extra.tlx`."""
import enum
import types
import numpy as np
from . import dtypes as D
from .descriptor import Descriptor
from .tile import Tensor, as_tensor, EmuTypeError
from .context import CTX
from .machine import (Alloc, BarrierArray, EmulationError, MBarrier, NamedBarrier, Storage, Task, View)


class storage_kind(enum.Enum):
    smem, tmem, smemCluster = 'smem', 'tmem', 'smemCluster'


class reuse_group_type(enum.Enum):
    shared, distinct = 'shared', 'distinct'


def M(): return CTX.machine
def _i(x): return int(x)
def _p(pred): return True if pred is None else bool(pred)


def _name(kind):
    """Name of the assignment target on the calling line (filled by the front end's rewrite)."""
    m = M(); n = m.next_name; m.next_name = None
    m.auto_name = n is None
    return n or f'{kind}{len(m.cur.cta.storages)}'


# ------------------------------------------------------------ task structure
class async_task:
    def __init__(self, *a, num_warps=None, num_regs=None, registers=None, replicate=1, warp_group_start_id=None):
        self.default = bool(a) and a[0] == 'default'
        self.num_warps, self.replicate = num_warps, int(replicate)


class async_tasks:
    def __init__(self, **kw): self.items = []
    def __enter__(self): return self
    def add(self, task, fn, line): self.items.append((task, fn, line))
    def __exit__(self, et, ev, tb):
        if et is not None: return False
        m = M(); parent = m.cur; kids = []
        if len(parent.cta.cluster) > 1: cluster_barrier()          # implicit in the compiled kernel
        for ti, (t, fn, line) in enumerate(self.items):
            warps = m.num_warps if t.default else int(t.num_warps)
            for r in range(t.replicate):
                nm = ('default' if t.default else f'task{ti}') + (f'.{r}' if t.replicate > 1 else '') + f'@L{line}'
                k = Task(m, parent.cta, nm, (lambda fn=fn, r=r: fn(r)), warps * 32, r)
                k.join(parent.vc); kids.append(k)
        parent.tick()
        left = [len(kids)]
        def on_done(k):
            def f():
                left[0] -= 1; parent.join(k.vc)
                if not left[0]: m.wake(parent)
            return f
        for k in kids: k.on_done = on_done(k); m.spawn(k)
        m.block(lambda: left[0] == 0, 'join')
        return False


def async_task_replica_id(): return M().cur.replica
def thread_id(axis): return Tensor(np.int32(0), D.int32)
def clock64(): return Tensor(np.int64(next(M().seq)), D.int64)
def cluster_cta_rank(): return Tensor(np.int32(M().cur.cta.rank), D.int32)
def cluster_size_1d(): return Tensor(np.int32(len(M().cur.cta.cluster)), D.int32)
def dtype_of(v): return v.dtype.element_ty if isinstance(v, Tensor) and v.ptr is not None else v.dtype
def size_of(dt): return dt.primitive_bitwidth // 8
def get_fp8_format_name(dt): return {'fp8e5': 'e5m2', 'fp8e4nv': 'e4m3'}[dt.name]
def layout(*a, **k): return None
def require_layout(x, l): return x
def swizzled_layout(*a, **k): return None
def dump_layout(x): pass
def assert_same_layout(*a): pass
class warp_pipeline_stage:
    def __init__(self, *a, **k): pass
    def __enter__(self): return self
    def __exit__(self, *a): return False


# ------------------------------------------------------------ buffers
class Buffer(View):
    """tlx.buffered_tensor: either an array of buffers (num>0) or one view (num==0)."""
    __slots__ = ('num',)
    def __init__(self, alloc, storage, off, shape, strides, dtype, idx, num=0):
        super().__init__(alloc, storage, off, shape, strides, dtype, idx); self.num = num
    @property
    def type(self): return types.SimpleNamespace(storage=storage_kind(self.storage.kind), shape=list(self.shape), num=self.num,
                                                 element_ty=self.dtype, scalar=self.dtype)
    def __getitem__(self, i): return local_view(self, i)


def _strides(shape, it, tmem):
    if tmem: return (2048, it)
    s, out = it, []
    for n in reversed(shape): out.append(s); s *= n
    return tuple(reversed(out))


class storage_alias_spec:
    def __init__(self, storage=storage_kind.smem, buffer_size_bytes=None):
        self.st = Storage(M().cur.cta, storage.value, _name('alias')); M().cur.cta.storages.append(self.st)
        self.size, self.kind = buffer_size_bytes, storage
    def set_buffer_overlap(self, tree):
        place(tree, self.st)


class reuse_group:
    def __init__(self, *args, group_type=reuse_group_type.shared, group_size=1):
        self.args, self.group_type, self.group_size = args, group_type, int(group_size)


def place(tree, st):
    align = 4 if st.kind == 'tmem' else 128
    up = lambda n: -(-n // align) * align
    def size(e, g):
        if isinstance(e, Buffer): return up(e.alloc.unit * g), e.alloc.num // g
        g *= e.group_size
        ss = [size(a, g) for a in e.args]
        nums = {n for _, n in ss}
        if len(nums) != 1: raise EmulationError(f'reuse_group: unequal buffer counts {nums}')
        tot = max(s for s, _ in ss) if e.group_type == reuse_group_type.shared else sum(s for s, _ in ss)
        return tot, nums.pop()
    total, n = size(tree, 1)
    def put(e, off, g):
        if isinstance(e, Buffer):
            e.alloc.base, e.alloc.stride, e.alloc.group = off, total, g
            return
        g *= e.group_size
        for a in e.args:
            put(a, off, g)
            if e.group_type == reuse_group_type.distinct: off += size(a, g)[0]
    put(tree, 0, 1)
    st.grow(total * n)


def local_alloc(shape, dtype, num, storage=storage_kind.smem, reuse=None, layout=None):
    cta = M().cur.cta
    shape = tuple(int(s) for s in shape); num = int(num)
    name = _name('buf')
    kind = storage.value
    if reuse is None:
        st = Storage(cta, kind, name); cta.storages.append(st)
    elif isinstance(reuse, storage_alias_spec): st = reuse.st
    elif isinstance(reuse, (list, tuple)): st = reuse[0].storage
    else: st = reuse.storage
    if st.kind != kind: raise EmulationError(f'{name}: reuse across storage kinds')
    al = Alloc(name, st, shape, dtype, num)
    al.auto = M().auto_name
    st.grow(al.nbytes_total)
    if reuse is None:
        tot = sum(s.used for s in cta.storages if s.kind == kind)
        lim = 2048 if kind == 'tmem' else 232448
        if tot > lim: M().violation('capacity', f'{kind} use {tot} B{"/lane" if kind=="tmem" else ""} > {lim}', 'warning')
    return Buffer(al, st, 0, shape, _strides(shape, dtype.itemsize, kind == 'tmem'), dtype, '*', num)


def local_view(b, i):
    if isinstance(b, BarrierArray): return b[i]
    if isinstance(b, CLCResponses): return b.slots[int(i)]
    i = int(i)
    if b.num == 0:
        if len(b.shape) == 1: return Buffer(b.alloc, b.storage, b.off + i * b.strides[0], (1,), b.strides, b.dtype, f'{b.idx},{i}')
        return Buffer(b.alloc, b.storage, b.off + i * b.strides[0], b.shape[1:], b.strides[1:], b.dtype, f'{b.idx},{i}')
    if not 0 <= i < b.num: raise EmulationError(f'buffer index {i} out of range for {b.alloc.name} (num={b.num})')
    return Buffer(b.alloc, b.storage, b.off + b.alloc.offset(i), b.shape, b.strides, b.dtype, i)


def subslice(b, offset, size):
    o = int(offset)
    return Buffer(b.alloc, b.storage, b.off + o * b.strides[-1], b.shape[:-1] + (int(size),), b.strides, b.dtype, f'{b.idx}:{o}+{int(size)}', b.num)


def local_slice(b, offset, shape):
    offs = [int(o) for o in offset]; shp = tuple(int(s) for s in shape)
    return Buffer(b.alloc, b.storage, b.off + sum(o * s for o, s in zip(offs, b.strides)), shp, b.strides, b.dtype, f'{b.idx}:{offs}')


def local_trans(b, dims=(1, 0)):
    return Buffer(b.alloc, b.storage, b.off, [b.shape[d] for d in dims], [b.strides[d] for d in dims], b.dtype, b.idx, b.num)


def local_reinterpret(b, dtype, shape=None):
    tm = b.storage.kind == 'tmem'
    shape = tuple(int(s) for s in (shape or b.shape))
    return Buffer(b.alloc, b.storage, b.off, shape, _strides(shape, dtype.itemsize, tm), dtype, b.idx, b.num)


def local_reshape(b, shape):
    shape = tuple(int(s) for s in shape)
    return Buffer(b.alloc, b.storage, b.off, shape, _strides(shape, b.dtype.itemsize, False), b.dtype, b.idx, b.num)


def local_load(b, token=None, layout=None, relaxed=False):
    m = M(); m.maybe_preempt()
    m.task_access(b, 'R'); m.trace('local_load', b.label, mem=b.storage.kind, bytes=b.nbytes)
    CTX.count(b.storage.kind + '_ld', b.nbytes)
    return Tensor(D.from_store(b.dtype, b.np()), b.dtype)


def local_store(b, v):
    m = M(); m.maybe_preempt()
    v = as_tensor(v)
    if v.dtype != b.dtype: raise EmuTypeError(f'local_store of {v.dtype} into {b.label} of {b.dtype}')
    if tuple(v.shape) != b.shape: raise EmuTypeError(f'local_store shape {v.shape} into {b.label} {b.shape}')
    m.task_access(b, 'W'); m.trace('local_store', b.label, mem=b.storage.kind, bytes=b.nbytes)
    CTX.count(b.storage.kind + '_st', b.nbytes)
    b.np()[...] = D.to_store(b.dtype, v.d)


def remote_shmem_store(dst, v, remote_cta_rank):
    m = M(); b = dst.on(m.cur.cta.cluster[int(remote_cta_rank)])
    m.task_access(b, 'W'); b.np()[...] = D.to_store(b.dtype, v.d)


def async_remote_shmem_store(dst, v, remote_cta_rank, barrier):
    m = M(); c = m.cur.cta.cluster[int(remote_cta_rank)]; b = dst.on(c); bar = _on(barrier, c); raw = D.to_store(b.dtype, v.d)
    def run(op): b.np()[...] = raw; bar.complete_tx(b.nbytes, op.vc, 'remote store', ('o', op.id))
    m.issue('dsmem_store', b.label, run, writes=[b])


def async_remote_shmem_copy(dst, src, remote_cta_rank, barrier):
    m = M(); c = m.cur.cta.cluster[int(remote_cta_rank)]; b = dst.on(c); bar = _on(barrier, c)
    def run(op): b.np()[...] = src.np(); bar.complete_tx(b.nbytes, op.vc, 'remote copy', ('o', op.id))
    m.issue('dsmem_copy', b.label, run, reads=[src], writes=[b])


def fence(scope):
    t = M().cur
    if scope == 'async_shared': t.tick(); t.fence_epoch = int(t.vc[t.slot])
def fence_async_shared(): fence('async_shared')
def fence_mbarrier_init_cluster(): pass
def prefetch(*a, **k): pass
def async_descriptor_prefetch_tensor(*a, **k): pass


# ------------------------------------------------------------ barriers
def alloc_barriers(num_barriers, arrive_count=1, _warp=False):
    m = M(); cta = m.cur.cta; name = _name('bar')
    arr = BarrierArray([MBarrier(m, cta, name, i, int(arrive_count), _warp) for i in range(int(num_barriers))], name)
    cta.bar_arrays.append(arr)
    arr.auto = m.auto_name
    for b in arr.bars: np.maximum(b.done_vc, m.cur.vc, out=b.done_vc)
    return arr


def alloc_warp_barrier(num_barriers, num_warps=1, num_arrivals=1):
    return alloc_barriers(num_barriers, int(num_warps) * 32 * int(num_arrivals), _warp=True)


def _on(bar, cta):
    if bar.cta is cta: return bar
    for k, arr in enumerate(bar.cta.bar_arrays):
        if bar in arr.bars:
            m = M()                       # the compiler syncs the cluster after barrier init; here: wait until the peer has allocated
            if m.cur is not None: m.block(lambda: len(cta.bar_arrays) > k, f'barrier init of cluster CTA {cta.rank}', cta)
            return cta.bar_arrays[k].bars[bar.idx]
    raise EmulationError('unknown barrier')


def _bar(b): return b[0] if isinstance(b, BarrierArray) and b.num == 1 else b
def local_gather(src, indices, axis, token=None):
    M().task_access(src, 'R'); i = indices.np() if isinstance(indices, Buffer) else indices.d
    return Tensor(D.from_store(src.dtype, np.take_along_axis(src.np(), i.astype(np.int64), axis)), src.dtype)
def local_scatter(dst, src, indices, axis, token=None):
    M().task_access(dst, 'W'); i = indices.np() if isinstance(indices, Buffer) else indices.d
    np.put_along_axis(dst.np(), i.astype(np.int64), D.to_store(dst.dtype, src.d), axis)
def remote_view(bar, rank): return _on(_bar(bar), M().cur.cta.cluster[int(rank)])


def barrier_expect_bytes(bar, size, pred=None):
    if not _p(pred): return
    m = M(); t = m.cur; bar = _bar(bar)
    q = m.trace('expect', bar.label, bytes=int(size), phase=bar.phase)
    bar.expect(int(size)); bar.arrive(1, t.vc, f'{t.name} expect({int(size)})', ('t', q)); t.tick()


def barrier_wait(bar, phase, pred=None):
    m = M(); t = m.cur; bar = _bar(bar)
    if not _p(pred): return
    if bar.cta is not t.cta: raise EmulationError('barrier_wait on a remote barrier')
    m.maybe_preempt()
    par = int(phase) & 1
    if not bar.passed(par):
        m.trace('wait_begin', bar.label, parity=par)
        m.block(lambda: bar.passed(par), bar, par, bar.phase)
    ws = m.wait_stats[m.line()]; ws[0] += 1; ws[1] += bool((bar.done_vc > t.vc).any())       # does this wait add any ordering?
    t.join(bar.done_vc)
    m.trace('wait', bar.label, parity=par, key=(id(bar), bar.phase - 1))


def barrier_arrive(bar, arrive_count=1, remote_cta_rank=None, pred=None):
    if not _p(pred): return
    m = M(); t = m.cur; bar = _bar(bar)
    m.maybe_preempt()
    if remote_cta_rank is not None: bar = _on(bar, t.cta.cluster[int(remote_cta_rank)])
    n = int(arrive_count) * (t.threads if bar.warp else 1)
    if not bar.warp: t.warp_sync()                # the compiler syncs the task before a single-thread arrive
    q = m.trace('arrive', bar.label, count=n, phase=bar.phase)
    bar.arrive(n, t.published(), t.name, ('t', q)); t.tick()


def named_barrier_arrive(bar, arrive_count):
    m = M(); t = m.cur; q = m.trace('named_arrive', int(bar)); t.warp_sync()
    t.cta.named_bar(int(bar)).arrive(t, int(arrive_count), ('t', q)); t.tick()


def named_barrier_wait(bar, arrive_count):
    m = M(); t = m.cur; nb = t.cta.named_bar(int(bar)); g = nb.gen; t.warp_sync()
    nb.arrive(t, int(arrive_count), ('t', m.trace('named_arrive', int(bar)))); t.tick()
    m.block(lambda: nb.gen > g, nb, g)
    t.join(nb.done_vc); m.trace('wait', nb.label, key=(id(nb), g))


def cluster_barrier():
    m = M(); t = m.cur; cl = t.cta.cluster
    nb = cl[0].cluster_bar
    if nb is None: nb = cl[0].cluster_bar = NamedBarrier(m, cl[0], 'cluster')
    g = nb.gen; old = t.threads
    nb.arrive(t, t.threads * len(cl)); t.tick()
    m.block(lambda: nb.gen > g, nb, g); t.join(nb.done_vc)


# ------------------------------------------------------------ TMA
def _core(s): return [int(x) for x in s if int(x) != 1]


def async_descriptor_load(desc, result, offsets, barrier, pred=None, cache_modifier='', eviction_policy='', multicast_targets=(), two_ctas=False):
    if not _p(pred): return
    m = M(); t = m.cur; cta = t.cta; barrier = _bar(barrier)
    m.maybe_preempt()
    offs = [int(o) for o in offsets]
    if _core(result.shape) != _core(desc.block_shape): raise EmuTypeError(f'TMA load of block {desc.block_shape} into {result.label} {result.shape}')
    targets = [cta.cluster[int(r)] for r in multicast_targets] or [cta]
    for c in targets:
        b = result.on(c)
        bar = _on(barrier, c) if c is not cta or multicast_targets else barrier
        if two_ctas: bar = _on(bar, cta.cluster[c.rank & ~1])
        def run(op, b=b, bar=bar):
            b.np()[...] = desc.read(offs).reshape(b.shape)
            bar.complete_tx(b.nbytes, op.vc, f'TMA {desc.name}', ('o', op.id))
        m.trace('tma_load', b.label, bytes=b.nbytes, bar=bar.label, desc=desc.name)
        op = m.issue('tma_load', b.label, run, writes=[b], info=dict(bytes=b.nbytes))
        if m.policy != 'eager': b.np().view()[...] = np.full((), np.nan, b.dtype.store) if b.dtype.kind == 'f' else 0   # tear: old contents are gone
    CTX.count('tma_load_bytes', result.nbytes)


def async_load(src, result, mask=None, other=None, cache_modifier='', eviction_policy='', is_volatile=False, bulk=False, bulk_size=None, barrier=None):
    from .tl_memory import resolve
    m = M(); b = result
    if bulk:
        n = int(bulk_size) if bulk_size is not None else b.nbytes
        start = int(src.d); cnt = n // b.dtype.itemsize
        def run(op): b.np().reshape(-1)[:cnt] = src.ptr.flat[start:start + cnt]; _bar(barrier).complete_tx(n, op.vc, 'bulk copy', ('o', op.id))
        m.issue('bulk_load', b.label, run, writes=[b]); return None
    buf, offs, mk = resolve(src, mask)
    def run(op):
        v = buf.flat[np.where(mk, offs, 0) if mk is not None else offs]
        if mk is not None: v = np.where(mk, v, np.zeros((), v.dtype) if other is None else D.to_store(b.dtype, as_tensor(other).d))
        b.np()[...] = v
    op = m.issue('cp_async', b.label, run, writes=[b]); m.cur.copies.append(op); return op
def async_load_commit_group(tokens=()):
    t = M().cur; g = [o for o in t.copies if not isinstance(o, list)]
    t.copies = [o for o in t.copies if isinstance(o, list)] + [g]; return g
def async_load_wait_group(pendings, tokens=()):
    t = M().cur; gs = t.copies; n = len(gs) - int(pendings)
    for g in gs[:max(0, n)]: M().wait_ops(g, 'cp.async group')
    t.copies = gs[max(0, n):]


def async_descriptor_store(desc, source, offsets, eviction_policy='', store_reduce=''):
    m = M(); t = m.cur; offs = [int(o) for o in offsets]
    m.maybe_preempt()
    if _core(source.shape) != _core(desc.block_shape): raise EmuTypeError(f'TMA store of {source.label} {source.shape} as block {desc.block_shape}')
    def run(op): desc.write(offs, np.array(source.np()).reshape(desc.block_shape), store_reduce)
    m.trace('tma_reduce' if store_reduce else 'tma_store', source.label, bytes=source.nbytes, desc=desc.name)
    CTX.count('tma_store_bytes', source.nbytes)
    t.stores.append(m.issue('tma_reduce' if store_reduce else 'tma_store', source.label, run, reads=[source], info=dict(bytes=source.nbytes)))


def async_store(ptr, src, size):
    m = M(); n = int(size) // src.dtype.itemsize; start = int(ptr.d)
    def run(op): ptr.ptr.flat[start:start + n] = src.np().reshape(-1)[:n]
    m.cur.stores.append(m.issue('bulk_store', src.label, run, reads=[src]))


def async_descriptor_store_wait(pendings):
    m = M(); t = m.cur; n = len(t.stores) - int(pendings)
    m.trace('store_wait', int(pendings))
    if n > 0:
        m.wait_ops(t.stores[:n], f'TMA stores (pending<={int(pendings)})'); t.stores = t.stores[n:]


class _DescPtr:
    def __init__(self, slots, i): self.slots, self.i = slots, i
    def __getitem__(self, k): return _DescPtr(self.slots, self.i + int(k))
def allocate_tensor_descriptor(num): return _DescPtr([None] * int(num), 0)
def make_tensor_descriptor(desc_ptr, base, shape, strides, block_shape, padding_option='zero'):
    d = Descriptor(base, shape, strides, block_shape, padding_option, base.ptr.name)
    if desc_ptr is not None: desc_ptr.slots[desc_ptr.i] = d
    return d
def reinterpret_tensor_descriptor(desc_ptr, block_shape, dtype): return desc_ptr.slots[desc_ptr.i]


# ------------------------------------------------------------ MMA
class PendingTensor(Tensor):
    """Result registers of an in-flight wgmma."""
    __slots__ = ('op', 'shp', '_d')
    def __init__(self, shp, dtype): self.dtype, self.ptr, self.shp, self.op, self._d = dtype, None, tuple(shp), None, None
    @property
    def shape(self): return self.shp
    @property
    def d(self):
        m = M(); op = self.op
        if m.cur is not None and op.vc[op.slot] > m.cur.vc[op.slot]:
            m.violation('register hazard', f'{m.cur.name} (line {m.line()}) reads the result of an async_dot (line {op.line}) before async_dot_wait')
            return np.full(self.shp, np.nan, np.float32)
        return self._d


def async_dot(A, B, acc=None, use_acc=None, pred=None, mBarriers=(), two_ctas=False, force_async=False, input_precision=None, out_dtype=D.float32):
    m = M(); t = m.cur
    m.maybe_preempt()
    Mr, K = A.shape; N = B.shape[1]
    if Mr < 64 or K < 16 or N < 32: raise EmuTypeError(f'async_dot tile {Mr}x{N}x{K} too small')
    flop = 2 * Mr * N * K
    if isinstance(acc, Buffer): return _mma5(m, t, A, B, acc, use_acc, pred, mBarriers, two_ctas, force_async, flop)
    if isinstance(A, Buffer) and A.storage.kind == 'tmem': raise EmuTypeError('TMEM operand needs a TMEM accumulator')
    res = PendingTensor((Mr, N), out_dtype)
    areg = None if isinstance(A, Buffer) else D.mma_operand(A.dtype, A.d)
    prec = (lambda v: v.np().astype(np.float32)) if input_precision == 'ieee' else (lambda v: D.mma_operand(v.dtype, v.np()))
    def run(op):
        r = (areg if areg is not None else prec(A)) @ prec(B)
        if acc is not None: r = r + ((acc._d if isinstance(acc, PendingTensor) else acc.d) if isinstance(acc, Tensor) else acc)
        res._d = r
    m.trace('wgmma', B.label, shape=(Mr, N, K), dtype=str(B.dtype)); CTX.count('mma_flop', flop)
    op = m.issue('wgmma', B.label, run, reads=[v for v in (A, B) if isinstance(v, Buffer)], channel=('wgmma', t.slot), info=dict(flop=flop, dtype=str(B.dtype)))
    res.op = op; t.dots.append(op)
    return res


def async_dot_wait(pendings, inp):
    m = M(); t = m.cur; n = len(t.dots) - int(pendings)
    if n > 0: m.wait_ops(t.dots[:n], f'async_dot_wait({int(pendings)})'); t.dots = t.dots[n:]
    m.trace('wgmma_wait', int(pendings))
    if isinstance(inp, PendingTensor) and inp.op.done and inp.op not in t.dots: return Tensor(inp._d, inp.dtype)
    return inp


def _mma5(m, t, A, B, acc, use_acc, pred, bars, two, force_async, flop, kind='mma', operands=None, extra=()):
    cta = t.cta; bars = [_bar(b) for b in bars]
    if not _p(pred): return
    ua = True if use_acc is None else bool(use_acc)
    if two and cta.rank % 2: return                              # only the leader CTA of the pair issues
    ctas = [cta, cta.cluster[cta.rank + 1]] if two else [cta]
    if acc.dtype != D.float32 and acc.dtype != D.float16: raise EmuTypeError('accumulator must be fp32/fp16')
    if not two and A.shape[1] != B.shape[0]: raise EmuTypeError(f'async_dot {A.shape} x {B.shape}')
    As, Bs, Cs = [A.on(c) for c in ctas], [B.on(c) for c in ctas], [acc.on(c) for c in ctas]
    ld = operands or (lambda v, side: D.mma_operand(v.dtype, v.np()))
    targets = [_on(b, c) for b in bars for c in ctas]
    half = two and acc.shape[0] == 64        # cta_group::2, M=128: lanes 0-63 hold the left half of N, lanes 64-127 the right
    if half: Cs = [Buffer(c.alloc, c.storage, c.off, (128, c.shape[1] // 2), c.strides, c.dtype, c.idx) for c in Cs]
    def run(op):
        b = np.concatenate([ld(x, 'B') for x in Bs], axis=1) if two else ld(Bs[0], 'B')
        for a, c in zip(As, Cs):
            out = c.np(); r = ld(a, 'A') @ b
            if half: r = np.concatenate(np.split(r, 2, axis=1), axis=0)
            out[...] = r + out if ua else r
        for bar in targets: bar.arrive(1, op.vc, f'{kind} {acc.label}', ('o', op.id))
    m.trace(kind, acc.label, shape=(A.shape[0] * len(ctas), acc.shape[1], A.shape[1]), dtype=str(B.dtype), A=A.label, B=B.label, use_acc=ua,
            bars=[b.label for b in bars])
    CTX.count('mma_flop', flop * (2 if two else 1) * (acc.shape[1] // B.shape[1] if two else 1))
    op = m.issue(kind, acc.label, run, reads=As + Bs + list(extra), writes=Cs, channel=('mma', t.slot), info=dict(flop=flop * (2 if two else 1), dtype=str(B.dtype)))
    if m.policy != "eager" and not ua and op.prev is None:
        for c in Cs: c.np()[...] = np.nan
    if not (bars or force_async): m.wait_ops([op], f'synchronous async_dot into {acc.label}')


def tcgen05_commit(bar, two_ctas=False):
    m = M(); t = m.cur; cta = t.cta; bar = _bar(bar)
    if two_ctas and cta.rank % 2: return
    ctas = [cta, cta.cluster[cta.rank + 1]] if two_ctas else [cta]
    targets = [_on(bar, c) for c in ctas]
    def run(op):
        for b in targets: b.arrive(1, op.vc, 'tcgen05_commit', ('o', op.id))
    m.trace('commit', bar.label)
    m.issue('commit', bar.label, run, channel=('mma', t.slot))


_FMT = {'e4m3': D.float8e4nv, 'e5m2': D.float8e5}


def _scales(buf, rows, k32):
    """(rows, K/32) e8m0 scale bytes from the packed layouts TLX accepts, or a plain 2D one."""
    raw = np.array(buf.np()).view(np.uint8)
    if raw.shape == (rows, k32): pass
    else:
        r = raw.reshape(rows // 128, k32 // 4, 32, 4, 4)          # (rep_m, rep_k, 32 rows, 4 row groups, 4 k)
        raw = r.transpose(0, 3, 2, 1, 4).reshape(rows, k32)
    return np.exp2(raw.astype(np.float32) - 127)


def async_dot_scaled(A, B, acc, A_scale, A_format, B_scale, B_format, use_acc=None, pred=None, mBarriers=(), two_ctas=False, force_async=False, out_dtype=D.float32):
    if 'e2m1' in (A_format, B_format): raise NotImplementedError('e2m1 operands')
    m = M(); t = m.cur; m.maybe_preempt()
    K = A.shape[1]; N = B.shape[1]
    def ld(v, side):
        x = np.array(v.np()).view(_FMT[A_format if side == 'A' else B_format].store).astype(np.float32)
        if side == 'A': return x * np.repeat(_scales(A_scale, x.shape[0], K // 32), 32, 1)
        return x * np.repeat(_scales(B_scale, N, K // 32), 32, 1).T
    return _mma5(m, t, A, B, acc, use_acc, pred, mBarriers, two_ctas, force_async, 2 * A.shape[0] * N * K, 'mma_scaled', ld, [A_scale, B_scale])


def tmem_copy(src, dst):
    m = M(); t = m.cur
    def run(op):
        raw = np.array(src.np()); d = dst.np()
        if raw.shape != d.shape:
            rows, cols = d.shape
            raw = raw.reshape(rows // 128, cols // 4, 32, 4, 4).transpose(0, 3, 2, 1, 4).reshape(rows, cols)
        d[...] = raw
    m.trace('tmem_copy', dst.label, bytes=dst.nbytes)
    m.issue('tmem_copy', dst.label, run, reads=[src], writes=[dst], channel=('mma', t.slot))


# ------------------------------------------------------------ CLC
class CLCResponses:
    def __init__(self, n): self.slots = [types.SimpleNamespace(value=None, slot=0, epoch=0) for _ in range(n)]


class CLCPipelineContext:
    def __init__(self, n, consumers):
        m = M()
        m.next_name = 'clc_empty'; self.empty = alloc_barriers(n, consumers)
        m.next_name = 'clc_full'; self.full = alloc_barriers(n)
        self.resp = CLCResponses(n); m.cur.cta.clc = self


def clc_create_context(num_consumers, num_stages=1): M().next_name = None; return CLCPipelineContext(int(num_stages), int(num_consumers))


def clc_producer(ctx, p_producer=None, multi_ctas=False, k=0):
    m = M(); t = m.cur; k = int(k); cl = t.cta.cluster
    if not multi_ctas or t.cta.rank == 0: barrier_wait(ctx.empty[k], p_producer)
    barrier_expect_bytes(ctx.full[k], 16)
    if multi_ctas and t.cta.rank: return
    def run(op):
        pid = m.clc_queue.popleft() if m.clc_queue else None
        for c in cl if multi_ctas else [t.cta]:
            c.clc.resp.slots[k].value = pid; c.clc.full.bars[k].complete_tx(16, op.vc, 'CLC', ('o', op.id))
    m.trace('clc_issue', k); m.issue('clc', f'clc[{k}]', run)


def clc_consumer(ctx, p_consumer=None, multi_ctas=False, k=0, return_3d=False):
    m = M(); t = m.cur; k = int(k)
    barrier_wait(ctx.full[k], p_consumer)
    pid = ctx.resp.slots[k].value
    if pid is None: ids = (-1, -1, -1)
    else: ids = (pid[0] + t.cta.rank, pid[1], pid[2])
    ids = tuple(Tensor(np.int32(v), D.int32) for v in ids)
    if pid is not None: barrier_arrive(ctx.empty[k], 1, 0 if multi_ctas else None)
    return ids if return_3d else ids[0]


def vote_ballot_sync(mask, pred):
    """Layout dependent on hardware; here lane = element index modulo 32 of the flattened tensor (one row per lane)."""
    p = as_tensor(pred).d != 0
    if p.ndim == 0: return Tensor(np.int32(-1 if p else 0), D.int32)
    f = p.reshape(-1)
    g = f.reshape(-1, 32) if f.size % 32 == 0 else f.reshape(1, -1)
    bits = (g.astype(np.int64) << np.arange(g.shape[1])).sum(1).astype(np.uint32).view(np.int32)
    return Tensor(np.repeat(bits, g.shape[1]).reshape(p.shape), D.int32)


def stoch_round(src, dst_ty, rand_bits): return src.to(dst_ty)
class mbarrier: pass
class buffered_tensor: pass
buffered_tensor = Buffer


def __getattr__(n):
    """Anything not emulated here but defined as @triton.jit source in the real tlx is run from source."""
    if n.startswith('__'): raise AttributeError(n)
    import importlib
    from .frontend import map_value
    real = importlib.import_module('triton.language.extra.tlx')
    return map_value(getattr(real, n))
