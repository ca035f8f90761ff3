"""Ordering instructions that kernels write as inline PTX.

cp.async.bulk.wait_group N waits until all but the last N bulk stores of the task are complete, so that their
global writes are ordered before what follows; with .read it only waits until they have read their source in
shared memory. A complete bulk store is visible to the task that waited for it, and to its CTA; other CTAs may
see it once this task has passed a fence that reaches beyond the CTA: fence.acq_rel at cluster, gpu or sys
scope, membar.gl, fence.proxy.async without a state space (the assembler puts a MEMBAR of the GPU in front of
that one only), an atomic with release semantics, the cluster barrier. An arrive on another CTA's mbarrier is
no such fence: on an H200 a store that was followed by it alone has overtaken the other CTA's add.

fence.acq_rel at gpu (or sys) scope makes the relaxed atomics around it release and acquire, as in the PTX
memory model; at cta or cluster scope it adds nothing that crosses clusters (inside a cluster the mbarriers
order). fence.proxy.async makes ordinary writes to shared memory visible to the async proxy. Not modelled: the
proxy of global memory (a missing fence.proxy.async between a global store and a TMA load of it is not
reported), a fence by another task of the CTA than the one that waited (it shows nothing here).
"""

from .errors import UnknownConstruct

WIDE_SCOPES = ("gpu", "sys")
BEYOND_CTA = ("cluster", *WIDE_SCOPES)
MAX_STORES = 64


def order_by_ptx(machine, op, *args):
    """Applies one ordering instruction to the running task."""
    task = machine.cur
    if op == "bulk_wait":
        wait_stores(machine, int(args[0]), bool(args[1]))
    elif op == "bulk_commit":
        pass  # every emulated bulk store is its own group
    elif op == "fence":
        fence(task, *args)
    elif op == "proxy_fence":
        task.tick()
        task.fences.append(task.epoch)
        if args[0] == "all":
            task.show_stores()
    elif op == "cp_async_commit":
        commit_copies(task)
    elif op == "cp_async_wait":
        wait_copies(machine, int(args[0]))
    elif op == "yield":
        machine.poll()
    elif op != "griddepcontrol":  # one grid at a time: nothing to wait for, nothing to launch
        raise UnknownConstruct(f"ordering instruction {op}")


def wait_stores(machine, pending, read_only):
    """Waits until at most `pending` bulk stores of the task have not read their source (or not completed)."""
    task = machine.cur
    n = len(task.stores) - pending
    machine.trace("store_wait", pending, read_only=read_only)
    if n <= 0:
        return
    what = f"TMA stores (at most {pending} pending)"
    machine.wait_ops([read if read_only else write for read, write in task.stores[:n]], what)
    if read_only:  # a later full wait must still find the write stage; older ones are long complete
        task.stores = task.stores[-MAX_STORES:]
    else:
        task.hidden += [write.site for _, write in task.stores[:n]]
        task.stores = task.stores[n:]


def commit_copies(task):
    """Closes a cp.async group; returns it."""
    group = [op for op in task.copies if not isinstance(op, list)]
    task.copies = [op for op in task.copies if isinstance(op, list)] + [group]
    return group


def wait_copies(machine, pending):
    """Waits until at most `pending` committed cp.async groups are in flight."""
    task = machine.cur
    n = max(0, len(task.copies) - pending)
    for group in task.copies[:n]:
        machine.wait_ops(group if isinstance(group, list) else [group], "cp.async groups")
    task.copies = task.copies[n:]


def fence(task, scope, semantics="acq_rel"):
    """fence.acq_rel: later relaxed writes release what came before, earlier relaxed reads acquire.

    semantics: "acq_rel", or "acquire" or "release" for one half of it.
    """
    if semantics != "acquire" and scope in BEYOND_CTA:
        task.show_stores()
    if scope not in WIDE_SCOPES:
        return
    if semantics != "release" and task.observed is not None:
        for clock in task.observed:
            task.clock.join(clock)
        task.observed = None
    if semantics != "acquire":
        task.released = task.published().copy()
        task.tick()
