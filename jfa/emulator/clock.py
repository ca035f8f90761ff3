"""Vector clocks: who has seen which point of whose program.

The CTAs of one cluster form a group whose agents (tasks, in-order engines, single asynchronous operations)
share a dense clock. What a group knows of other groups is rare (it passes only through atomics on global
memory) and therefore kept apart, in `far`: {group id: array}.
"""

import numpy as np


class Clock:
    """A vector clock of one group: v[slot] is the last epoch of agent `slot` that is ordered before now."""

    __slots__ = ("group", "v", "far")

    def __init__(self, group, v=None, far=None):
        self.group = group
        self.v = np.zeros(group.width, np.int32) if v is None else v
        self.far = far

    def copy(self):
        return Clock(self.group, self.v.copy(), dict(self.far) if self.far else None)

    def widen(self):
        """Makes room for agents that were created after this clock."""
        width = self.group.width
        if len(self.v) < width:
            wide = np.zeros(width, np.int32)
            wide[: len(self.v)] = self.v
            self.v = wide

    def join(self, other):
        """Everything that `other` has seen is seen here too."""
        if other.group is self.group:
            if len(other.v) == len(self.v):
                np.maximum(self.v, other.v, out=self.v)
            else:
                self.widen()
                n = len(other.v)
                np.maximum(self.v[:n], other.v, out=self.v[:n])
        else:
            self._join_far(other.group.id, other.v)
        if other.far:
            for group, v in other.far.items():
                self._join_far(group, v)

    def _join_far(self, group, v):
        if group == self.group.id:
            n = len(v)
            if len(self.v) < n:
                self.widen()
            np.maximum(self.v[:n], v, out=self.v[:n])
            return
        if self.far is None:
            self.far = {}
        mine = self.far.get(group)
        if mine is None:
            self.far[group] = v.copy()
        elif len(mine) >= len(v):
            merged = mine.copy()
            np.maximum(merged[: len(v)], v, out=merged[: len(v)])
            self.far[group] = merged
        else:
            merged = v.copy()
            np.maximum(merged[: len(mine)], mine, out=merged[: len(mine)])
            self.far[group] = merged

    def covers(self, other):
        """True when everything in `other` (a clock of the same group) is seen here already."""
        if other.far:
            return False
        if len(self.v) == len(other.v):
            return not (other.v > self.v).any()
        n = min(len(self.v), len(other.v))
        return not (other.v[:n] > self.v[:n]).any() and not other.v[n:].any()

    def saw(self, group, slot, epoch):
        """True when epoch `epoch` of agent `slot` of group id `group` is ordered before now."""
        if group == self.group.id:
            return slot < len(self.v) and epoch <= self.v.item(slot)
        far = self.far.get(group) if self.far else None
        return far is not None and slot < len(far) and epoch <= far.item(slot)
