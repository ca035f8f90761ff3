"""Indirection so that tile code can count work / trace without importing the machine."""
import collections
import threading


class UnknownConstruct(Exception):
    """A construct that the emulator does not know; the launch reports it with its line."""


class _Ctx(threading.local):
    def __init__(self):
        self.machine = None
        self.work = collections.Counter()
    def count(self, what, n):
        self.work[what] += n
        m = self.machine
        if m is not None and m.cur is not None: m.cur.work[what] += n
    def trace(self, op, what, **kw):
        m = self.machine
        if m is not None: m.trace(op, what, **kw)

    def global_read(self, buf, offsets, mask=None, volatile=False): pass
    def global_write(self, buf, offsets, mask=None): pass
    def global_atomic(self, buf, offsets, mask=None, sem=None, scope=None): pass
    def global_window(self, kind, buf, start, shape, strides): pass
    def ordering(self, op, *args): pass


CTX = _Ctx()
