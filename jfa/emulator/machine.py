"""The scheduler: runs the tasks and asynchronous operations of one launch in a seeded order.

Policies: "eager" (an asynchronous effect lands at once), "lazy" (as late as possible), "random" (seeded, with
task preemption at synchronization points). CTAs of the grid run interleaved, `resident` clusters at a time;
when one finishes the next starts. Modelled: any order that barriers allow. Not modelled: time (see
jfa.timing).
"""

import collections
import random
import sys

from greenlet import getcurrent

from .agents import Group, Task, Wait
from .deadlock import check_byte_counts, describe_deadlock, unsettled_barriers
from .engines import Engines
from .errors import EmulationError, EndlessError
from .global_order import GlobalOrder
from .kernels import user_line
from .mangling import Bodies
from .memory import SMEM_BYTES, TMEM_COLUMNS, TMEM_PITCH
from .order import OnChipOrder, Site
from .ordering import order_by_ptx
from .report import Findings
from .trace import Tracer

RESIDENT = 8  # clusters that run interleaved
RESIDENT_WITH_CLC = 2
COMPLETE_SHARE = 0.15  # random policy: share of steps that complete an operation while tasks could run
LOOP_TURNS = 2**18  # turns of one loop of a kernel; with a smaller max_steps that many, but at least the next
LEAST_LOOP_TURNS = 10_000
IDLE_POLLS = 5_000  # polls of every task without any progress: a livelock


