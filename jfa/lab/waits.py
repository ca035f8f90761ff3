"""At which instruction warps wait: Nsight Compute's samples, told apart by who waits and what for.

    python -m jfa.lab.waits record --output figures/10_waits.csv    (on an H200 with ncu)

A kernel's stall reasons add all warps up, whatever they are there for. Three of twelve warps of a forward
kernel have no role: they park at a barrier until it ends. A loader that waits for a free slot does its job.
And on Hopper a group that waits for its product counts as one at a barrier. The samples of single
instructions tell these apart. The code of every role ends with the same barrier; between two of them a part
with products is a consumer's, one with bulk copies a loader's or a writer's. Behind the last exit stand loops
that try a barrier again; they belong to the role that they jump back to.
"""

import argparse
import csv
import io
import re
import sys

import pandas

from jfa.lab import counters, measure
from jfa.lab.targets import case_text

CONSUMERS, HELPERS, NOBODY = "consumers", "loaders and writers", "no role"
WHO = (CONSUMERS, HELPERS, NOBODY)
ISSUE, OWN, PRODUCT = "issuing", "own latencies", "a product"
ARRIVAL, OTHERS, FENCE, MEMORY = "a load or a slot", "other warps", "a fence", "memory"
WHY = (ISSUE, OWN, PRODUCT, ARRIVAL, OTHERS, FENCE, MEMORY)
PARKED = re.compile(r"BAR\.SYNC\S* 0x1$")  # ends a role's code
COPIES = re.compile(r"UTMA|UBLKCP")
NEAR, BRANCH = 4, 24  # instructions behind a try-wait that may wait for its result, and a branch by it


def instructions(text: str) -> list[dict]:
    """Kernels from the CSV that ``ncu --page source --csv`` prints: name, and a dict an instruction.

    Such a dict has ``sass``, its ``address``, and ``samples`` by stall reason. Raises ValueError for a text
    without a kernel.
    """
    found = []
    for line in csv.reader(io.StringIO(text)):
        if line[:1] == ["Kernel Name"]:
            found.append({"kernel": counters.short_name(line[1]), "code": []})
            header = None
        elif found and "Source" in line:
            header = line
        elif found and header and len(line) == len(header):
            cells = dict(zip(header, line))
            sass = re.sub(r"^@!?U?P\w+\s+", "", cells["Source"].strip())
            counted = {
                name.removeprefix("stall_"): int(cells[name] or 0)
                for name in header
                if name.startswith("stall_") and "Not" not in name
            }
            address = int(cells["Address"], 16)
            found[-1]["code"].append({"sass": sass, "address": address, "samples": counted})
    if not found:
        raise ValueError('expected the CSV of ncu --page source, found no "Kernel Name"')
    return found


def owners(code: list[dict]) -> list[str]:
    """Who runs each instruction, one of ``WHO``; ValueError if that cannot be told."""
    sass = [one["sass"] for one in code]
    last = max((i for i, text in enumerate(sass) if text.startswith("EXIT")), default=-1)
    # A warp at a barrier is sampled at the instruction behind it.
    cuts = [0, *(i + 2 for i, text in enumerate(sass[:last]) if PARKED.match(text)), last + 1]
    found, consumers = [], 0
    for begin, end in zip(cuts, cuts[1:]):
        part = " ".join(sass[begin:end])
        who = CONSUMERS if "HGMMA" in part else HELPERS if COPIES.search(part) else NOBODY
        consumers += who == CONSUMERS
        found += [who] * (end - begin)
    if consumers < 2 or HELPERS not in found or NOBODY not in found:
        raise ValueError("expected two consumers, a loader and a part of no role, found other code")
    places = {one["address"]: i for i, one in enumerate(code)}
    behind = [NOBODY]
    for text in reversed(sass[last + 1 :]):
        target = re.match(r"BRA (0x[0-9a-f]+)", text)
        place = places.get(int(target[1], 16), len(found)) if target else len(found)
        behind.append(found[place] if place < len(found) else behind[-1])
    return found + behind[:0:-1]


