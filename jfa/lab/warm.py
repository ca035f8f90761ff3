"""Fill the compilers' caches before anything is timed: every kernel variant once, in several processes."""

import concurrent.futures
import functools
import math
import multiprocessing
import time

import torch

from jfa.lab import bench, child, measure, ours
from jfa.lab.cases import Case, make_inputs
from jfa.lab.peers import PEERS, REMOTE

OURS = ("jfa", "jfa_baseline")
# FlashAttention-4 keeps what it compiled where FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=1 asks it to.
THEIRS = ("fa4",)
LONG = 10  # beyond a mean length of 2 ** LONG keys no choice is expected to change


def kind_of(case: Case, name: str = "jfa"):
    """What decides which variants a case compiles: shapes, and for our choice by length its mean length."""
    if name in THEIRS:
        masks = (case.causal, case.window, case.dtype)
        return (case.suite == "dense", case.packed, case.M <= 128, case.Hq // case.Hkv, case.D, *masks)
    if case.suite != "jagged":
        return case
    mean = min(math.ceil(math.log2(max(float(case.lengths().double().mean()), 1))), LONG)
    return (case.M, case.B, case.Hq, case.Hkv, case.D, case.causal, case.window, case.dtype, mean)


def one_of_a_kind(chosen: list[Case], name: str = "jfa") -> list[Case]:
    """The smallest case of every kind."""
    found = {}
    for case in sorted(chosen, key=lambda case: case.N * case.density):
        found.setdefault(kind_of(case, name), case)
    return list(found.values())


def jobs_of(options) -> list[tuple]:
    """(case, implementation, scopes) to run once, the slow compilers first."""
    chosen = bench.selected(options)
    jobs = [(case, name) for case in chosen for name in bench.impls_of(case, options) if name in REMOTE]
    for name in THEIRS:
        users = [case for case in chosen if name in bench.impls_of(case, options)]
        jobs += [(case, name) for case in one_of_a_kind(users, name)]
    for case in one_of_a_kind(chosen):
        names = [name for name in bench.impls_of(case, options) if name in OURS]
        jobs += [(case, name) for name in [*names, *options.steps]]
    return jobs


def once(case: Case, name: str, directions, scopes, device: str = "cuda") -> str:
    """Run one implementation once, forward and backward; gives "" or what was wrong."""
    try:
        if name in REMOTE:
            with child.Child() as process:
                answer = process.prepare(case, directions, scopes, False)
                return "; ".join(sorted({reason for reason in answer["functions"].values() if reason}))
        make = PEERS.get(name)
        if make is None:
            make = functools.partial(ours.prepare, step=ours.named_step(name))
        inputs = make_inputs(case, device)
        for scope in scopes:
            run = make(inputs, scope)
            run.forward()
            run.backward()
        ours.schedule_maker(inputs)
        return ""
    except Exception as error:
        return measure.told(error)
    finally:
        if device != "cpu":
            run = inputs = None
            torch.cuda.empty_cache()  # the other processes need the memory


def fill(options) -> int:
    """Run every job in ``options.compile`` processes and say what failed."""
    start = time.monotonic()
    jobs = jobs_of(options)
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(options.compile, mp_context=spawn) as pool:
        rest = (options.direction, options.scope, options.device)
        waiting = {pool.submit(once, case, name, *rest): (case, name) for case, name in jobs}
        for future in concurrent.futures.as_completed(waiting):
            if future.exception() or future.result():
                case, name = waiting[future]
                reason = future.exception() or future.result()
                print(f"{case.suite} M={case.M} N={case.N} s={case.density} {name}: {reason}", flush=True)
    print(f"{len(jobs)} jobs in {time.monotonic() - start:.0f} s", flush=True)
    return 0
