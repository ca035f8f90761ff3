"""tlx: warp-specialized tasks, and what a task can ask about itself.

Modelled: tasks run concurrently and are the unit of execution; replicas; values captured by value. Not
modelled: divergence inside a warp, register counts (accepted, ignored), the layout of registers.
"""

import numpy as np

from . import dtypes as D
from .agents import Task, Wait
from .context import CTX
from .tile import Tensor, as_tensor
from .tlx_barriers import meet_at_start


class async_task:
    """One task of an async_tasks block: async_task("default") or async_task(num_warps=...)."""

    def __init__(
        self, *args, num_warps=None, num_regs=None, registers=None, replicate=1, warp_group_start_id=None
    ):
        self.default = bool(args) and args[0] == "default"
        self.num_warps = num_warps
        self.replicate = int(replicate)


class async_tasks:
    """Context manager; the rewritten source adds the tasks, leaving it runs them and joins them."""

    def __init__(self, *args, exclusive=False, no_ending_cluster_sync=False, **kwargs):
        self.items = []

    def __enter__(self):
        return self

    def add(self, task, function, line):
        self.items.append((task, function, line))

    def __exit__(self, kind, error, traceback):
        if kind is not None:
            return False
        machine = CTX.machine
        parent = machine.cur
        parent.cta.group.visits.tasks = True
        if len(parent.cta.cluster) > 1:
            meet_at_start()
        children = [
            child for k, item in enumerate(self.items) for child in self.tasks_of(machine, parent, k, *item)
        ]
        parent.tick()
        left = [len(children)]

        def finished(child):
            left[0] -= 1
            parent.clock.join(child.clock)
            if not left[0]:
                machine.wake(parent)

        for child in children:
            child.on_done = lambda child=child: finished(child)
            machine.spawn(child)
        machine.block(lambda: left[0] == 0, list, Wait(what="join"))
        return False

    def tasks_of(self, machine, parent, k, task, function, line):
        warps = machine.num_warps if task.default else int(task.num_warps or 1)
        for replica in range(task.replicate):
            name = "default" if task.default else f"task{k}"
            name += f".{replica}" if task.replicate > 1 else ""
            body = lambda replica=replica: function(replica)  # noqa: E731
            child = Task(machine, parent.cta, f"{name}@L{line}", body, warps * 32, replica)
            child.clock.join(parent.clock)
            yield child


def async_task_replica_id():
    return CTX.machine.cur.replica


def thread_id(axis):
    """The first thread of the task stands for all of them."""
    return Tensor(np.int32(0), D.int32)


def clock64():
    """A counter that only grows; it is not time."""
    return Tensor(np.int64(CTX.machine.sequence()), D.int64)


def cluster_cta_rank():
    return Tensor(np.int32(CTX.machine.cur.cta.rank), D.int32)


def cluster_size_1d():
    return Tensor(np.int32(len(CTX.machine.cur.cta.cluster)), D.int32)


class warp_pipeline_stage:
    """Accepted, no effect (AMD)."""

    def __init__(self, label=None, priority=None):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        return False


def vote_ballot_sync(mask, pred):
    """Ballot of a warp; here the lane of an element is its index modulo 32 (one row a lane on hardware)."""
    p = as_tensor(pred).d != 0
    if p.ndim == 0:
        return Tensor(np.int32(-1 if p else 0), D.int32)
    flat = p.reshape(-1)
    lanes = flat.reshape(-1, 32) if flat.size % 32 == 0 else flat.reshape(1, -1)
    bits = (lanes.astype(np.int64) << np.arange(lanes.shape[1])).sum(1).astype(np.uint32).view(np.int32)
    return Tensor(np.repeat(bits, lanes.shape[1]).reshape(p.shape), D.int32)
