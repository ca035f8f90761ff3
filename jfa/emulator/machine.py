"""The machine: CTAs, tasks (greenlets), SMEM/TMEM storage, barriers, asynchronous engines,
vector-clock race detection, deadlock reports, trace."""
import collections
import itertools
import random
import sys
import numpy as np
from greenlet import greenlet, getcurrent
from .context import CTX

TMEM_PITCH = 2048            # bytes per lane: 512 columns x 4 B
SMEM_GRAIN = 16
_POISON = 0xFF               # NaN in every float type used here


class EmulationError(Exception): pass
class DeadlockError(EmulationError): pass
class RaceError(EmulationError): pass


class Violation:
    def __init__(self, kind, msg, level='error'): self.kind, self.msg, self.level, self.count = kind, msg, level, 1
    def __str__(self): return f'[{self.level}] {self.kind}: {self.msg}' + (f'  (x{self.count})' if self.count > 1 else '')


# ---------------------------------------------------------------- memory
class Storage:
    """A block of SMEM (bytes) or TMEM (128 lanes x 2048 B) that one or several allocations alias."""
    def __init__(self, cta, kind, name):
        self.cta, self.kind, self.name = cta, kind, name
        self.size = TMEM_PITCH * 128 if kind == 'tmem' else 0
        self.bytes = np.full(self.size, _POISON, np.uint8)
        self.used = 0             # bytes (smem) / bytes per lane (tmem)
        self.written = 0          # bitmask of granules ever written
        self.recs = []            # access history for race detection
        self.masks = {}; self.grain = None
    def grow(self, n):
        self.used = max(self.used, n)
        if self.kind == 'smem' and n > self.size:
            nb = np.full(n, _POISON, np.uint8); nb[:self.size] = self.bytes
            self.bytes, self.size = nb, n
        if self.kind == 'tmem' and n > TMEM_PITCH:
            raise EmulationError(f'TMEM allocation {self.name} needs {n//4} columns > 512')
    def mask(self, off, shape, strides, itemsize):
        if self.grain is None: self.grain = SMEM_GRAIN if self.size > 8192 else 4      # small buffers need exact granules
        key = (off, shape, strides, itemsize)
        m = self.masks.get(key)
        if m is None:
            a = np.array([off], np.int64)
            for n, s in zip(shape, strides): a = (a[:, None] + np.arange(n, dtype=np.int64) * s).ravel()
            if itemsize > SMEM_GRAIN: raise ValueError
            if self.kind == 'smem': g = a // self.grain
            else: g = (a // TMEM_PITCH // 32) * 512 + (a % TMEM_PITCH) // 4
            bits = np.zeros(int(g.max()) + 1, np.uint8); bits[g] = 1
            m = self.masks[key] = int.from_bytes(np.packbits(bits, bitorder='little').tobytes(), 'little')
        return m


class Alloc:
    def __init__(self, name, storage, shape, dtype, num):
        self.name, self.storage, self.shape, self.dtype, self.num = name, storage, tuple(shape), dtype, num
        it = dtype.itemsize
        if storage.kind == 'tmem':
            if len(shape) != 2: raise EmulationError(f'TMEM buffer {name} must be 2D')
            rows, cols = shape
            self.unit = cols * it * max(1, -(-rows // 128))          # bytes per lane per buffer
        else:
            self.unit = int(np.prod(shape)) * it
        self.base, self.stride, self.group = 0, self.unit, 1
        self.nbytes_total = self.unit * num
    def offset(self, i):
        return self.base + (i // self.group) * self.stride + (i % self.group) * self.unit


class View:
    """A memdesc: strided window over a Storage.  idx labels the buffer index for messages."""
    __slots__ = ('alloc', 'storage', 'off', 'shape', 'strides', 'dtype', 'idx')
    def __init__(self, alloc, storage, off, shape, strides, dtype, idx):
        self.alloc, self.storage, self.off, self.shape, self.strides, self.dtype, self.idx = \
            alloc, storage, off, tuple(shape), tuple(strides), dtype, idx
    @property
    def label(self): return f'{self.alloc.name}[{self.idx}]'
    @property
    def nbytes(self): return int(np.prod(self.shape)) * self.dtype.itemsize
    def np(self, storage=None):
        s = storage or self.storage
        last = self.off + sum((n - 1) * t for n, t in zip(self.shape, self.strides)) + self.dtype.itemsize
        if self.off < 0 or last > s.size: raise EmulationError(f'{self.label}: view outside its allocation')
        return np.ndarray(self.shape, self.dtype.store, s.bytes, self.off, self.strides)
    def mask(self): return self.storage.mask(self.off, self.shape, self.strides, self.dtype.itemsize)
    def on(self, cta):
        """The same view in another CTA of the cluster (same allocation order)."""
        if self.storage.cta is cta: return self
        k, m = self.storage.cta.storages.index(self.storage), cta.m
        if m.cur is not None: m.block(lambda: len(cta.storages) > k and cta.storages[k].used >= self.storage.used, f'allocation in cluster CTA {cta.rank}', cta)
        st = cta.storages[k]
        return View(self.alloc, st, self.off, self.shape, self.strides, self.dtype, self.idx)


# ---------------------------------------------------------------- barriers
class MBarrier:
    def __init__(self, m, cta, name, idx, count, warp=False):
        self.m, self.cta, self.name, self.idx, self.count, self.warp = m, cta, name, idx, count, warp
        self.pending, self.tx, self.phase = count, 0, 0
        self.vc, self.done_vc = m.new_vc(), m.new_vc()
        self.log = collections.deque(maxlen=6); self.contrib = []
    @property
    def label(self): return f'{self.name}[{self.idx}]' + (f'@cta{self.cta.rank}' if len(self.cta.cluster) > 1 else '')
    def passed(self, parity): return (self.phase & 1) != (parity & 1)
    def arrive(self, n, vc, who, src=None):
        self.contrib.append(src)
        if n > self.pending:
            self.m.violation('barrier over-arrival', f'{who} arrives {n} on {self.label} (phase {self.phase}) but only '
                             f'{self.pending} of {self.count} arrivals are outstanding')
        self.pending -= n
        np.maximum(self.vc, vc, out=self.vc)
        self.log.append(f'{who} arrive({n}) phase {self.phase}')
        self.check()
    def expect(self, nbytes): self.tx += nbytes
    def complete_tx(self, nbytes, vc, who, src=None):
        self.contrib.append(src)
        self.tx -= nbytes
        np.maximum(self.vc, vc, out=self.vc)
        self.log.append(f'{who} complete_tx({nbytes}) phase {self.phase}')
        self.check()
    def check(self):
        if self.pending <= 0 and self.tx == 0:
            np.maximum(self.done_vc, self.vc, out=self.done_vc)
            self.phase += 1
            self.pending += self.count
            self.m.trace_raw('phase_done', self.label, None, key=(id(self), self.phase - 1), src=self.contrib); self.contrib = []
            for t in self.m.tasks:
                w = t.wait
                if w is not None and w[0] is self:
                    if self.phase - w[2] >= 2:
                        self.m.violation('phase overrun', f'{t.name} waits for phase {w[2]} of {self.label} but the barrier '
                                         f'already completed phase {self.phase-1}: the parity wait can hang on hardware')
                    self.m.wake(t)
    def state(self):
        return (f'phase {self.phase} in progress: {self.count-self.pending}/{self.count} arrivals'
                + (f', {self.tx} bytes outstanding' if self.tx else '')
                + (f'; last: {" | ".join(self.log)}' if self.log else '; never signalled'))


class BarrierArray:
    def __init__(self, bars, name): self.bars, self.name, self.num = bars, name, len(bars)
    def __getitem__(self, i):
        i = int(i)
        if not 0 <= i < len(self.bars): raise EmulationError(f'barrier index {i} out of range for {self.name}[{len(self.bars)}]')
        return self.bars[i]


class NamedBarrier:
    def __init__(self, m, cta, bid): self.m, self.cta, self.id = m, cta, bid; self.arrived = 0; self.gen = 0; self.vc = m.new_vc(); self.done_vc = m.new_vc(); self.need = None; self.who = []; self.contrib = []
    label = property(lambda s: f'named_barrier({s.id})')
    def arrive(self, task, need, src=None):
        self.contrib.append(src)
        if self.need not in (None, need) and self.arrived:
            self.m.violation('named barrier', f'{task.name}: {self.label} used with {need} threads, another party uses {self.need}')
        self.need = need
        self.arrived += task.threads
        if task.name in self.who:
            self.m.violation('named barrier', f'{task.name} arrives twice at {self.label} before it completes', 'warning')
        self.who.append(task.name)
        np.maximum(self.vc, task.vc, out=self.vc)
        if self.arrived > need:
            self.m.violation('named barrier', f'{self.label}: {self.arrived} threads arrived, {need} expected')
        if self.arrived >= need:
            np.maximum(self.done_vc, self.vc, out=self.done_vc)
            self.m.trace_raw('phase_done', self.label, None, key=(id(self), self.gen), src=self.contrib); self.contrib = []
            self.gen += 1; self.arrived = 0; self.who = []
            for t in self.m.tasks:
                if t.wait is not None and t.wait[0] is self: self.m.wake(t)
    def state(self): return f'{self.arrived}/{self.need} threads arrived (from {", ".join(self.who) or "nobody"})'


# ---------------------------------------------------------------- agents
class Task:
    def __init__(self, m, cta, name, fn, threads=128, replica=0):
        self.m, self.cta, self.name, self.threads, self.replica = m, cta, name, threads, replica
        self.slot = m.new_slot(); self.vc = m.new_vc()
        self.wait = None; self.done = False; self.children = 0
        self.work = collections.Counter()
        self.stores, self.copies, self.dots = [], [], []        # outstanding bulk stores / cp.async groups / wgmmas
        self.fence_epoch = 0; self.last_work = {}; self.subs = None
        self.tick()
        self.g = greenlet(fn, m.hub)
    def tick(self): self.vc[self.slot] += 1
    def warp_sync(self):
        """All warps of the task synchronise (bar.sync, or the one the compiler puts before an mbarrier arrive)."""
        if self.subs:
            for s in self.subs: self.vc[s] = self.vc[self.slot]
            self.tick()
    def published(self):
        """Clock that a release makes visible: includes all warp groups of the task."""
        if not self.subs: return self.vc
        v = self.vc.copy()
        for s in self.subs: v[s] = self.vc[self.slot]
        return v
    def join(self, vc): np.maximum(self.vc, vc, out=self.vc)


class AsyncOp:
    __slots__ = ('kind', 'label', 'task', 'run', 'vc', 'slot', 'epoch', 'prev', 'done', 'line', 'id', 'waiters', 'reads', 'writes')


class CTA:
    def __init__(self, m, rank, pid):
        self.m, self.rank, self.pid = m, rank, pid
        self.cluster = [self]
        self.storages, self.bar_arrays, self.named = [], [], {}
        self.chan = {}; self.live = 0; self.cluster_bar = None
    def named_bar(self, i):
        if i not in self.named: self.named[i] = NamedBarrier(self.m, self, i)
        return self.named[i]


class Machine:
    """policy: 'eager' (async effects land at once), 'lazy' (as late as possible), 'random' (seeded)."""
    def __init__(self, seed=0, policy='random', races='report', preempt=0.05, trace=False, arch='sm100', max_steps=20_000_000, warp_mode=True):
        self.rng = random.Random(seed); self.policy, self.races, self.preempt = policy, races, preempt
        self.tracing, self.arch, self.warp_mode = trace, arch, warp_mode
        self.events, self.violations, self._vkeys = [], [], {}
        self.nvc = 64; self._vcs = []; self.slots = 0
        self.hub = None; self.tasks = []; self.ready = []; self.pending = []
        self.free_async = []                 # async slots: (slot, last op) reused when HB-ordered
        self.cur = None; self.seq = itertools.count(); self.stats = collections.Counter()
        self.clc_queue = None; self._last_poll = -1; self.max_steps = max_steps
        self.wait_stats = collections.defaultdict(lambda: [0, 0])     # wait line -> [executed, added ordering]

    # -- vector clocks
    def new_slot(self):
        self.slots += 1
        if self.slots > self.nvc:
            raise EmulationError(f"more than {self.nvc} concurrent agents: asynchronous operations are issued without ever being waited for")
        return self.slots - 1
    def new_vc(self): return np.zeros(self.nvc, np.int32)

    # -- reporting
    def line(self):
        from .frontend import user_line
        return user_line(sys._getframe(1))
    def violation(self, kind, msg, level='error'):
        v = self._vkeys.get((kind, msg))
        if v: v.count += 1; return
        v = self._vkeys[(kind, msg)] = Violation(kind, msg, level); self.violations.append(v)
        if level == 'error' and self.races == 'raise': raise RaceError(str(v))
    def trace(self, op, what, **kw):
        if not self.tracing: return None
        t, q = self.cur, next(self.seq)
        w = {k: v - t.last_work.get(k, 0) for k, v in t.work.items() if v != t.last_work.get(k, 0)}
        if w: kw['work'] = w; t.last_work = dict(t.work)
        self.events.append((q, t.cta.pid, t.name, op, what, self.line(), kw))
        return q
    def trace_raw(self, op, what, task, **kw):
        if self.tracing: self.events.append((next(self.seq), task.cta.pid if task else None, task.name if task else '-', op, what, None, kw))

    # -- race detection
    def access(self, view, kind, slot, epoch, vc, desc, generic, fence_check=None):
        if self.races == 'off': return
        st = view.storage; mask = view.mask(); recs = st.recs
        keep = []
        for r in recs:
            ov = r[3] & mask
            if not ov: keep.append(r); continue
            if (kind == 'W' or r[0] == 'W') and r[2] > vc[r[1]] and r[1] != slot:
                a = 'write' if kind == 'W' else 'read'; b = 'write' if r[0] == 'W' else 'read'
                other = '' if r[5] == view.label else f' through alias {r[5]}'
                self.violation('race', f'{a} of {view.label} by {desc} is not ordered after the {b} by {r[4]}{other}')
            elif fence_check and r[0] == 'W' and r[6] is not None and r[6].fence_epoch < r[2] and st.kind == 'smem':
                self.violation('proxy fence', f'{desc} reads {view.label} through the async proxy; {r[4]} wrote it with '
                               f'ordinary stores and no fence("async_shared") since (the compiler may add one)', 'warning')
            if kind == 'R' and r[0] == 'W' and r[7].name != view.alloc.name:
                self.violation('alias', f'{desc} reads {view.label}, but those bytes were last written as {r[5]} by {r[4]}', 'warning')
            if kind == 'W' or (r[0] == 'R' and r[1] == slot):
                r[3] &= ~mask
                if r[3]: keep.append(r)
            else: keep.append(r)
        st.recs = keep
        if kind == 'W': st.written |= mask
        elif mask & ~st.written:
            self.violation('uninitialised read', f'{desc} reads {view.label} before anything was written there', level='note')
            st.written |= mask
        keep.append([kind, slot, epoch, mask, desc, view.label, generic, view.alloc])
    def task_access(self, view, kind):
        t = self.cur
        if view.storage.cta is not t.cta and view.storage.kind == 'tmem': raise EmulationError('TMEM of another CTA')
        d = f'{t.name} (line {self.line()})'
        if view.storage.kind == 'tmem' and t.threads > 128 and self.warp_mode and view.shape[1] % (t.threads // 128) == 0:
            # 8-warp tasks: warps w and w+4 share lanes and split the columns; they are only ordered by explicit syncs
            n = t.threads // 128
            if t.subs is None: t.subs = [self.new_slot() for _ in range(n)]
            w = view.shape[1] // n
            for g in range(n):
                part = View(view.alloc, view.storage, view.off + g * w * view.strides[1], (view.shape[0], w), view.strides, view.dtype, view.idx)
                vc = t.vc.copy(); vc[t.subs[g]] = t.vc[t.slot]
                self.access(part, kind, t.subs[g], t.vc[t.slot], vc, d + f' warp group {g}', t if kind == 'W' else None)
            return
        self.access(view, kind, t.slot, t.vc[t.slot], t.vc, d, t if kind == 'W' else None)

    # -- scheduling
    def wake(self, t):
        t.wait = None
        if t not in self.ready: self.ready.append(t)
    def block(self, cond, *info):
        """Suspend the current task until cond() holds."""
        t = self.cur
        while not cond():
            t.wait = info
            t.line = self.line()
            self.hub.switch()
        t.wait = None
    def maybe_preempt(self):
        t = self.cur
        if self.preempt and t is not None and self.rng.random() < self.preempt:
            self.ready.append(t); self.hub.switch()
    def spawn(self, task):
        self.tasks.append(task); self.ready.append(task); task.cta.live += 1
    def _step_task(self):
        i = self.rng.randrange(len(self.ready)) if self.policy == 'random' else 0
        t = self.ready.pop(i)
        if t.done: return
        self.cur = t
        t.g.switch()
        self.cur = None
        if t.g.dead and not t.done:
            t.warp_sync(); t.done = True; t.cta.live -= 1; self.tasks.remove(t)
            if t.stores and any(not o.done for o in t.stores):
                self.violation('unwaited store', f'{t.name} exits with TMA stores in flight (no async_descriptor_store_wait)', 'warning')
            if t.on_done: t.on_done()
    def run(self, roots):
        self.hub = getcurrent()
        for t in roots: t.g.parent = self.hub; self.spawn(t)
        n = 0
        while True:
            n += 1
            if n > self.max_steps: raise EmulationError('step limit')
            ops = [o for o in self.pending if o.prev is None or o.prev.done] if self.pending else ()
            if self.ready and ops and self.policy == 'random':
                if self.rng.random() < 0.15: self._complete(self.rng.choice(ops))
                else: self._step_task()
            elif self.ready and not (ops and self.policy == 'eager'): self._step_task()
            elif ops: self._complete(ops[0] if self.policy != 'random' else self.rng.choice(ops))
            elif self.tasks:
                w = [t for t in self.tasks if t.wait and len(t.wait) > 1 and isinstance(t.wait[1], CTA)]
                have = sum(len(c.bar_arrays) + len(c.storages) for c in {t.cta for t in self.tasks})
                if not w or have == self._last_poll: self.deadlock()          # no allocation happened since the last retry
                self._last_poll = have
                for t in w: self.wake(t)
            else: break
        self.steps = n
    def _complete(self, op):
        self.pending.remove(op)
        op.run(op)
        op.done = True
        for t in op.waiters: self.wake(t)
        self.trace_raw('done:' + op.kind, op.label, op.task, id=op.id)
    def deadlock(self):
        out = ['no task can run and no asynchronous operation is in flight:']
        for t in self.tasks:
            w = t.wait
            if w is None: continue
            if isinstance(w[0], MBarrier):
                out.append(f'  {t.name} (CTA {t.cta.pid}) line {t.line}: waits for {w[0].label} parity {w[1]} (phase {w[2]}); barrier is in {w[0].state()}')
            elif isinstance(w[0], NamedBarrier):
                out.append(f'  {t.name} (CTA {t.cta.pid}) line {t.line}: waits at {w[0].label}; {w[0].state()}')
            elif w[0] != 'join': out.append(f'  {t.name} (CTA {t.cta.pid}) line {t.line}: waits for {w[0]}')
        from .frontend import signal_sites
        done = set()
        for t in self.tasks:
            b = t.wait[0] if t.wait else None
            if isinstance(b, MBarrier) and b.name not in done:
                done.add(b.name)
                out.append(f'  {b.name} is signalled by source lines {signal_sites(b.name)}')
        raise DeadlockError('\n'.join(out))

    # -- asynchronous operations
    def issue(self, kind, label, run, reads=(), writes=(), channel=None, info=None):
        """Fork an asynchronous agent.  channel: in-order engine key (tcgen05 / wgmma), else unordered."""
        t = self.cur
        op = AsyncOp(); op.kind, op.label, op.task, op.run, op.done, op.prev = kind, label, t, run, False, None
        op.line = self.line(); op.id = next(self.seq); op.waiters = []
        if channel is not None:
            ch = t.cta.chan.get(channel)
            if ch is None: ch = t.cta.chan[channel] = [self.new_slot(), self.new_vc(), None]
            np.maximum(ch[1], t.vc, out=ch[1])
            op.slot = ch[0]; ch[1][op.slot] += 1; op.vc = ch[1].copy(); op.prev = ch[2]; ch[2] = op
            if op.prev is not None and op.prev.done: op.prev = None
        else:
            for i, (slot, epoch) in enumerate(self.free_async):
                if epoch <= t.vc[slot]:
                    self.free_async[i] = (slot, epoch + 1); op.slot, ep = slot, epoch + 1; break
            else:
                op.slot, ep = self.new_slot(), 1; self.free_async.append((op.slot, 1))
            op.vc = t.vc.copy(); op.vc[op.slot] = ep
        op.epoch = op.vc[op.slot]
        t.tick()
        d = f'{kind} issued by {t.name} (line {op.line})'
        fc = kind in ('mma', 'wgmma', 'mma_scaled', 'tmem_copy', 'dsmem_copy')     # the compiler fences TMA stores by itself
        for v in reads: self.access(v, 'R', op.slot, op.epoch, op.vc, d, None, fence_check=fc)
        for v in writes: self.access(v, 'W', op.slot, op.epoch, op.vc, d, None)
        self.pending.append(op)
        self.stats[kind] += 1
        if self.tracing: self.trace('issue', label, id=op.id, kind=kind, **(info or {}))
        return op
    def wait_ops(self, ops, what):
        t = self.cur
        if self.tracing: self.trace('wait_ops', what, ids=[o.id for o in ops])
        for o in ops:
            if not o.done:
                o.waiters.append(t)
                self.block(lambda: o.done, what)
            t.join(o.vc)
