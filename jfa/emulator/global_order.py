"""Happens-before on global memory: conflicting accesses of different CTAs (and of different tasks of one).

Two overlapping accesses of which one writes are a race unless one is ordered before the other or both are
atomic (tl.atomic_* and TMA reductions; a volatile load is not atomic: its lanes may see different values).
Ordering between CTAs comes from atomics with acquire and release semantics, from relaxed ones together with
fence.acq_rel.gpu, and inside a cluster from mbarriers. A complete bulk store (or reduction) must besides have
been shown to other CTAs by a fence of its own task (ordering.py): else what follows it there is a "store not
visible". Reads of memory that the launch never writes cost next to nothing: they are only logged until the
first write to the same tensor.
"""

import numpy as np

from .clock import Clock
from .order import Site
from .regions import Shadow, of_pointers, window

READS = "RV"
LANES = "the lanes of the reading warps may see different values"
HARMLESS = {"RR", "RV", "VR", "VV", "AA", "AZ", "ZA", "ZZ"}
BULK_WRITES = {"tma_store_write", "tma_reduce_write", "bulk_store_write"}
WORDS = {
    "R": "read",
    "V": "volatile read",
    "W": "write",
    "A": "atomic update",
    "Z": "addition of zeros",
}
LARGE = 64  # atomics on more elements than this synchronize through one variable a tensor


class Access:
    """One access to a page. kind: R, V (volatile read), W, A (atomic), Z (atomic, adds zero: a warning)."""

    __slots__ = ("kind", "group", "slot", "epoch", "mask", "site")

    def __init__(self, kind, group, slot, epoch, mask, site):
        self.kind = kind
        self.group = group
        self.slot = slot
        self.epoch = epoch
        self.mask = mask
        self.site = site


def _same_bits(flat, offsets, mask, value):
    """True when memory already holds the bit patterns `value`."""
    old = np.asarray(flat[np.asarray(offsets) if mask is None else np.asarray(offsets)[mask]])
    new = np.asarray(value if mask is None else np.broadcast_to(value, np.shape(offsets))[mask])
    return (
        np.ascontiguousarray(old).tobytes() == np.ascontiguousarray(np.broadcast_to(new, old.shape)).tobytes()
    )


def _shown(record, clock, site):
    """False for a complete bulk store of another CTA whose task has passed no fence that `clock` has seen."""
    store = record.site
    if store.op not in BULK_WRITES or store.task.cta is site.task.cta:
        return True
    return store.shown is not None and clock.saw(record.group, store.task.slot, store.shown)