def samples(code: list[dict]) -> dict[tuple[str, str], int]:
    """(who, why) -> samples of a kernel's instructions, from `instructions`. Raises as `owners`."""
    sass = [one["sass"] for one in code]
    total = {(who, why): 0 for who in WHO for why in WHY}
    for i, (who, one) in enumerate(zip(owners(code), code)):
        for reason, count in one["samples"].items():
            total[who, _why(sass, i, reason)] += count
    return total


def _why(sass: list[str], i: int, reason: str) -> str:
    if reason == "selected":
        return ISSUE
    if reason == "barrier":
        return PRODUCT if sass[i].startswith("WARPGROUP.DEPBAR") else OTHERS
    if reason == "membar" or (reason == "long_sb" and re.match("MEMBAR|FENCE", sass[i])):
        return FENCE
    if reason == "long_sb":
        reach = BRANCH if sass[i].startswith("BRA") else NEAR
        if any("TRYWAIT" in text for text in sass[max(i - reach, 0) : i + 1]):
            return ARRIVAL
        return FENCE if re.match("MEMBAR|FENCE", sass[i - 1]) else MEMORY
    return OWN


def rows_of(text: str, chosen) -> list[dict]:
    """A row for each target, who and why: ``samples``, and ``share`` of the samples of all its warps."""
    found = []
    for launch in counters.by_target(instructions(text), chosen):
        counted = samples(launch.pop("code"))
        whole = max(sum(counted.values()), 1)
        for (who, why), count in counted.items():
            found.append({**launch, "who": who, "why": why, "samples": count, "share": count / whole})
    return found


def command(report: str) -> list[str]:
    """The ncu command line that samples what `main` runs."""
    return counters.command(None, report, program="jfa.lab.waits")


def record(raw: str | None = None, seconds: float = 120) -> list[dict]:
    """Rows of `counters.CALLED`, sampled by ncu on this GPU, with the provenance.

    Raises RuntimeError where there is no ncu, ValueError for an unknown profile. ``raw`` keeps ncu's own
    CSV, a line an instruction.
    """
    text = counters.profiled("source", command, seconds, raw)
    where = measure.provenance()
    return [{**where, **row} for row in rows_of(text, counters.CALLED)]


def table(rows):
    """A line a kernel: the share of all warps that have no role, and what the consumers do, as shares."""
    rows = rows.assign(case=[case_text(row) for row in rows.to_dict("records")])
    key = ["direction", "case", "step"]
    order = list(dict.fromkeys(rows[key].itertuples(index=False, name=None)))
    wide = rows.pivot_table(index=key, columns=["who", "why"], values="samples", aggfunc="sum").loc[order]
    consumers = wide[CONSUMERS][list(WHY)]
    found = consumers.div(consumers.sum(axis=1), axis=0)
    found.insert(0, NOBODY, wide[NOBODY].sum(axis=1) / wide.sum(axis=1))
    return found


def show(frame: pandas.DataFrame) -> str:
    """`table` as text, in percent."""
    return (100 * frame).round(0).astype(int).rename_axis(columns=None).to_string()


def main(arguments: list[str] | None = None) -> int:
    """Run the targets (for ncu), or record them."""
    import torch

    parser = argparse.ArgumentParser(prog="python -m jfa.lab.waits", description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("run", "record"))
    parser.add_argument("--output", help="CSV to write")
    parser.add_argument("--raw", help="file for ncu's own CSV")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("no CUDA device: there is nothing to sample here")
    if options.what == "run":
        counters.run(list(counters.CALLED))
        return 0
    try:
        rows = record(raw=options.raw)
    except (RuntimeError, ValueError) as error:
        parser.error(str(error))
    print(show(table(pandas.DataFrame(rows))), flush=True)
    if options.output:
        measure.write_rows(options.output, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
