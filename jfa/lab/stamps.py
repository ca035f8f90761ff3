"""Stamp the clock inside a kernel: what the consumer groups of a forward step do with their time.

    python -m jfa.lab.stamps --output figures/10_stamps.csv        (on an H200)

A profiler's stall reasons count all warps, also those that have no role. Here the first thread of each role
reads its SM's clock at chosen points and writes it down. For that the kernel's text is edited (as in
`jfa.lab.ablation`); its answers stay the same. It gets slower, and ptxas orders some instructions otherwise:
it moves arithmetic over a stamp, and the end of a product, but neither barriers nor a product's start. So a
softmax and the product under it are one span. A wait is for the loader or the other group, and for the other
warps of the group, which the compiler has meet there; a wait for V inside the loop lies in the span of S.
"""

import argparse
import functools
import re
import sys
import time
from unittest import mock

import numpy as np
import torch
import triton
import triton.language as tl
import triton.language.extra.tlx as tlx

from jfa.kernels.hopper import launch
from jfa.lab import ablation, counters, measure
from jfa.lab.cases import shape_text
from jfa.lab.targets import Target, prepare, step_of

ROOM = tl.constexpr(512)  # items, and blocks of keys, of a CTA that are stamped; later ones are not
LANES = tl.constexpr(5)  # items of both groups, blocks of both groups, items of the loader
POINTS = tl.constexpr(8)
SKIPPED = 2  # items at either end of a CTA's work, where its pipeline fills and drains
SHOWN = range(20, 23)  # items of the timeline
GROUPS, LOADER = ("group 0", "group 1"), "loader"

EMPTY, Q, K, V, TURN = "two stamps", "wait for Q", "wait for K", "wait for V", "wait for the turn"
SCORES, SOFTMAX, LAST = "S = Q K", "softmax, O += P V", "last O += P V"
NEXT, WRITE, LOAD = "next item", "write O", "load an item"
WHAT = (EMPTY, Q, K, V, TURN, SCORES, SOFTMAX, LAST, NEXT, WRITE)
WAITS = (Q, K, V, TURN)


@triton.jit
def mark(stamps, LANE: tl.constexpr, i, POINT: tl.constexpr):
    """Write the SM's clock down as one of the points of a lane's i-th item or block."""
    at = ((tl.program_id(0) * LANES + LANE) * ROOM + i) * POINTS + POINT
    tl.store(stamps + at, tlx.clock64(), i < ROOM)


def _around(line: str, before=(), after=(), count: int = 1) -> tuple[str, str, int]:
    """The edit that puts stamps before and after the lines, ``count`` of them, that begin so."""
    first, then = ("".join(rf"\1{stamp}\n" for stamp in stamps) for stamps in (before, after))
    return rf"(?m)^( +){re.escape(line)}[^\n]*\n", rf"{first}\g<0>{then}", count


def _stamps(text: str, count: int) -> list[str]:
    return [f"mark({text}, {point})" for point in range(count)]


_ITEM = _stamps("group.stamps, group.ME, turn", 6)
_BLOCK = _stamps("group.stamps, 2 + group.ME, item", 6)
_LOAD = _stamps("stamps, 4, turn", 2)
EDITS = [
    ablation.imported("jfa.lab.stamps", "mark"),
    (r"    PINGPONG: tl\.constexpr\n\n", "    PINGPONG: tl.constexpr\n    stamps: tl.tensor\n\n", 1),
    (r"(DTYPE, SOFTMAX, PINGPONG)\)", r"\1, stamps)", 2),
    (r"(\n    scale,)(\n    HEADS: tl)", r"\1\n    stamps,\2", 1),
    (r"def load\(\n", "def load(\n    stamps,\n", 1),
    (r"LOAD\(", "LOAD(stamps, ", 1),
    _around("slot = group.q.await_full(q_item)", _ITEM[:2], _ITEM[2:3]),
    _around("t = HEAR(deal, turn + 1)", _ITEM[3:4], _ITEM[4:5]),
    _around("FINISH(group, ", (), _ITEM[5:]),
    _around("slot = group.k.await_full(item)", _BLOCK[:1], _BLOCK[1:2], count=2),
    _around("scores = tlx.async_dot(q, ", _BLOCK[2:3], count=2),
    _around("scores = tlx.async_dot_wait(", (), _BLOCK[3:4], count=2),
    _around("slot = group.v.await_full(item)", _BLOCK[4:5], _BLOCK[5:6]),
    _around("PUBLISH(deal, turn + 1, ahead)", _LOAD[:1]),
    _around("before = tile", (), _LOAD[1:]),
]


def stamped(target: Target, device: str = "cuda"):
    """A function that runs a forward target with stamps, and the tensor that it writes them to.

    The tensor is (CTAs, LANES, ROOM, POINTS) int64, clocks of each CTA's SM, 0 where nothing was stamped.
    """
    step = ablation.edited(step_of(target), EDITS)
    kernel = sys.modules[step.consume.fn.__module__].kernel
    programs = launch.multiprocessors(torch.device(device))
    shape = (programs, LANES.value, ROOM.value, POINTS.value)
    stamps = torch.zeros(shape, dtype=torch.int64, device=device)
    plain = prepare(target, device)
    call = functools.partial(plain.func, *plain.args, **plain.keywords | {"step": step})

    def with_stamps(_, grid, *arguments, **constants):
        kernel[grid](*arguments, stamps=stamps, **constants)

    def run():
        with mock.patch.object(launch, "launch", with_stamps):
            return call()

    return run, stamps