class Machine:
    """State of one launch. `cur` is the running task."""

    def __init__(
        self, grid, num_warps, seed=0, policy="random", checks=True, preempt=0.05, trace=False, arch=None
    ):
        self.grid = grid
        self.num_warps = num_warps
        self.rng = random.Random(seed)
        self.policy = policy
        self.checks = checks
        self.preempt = preempt
        self.arch = arch
        self.tracing = bool(trace)
        self.tracer = Tracer(self)
        self.findings = Findings()
        self.order = OnChipOrder(self.findings)
        self.globals = GlobalOrder(self)
        self.bodies = Bodies(self.findings)
        self.ops = collections.Counter()
        self.waits = collections.defaultdict(lambda: [0, 0])
        self.hub = None
        self.cur = None
        self.tasks = []
        self.ready = []
        self.engines = Engines(self)
        self.runnable = self.engines.runnable
        self.issue = self.engines.issue
        self.wait_ops = self.engines.wait_ops
        self.complete = self.engines.complete
        self.groups = 0
        self.live_groups = 0
        self.queue = collections.deque()  # clusters that have not started
        self.host_storages = []  # host tensors that raw addresses may point into
        self.steps = 0
        self.unsettled = []  # barriers that were owed bytes when their cluster ended
        self.next_name = None
        self.launch_control = False  # set by the first use of cluster launch control
        self.many_ctas = grid != (1, 1, 1)
        self._sequence = 0
        self._idle_polls = 0
        self.loop_turns = LOOP_TURNS
        self.since_completion = 0

    # ---- run
    def prepare(self, kernel, functions):
        """kernel runs the kernel's body for the current task, functions gives the functions it can reach."""
        self.kernel = kernel
        self.functions = functions

    def run(self, heads, cluster, resident, max_steps):
        """Executes the clusters whose first CTAs are `heads`, at most `resident` (or RESIDENT) at a time."""
        self.hub = getcurrent()
        self.queue = collections.deque(heads)
        self.cluster = cluster
        self.resident = resident
        self.loop_turns = max(LEAST_LOOP_TURNS, min(LOOP_TURNS, max_steps))
        while self.tasks or self.runnable or self.queue:
            self.steps += 1
            if self.steps > max_steps:
                raise EndlessError(f"more than {max_steps} scheduler steps", self.findings.list)
            self.step()
        check_byte_counts(self, self.unsettled)

    def room(self):
        """True when one more cluster may start; launch control needs some that have not started."""
        default = RESIDENT_WITH_CLC if self.launch_control else RESIDENT
        return self.live_groups < (default if self.resident is None else self.resident)

    def start_group(self):
        """Starts the next cluster of the grid."""
        x, y, z = self.queue.popleft()
        cx, cy, cz = self.cluster
        pids = [(x + i, y + j, z + k) for k in range(cz) for j in range(cy) for i in range(cx)]
        group = Group(self, self.groups, pids)
        self.groups += 1
        self.live_groups += 1
        for cta in group.ctas:
            first = Task(self, cta, "main", self.kernel, self.num_warps * 32)
            cta.born = (first.slot, first.epoch)
            self.spawn(first)

    def step(self):
        """One turn: a cluster may start, then a task runs to where it blocks, or an operation completes."""
        if self.queue and self.room():
            self.start_group()
        if not self.ready:
            if not self.runnable:
                self.fail_deadlock()
            self.complete(self.pick_op())
        elif not self.runnable:
            self.run_task()
        elif self.policy == "eager":
            self.complete(self.pick_op())
        elif self.policy == "random":
            if self.rng.random() < COMPLETE_SHARE:
                self.complete(self.pick_op())
            else:
                self.run_task()
        elif self._idle_polls > 4 * len(self.ready) or self.since_completion > 64 + 16 * len(self.tasks):
            self.complete(self.pick_op())  # lazy, but a task may poll for this operation
        else:
            self.run_task()

    def pick_op(self):
        i = self.rng.randrange(len(self.runnable)) if self.policy == "random" else 0
        return self.runnable.pop(i)

    def run_task(self):
        self.since_completion += 1
        i = self.rng.randrange(len(self.ready)) if self.policy == "random" else 0
        task = self.ready.pop(i)
        if task.done:
            return
        self.cur = task
        task.greenlet.switch()
        self.cur = None
        if task.greenlet.dead and not task.done:
            self.finish(task)

    def finish(self, task):
        task.warp_sync()
        task.done = True
        self.progress()
        self.tasks.remove(task)
        if any(not read.done or not read.saw(task.clock) for read, _ in task.stores):
            lines = sorted({read.line for read, _ in task.stores})
            self.findings.add(
                "unwaited store",
                f"{task.name} exits while TMA stores of line {', '.join(map(str, lines))} may still "
                f"read shared memory (no async_descriptor_store_wait)",
                task=task,
                line=lines[0],
                key=("unwaited store", tuple(lines)),
            )
        group = task.cta.group
        group.live -= 1
        group.visits.leave(task)
        if task.on_done:
            task.on_done()
        if group.live == 0:
            self.finish_group(group)

    def finish_group(self, group):
        self.live_groups -= 1
        if self.checks:
            group.visits.judge(self.findings)
        self.unsettled += unsettled_barriers(group)
        if not group.in_flight:
            group.release()

    def spawn(self, task):
        self.tasks.append(task)
        self.ready.append(task)
        task.cta.group.live += 1

    def close(self):
        """Ends tasks that have not finished (after an error), so that nothing of the launch stays alive."""
        self.cur = None
        for task in self.tasks:
            if task.greenlet and not task.greenlet.dead:
                task.greenlet.throw()
        self.tasks = []

    # ---- blocking
    def wake(self, task):
        if task.wait is not None:
            task.wait = None
            self.ready.append(task)

    def block(self, condition, waiters, wait):
        """Suspends the running task until condition() holds; waiters() is the list to join meanwhile."""
        task = self.cur
        while not condition():
            task.wait = wait
            task.line = self.line()
            waiters().append(task)
            self.hub.switch()

    def block_on(self, condition, waitable, wait):
        self.block(condition, lambda: waitable.waiters, wait)

    def wait_for_setup(self, cta, condition):
        """Waits until a peer CTA has allocated what the running task refers to."""
        if self.cur is not None and not condition():
            self.block(
                condition, lambda: cta.setup_waiters, Wait(what=f"the set-up of cluster CTA {cta.rank}")
            )

    def maybe_preempt(self):
        task = self.cur
        if self.preempt and task is not None and self.rng.random() < self.preempt:
            self.ready.append(task)
            self.hub.switch()

    def poll(self):
        """A point where a task may spin: always yields when it comes twice in a row from one line."""
        task = self.cur
        if task is None:
            return
        line = self.line()
        if task.poll_line != line:
            task.poll_line = line
            self.maybe_preempt()
            return
        task.line = line
        self._idle_polls += 1
        if self._idle_polls > IDLE_POLLS * max(1, len(self.tasks)):
            task.wait = Wait(what="a value in global memory that never comes (spins)")
            self.fail_deadlock()
        self.ready.append(task)
        self.hub.switch()

    def progress(self):
        self._idle_polls = 0

    def fail_deadlock(self):
        raise describe_deadlock(self)

    def sequence(self):
        self._sequence += 1
        return self._sequence

    def ordering(self, op, *args):
        """Effect of inline PTX on ordering; see ordering.py."""
        order_by_ptx(self, op, *args)

    # ---- accesses and reports
    def line(self):
        """Line of the kernel that runs now."""
        return user_line(sys._getframe(1))

    def task_access(self, buffer, write):
        """An ordinary load or store of the running task to on-chip memory."""
        if not self.checks:
            return
        task = self.cur
        storage = buffer.storage
        line = self.line()
        generic = task if write else None
        if storage.kind == "tmem":
            if storage.cta is not task.cta:
                raise EmulationError(f"{task.name} (line {line}) accesses tensor memory of another CTA")
            if task.threads > 128 and buffer.shape[1] % (task.threads // 128) == 0:
                self._warp_group_access(task, buffer, write, line, generic)
                return
        self.order.access(buffer, write, task.slot, task.epoch, task.clock, Site(task, line), generic)

    def _warp_group_access(self, task, buffer, write, line, generic):
        """Warps w and w+4 of a task share lanes and split the columns; only explicit syncs order them."""
        slots = task.warp_groups()
        width = buffer.shape[1] // len(slots)
        for g, slot in enumerate(slots):
            part = buffer.derive(g * width * buffer.strides[1], (buffer.shape[0], width))
            clock = task.clock.copy()
            clock.widen()
            clock.v[slot] = task.epoch
            self.order.access(part, write, slot, task.epoch, clock, Site(task, line, part=g), generic)

    def check_capacity(self, cta, kind):
        """Total on-chip memory of a CTA against what the hardware has."""
        used = sum(s.least for s in cta.storages if s.kind == kind)
        if kind == "tmem" and used > TMEM_PITCH:
            message = f"tensor memory: {used // 4} columns allocated, a CTA has {TMEM_COLUMNS}"
        elif kind != "tmem" and used > SMEM_BYTES:
            message = f"shared memory: {used} bytes allocated, a CTA has {SMEM_BYTES}"
        else:
            return
        line = self.line()
        self.findings.add(
            "capacity", f"{message} (line {line})", task=self.cur, line=line, key=("capacity", kind, line)
        )

    def violation(self, kind, message, level="error"):
        """A finding of the running task, at the line that runs."""
        line = self.line()
        task = self.cur
        where = f" ({task.name}, CTA {task.cta.pid}, line {line})" if task is not None else ""
        self.findings.add(kind, message + where, level, task=task, line=line, key=(kind, message, line))

    def trace(self, op, what, **info):
        return self.tracer.event(op, what, **info) if self.tracing else None
