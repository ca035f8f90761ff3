"""Front end: rewrite @triton.jit sources into plain Python closures over the emulated tl/tlx, and launch grids."""
import ast
import builtins
import collections
import inspect
import os
import textwrap
import time
import types
import numpy as np
from . import dtypes as D, tl_ops as lang, tlx_ops as tlxops
from .context import CTX
from .machine import CTA, DeadlockError, EmulationError, Machine, Task
from .descriptor import Descriptor, GlobalBuffer
from .tile import Tensor, as_tensor

_FILES = set()
_HERE = os.path.dirname(os.path.abspath(__file__))


def user_line(f):
    """Innermost kernel source line on the Python stack."""
    while f is not None:
        if f.f_code.co_filename in _FILES: return f.f_lineno
        f = f.f_back
    return None


# ------------------------------------------------------------------ AST rewriting
_NAMED = {'local_alloc', 'alloc_barriers', 'alloc_warp_barrier', 'storage_alias_spec'}


def _callee(node):
    f = node.func if isinstance(node, ast.Call) else None
    return f.attr if isinstance(f, ast.Attribute) else (f.id if isinstance(f, ast.Name) else None)


def _stored(nodes):
    out = set()
    for n in nodes:
        for x in ast.walk(n):
            if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store): out.add(x.id)
    return out


class Rewriter(ast.NodeTransformer):
    def __init__(self): self.n = 0; self.outer = set()

    def visit_FunctionDef(self, node):
        node.decorator_list = []
        node.returns = None
        for a in node.args.args + node.args.kwonlyargs: a.annotation = None
        self.outer = {a.arg for a in node.args.args} | _stored(node.body)
        self.generic_visit(node)
        return node

    def visit_Assign(self, node):
        self.generic_visit(node)
        if len(node.targets) == 1 and isinstance(node.targets[0], ast.Name) and _callee(node.value) in _NAMED:
            node.value = ast.BoolOp(ast.Or(), [ast.Call(ast.Name('__setname', ast.Load()), [ast.Constant(node.targets[0].id)], []), node.value])
        elif len(node.targets) == 1 and isinstance(node.targets[0], ast.Name) and isinstance(node.value, ast.Call) and isinstance(node.value.func, ast.Name):
            node.value = ast.Call(ast.Name('__label', ast.Load()), [ast.Constant(node.targets[0].id), node.value], [])
        return node

    def visit_Attribute(self, node):
        self.generic_visit(node)
        if node.attr == 'value' and isinstance(node.ctx, ast.Load):
            return ast.copy_location(ast.Call(ast.Name('__value', ast.Load()), [node.value], []), node)
        return node

    def visit_AnnAssign(self, node):
        if node.value is None: return node
        n = ast.copy_location(ast.Assign([node.target], node.value), node)
        return self.visit_Assign(n)

    def visit_With(self, node):
        kind = _callee(node.items[0].context_expr)
        if kind == 'async_tasks':
            node.items[0].optional_vars = ast.Name('__ts', ast.Store())
            self.generic_visit(node)
            return node
        if kind == 'async_task':
            self.n += 1
            names = sorted(_stored(node.body) & self.outer)
            body = [self.visit(s) for s in node.body]
            flat = []
            for b in body: flat.extend(b if isinstance(b, list) else [b])
            pre = [ast.parse(f"if {n!r} in __L: {n} = __L[{n!r}]").body[0] for n in names]
            fn = f'__task_{self.n}'
            d = ast.parse(f'def {fn}(__rid, __L=dict(locals())): pass').body[0]
            d.body = pre + flat
            add = ast.Expr(ast.Call(ast.Attribute(ast.Name('__ts', ast.Load()), 'add', ast.Load()),
                                    [node.items[0].context_expr, ast.Name(fn, ast.Load()), ast.Constant(node.lineno)], []))
            for s in pre + [d, add]: ast.copy_location(s, node)
            return [d, add]
        self.generic_visit(node)
        return node


