"""What a pair of CTAs moves: predicted from the shapes of its products, counted in the emulator's trace.

Everything is per 128 x 128 block of scores of one CTA, so that a CTA alone and one of a pair compare.
"""

from jfa.lab import rates

BLOCK = 128
SHARED_RATE = 128  # bytes a clock that an SM's shared memory serves, on both targets
QUERIES, LENGTHS = 256, (512,)  # the run that is counted: two query blocks, keys for two pairs
# (M, N, K) of the five products of the backward pass, and whether their left operand lies in shared memory
# (else in tensor memory): a CTA alone, and a pair with the keys of both.
ALONE = {
    "S": ((128, 128, 128), True),
    "dP": ((128, 128, 128), True),
    "dV": ((128, 128, 128), False),
    "dK": ((128, 128, 128), False),
    "dQ": ((128, 128, 128), True),
}
PAIR = {
    "S": ((256, 128, 128), True),
    "dP": ((256, 128, 128), True),
    "dV": ((256, 128, 128), False),
    "dK": ((256, 128, 128), False),
    "dQ": ((128, 128, 256), True),
}
PRODUCTS = tuple(ALONE)
TARGETS = {"peeled": "a CTA alone", "two_cta": "one of a pair"}


def operand_bytes(shape, left_in_shared: bool, ctas: int = 1) -> int:
    """Bytes of bf16 operands that one CTA's shared memory gives to a product (M, N, K) of ``ctas`` CTAs.

    A pair's CTA gives its half of the rows of the left operand and half of the columns of the right one.
    """
    m, n, k = shape
    return 2 * k * ((m if left_in_shared else 0) + n) // ctas


def predicted_operands() -> dict[str, dict[str, int]]:
    """Operand bytes of every product by step name, from the shapes alone."""
    return {
        "peeled": {name: operand_bytes(*product) for name, product in ALONE.items()},
        "two_cta": {name: operand_bytes(*product, 2) for name, product in PAIR.items()},
    }


def traced(step, lengths=LENGTHS, queries: int = QUERIES, head_dim: int = 128):
    """Events of a backward step's main kernel in the emulator, and how many blocks of scores it computed."""
    import torch

    from jfa import emulator
    from jfa.lab import ladder

    problem = ladder.problem_of(lengths, queries, 1, head_dim)
    tensors = ladder.tensors_of(problem, lengths)
    draw = torch.Generator().manual_seed(1)
    dout = torch.randn(problem.out_shape, generator=draw).to(problem.dtype)
    with emulator.emulate(arch=ladder.TARGETS[step.arch], policy="eager", trace=True) as machine:
        ladder.run_step(step, problem, *tensors, dout)
    (report,) = (report for report in machine.reports if report.kernel == "kernel")
    return report.events, sum(lengths) * queries / BLOCK**2


def _product(info, what: str) -> str:
    """Which of the five products an MMA of the Blackwell kernel is, by the accumulator that it writes."""
    accumulator = what.split("[")[0].removeprefix("x.")
    return {"s": "S", "dp": "dP", "dv": "dV", "dk": "dK", "dq": "dQ"}[accumulator]


def traffic(step, **sizes) -> dict[str, float]:
    """Bytes by what moves, counted in a run of the step (see `traced` for ``sizes``).

    Keys: the five products (operands from shared memory; Blackwell only), "exchange" (dS to the other CTA),
    "arrives" (what TMA writes into a CTA's shared memory), "asked of L2" (the same, a multicast counted
    once), "dQ added" (reduce-adds to global memory).
    """
    events, blocks = traced(step, **sizes)
    found = dict.fromkeys((*PRODUCTS, "exchange", "arrives", "asked of L2", "dQ added"), 0.0)
    asked = set()
    for _, cta, _, op, what, _, info in events:
        if op != "issue":
            continue
        kind = info["kind"]
        if kind == "mma":
            in_shared = not info["A"].startswith("x.")
            # A pair's product is issued once for both CTAs, and both read as much.
            found[_product(info, what)] += operand_bytes(info["shape"], in_shared)
        elif kind == "dsmem_copy":
            found["exchange"] += info["bytes"]
        elif kind == "tma_load":
            found["arrives"] += info["bytes"]
            # A multicast is one request with an event for every CTA that it reaches.
            if (request := (cta, what, info["desc"], info["phase"])) not in asked:
                asked.add(request)
                found["asked of L2"] += info["bytes"]
        elif kind == "tma_reduce":
            found["dQ added"] += info["bytes"]
    return {name: count / blocks for name, count in found.items()}


