"""Emulated `triton.language`."""
import builtins as _b
import types
import numpy as np
from . import dtypes as D
from .dtypes import *          # noqa: F401,F403  (tl.float16 ...)
from .tile import Tensor, Descriptor, as_tensor, binary_types, BlockType, EmuTypeError, _shape
from .tile import _truediv, _idiv
from .context import CTX
from . import ptx

pointer_type = D.PtrType
tensor_descriptor = Descriptor
tensor_descriptor_base = Descriptor
tensor = Tensor
dtype = D.DType
bfloat16 = D.bfloat16
PropagateNan = types.SimpleNamespace(NONE=0, ALL=1)


def constexpr(v=None): return v
def const(v): return v


class range:                                     # tl.range(...)
    def __new__(cls, a, b=None, step=1, **kw):
        lo, hi = (0, a) if b is None else (a, b)
        dyn = any(isinstance(x, Tensor) for x in (lo, hi, step))
        it = _b.range(int(lo), int(hi), int(step))
        return (Tensor(np.int32(i), D.int32) for i in it) if dyn else iter(it)


def static_range(a, b=None, step=1, **kw):
    return _b.range(int(a), int(b) if b is not None else None, int(step)) if b is not None else _b.range(int(a))


def static_assert(c, msg=''): assert c, msg
def static_print(*a): print(*a)
def device_print(*a, **k): pass
def device_assert(c, msg='', mask=None):
    if not np.all(as_tensor(c).d): raise AssertionError(f'device_assert {msg}')
def assume(c): pass
def debug_barrier(): pass
def multiple_of(x, v): return x
max_contiguous = max_constancy = multiple_of


def program_id(axis): return Tensor(np.int32(CTX.machine.cur.cta.pid[int(axis)]), D.int32)
def num_programs(axis): return Tensor(np.int32(CTX.machine.grid[int(axis)]), D.int32)


def _pow2(shape):
    for n in shape:
        if n & (n - 1): raise EmuTypeError(f'block dimension {n} is not a power of two')


def arange(a, b):
    _pow2([int(b) - int(a)])
    return Tensor(np.arange(int(a), int(b), dtype=np.int32), D.int32)
