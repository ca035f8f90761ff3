"""tlx: cluster launch control - a running cluster cancels the launch of a waiting one and takes its work.

Modelled: the request is asynchronous, its 16-byte answer completes on the full barrier of every CTA of the
cluster, -1 when no cluster waits. The clusters that have not started are the queue.
"""

import types

import numpy as np

from . import dtypes as D
from .barriers import BarrierArray
from .context import CTX
from .errors import EmulationError
from .tile import Tensor
from .tlx_barriers import barrier_arrive, barrier_expect_bytes, barrier_wait

ANSWER_BYTES = 16


class CLCResponses:
    """The answers, one a stage."""

    def __init__(self, num):
        self.slots = [types.SimpleNamespace(value=None) for _ in range(num)]

    def __getitem__(self, i):
        return self.slots[int(i)]


class CLCPipelineContext:
    """Answers and barriers of a ring of requests."""

    def __init__(self, num_stages, num_consumers):
        machine = CTX.machine
        cta = machine.cur.cta
        if machine.arch == "sm_90":
            raise EmulationError("cluster launch control is only available on Blackwell")
        self.empty = BarrierArray(machine, cta, "clc_empty", True, num_stages, num_consumers)
        self.full = BarrierArray(machine, cta, "clc_full", True, num_stages, 1)
        self.responses = CLCResponses(num_stages)
        for bar in self.empty.bars + self.full.bars:
            bar.done_clock.join(machine.cur.clock)
        cta.clc = self
        machine.launch_control = True
        cta.allocated()


def clc_create_context(num_consumers, num_stages=1):
    CTX.machine.next_name = None
    return CLCPipelineContext(int(num_stages), int(num_consumers))


def clc_producer(context, p_producer=None, multi_ctas=False, k=0):
    """Asks for the next cluster (the leader CTA asks, all CTAs expect the answer)."""
    machine = CTX.machine
    cta = machine.cur.cta
    k = int(k)
    if not multi_ctas or cta.rank == 0:
        barrier_wait(context.empty[k], p_producer)
    barrier_expect_bytes(context.full[k], ANSWER_BYTES)
    if multi_ctas and cta.rank:
        return
    peers = cta.cluster if multi_ctas else [cta]

    def run(op):
        head = machine.queue.popleft() if machine.queue else None
        for peer in peers:
            peer.clc.responses.slots[k].value = head
            peer.clc.full.bars[k].complete_bytes(ANSWER_BYTES, op.clock, op.site, ("o", op.id))

    op = machine.issue("clc", f"clc[{k}]", run, info=dict(bytes=ANSWER_BYTES))
    for peer in peers:
        cta.group.visits.note_copy(peer, op, f"writes {op.label}")


def clc_consumer(context, p_consumer=None, multi_ctas=False, k=0, return_3d=False):
    """The program id that the answer names, or -1."""
    k = int(k)
    barrier_wait(context.full[k], p_consumer)
    head = context.responses.slots[k].value
    if head is None:
        ids = (-1, -1, -1)
    else:
        ids = (head[0] + CTX.machine.cur.cta.rank, head[1], head[2])
        barrier_arrive(context.empty[k], 1, 0 if multi_ctas else None)
    ids = tuple(Tensor(np.int32(i), D.int32) for i in ids)
    return ids if return_3d else ids[0]
