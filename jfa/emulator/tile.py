"""Register values: Tensor (scalar or block) with Triton's typing rules on numpy payloads."""
import numpy as np
from . import dtypes as D
from .context import CTX

_INT_RANK = {1: 0, 8: 1, 16: 2, 32: 3, 64: 4}


class EmuTypeError(TypeError):
    pass


class BlockType:
    def __init__(self, elt, shape): self.element_ty = elt; self.scalar = elt; self.shape = tuple(shape)
    def is_block(self): return True
    def is_ptr(self): return False
    def get_block_shapes(self): return self.shape
    def __repr__(self): return f'<{self.shape},{self.element_ty}>'


def weak_dtype(v):
    if isinstance(v, (bool, np.bool_)): return D.int1
    if isinstance(v, (int, np.integer)):
        return D.int32 if -2**31 <= v < 2**31 else (D.uint32 if 0 <= v < 2**32 else D.int64)
    return D.float32


def _kind(dt): return {'b': 0, 'i': 1, 'u': 1, 'f': 2}[dt.kind]


def promote(a, b, div=False):
    if a == b and not (div and a.kind == 'f' and a.bits < 32): return a
    if D.float64 in (a, b): return D.float64
    if D.float32 in (a, b): return D.float32
    if D.float16 in (a, b): return D.float32 if div else D.float16
    if D.bfloat16 in (a, b): return D.bfloat16 if a == b and not div else D.float32
    if a.is_fp8() and b.is_fp8(): return a if a == b else D.float16
    if a.kind == 'f': return a
    if b.kind == 'f': return b
    ra, rb = _INT_RANK[a.bits], _INT_RANK[b.bits]
    if (a.kind == 'u') == (b.kind == 'u'): return a if ra > rb else b
    return (a if ra >= rb else b) if a.kind == 'u' else (b if rb >= ra else a)


class Tensor:
    __slots__ = ('_d', 'dtype', 'ptr')
    __array_priority__ = 1000

    def __init__(self, d, dtype, ptr=None):
        self._d = d if isinstance(d, (np.ndarray, np.generic)) else np.asarray(d, dtype.payload)
        self.dtype = dtype                # DType, or PtrType when ptr is a GlobalBuffer
        self.ptr = ptr

    @property
    def d(self): return self._d
    @property
    def shape(self): return self.d.shape
    @property
    def type(self): return BlockType(self.dtype, self.shape) if self.d.ndim else self.dtype
    @property
    def T(self): return self.trans()
    @property
    def numel(self): return self.d.size
    def __repr__(self): return f'Tensor({self.dtype}{list(self.shape)})'
    def _scalar(self):
        if self.d.size != 1: raise EmuTypeError(f'block value {self!r} used as a scalar condition/index')
        return self.d.reshape(()).item()
    def __bool__(self): return bool(self._scalar())
    def __int__(self): return int(self._scalar())
    def __float__(self): return float(self._scalar())
    __index__ = __int__
    __hash__ = object.__hash__

    # -- shape ops
    def __getitem__(self, idx):
        if not isinstance(idx, tuple): idx = (idx,)
        for i in idx:
            if not (i is None or i == slice(None)): raise EmuTypeError('only None and : may index a tensor')
        return Tensor(self.d[idx], self.dtype, self.ptr)
    def _re(self, a): return Tensor(a, self.dtype, self.ptr)
    def trans(self, *dims):
        dims = _shape(dims)
        return self._re(self.d.transpose(dims) if dims else self.d.swapaxes(-1, -2))
    permute = trans
    def reshape(self, *s): return self._re(self.d.reshape(_shape(s)))
    view = reshape
    def broadcast_to(self, *s): return self._re(np.broadcast_to(self.d, _shape(s)))
    def expand_dims(self, axis): return self._re(np.expand_dims(self.d, axis))
    def split(self): return self._re(self.d[..., 0]), self._re(self.d[..., 1])
    def cast(self, dtype, fp_downcast_rounding=None, bitcast=False): return self.to(dtype, fp_downcast_rounding, bitcast)
    def to(self, dtype, fp_downcast_rounding=None, bitcast=False):
        if self.ptr is not None:
            if not dtype.is_ptr(): return Tensor(self.d.astype(np.int64), D.int64)
            return self if dtype == self.dtype else Tensor(self.d, dtype, self.ptr.view(dtype.element_ty, self.dtype.element_ty))
        if dtype.is_ptr():                                   # an address loaded from memory: find the host tensor that owns it
            from .frontend import resolve_address
            return resolve_address(int(self), dtype)
        if bitcast:
            return Tensor(D.from_store(dtype, D.to_store(self.dtype, self.d).view(dtype.store)), dtype)
        if dtype == self.dtype: return self
        if self.d.size > 1: CTX.count('cvt', self.d.size)
        if dtype.kind == 'f': return Tensor(D.round_to(dtype, self.d.astype(dtype.payload)), dtype)
        if dtype.kind == 'b': return Tensor(self.d != 0, dtype)
        return Tensor(self.d.astype(dtype.payload), dtype)
    def store(self, v, mask=None): from . import lang; return lang.store(self, v, mask)


