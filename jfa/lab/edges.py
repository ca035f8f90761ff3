"""Which tiles an edge runs through, as the kernels decide, and what a mask costs: the rows of notebook 07.

Tiles come from the kernels' own functions, run in the emulator. Instructions and registers are counted in
compiled code. Times are predictions from both.
"""

import dataclasses
import functools
import re

import torch
import triton
import triton.language as tl
from triton.runtime.jit import JITFunction

from jfa import jagged
from jfa.kernels.keys import Keys

BLOCK = 128
SKIPPED, BULK, EDGE = 0, 1, 2  # a tile that is not walked, one that needs no mask, one that does
# A sequence for each kind of call: (rows of queries, keys, left, right); None: no bound.
CASES = {
    "shared queries, 700 keys": (256, 700, None, None),
    "causal self-attention, 700 rows": (700, 700, None, 0),
    "causal window of 256 keys": (700, 700, 256, 0),
}


@triton.jit
def classify(
    offsets,
    q_offsets,
    out,
    query_len,
    left,
    right,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TILE: tl.constexpr,
):
    """One program a key tile of one sequence: what the backward walk does with each block of queries."""
    place = tl.program_id(0)
    nothing = place * 0
    lists = (offsets, offsets, offsets, q_offsets, 1, query_len, query_len, left, right)
    keys = Keys(*lists, 1, 1, False, LEFT, RIGHT, BLOCK_M, BLOCK_N, BLOCK_N, nothing)
    tile = TILE(keys, nothing, place)
    low, high = keys.query_blocks(tile)
    first, end = keys.bulk_blocks(tile, low, high)
    for block in range(low, high):
        edge = (block < first) | (block >= end)
        tl.store(out + block * tl.num_programs(0) + place, 1 + edge.to(tl.int32))


