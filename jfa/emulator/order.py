"""Happens-before on shared and tensor memory: races, clobbered aliases, missing initialization and fences.

Every access leaves a record (who, at which epoch, which granules). Two overlapping accesses of which one
writes are a race unless the later one's clock has seen the earlier one; this does not depend on the schedule
that happened to run. Modelled as ordering: mbarriers, named and cluster barriers, waits for asynchronous
operations, the in-order queues of tcgen05 and wgmma. The unit is the task (for tensor memory its warp
groups), not the thread.
"""

import bisect

FENCED = {"mma", "wgmma", "mma_scaled", "tmem_copy", "dsmem_copy"}
FENCED_ACROSS = {"tma_store", "tma_reduce"}  # the compiler fences what the storing task itself has written


class Site:
    """Who accesses, for messages; rendered only when a finding needs it."""

    __slots__ = ("task", "line", "op", "part", "shown")

    def __init__(self, task, line, op=None, part=None):
        self.task = task
        self.line = line
        self.op = op
        self.part = part
        self.shown = None  # of a bulk store: its task's epoch at the fence that showed it to other CTAs

    def __str__(self):
        cta = f" of CTA {self.task.cta.pid}" if self.task.cta.machine.many_ctas else ""
        if self.op is not None:
            return f"{self.op} issued by {self.task.name}{cta} (line {self.line})"
        part = f" warp group {self.part}" if self.part is not None else ""
        return f"{self.task.name}{part}{cta} (line {self.line})"


class Record:
    """One access to a storage that a later access may conflict with."""

    __slots__ = ("write", "slot", "epoch", "mask", "site", "buffer", "generic")

    def __init__(self, write, slot, epoch, mask, site, buffer, generic):
        self.write = write
        self.slot = slot
        self.epoch = epoch
        self.mask = mask
        self.site = site
        self.buffer = buffer
        self.generic = generic  # the task when written with ordinary stores, else None


def fenced(writer, record, seen) -> bool:
    """Whether the writer's first fence after a record is among what a reader has seen of the writer."""
    later = bisect.bisect_right(writer.fences, record.epoch)
    return later < len(writer.fences) and writer.fences[later] <= seen.item(record.slot)


class OnChipOrder:
    """Checks every access to on-chip memory of one launch and reports to `findings`."""

    def __init__(self, findings):
        self.findings = findings

    def access(self, buffer, write, slot, epoch, clock, site, generic=None, reads_result=False):
        """Checks one access of agent `slot` at `epoch` with `clock`, then records it."""
        storage = buffer.storage
        mask = buffer.mask()
        if len(clock.v) < clock.group.width:
            clock.widen()
        seen = clock.v
        keep = []
        for r in storage.records:
            overlap = r.mask & mask
            if not overlap:
                keep.append(r)
                continue
            if (write or r.write) and r.slot != slot and r.epoch > seen.item(r.slot):
                self.race(buffer, write, site, r)
            elif not write and r.write:
                self.check_read(buffer, site, r, storage, seen)
            if write or (not r.write and r.slot == slot):
                r.mask &= ~mask
                if r.mask:
                    keep.append(r)
            else:
                keep.append(r)
        if write:
            storage.written |= mask
            buffer.alloc.written |= mask
        elif mask & ~storage.written:
            self.uninitialised(buffer, site, storage)
            storage.written |= mask
        keep.append(Record(write, slot, epoch, mask, site, buffer, generic))
        storage.records = keep

    def race(self, buffer, write, site, record):
        one = "write" if write else "read"
        other = "write" if record.write else "read"
        alias = "" if record.buffer.label == buffer.label else f" through alias {record.buffer.label}"
        self.findings.add(
            "race",
            f"{one} of {buffer.label} by {site} is not ordered after the {other} by {record.site}{alias}",
            task=site.task,
            line=site.line,
            buffer=buffer.label,
            key=(
                "race",
                write,
                record.write,
                site.line,
                site.op,
                record.site.line,
                record.site.op,
                buffer.alloc.name,
            ),
        )

    def check_read(self, buffer, site, record, storage, seen):
        """A properly ordered read after a write: is it the right data, and visible to the async proxy?

        Visible is what the writer fenced before the release that the reader (who has ``seen`` it) waited for.
        """
        writer = record.generic
        if (
            writer is not None
            and storage.kind == "smem"
            and (site.op in FENCED or (site.op in FENCED_ACROSS and writer is not site.task))
            and not fenced(writer, record, seen)
        ):
            self.findings.add(
                "proxy fence",
                f"{site} reads {buffer.label} through the async proxy; {record.site} wrote it with "
                f"ordinary stores and "
                f'no fence("async_shared") between (the compiler may add one)',
                "warning",
                task=site.task,
                line=site.line,
                buffer=buffer.label,
                key=("proxy fence", site.line, record.site.line, buffer.alloc.name),
            )
        if record.buffer.alloc is not buffer.alloc and buffer.alloc.written & record.mask & buffer.mask():
            # (never written under its own name: it is just another view of the same tile)
            self.findings.add(
                "alias clobber",
                f"{site} reads {buffer.label}, but those bytes were last written as "
                f"{record.buffer.label} by {record.site}",
                task=site.task,
                line=site.line,
                buffer=buffer.label,
                key=(
                    "alias clobber",
                    site.line,
                    record.site.line,
                    buffer.alloc.name,
                    record.buffer.alloc.name,
                ),
            )

    def uninitialised(self, buffer, site, storage):
        """An accumulator may be read before its first MMA (and then be overwritten): only a note there."""
        level = "note" if storage.kind == "tmem" and site.op is None else "error"
        self.findings.add(
            "uninitialised read",
            f"{site} reads {buffer.label} before anything was written there",
            level,
            task=site.task,
            line=site.line,
            buffer=buffer.label,
            key=("uninitialised read", site.line, buffer.alloc.name),
        )