def tensor_clocks(arch: str = "sm_100") -> float:
    """Clocks of the tensor cores of an SM for the five products of a block."""
    return len(PRODUCTS) * 2 * BLOCK**3 / rates.RATES[arch].tensor_flops


def shared_clocks(counted: dict[str, float]) -> float:
    """Clocks of shared memory for operands, what arrives, the exchange and dQ's staging (in and out)."""
    moved = sum(counted[name] for name in PRODUCTS) + counted["arrives"]
    moved += 2 * counted["exchange"] + 2 * counted["dQ added"]
    return moved / SHARED_RATE


def traffic_rows() -> list[dict]:
    """KiB a block by target, step and what moves (08_traffic)."""
    from jfa import steps

    rows = []
    for arch in ("blackwell", "hopper"):
        for name in TARGETS:
            counted = traffic(steps.find(arch, "backward", name))
            for what, count in counted.items():
                if arch == "blackwell" or what not in PRODUCTS:
                    row = {"arch": arch, "step": name, "what": what, "kib": round(count / 1024, 3)}
                    rows.append(row)
    return rows


# ------------------------------------------------------------------------------------- who needs which dS


def exchange_rows() -> list[dict]:
    """The quarters of a pair's dS: where they are made and where dQ needs them (08_exchange).

    ``made`` is the CTA that has the keys, ``needed`` the one that sums dQ of the rows. Bytes are counted in
    the emulator: what crosses, divided by the quarters that do.
    """
    from jfa import steps

    counted = traffic(steps.find("blackwell", "backward", "two_cta"))
    quarters = [(keys, rows) for keys in range(2) for rows in range(2)]
    crossing = sum(keys != rows for keys, rows in quarters)
    each = 2 * counted["exchange"] / crossing  # two CTAs' blocks of scores
    return [
        {
            "keys_of": keys,
            "rows_half": rows,
            "made": keys,
            "needed": rows,
            "crosses": int(keys != rows),
            "bytes": round(each),
        }
        for keys, rows in quarters
    ]


LANES = ("tensor cores of both", "CTA 0 sends dS", "CTA 1 sends dS", "CTA 0 adds dQ", "CTA 1 adds dQ")
EACH = {"S": 1, "dP": 1, "dV": 2, "dK": 2, "dQ": 1, "sends dS": 1, "adds dQ": 8}  # operations of one turn


def _shown(kind: str, cta, what: str, info) -> tuple[str, str, str] | None:
    """Lane, what is counted, and kind of an asynchronous operation of the pair; None if it is not drawn."""
    if kind == "mma":
        return LANES[0], _product(info, what), "mma"
    names = {"dsmem_copy": ("sends dS", "schedule"), "tma_reduce": ("adds dQ", "reduce")}
    if kind not in names:
        return None
    what, kind = names[kind]
    return f"CTA {cta[0] % 2} {what}", what, kind


def order_rows() -> list[dict]:
    """What a pair does in which order, three blocks of query rows (08_order).

    start, end: places among the beginnings and ends that are drawn, in the emulator's order; no time.
    """
    from jfa import steps

    events, _ = traced(steps.find("blackwell", "backward", "two_cta"), lengths=(256,), queries=384)
    issued, counts, spans = {}, {}, {}
    for sequence, cta, _, op, what, _, info in events:
        if op == "issue" and (shown := _shown(info["kind"], cta, what, info)):
            lane, name, kind = shown
            turn = counts.get((lane, name), 0) // EACH[name]
            counts[lane, name] = counts.get((lane, name), 0) + 1
            issued[info["id"]] = span = (lane, name, kind, turn)
            spans.setdefault(span, [sequence, sequence])
        elif op.startswith("done:") and info["id"] in issued:
            spans[issued[info["id"]]][1] = sequence
    place = {moment: index for index, moment in enumerate(sorted(sum(spans.values(), [])))}
    rows = []
    for (lane, name, kind, turn), (start, end) in spans.items():
        label = f"{name}{turn}" if kind == "mma" else f"{turn}"
        rows.append(
            {"lane": lane, "label": label, "kind": kind, "start": place[start], "end": place[end] + 0.9}
        )
    return rows


# ---------------------------------------------------------------------------------------------- measured


def measured_rows() -> list[dict]:
    """Recorded Hopper steps `peeled` and `two_cta` from the backward ladder (08_steps); [] if none is.

    Rows keep the columns of figures/05_steps.csv.
    """
    from jfa.lab import figures, measure

    path = figures.path_of("05_steps")
    rows = measure.read_rows(path) if path.exists() else []
    return [row for row in rows if row["step"] in TARGETS and row["direction"] == "backward"]


