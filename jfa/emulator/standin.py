"""Stand-in `triton` package: kernels import and run with no triton wheel installed (macOS, Windows, CI)."""
import sys
import types
from . import frontend as F, tl_ops as lang, tlx_ops as tlxops

OPTS = {}                                    # default launch options
REPORTS = []


class StubJIT:
    def __init__(self, fn, **kw): self.fn = fn; self.__name__ = fn.__name__; self.__doc__ = fn.__doc__
    def __getitem__(self, grid): return lambda *a, **k: self.run(*a, grid=grid, **k)
    def run(self, /, *a, grid, warmup=False, **k): REPORTS.append(F.launch(self, grid, a, k, **OPTS))
    def __call__(self, *a, **k): return F.kernel(self)(*a, **k)


class StubAutotuner(StubJIT):
    def __init__(self, fn, configs, prune=None):
        self.fn, self.configs, self.best_config = fn, configs, None
        self.early_config_prune = (prune or {}).get('early_config_prune')


class Heuristics(StubJIT):
    def __init__(self, fn, values): self.fn, self.values = fn, values


class Config:
    def __init__(self, kwargs, num_warps=4, num_stages=3, num_ctas=1, pre_hook=None, ctas_per_cga=None, **kw):
        self.kwargs, self.num_warps, self.num_stages, self.pre_hook, self.ctas_per_cga = kwargs, num_warps, num_stages, pre_hook, ctas_per_cga


class TensorDescriptor:
    def __init__(self, base, shape, strides, block_shape, padding='zero'):
        self.base, self.shape, self.strides, self.block_shape, self.padding = base, list(shape), list(strides), list(block_shape), padding
    @classmethod
    def from_tensor(cls, t, block_shape, padding='zero'):
        st = t.stride() if hasattr(t, 'stride') else [s // t.itemsize for s in t.strides]
        return cls(t, t.shape, st, block_shape, padding)


def jit(fn=None, **kw): return StubJIT(fn) if fn is not None else (lambda f: StubJIT(f))
def autotune(configs, key=None, prune_configs_by=None, **kw): return lambda fn: StubAutotuner(fn, configs, prune_configs_by)
def heuristics(values): return lambda fn: Heuristics(fn, values)


@jit
def get_bufidx_phase(count, NUM: lang.constexpr):
    return count % NUM, (count // NUM) & 1


def _mul_f32x2(a, b): return a * b
def _sub_f32x2(a, b): return a - b
def _fma_f32x2(a, b, c): return a * b + c


def _split_n_2D(x, n):
    import numpy as np
    return tuple(x._re(p) for p in np.split(x.d, n, axis=1))


def _join_n_2D(xs):
    import numpy as np
    return xs[0]._re(np.concatenate([x.d for x in xs], axis=1))


def install():
    def mod(name, **attrs):
        m = types.ModuleType(name); m.__path__ = []; m.__dict__.update(attrs); sys.modules[name] = m
        if '.' in name: setattr(sys.modules[name.rpartition('.')[0]], name.rpartition('.')[2], m)
        return m
    def device():
        try: import torch; return torch.device('cpu')
        except ImportError: return 'cpu'
    drv = types.SimpleNamespace(active=types.SimpleNamespace(get_active_torch_device=device))
    mod('triton', jit=jit, autotune=autotune, heuristics=heuristics, Config=Config, cdiv=lambda a, b: -(-a // b),
        next_power_of_2=F.emu_triton.next_power_of_2, set_allocator=lambda f: None)
    mod('triton.runtime', driver=drv)
    mod('triton.tools'); mod('triton.tools.tensor_descriptor', TensorDescriptor=TensorDescriptor)
    sys.modules['triton.language'] = lang; sys.modules['triton'].language = lang
    sys.modules['triton.language.extra'] = lang.extra; sys.modules['triton.language.extra.tlx'] = tlxops
    for n, a in (('triton.language.extra.tlx.warp_spec', dict(get_bufidx_phase=get_bufidx_phase)),
                 ('triton.language.extra.subtile_ops', dict(_split_n_2D=_split_n_2D, _join_n_2D=_join_n_2D)),
                 ('triton.language.extra.libdevice', {}), ('triton.language.extra.cuda', {}),
                 ('triton.language.extra.cuda.inline_ptx_lib', dict(_mul_f32x2=_mul_f32x2, _sub_f32x2=_sub_f32x2, _fma_f32x2=_fma_f32x2))):
        m = types.ModuleType(n); m.__dict__.update(a); m.__path__ = []; sys.modules[n] = m
