"""A CTA that reaches into a cluster neighbour's shared memory must do so before the neighbour exits."""

import pytest
import torch
import triton
import triton.language as tl
import triton.language.extra.tlx as tlx

from jfa import emulator


@triton.jit
def ring_a_bell(out, WAIT: tl.constexpr, MEET: tl.constexpr):
    """Every CTA arrives at its neighbour's barrier; the neighbour may wait for it, or all meet at the end."""
    bells = tlx.alloc_barriers(1)
    rank = tlx.cluster_cta_rank()
    with tlx.async_tasks():
        with tlx.async_task("default"):
            tl.store(out + rank, rank)
            tlx.barrier_arrive(bells[0], 1, remote_cta_rank=1 - rank)
        with tlx.async_task(num_warps=1, registers=24):
            if WAIT:
                tlx.barrier_wait(bells[0], 0)
    if MEET:
        tlx.cluster_barrier()


def findings(seed, **roles):
    out = torch.zeros(2, dtype=torch.int32)
    with emulator.emulate(arch="sm_90", seed=seed) as emulation:
        ring_a_bell[(2,)](out, num_warps=4, ctas_per_cga=(2, 1, 1), **roles)
    assert out.tolist() == [0, 1]
    return [finding for finding in emulation.reports[0].errors()]


@pytest.mark.parametrize("seed", range(4))
def test_an_arrive_that_nobody_waits_for_may_come_after_the_exit(seed):
    found = findings(seed, WAIT=False, MEET=False)
    assert {finding.kind for finding in found} == {"peer exited"}
    assert "arrives at bells[0]" in str(found[0])
    assert "may have exited" in str(found[0])


@pytest.mark.parametrize("seed", range(4))
def test_a_wait_or_a_cluster_barrier_at_the_end_orders_it(seed):
    assert findings(seed, WAIT=True, MEET=False) == []
    assert findings(seed, WAIT=False, MEET=True) == []
    assert findings(seed, WAIT=True, MEET=True) == []