# ------------------------------------------------------------------------------------------ reading stamps


def spans(stamps: np.ndarray):
    """Yield (lane, item, what, begin, end) of one CTA, from its (LANES, ROOM, POINTS) stamps, in clocks.

    A group's spans follow each other without a gap, from its first item to its last one that has all stamps.
    """
    for number, lane in enumerate(GROUPS):
        items, blocks = stamps[number], stamps[2 + number]
        first = 0
        for item, (begin, nothing, q, attended, heard, written, *_) in enumerate(items):
            mine = blocks[first:][(blocks[first:, 0] > q) & (blocks[first:, 0] < attended)]
            if not (begin and written and len(mine) and mine[-1, 5]):
                break
            if item:
                yield lane, item, NEXT, items[item - 1][5], begin
            yield lane, item, EMPTY, begin, nothing
            yield lane, item, Q, nothing, q
            came = q
            for block, after in zip(mine, [*mine[1:, 0], mine[-1, 4]]):
                yield lane, item, K, came, block[1]
                yield lane, item, TURN, block[1], block[2]
                yield lane, item, SCORES, block[2], block[3]
                yield lane, item, SOFTMAX, block[3], after
                came = after
            yield lane, item, V, came, mine[-1, 5]
            yield lane, item, LAST, mine[-1, 5], attended
            yield lane, item, NEXT, attended, heard
            yield lane, item, WRITE, heard, written
            first += len(mine)
    for item, (begin, end, *_) in enumerate(stamps[4]):
        if begin and end:
            yield LOADER, item, LOAD, begin, end


def means(stamps: np.ndarray) -> tuple[dict[str, tuple[float, float]], int]:
    """What a group does -> its clocks and its spans an item, means over all groups; and how many items.

    ``stamps``: (CTAs, LANES, ROOM, POINTS). The first and last items of a group do not count.
    """
    clocks, count, items = dict.fromkeys(WHAT, 0), dict.fromkeys(WHAT, 0), 0
    for one in stamps:
        found = list(spans(one))
        for lane in GROUPS:
            mine = [span for span in found if span[0] == lane]
            kept = range(SKIPPED, max((span[1] for span in mine), default=0) - SKIPPED + 1)
            items += len(kept)
            for _, item, what, begin, end in mine:
                if item in kept:
                    clocks[what] += int(end - begin)
                    count[what] += 1
    return {what: (clocks[what] / max(items, 1), count[what] / max(items, 1)) for what in WHAT}, items


def timeline(stamps: np.ndarray, items=SHOWN) -> list[dict]:
    """Columns of spans: the groups of a CTA work on some items; and what the loader does meanwhile."""
    each = list(spans(stamps))
    groups = [span for span in each if span[0] in GROUPS and span[1] in items]
    start, stop = min(span[3] for span in groups), max(span[4] for span in groups)
    groups += [span for span in each if span[0] == LOADER and span[3] < stop and span[4] > start]
    return [
        {"kind": "span", "what": what, "lane": lane, "item": item}
        | {"begin": int(begin - start), "clocks": int(end - begin), "spans": 1}
        for lane, item, what, begin, end in groups
    ]


# ------------------------------------------------------------------------------------------------- on a GPU

TIMELINE = Target("forward", "staged", M=512, density=0.1)  # whose spans are kept one by one
SHAPES = (*(target for target in counters.CALLED if target.direction == "forward"), TIMELINE)


def recorded(chosen=SHAPES, rounds: int = 9, busy_s: float = 0.1):
    """Yield a row for each shape and thing that a group does, then a row a span of the timeline's CTA."""
    shown = []
    for target in chosen:
        plain, (run, stamps) = prepare(target), stamped(target)
        functions = {"plain": plain, "stamped": run}
        options = {"sample_ms": 5.0, "settle_ms": measure.SETTLE_MS, "warmup_ms": 20}
        with measure.Monitor() as monitor:  # before the warm-up: it takes a while until it sees
            whole, slow = measure.interleave(functions, rounds, graph=True, monitor=monitor, **options)
        begun = time.monotonic()
        while time.monotonic() - begun < busy_s:  # the clock that a working GPU has
            run()
        stamps.zero_()
        run()
        found = stamps.cpu().numpy()
        slower = slow["ms_p50"] / whole["ms_p50"]
        about = {name: whole[name] for name in ("ms_p50", "timer", *measure.PROVENANCE)}
        average, items = means(found)
        columns = {**target.columns(), **about, "slower": slower, "items": items}
        for what, (clocks, count) in average.items():
            yield columns | {"kind": "mean", "what": what, "clocks": clocks, "spans": count}
        if target == TIMELINE:
            shown += [columns | span for span in timeline(found[0])]
    yield from shown


def show(row: dict) -> str:
    """A row as a line."""
    spent = f"{row['clocks']:8.0f} clocks in {row['spans']:.1f} spans an item"
    return f"{shape_text(row):<22} {row['what']:<18} {spent}"


def main(arguments: list[str] | None = None) -> int:
    """Record the stamps of all shapes."""
    parser = argparse.ArgumentParser(prog="python -m jfa.lab.stamps", description=__doc__.splitlines()[0])
    parser.add_argument("--output", help="CSV to write")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("no CUDA device: there is nothing to measure here")
    rows = list(recorded())
    if options.output:
        measure.write_rows(options.output, rows)
    for row in rows:
        if row["kind"] == "mean":
            print(show(row))
    return 0


if __name__ == "__main__":
    sys.exit(main())
