"""Which SM works on which tile when: tile lists of jfa.schedule and the deals of the kernels, played through.

Nothing here is measured. The list is the true one and the rule is the kernel's own function, but the time
that a tile takes is assumed: a number of key tiles and a constant on top. So every time is a prediction, in
units of one key tile (one block of keys against one block of queries).
"""

import dataclasses
import heapq
import types

import torch

from jfa import jagged
from jfa.kernels import parts
from jfa.schedule import make_schedule

SMS = {"H200": 132, "B200": 148}
BLOCK = 128
TILE_COST = 1.5  # key tiles that an item costs on top, about what the replay of notebook 03 says
HEADS = 4
QUERIES = 128


@dataclasses.dataclass(frozen=True)
class Plan:
    """Who did what: ``events`` (dicts with lane, start, end, item), ``useful`` key tiles, ``sms``."""

    events: tuple
    useful: float
    sms: int

    @property
    def time(self) -> float:
        """When the last SM ends."""
        return max((event["end"] for event in self.events), default=0.0)

    @property
    def busy(self) -> float:
        """Share of the SMs' time, 0 to 1, in which they work on some tile."""
        worked = sum(event["end"] - event["start"] for event in self.events)
        return worked / (self.sms * self.time) if self.time else 1.0

    @property
    def efficiency(self) -> float:
        """Key tiles that were asked for, over the key tiles that the SMs had time for."""
        return self.useful / (self.sms * self.time) if self.time else 1.0

    def loads(self) -> list[float]:
        """Work of each SM."""
        found = [0.0] * self.sms
        for event in self.events:
            found[event["lane"]] += event["end"] - event["start"]
        return found


def data_sets(seed: int = 0) -> dict[str, list[int]]:
    """The lengths that the figures use: real histories, and 768 sequences of at most 1024 rows by density."""
    sets = {"real histories": jagged.history_lengths().tolist()}
    for density in (0.1, 0.5, 0.9):
        sets[f"density {density}"] = jagged.density_lengths(768, 1024, density, seed=seed).tolist()
    return sets


def listed(lengths, step, queries: int = QUERIES, block_n: int = BLOCK):
    """The step's schedule for these lengths with a shared query block."""
    offsets = jagged.lengths_to_offsets(torch.tensor(lengths))
    shapes = (queries, int(offsets[-1]))
    return make_schedule(shapes, offsets, None, BLOCK, block_n, order=step.order, pruned=step.pruned)


