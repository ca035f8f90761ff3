"""Asynchronous engines: TMA, tcgen05, wgmma, cp.async, DSMEM, cluster launch control.

An operation is issued now and executed (`run`) when the scheduler completes it. Operations of one in-order
queue (tcgen05 or wgmma of one task) complete in order, the rest in any order. Each operation is an agent of
its own for happens-before: it sees what its issuer had seen, and whoever waits for it sees it. Not modelled:
engine rates, limits on what may be in flight.
"""

from .agents import AsyncOp, Queue, Wait
from .order import Site


class Engines:
    """Issues, completes and waits for the asynchronous operations of one machine."""

    def __init__(self, machine):
        self.machine = machine
        self.runnable = []  # operations that may complete now

    def issue(self, kind, buffer, run, reads=(), writes=(), queue=None, after=None, info=None):
        """Forks an asynchronous operation.

        queue: key of an in-order engine of the CTA, else the operation is unordered. after: an operation that
        must complete first (a later stage of the same copy). The operation executes `run(op)` when it
        completes.
        """
        machine = self.machine
        task = machine.cur
        op = AsyncOp()
        op.kind = kind
        op.buffer = buffer
        op.task = task
        op.run = run
        op.done = False
        op.line = machine.line()
        op.id = machine.sequence()
        op.waiters = []
        op.next = []
        op.site = Site(task, op.line, kind)
        self._clock_in(op, task, queue, after)
        if machine.checks:
            for b in reads:
                machine.order.access(b, False, op.slot, op.epoch, op.clock, op.site)
            for b in writes:
                machine.order.access(b, True, op.slot, op.epoch, op.clock, op.site)
        if op.previous is None:
            self.runnable.append(op)
        else:
            op.previous.next.append(op)
        task.cta.group.in_flight += 1
        machine.ops[kind] += 1
        if machine.tracing:
            machine.tracer.issue(op, info or {})
        return op

    def _clock_in(self, op, task, queue, after):
        """Gives the operation its agent slot, epoch and clock, and orders it after its predecessor."""
        group = task.cta.group
        if queue is not None:
            engine = task.cta.queues.get(queue)
            if engine is None:
                engine = task.cta.queues[queue] = Queue(group)
            engine.clock.join(task.clock)
            engine.clock.widen()
            engine.clock.v[engine.slot] += 1
            op.slot = engine.slot
            op.clock = engine.clock.copy()
            op.previous = engine.last
            engine.last = op
        else:
            base = task.clock if after is None else after.clock
            op.slot, epoch = group.async_slot(base)
            op.clock = base.copy()
            op.clock.widen()
            op.clock.v[op.slot] = epoch
            op.previous = after
        op.epoch = op.clock.v.item(op.slot)
        if op.previous is not None and op.previous.done:
            op.previous = None
        task.tick()

    def complete(self, op):
        """Executes the operation, lets its successor run and wakes who waits for it."""
        machine = self.machine
        machine.since_completion = 0
        machine.progress()
        op.run(op)
        op.done = True
        op.previous = None
        group = op.task.cta.group
        group.in_flight -= 1
        if not group.in_flight and not group.live:
            group.release()
        self.runnable.extend(op.next)
        op.next = ()
        waiters = op.waiters
        op.waiters = []
        for task in waiters:
            machine.wake(task)
        if machine.tracing:
            machine.tracer.done(op)

    def wait_ops(self, ops, what):
        """Blocks until the operations are complete, and orders the task after them."""
        machine = self.machine
        task = machine.cur
        if machine.tracing:
            machine.tracer.event("wait_ops", what, ids=[o.id for o in ops])
        for op in ops:
            if not op.done:
                machine.block(lambda op=op: op.done, lambda op=op: op.waiters, Wait(what=what))
            task.clock.join(op.clock)
