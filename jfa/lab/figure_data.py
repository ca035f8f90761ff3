"""The rows behind the figures of notebooks 00 to 02: those that any machine can compute."""

import torch

from jfa import jagged
from jfa.kernels.problem import Problem
from jfa.lab import loops, rates, waste

HEADS = 4
BLOCK = 128
EXAMPLE = (5, 2, 0, 7, 3, 1)
QUERIES = 3
DENSITIES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
BATCH, LONGEST = 1024, 1024


def where_work_goes() -> list[dict]:
    """Real share of the rows and busy share of the SMs on the real histories, a case a row (00_waste).

    Who works on what is `dealing.plan`, as in notebook 04: a prediction, in key tiles.
    """
    from jfa.lab import dealing

    lengths = jagged.history_lengths().tolist()
    busy = {name: dealing.plan(step, lengths).busy for name, step in dealing.forward_deals().items()}
    rows = [
        ("padding", "padded to the longest", waste.padded(lengths)),
        ("tiles", f"packed, key tiles of {BLOCK}", waste.tiled(lengths, BLOCK)),
        ("tiles", f"packed, key tiles of {BLOCK // 2}", waste.tiled(lengths, BLOCK // 2)),
        ("deal", f"tiles in turn to {waste.H200_SMS} SMs", busy["natural order"]),
        ("deal", "longest first, to a free SM", busy["dynamic"]),
    ]
    return [{"loss": loss, "case": case, "useful_share": round(share, 6)} for loss, case, share in rows]


def histories() -> list[dict]:
    """The real history lengths, longest first (01_histories)."""
    lengths = sorted(jagged.history_lengths().tolist(), reverse=True)
    return [{"rank": rank, "length": length} for rank, length in enumerate(lengths)]


def packing() -> list[dict]:
    """A batch small enough to draw row by row (01_packing)."""
    offsets = jagged.lengths_to_offsets(list(EXAMPLE)).tolist()
    return [
        {"sequence": index, "length": length, "start": offsets[index], "stop": offsets[index + 1]}
        for index, length in enumerate(EXAMPLE)
    ]


def padding() -> list[dict]:
    """Useful share over density, padded or cut into tiles, and on the real histories (01_padding)."""
    batches = [
        ("density", density, jagged.density_lengths(BATCH, LONGEST, density, seed=0).tolist())
        for density in DENSITIES
    ]
    real = jagged.history_lengths().tolist()
    batches.append(("histories", waste.padded(real), real))
    rows = []
    for source, density, lengths in batches:
        shares = {"padded": waste.padded(lengths), "tiles of 128": waste.tiled(lengths, 128)}
        shares["tiles of 64"] = waste.tiled(lengths, 64)
        rows += [
            {
                "lengths": source,
                "density": round(density, 6),
                "layout": layout,
                "useful_share": round(share, 6),
            }
            for layout, share in shares.items()
        ]
    return rows


def baseline_problem(query_len: int = 128, head_dim: int = 128) -> tuple[Problem, torch.Tensor]:
    """Return the facts of a call on the real histories with HEADS heads, and its offsets."""
    offsets = jagged.lengths_to_offsets(jagged.history_lengths())
    facts = {"batch": len(offsets) - 1, "total_q": query_len, "total_kv": int(offsets[-1])}
    heads = {"heads_q": HEADS, "heads_kv": HEADS, "head_dim": head_dim, "head_dim_v": head_dim}
    return Problem(**facts, **heads, broadcast_q=True, scale=head_dim**-0.5), offsets


def baseline_forward(query_len: int = 128, head_dim: int = 128):
    """Capture the launch of the baseline's forward kernel on the real histories, without running it."""
    from jfa.kernels import baseline
    from jfa.lab.launches import capture_launches

    problem, offsets = baseline_problem(query_len, head_dim)
    q = torch.empty(query_len, HEADS, head_dim, dtype=torch.bfloat16)
    k = torch.empty(problem.total_kv, HEADS, head_dim, dtype=torch.bfloat16)
    with capture_launches() as launches:
        baseline.forward(problem, q, k, k, offsets, None)
    (launch,) = launches
    return launch


def baseline_tiles(arch: str, head_dim: int = 128) -> list[dict[str, int]]:
    """Return tile sizes, warps and stages of the baseline on "sm_90" or "sm_100", the known ones first."""
    from jfa.kernels import baseline, baseline_launch

    problem, _ = baseline_problem(head_dim=head_dim)
    names = ("BLOCK_M", "BLOCK_N", "num_warps", "num_stages")
    table = {"sm_90": "hopper", "sm_100": "blackwell"}[arch]
    found = baseline_launch.configurations(baseline.FORWARD, problem, table)
    return [dict(zip(names, tiles, strict=True)) for tiles in found]


def baseline_report(arch: str, tiles: dict[str, int] | None = None, head_dim: int = 128):
    """Compile the baseline's forward kernel for "sm_90" or "sm_100", by default with its known tiles."""
    return baseline_forward(head_dim=head_dim).report(arch, **(tiles or baseline_tiles(arch, head_dim)[0]))


def instructions() -> list[dict]:
    """Every instruction of the baseline's main loop on both targets, in order (02_instructions)."""
    rows = []
    for arch in rates.RATES:
        loop = loops.main_loop(baseline_report(arch).text("sass"))
        rows += [{"arch": arch, "index": i.index, "opcode": i.opcode, "kind": i.kind} for i in loop]
    return rows


def turns() -> list[dict]:
    """Predicted clocks for BLOCK x BLOCK scores, tensor cores and the rest in turn (02_turns)."""
    rows = []
    for arch in rates.RATES:
        report, tiles = baseline_report(arch), baseline_tiles(arch)[0]
        flops = 4 * tiles["BLOCK_M"] * tiles["BLOCK_N"] * 128
        passes = BLOCK * BLOCK / (tiles["BLOCK_M"] * tiles["BLOCK_N"])
        pass_ = rates.take_turns(arch, loops.main_loop(report.text("sass")), flops, report.warps)
        for part, clocks in (("tensor cores", pass_.tensor), ("everything else", pass_.rest)):
            rows.append({"arch": arch, "part": part, "predicted_clocks": round(clocks * passes, 1)})
    return rows
