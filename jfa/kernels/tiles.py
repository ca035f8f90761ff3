"""Tile lists: which tiles a batch has, and in what order the CTAs take them.

Two lists describe a batch. ``q_tiles`` has a record for every block of query rows (forward), ``kv_tiles`` one
for every block of keys (backward). A record is four int32: sequence, block, first KV row, KV length. Tiles of
sequences with nothing on the other side (no keys, no queries) carry no work; a pruned list has them behind
the others, where a kernel only fills their rows. Rows past the last offset count as one more such sequence,
of queries without keys and of keys without queries.

Sorting is stable and by whole blocks of work, so equal sequences stay neighbours (their tails share L2).
Under a causal mask a sequence's last block of queries and its first block of keys have the most work: sorted
query tiles stand backwards within a sequence, key tiles never do.
"""

import dataclasses

import torch
import triton
import triton.language as tl

from jfa.kernels.launch import launch
from jfa.kernels.problem import Problem

ORDERS = ("natural", "sorted")
RANKED = 8192  # up to here each CTA ranks its sequence against all others; beyond, PyTorch sorts


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The tile lists of one batch, for the forward and backward pass of every layer that has its shapes.

    ``q_tiles`` and ``kv_tiles`` (capacity, 4): int32 records. ``q_counts`` and ``kv_counts`` (2,): int32, how
    many records have work, and how many there are. ``q_offsets`` (B + 2,): int32, the offsets of packed
    queries with all rows behind them, empty with broadcast-Q. ``block_m`` and ``block_n``: rows of a query
    and of a key tile. All on the device of the offsets; nothing here was ever read by the host.
    """

    q_tiles: torch.Tensor
    q_counts: torch.Tensor
    kv_tiles: torch.Tensor
    kv_counts: torch.Tensor
    q_offsets: torch.Tensor
    block_m: int
    block_n: int
    order: str
    pruned: bool

    def tensors(self) -> list[torch.Tensor]:
        """The schedule as tensors, the last one on the CPU: what an operator's signature can carry."""
        facts = [self.block_m, self.block_n, ORDERS.index(self.order), int(self.pruned)]
        facts = torch.tensor(facts, device="cpu")  # whatever the default device is
        return [self.q_tiles, self.q_counts, self.kv_tiles, self.kv_counts, self.q_offsets, facts]

    @classmethod
    def from_tensors(cls, tensors: list[torch.Tensor]) -> "Schedule":
        """The schedule that ``tensors`` gave."""
        *lists, facts = tensors
        block_m, block_n, order, pruned = facts.tolist()
        return cls(*lists, block_m, block_n, ORDERS[order], bool(pruned))

    def check(self, problem: Problem, kv_offsets, q_offsets, values: bool = False) -> None:
        """Raise ValueError unless this schedule was made for such a call: device and shapes.

        With ``values`` also the lengths, by making the lists again, for which the device is waited for.
        """
        batch, broadcast = problem.batch, problem.broadcast_q
        rows = (problem.total_q, problem.total_kv)
        if self.q_tiles.device != kv_offsets.device:
            raise ValueError(f"schedule: expected on {kv_offsets.device}, got {self.q_tiles.device}")
        wanted = (
            *capacities(batch, *rows, self.block_m, self.block_n, broadcast),
            0 if broadcast else batch + 2,
        )
        found = (self.q_tiles.shape[0], self.kv_tiles.shape[0], self.q_offsets.numel())
        if found != wanted:
            raise ValueError(
                f"schedule: expected one made for {batch} sequences, {rows[0]} rows of "
                f"{'shared' if broadcast else 'packed'} q and {rows[1]} of k: lists and offsets of {wanted} "
                f"entries, got {found}"
            )
        if values:
            again = _listed(kv_offsets, q_offsets, *rows, self.block_m, self.block_n, self.order, self.pruned)
            for tiles, counts, mine, count in zip(
                again[::2], again[1::2], (self.q_tiles, self.kv_tiles), (self.q_counts, self.kv_counts)
            ):
                used = int(counts[1])
                if not torch.equal(counts, count) or not torch.equal(tiles[:used], mine[:used]):
                    raise ValueError(
                        "schedule: expected one made from these offsets, got one of other lengths"
                    )
            if not torch.equal(again[4], self.q_offsets):
                raise ValueError("schedule: expected one made from these q_offsets, got one of other lengths")