def forward_items(lengths, step, heads: int = HEADS, queries: int = QUERIES) -> list[int]:
    """Key tiles that each item of a forward step walks; a tile without keys walks one, all of it masked."""
    schedule = listed(lengths, step, queries)
    rows = schedule.q_tiles[: int(schedule.q_counts[0]), 3].tolist()
    return [max(-(-length // BLOCK), 1) for length in rows for _ in range(heads)]


def backward_items(lengths, step, heads: int = HEADS) -> list[int]:
    """Key tiles that each item of a KV-stationary backward step walks: a sequence's, or one."""
    from jfa.kernels import keys

    if step.items is keys.sequence_items:
        return [-(-length // BLOCK) for length in lengths for _ in range(heads)]
    return [1] * int(listed(lengths, step).kv_counts[0]) * heads


def tiles_of(step, lengths, heads: int = HEADS, queries: int = QUERIES) -> list[int]:
    """Key tiles that each item of a step walks, in the order of its list."""
    if step.direction == "forward":
        return forward_items(lengths, step, heads, queries)
    return backward_items(lengths, step, heads)


def rule_of(step):
    """The function (deal, k) -> item of a step whose deal every role can compute, else None."""
    static = step.arch == "blackwell" and step.draw is None
    return step.hear.fn if static or getattr(step, "publish", None) is parts.stay_silent else None


def deal_out(rule, items: int, sms: int) -> list[list[int]]:
    """Items of each SM in order, by a static rule of the kernels (a Python function of deal and k)."""
    hands = []
    for program in range(sms):
        deal = types.SimpleNamespace(program=program, programs=sms, items=items)
        hand, k = [], 0
        while (item := rule(deal, k)) < items:
            hand.append(item)
            k += 1
        hands.append(hand)
    return hands


def play(costs, hands) -> list[dict]:
    """Events of SMs that work through their hands one item after another; a cost of 0 takes no time."""
    events = []
    for sm, hand in enumerate(hands):
        now = 0.0
        for item in hand:
            events.append({"lane": sm, "start": now, "end": now + costs[item], "item": item})
            now += costs[item]
    return events


def play_tickets(costs, sms: int, ahead: int = 2) -> list[dict]:
    """Events of SMs that draw from one counter, ``ahead`` items before they begin them (loaders look ahead).

    An SM begins with the item of its own number. Beginning its k-th item it draws its (k + ahead)-th.
    """
    drawn = [[sm] for sm in range(sms)]
    following = sms
    events = []
    for _ in range(ahead - 1):
        for sm in range(sms):
            drawn[sm].append(following)
            following += 1
    turns = [(0.0, sm, 0) for sm in range(sms)]
    while turns:
        now, sm, k = heapq.heappop(turns)
        drawn[sm].append(following)
        following += 1
        item = drawn[sm][k]
        if item < len(costs):
            events.append({"lane": sm, "start": now, "end": now + costs[item], "item": item})
            heapq.heappush(turns, (now + costs[item], sm, k + 1))
    return events


def plan(
    step,
    lengths,
    sms: int = SMS["H200"],
    heads: int = HEADS,
    tile_cost: float = TILE_COST,
    queries: int = QUERIES,
) -> Plan:
    """Predict who works on what when one step of a ladder runs; time in key tiles."""
    tiles = tiles_of(step, lengths, heads, queries)
    # A query tile is set up once and walks its keys; a backward item sets up each of its key tiles.
    setups = (lambda count: 1) if step.direction == "forward" else (lambda count: count)
    costs = [count + tile_cost * setups(count) if count else 0.0 for count in tiles]
    rule = rule_of(step)
    if rule is None:
        events = play_tickets(costs, sms, 2 if step.direction == "forward" and step.arch == "hopper" else 1)
    else:
        events = play(costs, deal_out(rule, len(costs), sms))
    useful = heads * sum(-(-length // BLOCK) for length in lengths)
    return Plan(tuple(event for event in events if event["end"] > event["start"]), useful, sms)


def forward_deals() -> dict[str, object]:
    """Steps that differ only in order and deal, by the name that figures give them."""
    from jfa import steps

    ladder = {step.name: step for step in steps.FORWARD["hopper"]}
    balanced = ladder["balanced"]
    dealt_in_order = dataclasses.replace(balanced, draw=parts.round_robin, hear=parts.round_robin)
    return {
        "natural order": ladder["warp_specialized"],
        "sorted": dealt_in_order,
        "boustrophedon": balanced,
        "dynamic": ladder["dynamic"],
    }


def backward_deals() -> dict[str, object]:
    """Backward steps by what an item of theirs is."""
    from jfa import steps

    ladder = {step.name: step for step in steps.BACKWARD["hopper"]}
    return {
        "whole sequences": ladder["warp_specialized"],
        "listed tiles": ladder["balanced"],
        "dynamic": ladder["dynamic"],
    }


# --------------------------------------------------------------------------------- rows of the figures


def _events(deals, lengths) -> list[dict]:
    rows = []
    for name, step in deals.items():
        tiles = tiles_of(step, lengths)
        for event in plan(step, lengths).events:
            row = {"deal": name, "sm": event["lane"], "start": event["start"], "end": event["end"]}
            rows.append({**row, "tiles": tiles[event["item"]]})
    return rows


def forward_map(lengths=None) -> list[dict]:
    """SM by time at density one half, where lengths spread most, one deal after another (04_forward)."""
    return _events(forward_deals(), lengths or data_sets()["density 0.5"])


def backward_map(lengths=None) -> list[dict]:
    """SM by time on the real histories, backward (04_backward)."""
    return _events(backward_deals(), lengths or data_sets()["real histories"])


def balance_rows() -> list[dict]:
    """Busy share of the SMs by direction, lengths and deal (04_balance)."""
    rows = []
    for direction, deals in (("forward", forward_deals()), ("backward", backward_deals())):
        for lengths, values in data_sets().items():
            for name, step in deals.items():
                made = plan(step, values)
                row = {"direction": direction, "lengths": lengths, "deal": name}
                rows.append({**row, "predicted_busy": round(made.busy, 4), "predicted_time": made.time})
    return rows


def emptied(lengths, share: float, seed: int = 0) -> list[int]:
    """The lengths with a share of the sequences, drawn at random, left without keys."""
    draw = torch.Generator().manual_seed(seed)
    gone = torch.randperm(len(lengths), generator=draw)[: round(share * len(lengths))].tolist()
    return [0 if index in set(gone) else length for index, length in enumerate(lengths)]


def empty_rows(shares=(0.0, 0.2, 0.4, 0.6, 0.8)) -> list[dict]:
    """Predicted efficiency over the share of sequences without keys, pruned and not (04_empty)."""
    deals = forward_deals()
    cases = {
        "static, empty tiles kept": deals["natural order"],
        "dynamic, empty tiles kept": dataclasses.replace(deals["dynamic"], pruned=False),
        "dynamic, pruned": deals["dynamic"],
    }
    real = data_sets()["real histories"]
    rows = []
    for share in shares:
        lengths = emptied(real, share)
        for name, step in cases.items():
            made = plan(step, lengths)
            rows.append(
                {"case": name, "empty_share": share, "predicted_efficiency": round(made.efficiency, 4)}
            )
    return rows


def measured_rows(directions=("forward", "backward")):
    """Recorded rows of steps (04_steps, 05_steps) as a DataFrame with a direction; None if there are none."""
    import pandas

    from jfa.lab import figures, recorded

    found = [figures.read(name) for name in ("04_steps", "05_steps") if figures.path_of(name).exists()]
    if not found:
        return None
    rows = pandas.concat(found, ignore_index=True)
    if "direction" not in rows:
        rows["direction"] = "forward"
    rows = recorded.timed(rows)
    return rows[rows["direction"].isin(directions)]


def measured_text(names, directions=("forward",)) -> str:
    """Median TFLOPS of steps by shape with their provenance, or the plain statement that there are none."""
    from jfa.lab import recorded

    rows = measured_rows(directions)
    if rows is None:
        return "not measured: no recording of a GPU is in figures/, so this notebook claims no speed"
    return recorded.speeds_text(rows, names, "measured, TFLOPS", ("direction", "M", "N", "density"))


def live_text(quick: bool = False) -> str:
    """Measure the forward steps that differ in their deal on the current GPU; a line a shape and step."""
    from jfa import steps
    from jfa.lab import ladder

    names = [step.name for step in steps.FORWARD["hopper"][:3]]
    shapes = ladder.SHAPES[1:2] if quick else ladder.SHAPES[:3]
    return ladder.live_text("forward", names, shapes, 3 if quick else 9)


def compared_text() -> str:
    """Measured and predicted ratio of the steps to the first one, forward, by recorded shape; "" without."""
    from jfa import steps

    rows = measured_rows(("forward",))
    if rows is None:
        return ""
    ladder = {step.name: step for step in steps.FORWARD["hopper"]}
    wide = rows.assign(B=rows["B"] if "B" in rows else 768)
    wide = wide.pivot_table(index=["M", "N", "density", "B"], columns="step", values="tflops")
    lines = [f"{'M':>4} {'N':>5} {'density':>7}  {'step':<10} measured  predicted  (times warp_specialized)"]
    for (m, n, density, batch), row in wide.iterrows():
        lengths = jagged.density_lengths(batch, n, density, seed=1).tolist()
        names = ("warp_specialized", "balanced", "dynamic")
        times = {name: plan(ladder[name], lengths, queries=m).time for name in names}
        for name in ("balanced", "dynamic"):
            if name in row and row[name] == row[name]:
                ratio, model = row[name] / row["warp_specialized"], times["warp_specialized"] / times[name]
                lines.append(f"{m:>4} {n:>5} {density:>7g}  {name:<10} {ratio:8.2f}  {model:9.2f}")
    return "\n".join(lines)


def separated():
    """Measured forward gains by shape as a DataFrame, each over what stands before it; None without rows.

    "sorted": `balanced` over natural order; "the deal": handed out at run time, with one Q tile, over
    `balanced`; "second Q tile": `dynamic` over that; "both": `dynamic` over `balanced`.
    """
    from jfa.lab import ladder

    rows = measured_rows(("forward",))
    names = ["warp_specialized", "balanced", ladder.ONE_QUERY_TILE, "dynamic"]
    if rows is None or not set(names) <= set(rows["step"]):
        return None
    wide = rows.pivot_table(index=["M", "N", "density"], columns="step", values="tflops")[names].dropna()
    first, static, one, two = (wide[name] for name in names)
    gains = {"sorted": static / first, "the deal": one / static, "second Q tile": two / one}
    return (wide.assign(**gains, both=two / static)[[*gains, "both"]]).rename_axis(columns=None)


def separated_text() -> str:
    """Measured: what `dynamic` gains by its deal and by its second Q tile, forward, by shape; or why not."""
    from jfa.lab import ladder, recorded

    gains = separated()
    if gains is None:
        return f"not measured yet: figures/04_steps.csv has no rows of {ladder.ONE_QUERY_TILE!r}"
    lines = [f"{'M':>4} {'N':>5} {'density':>7}  the deal  second Q tile  both  (measured, forward)"]
    means = [recorded.geometric_mean(gains[name]) for name in gains]
    for (m, n, density), *row in [*gains.itertuples(name=None), (("", "", ""), *means)]:
        shape = f"{m:>4} {n:>5} {density:>7g}" if n else "    geometric mean"
        lines.append(f"{shape}  {row[1]:8.2f}  {row[2]:13.2f}  {row[3]:4.2f}")
    return "\n".join(lines)


def handed_out_text() -> str:
    """Measured: backward `dynamic` over `balanced` by the items of an SM, two predictions beside it; or "".

    The model's items take equal time. "by chance" falls with the root of the items, from the fewest on.
    """
    from jfa import steps

    rows = measured_rows(("backward",))
    if rows is None or not {"balanced", "dynamic"} <= set(rows["step"]):
        return ""
    ladder = {step.name: step for step in steps.BACKWARD["hopper"]}
    wide = rows.assign(B=rows["B"] if "B" in rows else 768)
    wide = wide.pivot_table(index=["M", "N", "density", "B"], columns="step", values="tflops")
    found = []
    for (m, n, density, batch), gain in (wide["dynamic"] / wide["balanced"]).dropna().items():
        lengths = jagged.density_lengths(batch, n, density, seed=1).tolist()
        items = len(backward_items(lengths, ladder["dynamic"])) / SMS["H200"]
        times = [plan(ladder[name], lengths, queries=m).time for name in ("balanced", "dynamic")]
        found.append((items, m, n, density, gain, times[0] / times[1]))
    found.sort()
    lines = ["items of an SM     M     N density  measured  model  by chance  (dynamic over balanced)"]
    for items, m, n, density, gain, model in found:
        chance = 1 + (found[0][4] - 1) * (found[0][0] / items) ** 0.5
        shape = f"{items:>14.0f} {m:>5} {n:>5} {density:>7g}"
        lines.append(f"{shape}  {gain:8.3f}  {model:5.3f}  {chance:9.3f}")
    return "\n".join(lines)


def key_loads(events) -> dict[int, int]:
    """CTA -> tiles of K that it loaded, from an emulator's trace of a forward kernel."""
    found = {}
    for event in events:
        if event[3] == "issue" and event[6].get("desc") in ("desc_k", "k_desc"):
            found[event[1][0]] = found.get(event[1][0], 0) + 1
    return found