def tile_map(query_len: int, kv_len: int, left=None, right=None, block_m: int = BLOCK, block_n: int = BLOCK):
    """What the kernels do with each tile of one sequence: (query blocks, key blocks) of SKIPPED, BULK, EDGE.

    ``left`` and ``right`` are inclusive window bounds, None for no bound.
    """
    from jfa import emulator, steps

    out = torch.zeros(-(-query_len // block_m), -(-kv_len // block_n), dtype=torch.int32)
    offsets, q_offsets = (torch.tensor([0, length], dtype=torch.int32) for length in (kv_len, query_len))
    bounds = (-1 if left is None else left, -1 if right is None else right)
    flags = {"LEFT": left is not None, "RIGHT": right is not None}
    sizes = {"BLOCK_M": block_m, "BLOCK_N": block_n, "TILE": steps.BACKWARD["hopper"][0].tile}
    with emulator.emulate():
        classify[(out.shape[1],)](offsets, q_offsets, out, query_len, *bounds, **flags, **sizes)
    return out


def seen(query_len: int, kv_len: int, left=None, right=None):
    """Which query row sees which key, (query_len, kv_len) bool: the definition, aligned bottom right."""
    distance = torch.arange(kv_len)[None, :] - torch.arange(query_len)[:, None] - (kv_len - query_len)
    mask = torch.ones(query_len, kv_len, dtype=torch.bool)
    if right is not None:
        mask &= distance <= right
    if left is not None:
        mask &= distance >= -left
    return mask


def needed(query_len: int, kv_len: int, left=None, right=None, block_m: int = BLOCK, block_n: int = BLOCK):
    """The same map from the definition: a tile is BULK when all its query rows see all of a full tile."""
    mask = seen(query_len, kv_len, left, right)
    rows, columns = -(-query_len // block_m), -(-kv_len // block_n)
    found = torch.zeros(rows, columns, dtype=torch.int32)
    for row in range(rows):
        for column in range(columns):
            part = mask[row * block_m : (row + 1) * block_m, column * block_n : (column + 1) * block_n]
            if part.any():
                full = bool(part.all()) and part.shape[1] == block_n
                found[row, column] = BULK if full else EDGE
    return found


def map_rows(cases=CASES) -> list[dict]:
    """Every tile of the example sequences with what is done to it (07_masks)."""
    names = {SKIPPED: "skipped", BULK: "bulk", EDGE: "edge"}
    rows = []
    for case, (queries, keys, left, right) in cases.items():
        found = tile_map(queries, keys, left, right)
        for row in range(found.shape[0]):
            for column in range(found.shape[1]):
                entry = {"case": case, "queries": queries, "keys": keys, "left": left, "right": right}
                tile = {"query_block": row, "key_block": column, "tile": names[int(found[row, column])]}
                rows.append(entry | tile)
    return rows


# ------------------------------------------------------------------------------- how many tiles have an edge


def edge_share(lengths, queries: int = BLOCK, block_n: int = BLOCK) -> float:
    """Share of the tiles of a batch with shared queries that need a mask: those of the sequences' tails."""
    tiles = sum(-(-length // block_n) for length in lengths)
    tails = sum(length % block_n > 0 for length in lengths)
    return tails / max(tiles, 1)


def causal_share(lengths, left=None) -> float:
    """The same for causal self-attention over these lengths, from the kernels' own rule."""
    counts = torch.zeros(3)
    for length, times in _distinct(lengths).items():
        if length:
            found = tile_map(length, length, left, 0).flatten()
            counts += times * torch.bincount(found, minlength=3)
    return float(counts[EDGE] / counts[1:].sum().clamp(min=1))


def _distinct(lengths, step: int = 32) -> dict[int, int]:
    """How often each length occurs, lengths rounded up to a multiple of ``step``: the shares are the same."""
    found: dict[int, int] = {}
    for length in lengths:
        rounded = -(-length // step) * step
        found[rounded] = found.get(rounded, 0) + 1
    return found


def length_sets(seed: int = 1) -> dict[str, list[int]]:
    """The real histories, and batches by their longest allowed history and density."""
    sets = {"real histories": jagged.history_lengths().tolist()}
    for longest, density in ((512, 0.1), (1024, 0.5), (2048, 0.9), (4096, 0.9)):
        sets[f"N {longest}, density {density}"] = jagged.density_lengths(
            768, longest, density, seed=seed
        ).tolist()
    return sets


# ------------------------------------------------------------------------------------------ what a mask costs


@functools.cache
def loops_of(step):
    """The compiled block loops of a forward step, masked ones (most compares) first, each as instructions."""
    from jfa.lab import ladder, live

    return sorted(live.block_loops(ladder.compiled(step)), key=selects, reverse=True)


def selects(body) -> int:
    """Instructions of a loop that compare or select: what a mask is made of."""
    return sum(one.opcode.split(".")[0] in ("FSEL", "SEL", "ISETP", "LOP3", "PLOP3") for one in body)


def loop_rows() -> list[dict]:
    """Live registers along the block loop of both targets' forward, with and without masks (07_registers)."""
    from jfa import steps

    rows = []
    for arch in ("hopper", "blackwell"):
        ladder_ = {step.name: step for step in steps.FORWARD[arch]}
        masked, bulk = loops_of(ladder_["dynamic"])[0], loops_of(ladder_["peeled"])[-1]
        for loop, body in (("masked", masked), ("bulk", bulk)):
            for place, one in enumerate(body):
                row = {"arch": arch, "loop": loop, "place": place, "opcode": one.opcode, "kind": one.kind}
                rows.append({**row, "registers": one.general, "predicates": one.predicates})
    return rows


def peaks(rows) -> dict[tuple[str, str], dict[str, int]]:
    """(arch, loop) -> instructions, most live registers and predicates, from rows of `loop_rows`."""
    records = rows.to_dict("records") if hasattr(rows, "to_dict") else rows
    found: dict[tuple[str, str], dict[str, int]] = {}
    for row in records:
        nothing = {"instructions": 0, "registers": 0, "predicates": 0}
        entry = found.setdefault((row["arch"], row["loop"]), nothing)
        entry["instructions"] += 1
        for what in ("registers", "predicates"):
            entry[what] = max(entry[what], row[what])
    return found


def share_rows() -> list[dict]:
    """Per batch: share of its tiles that have an edge (07_share)."""
    rows = []
    for name, lengths in length_sets().items():
        rows.append({"lengths": name, "mask": "shared queries", "edge_share": round(edge_share(lengths), 4)})
        short = lengths[:: max(len(lengths) // 96, 1)]
        for mask, left in (("causal", None), ("causal window of 256", 256)):
            rows.append({"lengths": name, "mask": mask, "edge_share": round(causal_share(short, left), 4)})
    return rows


def without_masks(step):
    """A backward step whose walk masks nothing: wrong at every edge, and what the bulk costs alone.

    Its walk is the step's own with the question "masked = ..." answered by no. For compiling only: the
    emulator and a notebook's diff would still see the step's source.
    """
    walk = JITFunction(step.walk.fn)
    answered = re.sub(r"masked = .*", "masked = False", step.walk.src)
    if answered == step.walk.src:
        raise ValueError(f"the walk of {step.name} does not ask whether a block is masked")
    walk._unsafe_update_src(answered)
    return dataclasses.replace(step, name="unmasked", walk=walk)


# ------------------------------------------------------------------- what masks cost where it was measured

ISSUE = {"every clock": 1.0, "every other clock": 0.5}  # how often a scheduler gets an instruction out
COUNTED = ("warp_specialized", "peeled")  # steps that notebook 10 counts, with every mask and with few
PROVENANCE = ("gpu", "sm_clock_mhz", "power_w", "power_limit_w", "driver", "cuda", "torch", "fbtriton")
PROVENANCE += ("commit", "date")


def loop_clocks(body, issue: float = 1.0) -> float:
    """Clocks in which four warps get through a loop whose instructions a scheduler issues at this rate."""
    from jfa.lab import rates

    others = sum(one.kind != "tensor core" for one in body)
    exponentials = sum(one.kind == "exponential" for one in body)
    return max(others / issue, exponentials * 4 * 32 / rates.RATES["sm_90"].exponentials)


def block_time(step, clocks: float) -> float:
    """Predicted clocks of one more block of keys on Hopper, from replays of tiles of two lengths."""
    from jfa.lab import pipeline, replay

    dealt = replay.static(step)
    ends = [
        max(span["end"] for span in pipeline.specialized(dealt, clocks, blocks=blocks)) for blocks in (4, 8)
    ]
    return (ends[1] - ends[0]) / (2 * 4)  # two tiles


def block_times(step, peeled) -> dict[str, tuple[float, float]]:
    """Issue rate -> predicted clocks of a block with its mask and without, forward on Hopper."""
    masked, bulk = loops_of(step)[0], loops_of(peeled)[-1]
    return {
        name: tuple(block_time(step, loop_clocks(body, issue)) for body in (masked, bulk))
        for name, issue in ISSUE.items()
    }


def gain(share: float, times: tuple[float, float]) -> float:
    """Predicted speedup when a ``share`` of the blocks keeps its mask; times: of a block with, without."""
    masked, bulk = times
    return masked / (share * masked + (1 - share) * bulk)


def gain_rows() -> list[dict]:
    """Measured gain of peeling over the share of blocks with an edge, predictions beside it (07_gain).

    block_n: keys of a block of `peeled`; where it is not BLOCK, the gain is not of peeling alone.
    """
    from jfa import steps
    from jfa.lab import figures, ladder

    ladder_ = {step.name: step for step in steps.FORWARD["hopper"]}
    known = {way: steps.find("hopper", way, "peeled") for way in ("forward", "backward")}
    times = block_times(ladder_["dynamic"], ladder_["peeled"])
    rows = []
    for direction, recording, before in (
        ("forward", "04_steps", "dynamic"),
        ("backward", "05_steps", "dq_released"),
    ):
        if not figures.path_of(recording).exists():
            continue
        found = figures.read(recording)
        found = found[(found["direction"] == direction) & (found["scope"] == "kernel")]
        for (m, n, density, batch), shape in found.groupby(["M", "N", "density", "B"]):
            speeds = shape.set_index("step")["tflops"].to_dict()
            if not (speeds.get(before) and speeds.get("peeled")):
                continue
            lengths = jagged.density_lengths(int(batch), int(n), density, seed=1).tolist()
            share = edge_share(lengths)
            row = {"direction": direction, "M": m, "N": n, "density": density, "edge_share": round(share, 4)}
            row["block_n"] = known[direction].tiling(ladder.problem_of(lengths, int(m), 4, 128))["BLOCK_N"]
            row["measured_gain"] = round(float(speeds["peeled"]) / float(speeds[before]), 4)
            if direction == "forward":
                row |= {
                    "predicted_gain_fast": round(gain(share, times["every clock"]), 4),
                    "predicted_gain_slow": round(gain(share, times["every other clock"]), 4),
                }
            else:
                row |= {"predicted_gain_fast": "", "predicted_gain_slow": ""}
            last = shape.iloc[-1]
            rows.append(row | {name: last.get(name, "") for name in PROVENANCE})
    return rows


def counted_text() -> str:
    """What notebook 10's counters say of two steps, forward and backward; or that there are none."""
    from jfa.lab import figures

    if not figures.path_of("10_counters").exists():
        return "not counted: there is no figures/10_counters.csv"
    rows = figures.read("10_counters")
    rows = rows[rows["step"].isin(COUNTED) & rows["suite"].eq("jagged")]
    head = f"{'direction':<9} {'M':>4} {'N':>5} {'density':>7}  {'step':<16}"
    lines = [f"{head}  time    clock     instructions  issued in  (counted on a GPU)"]
    for row in rows.itertuples():
        shape = f"{row.direction:<9} {row.M:>4} {row.N:>5} {row.density:>7g}  {row.step:<16}"
        numbers = (
            f"{row.duration_us:5.0f} us  {row.sm_clock_mhz:.0f} MHz  {row.instructions / 1e6:7.0f} million"
        )
        lines.append(f"{shape}  {numbers}  {100 * row.issue_busy:.0f} % of clocks")
    return "\n".join(lines)
