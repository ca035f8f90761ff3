"""How fast the CTAs of a GPU can add tiles to memory when many of them add to the same ones.

That is what dQ of a shared query block asks for: every key tile of every sequence adds to the same rows. The
kernels here do nothing else. ``python -m jfa.lab.reduction --output figures/05_reduction.csv`` records their
bandwidth on an H200; without a GPU the emulator shows that they add up.
"""

import argparse
import functools
import sys

import torch
import triton
import triton.language as tl
import triton.language.extra.tlx as tlx
from triton.tools.tensor_descriptor import TensorDescriptor

from jfa.lab import argtypes, measure

WIDTH = 512  # columns of dQ: four heads of 128
TURNS = 256  # tiles that each CTA adds
DESTINATIONS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 8192)
# Rows and columns of a staging tile: half of dQ (a group on Hopper), a slice of dQ (Blackwell), a narrow one.
TILES = ((64, 64), (128, 32), (128, 16))
HEADER = f"{'what':<11} {'tile':>8} {'in flight':>9} {'destinations':>12} {'TB/s':>6}"


@triton.jit
def place_of(turn, destinations, COLUMNS: tl.constexpr, PER_ROW: tl.constexpr):
    """Row block and column of the destination that this CTA adds to in its turn; CTAs begin apart."""
    place = (tl.program_id(0) + turn * tl.num_programs(0)) % destinations
    return place // PER_ROW, place % PER_ROW * COLUMNS


@triton.jit(do_not_specialize=["turns", "destinations"])
def add_by_tma(
    out,
    turns,
    destinations,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PER_ROW: tl.constexpr,
    DEPTH: tl.constexpr,
    ADD: tl.constexpr,
):
    """Each CTA fills one of DEPTH staging tiles with ones, and TMA adds or stores it, turn after turn."""
    tiles = tlx.local_alloc((ROWS, COLUMNS), tl.float32, DEPTH)
    ones = tl.full([ROWS, COLUMNS], 1.0, tl.float32)
    for turn in range(turns):
        staged = tiles[turn % DEPTH]
        tlx.async_descriptor_store_wait(DEPTH - 1)  # the TMA unit has read what the tile held
        tlx.local_store(staged, ones)
        tlx.fence("async_shared")  # the TMA unit reads it
        block, column = place_of(turn, destinations, COLUMNS, PER_ROW)
        if ADD:
            tlx.async_descriptor_store(out, staged, [block * ROWS, column], store_reduce="add")
        else:
            tlx.async_descriptor_store(out, staged, [block * ROWS, column])
    tlx.async_descriptor_store_wait(0)


@triton.jit(do_not_specialize=["turns", "destinations"])
def add_by_threads(
    out, turns, destinations, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PER_ROW: tl.constexpr
):
    """The same without staging: every thread adds its elements by atomic instructions."""
    ones = tl.full([ROWS, COLUMNS], 1.0, tl.float32)
    rows, columns = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    for turn in range(turns):
        block, column = place_of(turn, destinations, COLUMNS, PER_ROW)
        at = (block * ROWS + rows).to(tl.int64)[:, None] * (PER_ROW * COLUMNS) + column + columns[None, :]
        tl.atomic_add(out + at, ones, sem="relaxed")