class GlobalOrder:
    """Checks every access to global memory of one launch."""

    def __init__(self, machine):
        self.machine = machine
        self.findings = machine.findings
        self.shadows = {}
        self.stored = None  # tells whether the store in progress leaves memory as it is

    def shadow(self, buf):
        """The shadow of a buffer's host allocation, and the buffer's byte offset in it."""
        if buf.shadow is None:
            buf.shadow = self.find_shadow(buf)
        return buf.shadow

    def find_shadow(self, buf):
        owner = buf.root.flat
        while isinstance(owner.base, np.ndarray):
            owner = owner.base
        key = owner.__array_interface__["data"][0]
        found = self.shadows.get(key)
        itemsize = buf.flat.itemsize
        if found is None:
            found = self.shadows[key] = Shadow(buf.name, min(4, itemsize))
        elif itemsize < found.grain and not found.written:
            found.refine(itemsize)
        offset = buf.flat.__array_interface__["data"][0] - key
        return found, offset

    # ---- entry points
    def pointer_access(self, kind, buf, offsets, mask, value=None):
        """An access of the running task through pointers; value: what a store writes."""
        if not self.machine.checks:
            return
        task = self.machine.cur
        site = Site(task, self.machine.line())
        if value is not None:
            self.stored = lambda: _same_bits(buf.flat, offsets, mask, value)
        self.pointers(kind, buf, offsets, mask, task.slot, task.epoch, task.clock, site)

    def op_pointer_access(self, kind, op, buf, offsets, mask):
        """An access of an asynchronous operation through pointers."""
        if self.machine.checks:
            self.pointers(kind, buf, offsets, mask, op.slot, op.epoch, op.clock, op.site)

    def pointers(self, kind, buf, offsets, mask, slot, epoch, clock, site):
        shadow, base = self.shadow(buf)
        region = of_pointers(offsets, mask, buf.flat.itemsize, base)
        self.record(kind, shadow, region, slot, epoch, clock, site)
        self.stored = None

    def window_access(self, kind, buf, start, shape, strides):
        """A synchronous descriptor access of the running task; start and strides in elements."""
        if not self.machine.checks:
            return
        task = self.machine.cur
        self.window(
            kind,
            buf,
            start,
            shape,
            strides,
            task.slot,
            task.epoch,
            task.clock,
            Site(task, self.machine.line()),
        )

    def op_access(self, kind, op, buf, window):
        """An access of an operation to a window (start, shape, strides) in elements; None: all is clipped."""
        if window is not None and self.machine.checks:
            self.window(kind, buf, *window, op.slot, op.epoch, op.clock, op.site)

    def op_reduction(self, op, buf, window, value):
        """A TMA reduction of `value` (its part inside the window); where it adds zero it changes nothing."""
        if window is None or not self.machine.checks:
            return
        zero = value == 0
        if not zero.any():
            self.op_access("A", op, buf, window)
            return
        start, shape, strides = window
        offsets = np.int64(start)
        for axis, (n, stride) in enumerate(zip(shape, strides)):
            steps = np.arange(n, dtype=np.int64) * (stride if n > 1 else 0)
            offsets = offsets + steps.reshape((n,) + (1,) * (len(shape) - 1 - axis))
        self.op_pointer_access("A", op, buf, offsets, ~zero)
        self.op_pointer_access("Z", op, buf, offsets, zero)

    def window(self, kind, buf, start, shape, strides, slot, epoch, clock, site):
        shadow, base = self.shadow(buf)
        region = window(start, shape, strides, buf.flat.itemsize, base)
        self.record(kind, shadow, region, slot, epoch, clock, site)

    # ---- records
    def record(self, kind, shadow, region, slot, epoch, clock, site):
        if not shadow.written:
            if kind in READS:
                shadow.log_read(region, clock.group.id, slot, epoch, site)
                return
            self.unroll_log(shadow)
        for page, mask in shadow.page_masks(region):
            self.check_page(kind, shadow, page, mask, slot, epoch, clock, site)

    def unroll_log(self, shadow):
        """First write to a tensor: the reads until now become records."""
        shadow.written = True
        for (region, group, slot, epoch), site in shadow.logged.items():
            for page, mask in shadow.page_masks(region):
                shadow.pages.setdefault(page, []).append(Access("R", group, slot, epoch, mask, site))
        shadow.logged = {}

    def check_page(self, kind, shadow, page, mask, slot, epoch, clock, site):
        records = shadow.pages.get(page)
        if records is None:
            shadow.pages[page] = [Access(kind, clock.group.id, slot, epoch, mask, site)]
            return
        keep = []
        for r in records:
            if r.mask & mask:
                complete = clock.saw(r.group, r.slot, r.epoch)
                ordered = complete and _shown(r, clock, site)
                if not ordered and kind + r.kind not in HARMLESS:
                    (self.not_visible if complete else self.race)(kind, shadow, site, r)
                if (
                    ordered and r.kind == kind
                ) or kind == "W":  # whoever conflicts with r conflicts with this access too
                    r.mask &= ~mask
            if r.mask:
                keep.append(r)
        keep.append(Access(kind, clock.group.id, slot, epoch, mask, site))
        shadow.pages[page] = keep

    def race(self, kind, shadow, site, record):
        other_cta = record.site.task.cta.pid
        same = kind + record.kind == "WW" and self.stored is not None and self.stored()
        self.findings.add(
            "global race",
            f"{WORDS[kind]} of {shadow.name} by {site} is not ordered after the {WORDS[record.kind]} "
            f"by {record.site}"
            + (f", CTA {other_cta}" if other_cta != site.task.cta.pid else "")
            + (" (both write the same value)" if same else "")
            + (f" ({LANES})" if kind in READS or record.kind in READS else ""),
            "warning" if same or "Z" in kind + record.kind else "error",
            task=site.task,
            line=site.line,
            buffer=shadow.name,
            key=(
                "global race",
                kind,
                record.kind,
                shadow.name,
                site.line,
                site.op,
                record.site.line,
                record.site.op,
                same,
            ),
        )

    def not_visible(self, kind, shadow, site, record):
        self.findings.add(
            "store not visible",
            f"{WORDS[kind]} of {shadow.name} by {site} can come before the {WORDS[record.kind]} by "
            f"{record.site}: cp.async.bulk.wait_group has made that visible to its own task only, and on an "
            f"H200 such a store has overtaken the next CTA's add in a few lines of cold memory; between that "
            f"wait and the word to the other CTA the storing task needs fence.proxy.async or "
            f"fence.acq_rel.cluster",
            "warning" if "Z" in kind + record.kind else "error",
            task=site.task,
            line=site.line,
            buffer=shadow.name,
            key=("not visible", kind, record.kind, shadow.name, site.line, site.op, record.site.line),
        )

    # ---- synchronization through global memory
    def atomic(self, buf, offsets, mask, sem, scope):
        """A read-modify-write: an access of kind A, and acquire and release as `sem` says."""
        self.pointer_access("A", buf, offsets, mask)
        sem = _sem(sem)
        self.acquire(buf, offsets, mask, sem)
        self.release(buf, offsets, mask, sem, scope)

    def acquire(self, buf, offsets, mask, sem):
        """Reads a synchronization variable: what was released there is seen, at once or by the next fence."""
        if not self.machine.checks:
            return
        task = self.machine.cur
        shadow, base = self.shadow(buf)
        for key in self.variables(buf, base, offsets, mask):
            for clock in shadow.released.get(key, ()):
                if sem in ("acquire", "acq_rel"):
                    task.clock.join(clock)
                else:
                    task.observed = (task.observed or []) + [clock]

    def release(self, buf, offsets, mask, sem, scope=None):
        """Writes a synchronization variable: releases the task's clock, or its clock at the last fence."""
        if not self.machine.checks:
            return
        task = self.machine.cur
        if sem in ("release", "acq_rel"):
            if _name(scope) != "cta":
                task.show_stores()
            clock = task.published().copy()
        elif task.released is not None:
            clock = task.released
        else:
            return
        shadow, base = self.shadow(buf)
        for key in self.variables(buf, base, offsets, mask):
            _merge(shadow.released.setdefault(key, []), clock)
        task.tick()

    def variables(self, buf, base, offsets, mask):
        offsets = np.asarray(offsets)
        if mask is not None:
            offsets = offsets[np.asarray(mask)]
        if offsets.size > LARGE:
            return [None]
        itemsize = buf.flat.itemsize
        return [int(o) * itemsize + base for o in np.unique(offsets)]


def _name(option):
    return str(getattr(option, "value", option) or "").lower()


def _sem(sem):
    name = _name(sem)
    return name if name in ("acquire", "release", "relaxed") else "acq_rel"


def _merge(clocks, clock):
    """Adds a clock to what a variable has released; one entry a group."""
    for i, c in enumerate(clocks):
        if c.group is clock.group:
            merged = Clock(c.group, c.v.copy(), dict(c.far) if c.far else None)
            merged.join(clock)
            clocks[i] = merged
            return
    clocks.append(clock)