# ------------------------------------------------------------------ name mapping
_cache = {}
PATCH = {}            # function name -> source mutation (mutation tests)


class _Proxy:
    def __init__(self, mod): self._m = mod
    def __getattr__(self, n): return map_value(getattr(self._m, n))


libdevice = lang.libdevice
lang.extra = types.SimpleNamespace(cuda=types.SimpleNamespace(libdevice=libdevice), libdevice=libdevice, tlx=tlxops)
emu_triton = types.SimpleNamespace(cdiv=lambda a, b: -(-a // b), next_power_of_2=lambda n: 1 << (int(n) - 1).bit_length(), language=lang)


def map_value(v):
    if v is lang or v is tlxops: return v
    if isinstance(v, types.ModuleType):
        n = v.__name__
        if n == 'triton': return emu_triton
        if n in ('triton.language', 'triton.language.core'): return lang
        if n == 'triton.language.math': return lang.math
        if n.endswith('extra.tlx'): return tlxops
        if 'libdevice' in n: return libdevice
        return _Proxy(v) if n.startswith('triton') or '.tlx' in n else v
    cn = type(v).__name__
    if isinstance(v, type) and getattr(v, '__triton_aggregate__', False): return aggregate(v)
    if cn in ('JITFunction', 'ConstexprFunction', 'Autotuner', 'Heuristics', 'InterpretedFunction', 'StubJIT', 'StubAutotuner', 'JITCallable'): return kernel(v)
    if cn == 'constexpr': return map_value(v.value)
    if cn == 'dtype' and type(v).__module__.startswith('triton'): return D.by_name(v.name)
    if callable(v) and (getattr(v, '__module__', '') or '').startswith(('triton.', 'torch._inductor')):
        name = getattr(v, '__name__', None)
        for ns in (lang, tlxops):
            if name in ns.__dict__: return ns.__dict__[name]
        if 'libdevice' in v.__module__: return getattr(libdevice, name)
        if isinstance(v, type) and name in ('dtype',): return D.DType
        w = getattr(v, '__wrapped__', None)
        if w is not None and inspect.isfunction(w): return kernel(w)          # tl.core.builtin written in Python
    if isinstance(v, tuple): return tuple(map_value(x) for x in v)
    return v


def _bmin(*a): return min(*a) if not any(isinstance(x, Tensor) for x in a) else __import__('functools').reduce(lang.minimum, a)
def _bmax(*a): return max(*a) if not any(isinstance(x, Tensor) for x in a) else __import__('functools').reduce(lang.maximum, a)
def _setname(n): CTX.machine.next_name = n


def _value(v): return v.value if hasattr(v, 'value') else v
_aggregates = {}


class Aggregate:
    """Base of emulated triton.aggregate classes."""


def aggregate(cls):
    """Emulated twin of a triton.aggregate class: methods run from source, fields are plain attributes."""
    if cls in _aggregates: return _aggregates[cls]
    ns = {}
    twin = _aggregates[cls] = type(cls.__name__, (Aggregate,), ns)
    fields = list(cls.__dict__.get('__annotations__', {}))
    init = getattr(cls, 'hash_attrs', [None])[0]
    if init is not None and not getattr(init, '__triton_builtin__', False):
        kinit = kernel(init)
        twin.__init__ = lambda self, *a, **k: (kinit(self, *a, **k), None)[1]
    else:
        def auto(self, *a, **k):
            for n, v in list(zip(fields, a)) + list(k.items()): setattr(self, n, v)
        twin.__init__ = auto
    twin._fields = fields
    for n in dir(cls):
        if n.startswith('__') and n not in ('__getitem__', '__call__', '__len__'): continue
        m = inspect.getattr_static(cls, n)
        if hasattr(m, 'fn') or (inspect.isfunction(m) and n not in ('_set_name', '_flatten_ir', '_get_instance')):
            f = kernel(m)
            setattr(twin, n, lambda self, *a, _f=f, **k: _f(self, *a, **k))
    return twin


def _label(name, v):
    if isinstance(v, Aggregate):
        for n in v._fields:
            x = getattr(v, n, None)
            a = getattr(x, 'alloc', x)
            if getattr(a, 'auto', False):
                a.name = f'{name}.{n}'; a.auto = False
                for b in getattr(a, 'bars', ()): b.name = a.name
    return v


class KernelFn:
    """A jit function compiled for emulation; calling it runs it inline (device call)."""
    def __init__(self, pyfn, patch=None):
        self.pyfn = pyfn; self.__name__ = pyfn.__name__
        self.params = list(inspect.signature(pyfn).parameters.values())
        self.constexpr = {p.name for p in self.params if 'constexpr' in str(p.annotation)}
        self.source = textwrap.dedent(inspect.getsource(pyfn))
        self.patch = patch                                   # optional source mutation (tests)
        self.code = self.tree = None
    def compile(self):
        src, first = inspect.getsourcelines(self.pyfn)
        text = textwrap.dedent(''.join(src))
        pt = self.patch or PATCH.get(self.__name__)
        if pt: text = pt(text)
        tree = Rewriter().visit(ast.parse(text))
        ast.fix_missing_locations(tree); ast.increment_lineno(tree, first - 1)
        fname = inspect.getsourcefile(self.pyfn); _FILES.add(fname)
        g = {'__builtins__': builtins, 'range': lang.range, '__label': _label, '__value': _value, 'tuple': builtins.tuple, 'min': _bmin, 'max': _bmax, 'print': lang.device_print, '__setname': _setname}
        src_globals = dict(self.pyfn.__globals__)
        if self.pyfn.__closure__:
            src_globals.update(zip(self.pyfn.__code__.co_freevars, (c.cell_contents for c in self.pyfn.__closure__)))
        used = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
        for n in used:
            if n in src_globals and n not in g: g[n] = map_value(src_globals[n])
        ns = {}
        exec(compile(tree, fname, 'exec'), g, ns)
        self.code = ns[self.pyfn.__name__]; self.tree = tree
    def __call__(self, *a, **k):
        if self.code is None: self.compile()
        return self.code(*a, **k)


def signal_sites(name):
    """Source lines of the kernels run so far that arrive on barrier `name` (arrive, mBarriers, commit, expect, TMA)."""
    out = []
    for kf in _cache.values():
        if kf.code is None or kf.tree is None: continue
        for n in ast.walk(kf.tree):
            if isinstance(n, ast.Call) and _callee(n) in ('barrier_arrive', 'async_dot', 'async_dot_scaled', 'tcgen05_commit', 'barrier_expect_bytes'):
                if any(isinstance(x, ast.Name) and x.id == name for x in ast.walk(n)): out.append(f'{n.lineno} ({_callee(n)})')
    return ', '.join(out) or '(none found)'


def base_fn(k):
    while not inspect.isfunction(k): k = k.fn if hasattr(k, 'fn') else k.__wrapped__
    return k


def kernel(k):
    f = base_fn(k)
    if f not in _cache: _cache[f] = KernelFn(f)
    return _cache[f]


# ------------------------------------------------------------------ host arguments
_TORCH = {'torch.float16': 'fp16', 'torch.bfloat16': 'bf16', 'torch.float32': 'fp32', 'torch.float64': 'fp64',
          'torch.float8_e4m3fn': 'fp8e4nv', 'torch.float8_e5m2': 'fp8e5', 'torch.int8': 'int8', 'torch.uint8': 'uint8',
          'torch.int16': 'int16', 'torch.int32': 'int32', 'torch.int64': 'int64', 'torch.bool': 'int1'}


def _pointer(t, bufs, name):
    if isinstance(t, np.ndarray):
        dt = D.by_name(str(t.dtype)); flat = t.reshape(-1); off = 0; key = (id(t), dt.name)
    else:
        import torch
        dt = D.by_name(_TORCH[str(t.dtype)]); st = t.untyped_storage(); key = (st.data_ptr(), dt.name); off = t.storage_offset()
        flat = None if key in bufs else torch.empty(0, dtype=torch.uint8).set_(st).numpy()
        if flat is not None: flat = flat[:len(flat) // dt.itemsize * dt.itemsize].view(dt.store)
    if key not in bufs: bufs[key] = GlobalBuffer(flat, dt, 0, name)
    return Tensor(np.int64(off), D.PtrType(dt), bufs[key])


_storages = []


def resolve_address(addr, ptype):
    """Pointer arrays (grouped GEMM): map a raw address to the live CPU tensor that owns it."""
    import gc, sys
    torch = sys.modules['torch']
    for fresh in (False, True):
        if fresh:
            _storages[:] = [o.untyped_storage() for o in gc.get_objects() if type(o) is torch.Tensor and o.device.type == 'cpu' and o.layout == torch.strided]
        for st in _storages:
            if st.data_ptr() <= addr < st.data_ptr() + st.nbytes():
                dt = ptype.element_ty
                flat = torch.empty(0, dtype=torch.uint8).set_(st).numpy()
                flat = flat[:len(flat) // dt.itemsize * dt.itemsize].view(dt.store)
                return Tensor(np.int64((addr - st.data_ptr()) // dt.itemsize), ptype, GlobalBuffer(flat, dt, 0, f'tensor@{addr:#x}'))
    raise EmulationError(f'address {addr:#x} belongs to no live CPU tensor')


def host_arg(v, bufs, name):
    if v is None or isinstance(v, (Tensor, str)): return v
    if isinstance(v, bool): return Tensor(np.bool_(v), D.int1)
    if isinstance(v, (int, np.integer)): return as_tensor(int(v))
    if isinstance(v, float): return Tensor(np.float32(v), D.float32)
    if hasattr(v, 'block_shape') and hasattr(v, 'base'):
        return Descriptor(_pointer(v.base, bufs, name), v.shape, v.strides, v.block_shape, getattr(v, 'padding', 'zero') or 'zero', name)
    if hasattr(v, 'data_ptr') or isinstance(v, np.ndarray): return _pointer(v, bufs, name)
    if isinstance(v, (tuple, list)): return tuple(host_arg(x, bufs, name) for x in v)
    return map_value(v)


class Report:
    def __init__(self): self.violations, self.events, self.work, self.ops = [], [], collections.Counter(), collections.Counter(); self.seconds = self.steps = 0; self.deadlock = None
    def errors(self): return [v for v in self.violations if v.level == 'error']
    def __str__(self):
        return '\n'.join([f'{self.seconds*1e3:.0f} ms, {self.steps} scheduler steps, ops {dict(self.ops)}'] + [str(v) for v in self.violations] + ([self.deadlock] if self.deadlock else []))


def launch(k, grid, args=(), kwargs=None, *, seed=0, policy='random', races='report', preempt=0.05, trace=False, sms=2,
           config=None, pick=None, patch=None, arch='sm100', raise_deadlock=True, warp_mode=True, max_steps=20_000_000):
    kwargs = dict(kwargs or {})
    obj = k
    while type(obj).__name__ in ('Autotuner', 'Heuristics', 'StubAutotuner'):
        if hasattr(obj, 'configs'):
            names = list(inspect.signature(base_fn(k)).parameters)
            cfgs = obj.configs
            if getattr(obj, 'early_config_prune', None):
                try: cfgs = obj.early_config_prune(cfgs, dict(zip(names, args)), **kwargs) or cfgs
                except Exception: pass
            cfg = config or (pick(cfgs) if pick else cfgs[0])
            obj.best_config = cfg
            ck = dict(cfg.kwargs)
            nargs = {**dict(zip(names, args)), **kwargs, **ck}
            kwargs.update(ck); kwargs.setdefault('num_warps', cfg.num_warps)
            if getattr(cfg, 'ctas_per_cga', None): kwargs.setdefault('ctas_per_cga', cfg.ctas_per_cga)
            if cfg.pre_hook: cfg.pre_hook(nargs)
        elif hasattr(obj, 'values'):
            for n, f in obj.values.items(): kwargs[n] = f({**dict(zip(inspect.signature(base_fn(k)).parameters, args)), **kwargs})
        obj = obj.fn
    kf = KernelFn(base_fn(k), patch) if patch else kernel(k)
    if patch: _cache[base_fn(k)] = kf
    names = [p.name for p in kf.params]
    num_warps = int(kwargs.get('num_warps') or 4)
    cluster = tuple(kwargs.get('ctas_per_cga') or kwargs.get('cluster_dims') or (1, 1, 1))
    bound = {p.name: p.default for p in kf.params if p.default is not inspect.Parameter.empty}
    bound.update(zip(names, args)); bound.update({n: v for n, v in kwargs.items() if n in names})
    if callable(grid): grid = grid(bound)
    grid = tuple(int(g) for g in grid) + (1,) * (3 - len(grid))
    bufs = {}
    call = {n: (map_value(v) if n in kf.constexpr else host_arg(v, bufs, n)) for n, v in bound.items()}
    rep = Report(); t0 = time.time()
    m = Machine(seed, policy, races, preempt, trace, arch, warp_mode=warp_mode, max_steps=max_steps)
    m.grid, m.num_warps, m.next_name = grid, num_warps, None
    CTX.machine, CTX.work = m, rep.work
    heads = [(x, y, z) for z in range(0, grid[2], cluster[2]) for y in range(0, grid[1], cluster[1]) for x in range(0, grid[0], cluster[0])]
    queue = collections.deque(heads)
    clc = 'clc_' in kf.source
    m.clc_queue = queue if clc else None
    old_err = np.seterr(all='ignore')
    try:
        while queue:
            wave = [queue.popleft() for _ in range(min(len(queue), sms if clc else 1))]
            n = len(wave) * cluster[0] * cluster[1] * cluster[2]
            m.nvc, m.slots, m.free_async, m.tasks, m.ready, m.pending = 128 * max(1, (n + 1) // 2), 0, [], [], [], []
            roots = []
            for h in wave:
                ctas = []
                for dz in range(cluster[2]):
                    for dy in range(cluster[1]):
                        for dx in range(cluster[0]):
                            ctas.append(CTA(m, len(ctas), (h[0] + dx, h[1] + dy, h[2] + dz)))
                for c in ctas:
                    c.cluster = ctas
                    t = Task(m, c, 'main' if n == 1 else f'main{c.pid}', None, num_warps * 32)
                    t.g.run = lambda c=c: kf(**call)
                    t.on_done = None; roots.append(t)
            m.run(roots)
            rep.steps += m.steps
    except DeadlockError as e:
        rep.deadlock = str(e)
        if raise_deadlock: raise
    finally:
        np.seterr(**old_err)
        rep.seconds = time.time() - t0
        rep.wait_stats = {k: tuple(v) for k, v in m.wait_stats.items()}
        rep.violations, rep.events, rep.ops = m.violations, m.events, m.stats
        CTX.machine = None; _storages.clear()
    return rep


class emulate:
    """Context manager: kernel[grid](...) in unmodified host code runs on the emulator."""
    def __init__(self, arch=None, checks=True, **opts):
        opts["races"] = "report" if checks else "off"
        if arch: opts["arch"] = arch
        self.opts, self.reports = opts, []
    def __enter__(self):
        import triton.runtime.jit as J, triton.runtime.autotuner as A
        self.saved = (J.JITFunction.run, A.Autotuner.run, A.Heuristics.run)
        def run(k, /, *args, grid, warmup=False, **kw):
            self.reports.append(launch(k, grid, args, kw, **self.opts))
        J.JITFunction.run = A.Autotuner.run = A.Heuristics.run = run
        return self
    def __exit__(self, *a):
        import triton.runtime.jit as J, triton.runtime.autotuner as A
        J.JITFunction.run, A.Autotuner.run, A.Heuristics.run = self.saved