def destinations_of(query_len: int, heads: int = 4, head_dim: int = 128, tile=TILES[0]) -> int:
    """Distinct tiles of dQ when ``query_len`` rows are shared by all sequences."""
    return heads * -(-query_len // tile[0]) * (head_dim // tile[1])


def launch(out, what: str, tile, in_flight: int, destinations: int, ctas: int, turns: int) -> None:
    """Start one kernel: ``what`` is "reduce-add" or "store" by TMA, or "atomics" of the threads.

    out: (row blocks * rows, WIDTH) float32 with at least ``destinations`` tiles.
    """
    rows, columns = tile
    sizes = {"ROWS": rows, "COLUMNS": columns, "PER_ROW": out.shape[1] // columns}
    if what == "atomics":
        add_by_threads[(ctas,)](out, turns, destinations, **sizes, num_warps=4)
    else:
        desc = TensorDescriptor(out, list(out.shape), list(out.stride()), [rows, columns])
        sizes |= {"DEPTH": in_flight, "ADD": what == "reduce-add"}
        add_by_tma[(ctas,)](desc, turns, destinations, **sizes, num_warps=4, num_stages=1)


def sums(what: str, tile, in_flight: int, destinations: int, ctas: int, turns: int, device="cpu"):
    """Run one kernel on a fresh output; returns what each destination got and what it should have."""
    blocks = -(-destinations // (WIDTH // tile[1]))
    out = torch.zeros(blocks * tile[0], WIDTH, device=device)
    launch(out, what, tile, in_flight, destinations, ctas, turns)
    per_tile = out.reshape(blocks, tile[0], WIDTH // tile[1], tile[1]).permute(0, 2, 1, 3).flatten(0, 1)
    got = per_tile[:destinations].flatten(1)
    turn, cta = torch.arange(turns), torch.arange(ctas)[:, None]
    wanted = torch.bincount(((cta + turn * ctas) % destinations).flatten(), minlength=destinations)
    return got.cpu(), wanted.clamp(max=1) if what == "store" else wanted


def right(*args, **kwargs) -> bool:
    """Whether every element of every destination has the right sum; arguments as of `sums`."""
    got, wanted = sums(*args, **kwargs)
    return bool((got == wanted[:, None]).all())


def variants(quick: bool = False) -> list[tuple[str, tuple[int, int], int]]:
    """(what, tile, staging tiles) that are measured."""
    adds = [("reduce-add", TILES[0], depth) for depth in (1, 2, 4)]
    if quick:
        return adds[:2]
    return [
        *adds,
        *(("reduce-add", tile, 2) for tile in TILES[1:]),
        ("store", TILES[0], 2),
        ("atomics", TILES[0], 0),
    ]


def measured(chosen=None, destinations=DESTINATIONS, rounds: int = 7, sample_ms: float = 4.0):
    """Yield a row for every variant and number of destinations on the current GPU, each checked first."""
    ctas = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
    for count in destinations:
        calls, columns = {}, {}
        for what, tile, depth in chosen or variants():
            if not right(what, tile, depth, count, ctas, 64, device="cuda"):
                raise RuntimeError(f"{what} of {tile} tiles to {count} destinations adds up wrongly")
            name = f"{what} {tile[0]}x{tile[1]} {depth}"
            blocks = -(-count // (WIDTH // tile[1]))
            out = torch.zeros(blocks * tile[0], WIDTH, device="cuda")
            calls[name] = functools.partial(launch, out, what, tile, depth, count, ctas, TURNS)
            columns[name] = {
                "what": what,
                "destinations": count,
                "tile_rows": tile[0],
                "tile_columns": tile[1],
                "in_flight": depth,
                "ctas": ctas,
                "payload_bytes": ctas * TURNS * tile[0] * tile[1] * 4,
            }
        for row in measure.interleave(calls, rounds, sample_ms=sample_ms, warmup_ms=10.0, graph=True):
            facts = columns[row["name"]]
            yield facts | row | {"gb_s": facts["payload_bytes"] / row["ms_p50"] / 1e6}


def show(row: dict) -> str:
    """One measured row as a line under `HEADER`."""
    tile = f"{row['tile_rows']}x{row['tile_columns']}"
    return (
        f"{row['what']:<11} {tile:>8} {row['in_flight']:>9} {row['destinations']:>12} "
        f"{row['gb_s'] / 1e3:>6.2f}"
    )


def main(arguments: list[str] | None = None) -> int:
    """Measure everything on the current GPU, print a line each, and write the rows."""
    parser = argparse.ArgumentParser(prog="python -m jfa.lab.reduction", description=__doc__)
    parser.add_argument("--output", help="CSV to write")
    parser.add_argument("--rounds", type=argtypes.count, default=7)
    chosen = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("no CUDA device: there is nothing to measure here")
    rows = []
    print(HEADER)
    for row in measured(rounds=chosen.rounds):
        rows.append(row)
        print(show(row), flush=True)
    if chosen.output:
        print("wrote", measure.write_rows(chosen.output, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
