"""At which instruction warps wait: Nsight Compute's samples, told apart by who waits and what for.

    python -m jfa.lab.waits record --output figures/10_waits.csv    (on an H200 with ncu)

A kernel's stall reasons add all warps up, whatever they are there for. Three of twelve warps of a forward
kernel have no role: they park at a barrier until it ends. A loader that waits for a free slot does its job.
And on Hopper a group that waits for its product counts as one at a barrier. The samples of single
instructions tell these apart: the compiler ends every role with a barrier of its own, so the code between
two of them is one role's; one with products is a consumer's, one with bulk copies a loader's or a writer's.
"""

import argparse
import csv
import io
import re
import sys
from pathlib import Path

import pandas

from jfa.lab import counters, measure
from jfa.lab.targets import case_text

CONSUMERS, HELPERS, NOBODY = "consumers", "loaders and writers", "no role"
WHO = (CONSUMERS, HELPERS, NOBODY)
OWN, PRODUCT, ARRIVAL = "own instructions", "a product", "a load or a slot"
EACH, FENCE, MEMORY = "each other", "a fence", "memory"
WHY = (OWN, PRODUCT, ARRIVAL, EACH, FENCE, MEMORY)
PARKED = re.compile(r"BAR\.SYNC\S* 0x1$")  # between roles
NEAR, BRANCH = 4, 24  # instructions behind a try-wait that may wait for its result, and a branch by it


def instructions(text: str) -> list[dict]:
    """Kernels from the CSV that ``ncu --page source --csv`` prints: name, and a dict an instruction.

    Such a dict has ``sass`` and samples by stall reason. Raises ValueError for a text without a kernel.
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
            samples = {
                name.removeprefix("stall_"): int(cells[name] or 0)
                for name in header
                if name.startswith("stall_") and "Not" not in name
            }
            found[-1]["code"].append({"sass": sass, **samples})
    if not found:
        raise ValueError('expected the CSV of ncu --page source, found no "Kernel Name"')
    return found


def samples(code: list[dict]) -> dict[tuple[str, str], int]:
    """(who, why) -> samples of a kernel's instructions, from `instructions`."""
    sass = [one["sass"] for one in code]
    cuts = [0, *(i + 1 for i, text in enumerate(sass) if PARKED.match(text)), len(sass)]
    total = {(who, why): 0 for who in WHO for why in WHY}
    for begin, end in zip(cuts, cuts[1:]):
        role = " ".join(sass[begin:end])
        who = CONSUMERS if "HGMMA" in role else HELPERS if re.search("UTMA|UBLKCP", role) else NOBODY
        for i in range(begin, end):
            for reason, count in code[i].items():
                if reason != "sass" and count:
                    total[who, _why(sass, i, reason)] += count
    return total


def _why(sass: list[str], i: int, reason: str) -> str:
    if reason == "barrier":
        return PRODUCT if sass[i].startswith("WARPGROUP.DEPBAR") else EACH
    if reason in ("long_sb", "membar"):
        reach = BRANCH if sass[i].startswith("BRA") else NEAR
        if any("SYNCS" in text for text in sass[max(i - reach, 0) : i + 1]):
            return ARRIVAL
        here = " ".join(sass[max(i - 1, 0) : i + 1])
        return FENCE if "MEMBAR" in here or "FENCE" in here else MEMORY
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


def record(chosen=counters.CALLED, raw: str | None = None, seconds: float = 120) -> list[dict]:
    """Rows of the targets, sampled by ncu on this GPU, with the provenance. Raises as `counters.record`.

    ``raw`` keeps ncu's own CSV, a line an instruction.
    """
    line = counters.command(None, "", program="jfa.lab.waits")
    text = counters.profiled(line, ["source"], seconds)
    if raw:
        Path(raw).write_text(text)
    where = measure.provenance()
    return [{**where, **row} for row in rows_of(text, chosen)]


def table(rows):
    """A line a kernel: the share of all warps that have no role, and what the consumers do, as shares."""
    rows = rows.assign(case=[case_text(row) for row in rows.to_dict("records")])
    key = ["direction", "case", "step"]
    order = list(dict.fromkeys(rows[key].itertuples(index=False, name=None)))
    wide = rows.pivot_table(index=key, columns=["who", "why"], values="samples", aggfunc="sum").loc[order]
    consumers = wide[CONSUMERS].reindex(columns=list(WHY), fill_value=0)
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
