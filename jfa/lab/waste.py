"""Where the work on a jagged batch is lost, by counting: padding, tile remainders, and tiles dealt unevenly.

Nothing here is a time. A length is a number of keys (rows of K and V); their sum measures the useful work.
"""

import heapq

H200_SMS = 132


def padded(lengths: list[int]) -> float:
    """Return the useful share, 0 to 1, of the work when every sequence is padded to the longest one."""
    return sum(lengths) / (len(lengths) * max(lengths)) if max(lengths) else 1.0


def tiles(lengths: list[int], block: int) -> list[int]:
    """Return how many key tiles of `block` rows each sequence takes."""
    return [-(-length // block) for length in lengths]


def tiled(lengths: list[int], block: int) -> float:
    """Return the useful share, 0 to 1, of the work when sequences are cut into key tiles of `block` rows."""
    rows = block * sum(tiles(lengths, block))
    return sum(lengths) / rows if rows else 1.0


def deal_fixed(work: list[int], workers: int) -> list[int]:
    """Return each worker's load when items are dealt round robin in their order, whatever they weigh."""
    return [sum(work[worker::workers]) for worker in range(workers)]


def deal_free(work: list[int], workers: int) -> list[int]:
    """Return each worker's load when the next item in order goes to the worker that is free first."""
    loads = [0] * workers
    for item in work:
        heapq.heapreplace(loads, loads[0] + item)
    return loads


def balance(loads: list[int]) -> float:
    """Return the mean load over the greatest, 0 to 1: the share of the time that an average worker works."""
    return sum(loads) / (len(loads) * max(loads)) if max(loads) else 1.0