def make_schedule(
    shapes: Problem | tuple[int, int],
    kv_offsets: torch.Tensor,
    q_offsets: torch.Tensor | None = None,
    block_m: int = 128,
    block_n: int = 128,
    *,
    order: str = "sorted",
    pruned: bool = True,
    where: str = "device",
) -> Schedule:
    """List the tiles of a batch, for arguments as ``jfa.schedule.make_schedule`` takes and checks them."""
    kv_offsets = kv_offsets.contiguous()
    q_offsets = None if q_offsets is None else q_offsets.contiguous()
    rows = (shapes.total_q, shapes.total_kv) if isinstance(shapes, Problem) else shapes
    device, batch = kv_offsets.device, kv_offsets.numel() - 1
    options = (*rows, block_m, block_n, order, pruned)
    if where == "host":
        offsets = [None if x is None else x.cpu() for x in (kv_offsets, q_offsets)]
        lists = [x.to(device) for x in _listed(*offsets, *options)]
    elif device.type == "cuda" and batch <= RANKED:
        lists = ranked(kv_offsets, q_offsets, *options)
    else:
        lists = _listed(kv_offsets, q_offsets, *options)
    return Schedule(*lists, block_m, block_n, order, pruned)


def capacities(batch: int, q_rows: int, kv_rows: int, block_m: int, block_n: int, broadcast: bool):
    """Records that the two lists can need, from shapes alone."""
    q_tiles = -(-q_rows // block_m)  # on the host, where triton.cdiv takes as long as a tensor's allocation
    return batch * q_tiles if broadcast else q_tiles + batch + 1, -(-kv_rows // block_n) + batch + 1


# ------------------------------------------------------------ with PyTorch's operators


def _listed(kv_offsets, q_offsets, q_rows, kv_rows, block_m, block_n, order, pruned):
    """Both lists by a dozen PyTorch operators, on any device, without reading a value."""
    batch = kv_offsets.numel() - 1
    kv_offsets = torch.cat([kv_offsets.int(), kv_offsets.new_full((1,), kv_rows, dtype=torch.int32)])
    kv_lengths = kv_offsets.diff()
    if q_offsets is None:
        q_offsets = kv_offsets.new_empty(0)
        q_lengths = torch.full_like(kv_lengths, q_rows)
        q_lengths[batch:] = 0
    else:
        q_offsets = torch.cat([q_offsets.int(), q_offsets.new_full((1,), q_rows, dtype=torch.int32)])
        q_lengths = q_offsets.diff()
    capacity = capacities(batch, q_rows, kv_rows, block_m, block_n, q_offsets.numel() == 0)
    # The rows behind the last offset have neither queries that see keys nor keys that are seen.
    seen_keys, seen_queries = kv_lengths.clone(), q_lengths.clone()
    seen_keys[batch:] = 0
    seen_queries[batch:] = 0
    lists = []
    q_side = (order == "sorted", q_lengths, seen_keys, block_m, block_n, seen_keys)
    kv_side = (False, kv_lengths, seen_queries, block_n, block_m, kv_lengths)
    for side, size in zip((q_side, kv_side), capacity, strict=True):
        lists += _list(*side, kv_offsets, size, order, pruned)
    return [*lists, q_offsets]


def _list(backwards, own, other, block, other_block, kv_lengths, kv_offsets, capacity, order, pruned):
    tiles = (own + block - 1) // block
    work = (other + other_block - 1) // other_block
    key = work if order == "sorted" else torch.ones_like(work)
    if pruned:
        key = torch.where(work > 0, key, 0)
    elif order == "natural":
        key = torch.zeros_like(work)
    sequences = torch.argsort(key, descending=True, stable=True)
    ends = tiles[sequences].cumsum(0)
    places = torch.arange(capacity, device=own.device)
    at = torch.searchsorted(ends, places, right=True).clamp_(max=ends.numel() - 1)
    sequence = sequences[at]
    block_index = places - (ends - tiles[sequences])[at]
    if backwards:
        block_index = tiles[sequence] - 1 - block_index
    records = torch.stack([sequence, block_index, kv_offsets[sequence], kv_lengths[sequence]], 1).int()
    total = ends[-1]
    busy = torch.where(work > 0, tiles, 0).sum() if pruned else total
    return records.contiguous(), torch.stack([busy, total]).int()


# ------------------------------------------------------------ with one kernel


def ranked(kv_offsets, q_offsets, q_rows, kv_rows, block_m, block_n, order, pruned):
    """Both lists by one kernel: a CTA a sequence, which finds its place by comparing with all others."""
    batch = kv_offsets.numel() - 1
    capacity = capacities(batch, q_rows, kv_rows, block_m, block_n, q_offsets is None)
    int32 = {"dtype": torch.int32, "device": kv_offsets.device}
    lists = []
    for size in capacity:
        lists += [torch.empty(size, 4, **int32), torch.empty(2, **int32)]
    longer = torch.empty(0 if q_offsets is None else batch + 2, **int32)
    launch(
        list_tiles,
        (batch + 1,),
        kv_offsets,
        kv_offsets if q_offsets is None else q_offsets,
        *lists,
        longer,
        batch,
        q_rows,
        kv_rows,
        BROADCAST=q_offsets is None,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        SORTED=order == "sorted",
        PRUNED=pruned,
        CHUNK=min(1024, 1 << batch.bit_length()),  # a power of two above batch
        num_warps=4,
    )
    return [*lists, longer]


@triton.jit(do_not_specialize=["batch", "q_rows", "kv_rows"])
def list_tiles(
    kv_offsets,
    q_offsets,
    q_tiles,
    q_counts,
    kv_tiles,
    kv_counts,
    longer,
    batch,
    q_rows,
    kv_rows,
    BROADCAST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SORTED: tl.constexpr,
    PRUNED: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Program i places sequence i in both lists; sequence ``batch`` is the rows past all others."""
    i = tl.program_id(0)
    kv_len, q_len, q_work, kv_work = _lengths(
        kv_offsets, q_offsets, i, batch, q_rows, kv_rows, BROADCAST, BLOCK_M, BLOCK_N
    )
    q_key, kv_key = _key(q_work, SORTED, PRUNED), _key(kv_work, SORTED, PRUNED)
    q_place, q_busy, q_all, kv_place, kv_busy, kv_all = 0, 0, 0, 0, 0, 0
    for start in range(0, batch + 1, CHUNK):
        j = start + tl.arange(0, CHUNK)
        kv, q, q_does, kv_does = _lengths(
            kv_offsets, q_offsets, j, batch, q_rows, kv_rows, BROADCAST, BLOCK_M, BLOCK_N
        )
        q_count, kv_count = tl.cdiv(q, BLOCK_M), tl.cdiv(kv, BLOCK_N)
        q_place += tl.sum(tl.where(_before(_key(q_does, SORTED, PRUNED), j, q_key, i), q_count, 0), 0)
        kv_place += tl.sum(tl.where(_before(_key(kv_does, SORTED, PRUNED), j, kv_key, i), kv_count, 0), 0)
        q_all += tl.sum(q_count, 0)
        kv_all += tl.sum(kv_count, 0)
        q_busy += tl.sum(tl.where(q_does > 0, q_count, 0), 0)
        kv_busy += tl.sum(tl.where(kv_does > 0, kv_count, 0), 0)
    kv_row = tl.load(kv_offsets + i).to(tl.int32)
    _write(q_tiles, q_place, tl.cdiv(q_len, BLOCK_M), i, kv_row, tl.where(i < batch, kv_len, 0), SORTED)
    _write(kv_tiles, kv_place, tl.cdiv(kv_len, BLOCK_N), i, kv_row, kv_len, False)
    if not BROADCAST:
        tl.store(longer + i, tl.load(q_offsets + i).to(tl.int32))
    if i == batch:
        tl.store(q_counts, q_busy if PRUNED else q_all)
        tl.store(q_counts + 1, q_all)
        tl.store(kv_counts, kv_busy if PRUNED else kv_all)
        tl.store(kv_counts + 1, kv_all)
        if not BROADCAST:
            tl.store(longer + batch + 1, q_rows)


@triton.jit
def _lengths(kv_offsets, q_offsets, i, batch, q_rows, kv_rows, BROADCAST, BLOCK_M, BLOCK_N):
    """Of sequence i: rows of keys and queries, and the work of a query tile and of a key tile in blocks."""
    real = i <= batch
    kv_start = tl.load(kv_offsets + i, mask=real, other=0).to(tl.int32)
    kv_end = tl.load(kv_offsets + i + 1, mask=i < batch, other=0).to(tl.int32)
    kv_len = tl.where(i < batch, kv_end, tl.where(real, kv_rows, 0)) - kv_start
    if BROADCAST:
        q_len = tl.where(i < batch, q_rows, 0)
    else:
        q_start = tl.load(q_offsets + i, mask=real, other=0).to(tl.int32)
        q_end = tl.load(q_offsets + i + 1, mask=i < batch, other=0).to(tl.int32)
        q_len = tl.where(i < batch, q_end, tl.where(real, q_rows, 0)) - q_start
    q_work = tl.where(i < batch, tl.cdiv(kv_len, BLOCK_N), 0)
    kv_work = tl.where(i < batch, tl.cdiv(q_len, BLOCK_M), 0)
    return kv_len, q_len, q_work, kv_work


@triton.jit
def _key(work, SORTED: tl.constexpr, PRUNED: tl.constexpr):
    """What the list descends by; equal keys stay in natural order."""
    key = work
    if not SORTED:
        key = tl.minimum(work, 1) if PRUNED else work * 0
    return key


@triton.jit
def _before(key_j, j, key_i, i):
    return (key_j > key_i) | ((key_j == key_i) & (j < i))


@triton.jit
def _write(tiles, place, count, sequence, kv_row, kv_len, BACKWARDS: tl.constexpr):
    for start in range(0, count, 128):
        block = start + tl.arange(0, 128)
        at = tiles + 4 * (place + (count - 1 - block if BACKWARDS else block))
        real = block < count
        tl.store(at, sequence + block * 0, real)
        tl.store(at + 1, block, real)
        tl.store(at + 2, kv_row + block * 0, real)
        tl.store(at + 3, kv_len + block * 0, real)