def ratios(rows) -> dict[tuple, float]:
    """(M, N, density) -> TFLOPS of `two_cta` over `peeled`, whole calls where there are, of measured rows."""
    rows = [row for row in rows if row.get("tflops") not in (None, "")]
    scope = "call" if any(row["scope"] == "call" for row in rows) else "kernel"
    rate = {
        (row["M"], row["N"], row["density"], row["step"]): row["tflops"]
        for row in rows
        if row["scope"] == scope
    }
    shapes = sorted({key[:3] for key in rate})
    return {
        shape: rate[*shape, "two_cta"] / rate[*shape, "peeled"]
        for shape in shapes
        if {(*shape, name) for name in TARGETS} <= set(rate)
    }


def empty_share(lengths, keys: int = BLOCK) -> float:
    """Share of the pairs (2 x ``keys`` keys of one sequence) whose second CTA gets no key."""
    tiles = [-(-int(length) // keys) for length in lengths]
    pairs = sum(-(-count // 2) for count in tiles)
    return sum(count % 2 for count in tiles) / max(pairs, 1)


def predicted_ratio(lengths, gain: float = 1.0) -> float:
    """Speed of a pair over CTAs alone: ``gain`` on what both do; an empty CTA takes as long for nothing."""
    return gain * (1 - empty_share(lengths) / 2)


def product_flops(step, lengths) -> dict[tuple, int]:
    """CTA -> FLOPs of its products, counted in the emulator: those of a Hopper step, 256 query rows."""
    events, _ = traced(step, lengths=lengths)
    found: dict[tuple, int] = {}
    for _, cta, _, op, _, _, info in events:
        if op == "issue" and info["kind"] == "wgmma":
            found[cta] = found.get(cta, 0) + int(info["flop"])
    return dict(sorted(found.items()))


def counted_text() -> str:
    """What notebook 10's counters say of both Hopper steps, by shape; or that there are none."""
    from jfa.lab import figures

    if not figures.path_of("10_counters").exists():
        return "not counted: there is no figures/10_counters.csv"
    rows = figures.read("10_counters")
    rows = rows[(rows["direction"] == "backward") & rows["step"].isin(TARGETS)]
    shapes = rows.groupby(["M", "N", "density"]).filter(lambda part: set(part["step"]) == set(TARGETS))
    lines = [
        "   M     N density  step     tensor cores  L2 busy  read of L2  added to L2  (counted on a GPU)"
    ]
    for row in shapes.itertuples():
        read, added = (32 * sectors / 1e9 for sectors in (row.l2_read_sectors, row.l2_red_sectors))
        shape = f"{row.M:>4} {row.N:>5} {row.density:>7g}  {row.step:<7}"
        busy = f"{100 * row.tensor_busy:9.0f} %  {100 * row.l2_busy:5.0f} %"
        lines.append(f"{shape}  {busy}  {read:7.2f} GB  {added:8.2f} GB")
    return "\n".join(lines)


def lengths_of(shape) -> list[int]:
    """The lengths of the batch that was measured as (M, N, density)."""
    from jfa.lab.cases import jagged_case

    return jagged_case(*shape).lengths().tolist()


def live_rows(quick: bool = False) -> list[dict]:
    """Measure both Hopper steps on the current GPU; rows as in figures/05_steps.csv."""
    from jfa.lab import ladder

    chosen = {name: step for name, step in ladder.variants("backward").items() if name in TARGETS}
    shapes = ladder.SHAPES[1:2] if quick else ladder.SHAPES[:3]
    return list(ladder.measured("backward", shapes, chosen, rounds=3 if quick else 9))


def text(rows, gain: float = 1.0) -> str:
    """A line a shape: empty second CTAs, what they predict with a gain and without, what was measured.

    "" without rows.
    """
    from jfa.lab import style

    if not rows:
        return ""
    lines = [f"{'M':>4} {'N':>5} {'density':>7}  empty second CTAs  predicted  with no gain  pair over alone"]
    for (m, n, density), ratio in ratios(rows).items():
        lengths = lengths_of((m, n, density))
        empty, wanted, least = 100 * empty_share(lengths), *(predicted_ratio(lengths, g) for g in (gain, 1.0))
        shape = f"{m:>4} {n:>5} {density:>7g}"
        lines.append(f"{shape}  {empty:15.0f} %  {wanted:9.2f}  {least:12.2f}  {ratio:15.2f}")
    return "\n".join([*lines, style.caption(rows)])