def _shape(s):
    if len(s) == 1 and isinstance(s[0], (tuple, list)): s = s[0]
    return tuple(int(x) for x in s)


def as_tensor(v, like=None):
    if isinstance(v, Tensor): return v
    if hasattr(v, '__emu_tensor__'): return v.__emu_tensor__()
    dt = weak_dtype(v)
    if like is not None and like.kind != 'v' and _kind(like) >= _kind(dt): dt = like
    return Tensor(np.asarray(v).astype(dt.payload), dt)


def binary_types(a, b, div=False):
    ta, tb = isinstance(a, Tensor), isinstance(b, Tensor)
    if ta and tb:
        dt = promote(a.dtype, b.dtype, div)
    elif ta:
        w = weak_dtype(b); dt = a.dtype if _kind(a.dtype) >= _kind(w) else w
        if div and dt.kind == 'f' and dt.bits < 32: dt = D.float32
    else:
        w = weak_dtype(a); dt = b.dtype if _kind(b.dtype) >= _kind(w) else w
        if div and dt.kind == 'f' and dt.bits < 32: dt = D.float32
    conv = lambda x: x.to(dt).d if isinstance(x, Tensor) else dt.payload.type(x)
    return conv(a), conv(b), dt


def _arith(a, b, fn, name):
    if isinstance(a, Tensor) and a.ptr is not None: return _ptr_add(a, b, name)
    if isinstance(b, Tensor) and b.ptr is not None: return _ptr_add(b, a, name)
    x, y, dt = binary_types(a, b)
    r = fn(x, y)
    if r.size > 1: CTX.count(name, r.size)
    if dt.kind == 'f' and dt.bits < 32: r = D.round_to(dt, r)
    elif r.dtype != dt.payload: r = r.astype(dt.payload)
    return Tensor(r, dt)


def _ptr_add(p, off, name):
    o = off.d.astype(np.int64) if isinstance(off, Tensor) else np.int64(off)
    return Tensor(p.d + o if name == 'add' else p.d - o, p.dtype, p.ptr)


def _truediv(a, b):
    x, y, dt = binary_types(a, b, div=True)
    if dt.kind != 'f': x, y, dt = x.astype(np.float32), y.astype(np.float32), D.float32
    r = x / y
    if r.size > 1: CTX.count('div', r.size)
    return Tensor(np.asarray(r, dt.payload), dt)


def _idiv(a, b):
    x, y, dt = binary_types(a, b)
    if dt.kind == 'f': raise EmuTypeError('// on floats is not allowed in Triton')
    if np.any(y == 0): raise ZeroDivisionError('integer division by zero in kernel')
    q = x // y
    if dt.kind == 'i': q = q + ((x % y != 0) & ((x < 0) != (y < 0))).astype(dt.payload)   # C truncation
    return Tensor(np.asarray(q, dt.payload), dt)


def _mod(a, b):
    x, y, dt = binary_types(a, b)
    return Tensor(np.asarray(np.fmod(x, y), dt.payload), dt)


def _cmp(a, b, fn):
    if isinstance(a, Tensor) and a.ptr is not None: return Tensor(fn(a.d, as_tensor(b).d), D.int1)
    x, y, _ = binary_types(a, b)
    r = fn(x, y)
    if r.size > 1: CTX.count('cmp', r.size)
    return Tensor(r, D.int1)


def _bit(a, b, fn):
    x, y, dt = binary_types(a, b)
    return Tensor(np.asarray(fn(x, y)), dt)


def _shift(a, b, left):
    x, y, dt = binary_types(a, b)
    amt = y.astype(np.int64)
    ok = (amt >= 0) & (amt < dt.bits)
    r = np.left_shift(x, np.where(ok, y, 0).astype(x.dtype)) if left else np.right_shift(x, np.where(ok, y, 0).astype(x.dtype))
    fill = np.zeros_like(r) if left or dt.kind == 'u' else np.where(x < 0, -1, 0).astype(x.dtype)
    return Tensor(np.where(ok, r, fill).astype(dt.payload), dt)


def _install():
    ar = {'add': np.add, 'sub': np.subtract, 'mul': np.multiply}
    for n, f in ar.items():
        setattr(Tensor, f'__{n}__', lambda s, o, f=f, n=n: _arith(s, o, f, n))
        setattr(Tensor, f'__r{n}__', lambda s, o, f=f, n=n: _arith(o, s, f, n))
    for n, f in {'truediv': _truediv, 'floordiv': _idiv, 'mod': _mod}.items():
        setattr(Tensor, f'__{n}__', lambda s, o, f=f: f(s, o))
        setattr(Tensor, f'__r{n}__', lambda s, o, f=f: f(o, s))
    for n, f in {'lt': np.less, 'le': np.less_equal, 'gt': np.greater, 'ge': np.greater_equal, 'eq': np.equal,
                 'ne': np.not_equal}.items():
        setattr(Tensor, f'__{n}__', lambda s, o, f=f: _cmp(s, o, f) if o is not None else (f is np.not_equal))
    for n, f in {'and': np.bitwise_and, 'or': np.bitwise_or, 'xor': np.bitwise_xor}.items():
        setattr(Tensor, f'__{n}__', lambda s, o, f=f: _bit(s, o, f))
        setattr(Tensor, f'__r{n}__', lambda s, o, f=f: _bit(o, s, f))
    Tensor.__lshift__ = lambda s, o: _shift(s, o, True)
    Tensor.__rlshift__ = lambda s, o: _shift(o, s, True)
    Tensor.__rshift__ = lambda s, o: _shift(s, o, False)
    Tensor.__rrshift__ = lambda s, o: _shift(o, s, False)
    Tensor.__neg__ = lambda s: Tensor(-s.d, s.dtype)
    Tensor.__pos__ = lambda s: s
    Tensor.__invert__ = lambda s: Tensor(~s.d, s.dtype)
    Tensor.logical_and = lambda s, o: Tensor((s.d != 0) & (as_tensor(o).d != 0), D.int1)
    Tensor.logical_or = lambda s, o: Tensor((s.d != 0) | (as_tensor(o).d != 0), D.int1)