def full(shape, value, dtype): return Tensor(np.full(_shape((shape,)), 0, dtype.payload) + as_tensor(value, dtype).to(dtype).d, dtype)
def zeros(shape, dtype): _pow2(_shape((shape,))); return Tensor(np.zeros(_shape((shape,)), dtype.payload), dtype)
def zeros_like(x): return Tensor(np.zeros_like(x.d), x.dtype)
def full_like(x, v): return full(x.shape, v, x.dtype)
def cast(x, dt, fp_downcast_rounding=None, bitcast=False): return as_tensor(x).to(dt, fp_downcast_rounding, bitcast)
def to_tensor(x): return as_tensor(x)
def cdiv(a, b):
    if isinstance(a, Tensor) or isinstance(b, Tensor): return _idiv(a + (b - 1), b)
    return -(-a // b)
def reshape(x, *s, can_reorder=False): return x.reshape(*s)
view = reshape
def trans(x, *dims): return x.trans(*dims)
def permute(x, *dims): return x.trans(*dims)
def expand_dims(x, axis): return x.expand_dims(axis)
def broadcast_to(x, *s): return as_tensor(x).broadcast_to(*s)
def broadcast(a, b):
    x, y = np.broadcast_arrays(a.d, b.d); return Tensor(x, a.dtype), Tensor(y, b.dtype)
def join(a, b): return Tensor(np.stack(np.broadcast_arrays(a.d, as_tensor(b).d), -1), a.dtype)
def split(x): return x.split()
def interleave(a, b): j = join(a, b); return j.reshape(*j.shape[:-2], -1)
def cat(a, b, can_reorder=False): return Tensor(np.concatenate([a.d, b.d]), a.dtype)
def ravel(x): return x.reshape(-1)
def flip(x, dim=None): return Tensor(np.flip(x.d, dim), x.dtype)
def gather(x, idx, axis): return Tensor(np.take_along_axis(x.d, idx.d.astype(np.int64), axis), x.dtype)


def where(c, a, b):
    x, y, dt = binary_types(a, b) if (isinstance(a, Tensor) or isinstance(b, Tensor)) else (as_tensor(a).d, as_tensor(b).d, as_tensor(a).dtype)
    r = np.where(as_tensor(c).d != 0, x, y)
    if r.size > 1: CTX.count('select', r.size)
    return Tensor(r.astype(dt.payload), dt)


def _minmax(fn, name):
    def f(a, b, propagate_nan=None):
        if not isinstance(a, Tensor) and not isinstance(b, Tensor): return getattr(_b, name[:3])(a, b)
        x, y, dt = binary_types(a, b)
        r = fn(x, y)
        if r.size > 1: CTX.count(name, r.size)
        return Tensor(r, dt)
    return f


maximum, minimum = _minmax(np.fmax, 'max'), _minmax(np.fmin, 'min')
def clamp(x, lo, hi, propagate_nan=None): return minimum(maximum(x, lo), hi)


def _unary(fn, name, f32=True):
    def f(x, **kw):
        x = as_tensor(x)
        if f32 and x.dtype.kind == 'f' and x.dtype.bits < 32:
            raise EmuTypeError(f'tl.math.{name} needs fp32/fp64, got {x.dtype}')
        if x.dtype.kind != 'f' and f32: x = x.to(D.float32)
        r = np.asarray(fn(x.d)).astype(x.dtype.payload)
        if r.size > 1: CTX.count(name, r.size)
        return Tensor(r, x.dtype)
    return f


exp, exp2, log, log2 = _unary(np.exp, 'exp'), _unary(np.exp2, 'exp2'), _unary(np.log, 'log'), _unary(np.log2, 'log2')
sqrt, sin, cos, floor, ceil = [_unary(getattr(np, n), n) for n in ('sqrt', 'sin', 'cos', 'floor', 'ceil')]
rsqrt = _unary(lambda v: 1 / np.sqrt(v), 'rsqrt')
sqrt_rn = sqrt
abs = _unary(np.abs, 'abs', f32=False)
tanh = _unary(np.tanh, 'tanh')
def _erf(v):
    import math as m
    return np.vectorize(m.erf)(v)
erf = _unary(_erf, 'erf')
sigmoid = _unary(lambda v: 1 / (1 + np.exp(-v)), 'sigmoid')
def fma(a, b, c): return a * b + c
def fdiv(a, b, ieee_rounding=False): return _truediv(a, b)
div_rn = fdiv
def umulhi(a, b): return Tensor(((a.d.astype(np.uint64) * b.d.astype(np.uint64)) >> np.uint64(32)).astype(np.uint32), D.uint32)
math = types.SimpleNamespace(**{k: globals()[k] for k in (
    'exp exp2 log log2 sqrt sin cos floor ceil rsqrt sqrt_rn abs tanh erf fma fdiv div_rn umulhi clamp').split()},
    max=maximum, min=minimum)
def softmax(x, dim=None): z = x - max(x, -1)[:, None]; e = exp(z); return e / sum(e, -1)[:, None]


# ---- reductions
def _red(fn, name, promo):
    def f(x, axis=None, return_indices=False, keep_dims=False, dtype=None, **kw):
        x = as_tensor(x)
        if x.dtype == D.bfloat16: x = x.to(D.float32)
        dt = x.dtype
        if promo and dt.kind in 'iub' and dt.bits < 32: dt = D.uint32 if dt.kind == 'u' else D.int32
        if dtype is not None: dt = dtype
        CTX.count('reduce', x.d.size)
        r = fn(x.d.astype(dt.payload), axis=axis, keepdims=keep_dims)
        r = D.round_to(dt, r) if dt.kind == 'f' and dt.bits < 32 else np.asarray(r).astype(dt.payload)
        if return_indices:
            i = (np.argmax if name == 'max' else np.argmin)(x.d, axis=axis)
            return Tensor(r, dt), Tensor(i.astype(np.int32), D.int32)
        return Tensor(r, dt)
    return f


max, min, sum = _red(np.fmax.reduce, 'max', True), _red(np.fmin.reduce, 'min', True), _red(np.add.reduce, 'sum', True)
xor_sum = _red(np.bitwise_xor.reduce, 'xor', True)
def argmax(x, axis, **k): return Tensor(np.argmax(x.d, axis=axis).astype(np.int32), D.int32)
def argmin(x, axis, **k): return Tensor(np.argmin(x.d, axis=axis).astype(np.int32), D.int32)


def reduce(x, axis, combine_fn, keep_dims=False):
    """Tree fold by halves (arbitrary combine functions, tuples allowed)."""
    tup = isinstance(x, tuple)
    xs = list(x) if tup else [x]
    CTX.count('reduce', xs[0].d.size)
    if axis is None: xs = [v.reshape(-1) for v in xs]; axis = 0
    cur = [np.moveaxis(v.d, axis, 0) for v in xs]
    while cur[0].shape[0] > 1:
        n = cur[0].shape[0]; h = n // 2
        a = [Tensor(c[:h], v.dtype) for c, v in zip(cur, xs)]; b = [Tensor(c[h:2*h], v.dtype) for c, v in zip(cur, xs)]
        r = combine_fn(*a, *b); r = r if isinstance(r, tuple) else (r,)
        cur = [np.concatenate([q.d, c[2*h:]]) if n % 2 else q.d for q, c in zip(r, cur)]
    out = [Tensor(np.expand_dims(c[0], axis) if keep_dims else c[0], v.dtype) for c, v in zip(cur, xs)]
    return tuple(out) if tup else out[0]


def associative_scan(x, axis, combine_fn, reverse=False):
    tup = isinstance(x, tuple); xs = list(x) if tup else [x]
    cols = [np.moveaxis(v.d, axis, 0) for v in xs]
    if reverse: cols = [c[::-1] for c in cols]
    acc = [[c[0]] for c in cols]
    for i in _b.range(1, cols[0].shape[0]):
        r = combine_fn(*[Tensor(a[-1], v.dtype) for a, v in zip(acc, xs)], *[Tensor(c[i], v.dtype) for c, v in zip(cols, xs)])
        r = r if isinstance(r, tuple) else (r,)
        for a, q in zip(acc, r): a.append(q.d)
    out = [Tensor(np.moveaxis(np.stack(a[::-1] if reverse else a), 0, axis), v.dtype) for a, v in zip(acc, xs)]
    return tuple(out) if tup else out[0]


def cumsum(x, axis=0, reverse=False, **k):
    d = np.flip(x.d, axis) if reverse else x.d
    r = np.cumsum(d, axis=axis, dtype=d.dtype); return Tensor(np.flip(r, axis) if reverse else r, x.dtype)


def map_elementwise(fn, *args, pack=1):
    ts = [as_tensor(a) for a in args]
    shape = np.broadcast_shapes(*[t.shape for t in ts])
    r = fn(*[Tensor(np.broadcast_to(t.d, shape), t.dtype) for t in ts])      # scalar code applied to whole arrays
    return r


def dot(a, b, acc=None, input_precision=None, allow_tf32=None, max_num_imprecise_acc=None, out_dtype=None):
    CTX.count('dot_flop', 2 * int(np.prod(a.shape)) * b.shape[-1])
    f = (lambda t: t.d.astype(np.float32)) if input_precision == 'ieee' or allow_tf32 is False else (lambda t: D.mma_operand(t.dtype, t.d))
    r = np.matmul(f(a), f(b))
    if acc is not None: r = r + acc.d
    return Tensor(r, D.float32)


# ---- global memory through pointers
def _resolve(p, mask):
    offs = p.d
    buf = p.ptr
    m = None if mask is None else np.broadcast_to(as_tensor(mask).d != 0, offs.shape)
    bad = (offs < 0) | (offs >= buf.flat.size)
    if m is not None: bad = bad & m
    if bad.any(): raise IndexError(f'out-of-bounds access to {buf.name}: element {int(np.asarray(offs)[bad].ravel()[0])} of {buf.flat.size}')
    return buf, offs, m


def load(p, mask=None, other=None, **kw):
    if isinstance(p, Descriptor): return p.load(mask)
    buf, offs, m = _resolve(p, mask)
    dt = p.dtype.element_ty
    if offs.size > 1: CTX.count('ld_global', offs.size * dt.itemsize)
    if m is None: return Tensor(D.from_store(dt, buf.flat[offs]), dt)
    o = np.zeros((), dt.payload) if other is None else as_tensor(other, dt).to(dt).d
    return Tensor(np.where(m, D.from_store(dt, buf.flat[np.where(m, offs, 0)]), o).astype(dt.payload), dt)


def store(p, v, mask=None, **kw):
    buf, offs, m = _resolve(p, mask)
    dt = p.dtype.element_ty
    v = np.broadcast_to(D.to_store(dt, as_tensor(v).to(dt).d), offs.shape)
    if offs.size > 1: CTX.count('st_global', offs.size * dt.itemsize)
    if m is None: buf.flat[offs] = v
    else: buf.flat[offs[m]] = v[m]


def _atomic(fn):
    def f(p, v, mask=None, sem=None, scope=None):
        CTX.machine.maybe_preempt()
        buf, offs, m = _resolve(p, mask); dt = p.dtype.element_ty
        v = np.broadcast_to(D.to_store(dt, as_tensor(v).to(dt).d), offs.shape)
        old = Tensor(D.from_store(dt, buf.flat[offs if m is None else np.where(m, offs, 0)]), dt)
        sel = slice(None) if m is None else m
        if offs.ndim == 0:
            if m is None or bool(m): buf.flat[int(offs)] = fn(buf.flat[int(offs)], v)
        else: fn.at(buf.flat, offs[sel], v[sel])
        return old
    return f


atomic_add, atomic_max, atomic_min = _atomic(np.add), _atomic(np.maximum), _atomic(np.minimum)
atomic_and, atomic_or, atomic_xor = _atomic(np.bitwise_and), _atomic(np.bitwise_or), _atomic(np.bitwise_xor)
def atomic_xchg(p, v, mask=None, **k): o = load(p, mask); store(p, v, mask); return o
def atomic_cas(p, c, v, **k):
    o = load(p)
    if int(o) == int(c): store(p, v)
    return o


def make_tensor_descriptor(base, shape, strides, block_shape, padding_option='zero'):
    return Descriptor(base, shape, strides, block_shape, padding_option, name=base.ptr.name)
_experimental_make_tensor_descriptor = make_tensor_descriptor


def inline_asm_elementwise(asm, constraints, args, dtype, is_pure=True, pack=1, _semantic=None):
    ts = [as_tensor(a) for a in args]
    shape = np.broadcast_shapes(*[t.shape for t in ts])
    CTX.count('asm', int(np.prod(shape)))
    dts = list(dtype) if isinstance(dtype, (tuple, list)) else [dtype]
    ins = [np.broadcast_to(D.to_store(t.dtype, t.d), shape) for t in ts]
    outs = ptx.run(asm, constraints, ins, [d.store for d in dts], shape, pack)
    res = tuple(Tensor(D.from_store(d, o), d) for d, o in zip(dts, outs))
    return res if isinstance(dtype, (tuple, list)) else res[0]


def swizzle2d(i, j, size_i, size_j, size_g):
    ij = i * size_j + j; g = size_g * size_j; gid = ij // g; off = gid * size_g
    sg = minimum(size_i - off, size_g); ij = ij % g
    return off + ij % sg, ij // sg
