"""What emulated functions know of the launch they run in: one object a thread, CTX.

Language code (tl functions, register tiles, inline PTX) reaches the machine only through CTX, so it can be
used without one (constant folding on the host, unit tests): every hook is then a no-op.
"""

import collections
import threading

from .errors import UnknownConstruct

__all__ = ["CTX", "UnknownConstruct"]


class Context(threading.local):
    """State of a thread: the machine of the launch in progress, its work counters, the active emulations."""

    def __init__(self):
        self.machine = None
        self.work = collections.Counter()
        self.emulations = []

    def count(self, what, n):
        """Adds n units of work (elements, bytes or FLOP) to the running task."""
        machine = self.machine
        if machine is None:
            return
        self.work[what] += n
        task = machine.cur
        if task is not None:
            task.work[what] += n

    def trace(self, op, what, **info):
        """Records one operation of the running task when tracing is on."""
        if self.machine is not None:
            self.machine.trace(op, what, **info)

    def global_read(self, buf, offsets, mask=None, volatile=False):
        """A load of buf.flat[offsets]; a volatile one may be a poll, so it yields (it is not atomic)."""
        if self.machine is not None:
            self.machine.globals.pointer_access("V" if volatile else "R", buf, offsets, mask)
            if volatile:
                self.machine.globals.acquire(buf, offsets, mask, "relaxed")
                self.machine.poll()

    def global_write(self, buf, offsets, mask=None, value=None):
        """A store of `value` (bit patterns) to the elements buf.flat[offsets]; call it before the store."""
        if self.machine is not None:
            self.machine.globals.pointer_access("W", buf, offsets, mask, value)

    def global_atomic(self, buf, offsets, mask=None, sem=None, scope=None):
        """A read-modify-write of buf.flat[offsets], ordering as `sem` says; call it before the update."""
        if self.machine is not None:
            self.machine.poll()
            self.machine.globals.atomic(buf, offsets, mask, sem, scope)

    def global_window(self, kind, buf, start, shape, strides):
        """A descriptor access ('R', 'W', or 'A' for a reduction) to a strided window; units are elements."""
        if self.machine is not None:
            self.machine.globals.window_access(kind, buf, start, shape, strides)

    def ordering(self, op, *args):
        """Inline PTX that orders memory; ptx_order.py lists the operations."""
        if self.machine is not None:
            self.machine.ordering(op, *args)


CTX = Context()