_install()


class GlobalBuffer:
    """One host tensor: flat numpy view of its whole storage (true bit patterns)."""
    def __init__(self, flat, dtype, offset, name):
        self.flat, self.dtype, self.offset, self.name = flat, dtype, offset, name
    def view(self, dt, old): return GlobalBuffer(self.flat.view(dt.store), dt, 0, self.name)


class Descriptor:
    """tl.tensor_descriptor / host TensorDescriptor."""
    def __init__(self, ptr, shape, strides, block_shape, padding='zero', name='desc'):
        self.ptr, self.block_shape, self.padding, self.name = ptr, [int(b) for b in block_shape], padding, name
        self.shape_, self.strides_ = [int(s) for s in shape], [int(s) for s in strides]
        self.dtype = ptr.dtype.element_ty
        self.shape = [Tensor(np.int32(s), D.int32) for s in self.shape_]
        self.strides = [Tensor(np.int64(s), D.int64) for s in self.strides_]
        if self.strides_[-1] != 1: raise EmuTypeError('descriptor: last stride must be 1')
        for s in self.strides_[:-1]:
            if s * self.dtype.itemsize % 16: raise EmuTypeError(f'descriptor {name}: stride {s} not 16-byte aligned')

    @property
    def type(self): return self
    block_type = property(lambda s: BlockType(s.dtype, s.block_shape))
    def _window(self, offs):
        """(numpy window view of the in-bounds part, destination slices)."""
        offs = [int(o) for o in offs]
        if len(offs) != len(self.block_shape): raise EmuTypeError('descriptor: wrong number of offsets')
        src, lo_hi = [], []
        base = int(self.ptr.d)
        for o, b, n in zip(offs, self.block_shape, self.shape_):
            lo, hi = max(0, -o), min(b, n - o)
            lo_hi.append((lo, max(lo, hi))); src.append(o + lo)
        buf = self.ptr.ptr
        cnt = [h - l for l, h in lo_hi]
        if 0 in cnt: return None, lo_hi
        start = base + sum(s * st for s, st in zip(src, self.strides_))
        last = start + sum((c - 1) * st for c, st in zip(cnt, self.strides_))
        if start < 0 or last >= buf.flat.size:
            raise IndexError(f'TMA access outside the allocation of {buf.name}')
        it = buf.flat.itemsize
        return np.lib.stride_tricks.as_strided(buf.flat[start:], cnt, [s * it for s in self.strides_]), lo_hi
    def read(self, offs):
        w, lh = self._window(offs)
        fill = np.nan if self.padding == 'nan' else 0
        if w is not None and list(w.shape) == self.block_shape: return w.copy()
        out = np.full(self.block_shape, fill, self.dtype.store)
        if w is not None: out[tuple(slice(l, h) for l, h in lh)] = w
        return out
    def write(self, offs, raw, reduce=''):
        w, lh = self._window(offs)
        if w is None: return
        v = raw[tuple(slice(l, h) for l, h in lh)]
        if reduce == 'add':
            w[...] = (D.round_to(self.dtype, w.astype(self.dtype.payload) + v.astype(self.dtype.payload))).astype(w.dtype)
        elif reduce in ('min', 'max'): w[...] = getattr(np, reduce + 'imum')(w, v)
        elif reduce: w[...] = getattr(np, f'bitwise_{reduce}')(w, v)
        else: w[...] = v
    def load(self, offs):
        CTX.trace('tma_load_sync', self.name, bytes=int(np.prod(self.block_shape)) * self.dtype.itemsize)
        return Tensor(D.from_store(self.dtype, self.read(offs)), self.dtype)
    def store(self, offs, v):
        CTX.trace('tma_store_sync', self.name, bytes=int(np.prod(self.block_shape)) * self.dtype.itemsize)
        self.write(offs, D.to_store(self.dtype, as_tensor(v).to(self.dtype).d.reshape(self.block_shape)))
    def atomic_add(self, offs, v):
        self.write(offs, D.to_store(self.dtype, as_tensor(v).to(self.dtype).d.reshape(self.block_shape)), 'add')
    def gather(self, rows, col):
        raise NotImplementedError('descriptor gather')
