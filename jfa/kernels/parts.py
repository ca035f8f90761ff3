"""The pieces that kernels of both architectures share: rings, tiles, ranges of key blocks, masks, and deals.

A ring passes tiles from one role to the next. A ``Work`` is the tile list with what every role must know of
the call; ``Work.fetch`` turns item t of it into a ``Tile``. A deal says which CTA takes which item.
"""

import triton
import triton.language as tl
import triton.language.extra.tlx as tlx

from jfa.kernels.ragged import ragged_row

LN2 = tl.constexpr(0.6931471805599453)
FIELDS = tl.constexpr(4)  # int32 numbers in a record of a tile list


@triton.aggregate
class Ring:
    """Tiles in shared memory that one role fills and others read, item after item.

    Item i lives in slot i % depth. ``fulls[slot]`` completes when TMA has brought the tile's ``bytes``,
    ``empties[slot]`` when every reader has let it go. A wait for item i has the parity of its lap i // depth.

    ``kinds`` keeps rings with different kinds of barriers apart: the compiler reuses a method for every ring
    of the same type, and the type of a barrier does not say whether each thread of a warp arrives, or one.
    """

    tiles: tlx.buffered_tensor
    fulls: tlx.mbarrier
    empties: tlx.mbarrier
    depth: tl.constexpr
    bytes: tl.constexpr
    kinds: tl.constexpr

    @triton.constexpr_function
    def __init__(self, tiles, fulls, empties, depth, bytes):
        self.tiles = tiles
        self.fulls = fulls
        self.empties = empties
        self.depth = tl.constexpr(depth)
        self.bytes = tl.constexpr(bytes)
        each_thread = [getattr(barrier, "is_warp_barrier", False) for barrier in (fulls, empties)]
        self.kinds = tl.constexpr("".join("threads " if each else "one " for each in each_thread))

    @triton.jit
    def slot(self, i):
        """Slot of item i and the parity of its lap."""
        return i % self.depth, (i // self.depth) & 1

    @triton.jit
    def claim(self, i):
        """Wait until the readers of item i - depth are done; then the slot is the caller's to fill."""
        slot, parity = self.slot(i)
        tlx.barrier_wait(self.empties[slot], parity ^ 1)
        return slot

    @triton.jit
    def bring(self, i, desc, end, length, row, column):
        """Load rows from ``row`` on of the sequence of ``length`` rows that ends at packed row ``end``.

        The slot is known to be empty; returns it. ``bytes`` may count other loads that follow.
        """
        slot = i % self.depth
        tlx.barrier_expect_bytes(self.fulls[slot], self.bytes)
        span, last, first = ragged_row(end, length, row)
        tlx.async_descriptor_load(desc, self.tiles[slot], [span, last, first, column], self.fulls[slot])
        return slot

    @triton.jit
    def fill(self, i, desc, end, length, row, column):
        """As `bring`, once the readers are done with the slot."""
        self.claim(i)
        self.bring(i, desc, end, length, row, column)

    @triton.jit
    def await_full(self, i):
        """Wait until item i has arrived; returns its slot."""
        slot, parity = self.slot(i)
        tlx.barrier_wait(self.fulls[slot], parity)
        return slot

    @triton.jit
    def release(self, i):
        """This reader is done with item i (one arrival of a warp barrier: every thread of the reader)."""
        tlx.barrier_arrive(self.empties[i % self.depth])


@triton.jit
def ring(
    tiles, depth: tl.constexpr, bytes: tl.constexpr, WARPS: tl.constexpr = 0, ARRIVALS: tl.constexpr = 1
):
    """A ring of ``tiles``: a slot is empty when WARPS warps have released it, or after ARRIVALS arrivals."""
    if WARPS > 0:
        empties = tlx.alloc_warp_barrier(depth, num_warps=WARPS)
    else:
        empties = tlx.alloc_barriers(depth, arrive_count=ARRIVALS)
    return Ring(tiles, tlx.alloc_barriers(depth), empties, depth, bytes)


@triton.aggregate
class Tile:
    """BLOCK_M query rows of one head against one sequence's keys: the work of one item."""

    sequence: tl.tensor
    head: tl.tensor
    row: tl.tensor  # first query row, counted in the sequence
    kv_end: tl.tensor  # packed row where the sequence's keys end
    kv_len: tl.tensor
    q_end: tl.tensor  # packed row where the sequence's queries end in q
    q_len: tl.tensor


@triton.aggregate
class Work:
    """The tile list and the facts of the call that every role needs.

    ``items`` = records that have keys * HEADS / PACK. Without a window LEFT and RIGHT are False and free.
    """

    records: tl.tensor
    counts: tl.tensor
    q_offsets: tl.tensor
    q_rows: tl.tensor  # rows of q: M with broadcast-Q, Tq with packed Q
    left: tl.tensor
    right: tl.tensor
    HEADS: tl.constexpr
    GROUP: tl.constexpr
    BROADCAST: tl.constexpr
    LEFT: tl.constexpr
    RIGHT: tl.constexpr
    BLOCK_M: tl.constexpr
    BLOCK_N: tl.constexpr
    PACK: tl.constexpr  # query heads of one group that an item works on: they share each K/V tile

    @triton.jit
    def items(self):
        """Items that have keys."""
        return tl.load(self.counts) * (self.HEADS // self.PACK)

    @triton.jit
    def all_items(self):
        """Items with those of empty sequences, which stand behind the others."""
        return tl.load(self.counts + 1) * (self.HEADS // self.PACK)

    @triton.jit
    def fetch(self, t, items):
        """Tile of item t; past the end the last one, so that a look-ahead may read it."""
        t = tl.maximum(tl.minimum(t, items - 1), 0)
        record = self.records + FIELDS * (t // (self.HEADS // self.PACK))
        head = t % (self.HEADS // self.PACK) * self.PACK
        sequence = tl.load(record)
        row = tl.load(record + 1) * self.BLOCK_M
        kv_row = tl.load(record + 2)
        kv_len = tl.load(record + 3)
        q_end = self.q_rows
        q_len = self.q_rows
        if not self.BROADCAST:
            q_end = tl.load(self.q_offsets + sequence + 1).to(tl.int32)
            q_len = q_end - tl.load(self.q_offsets + sequence).to(tl.int32)
        return Tile(sequence, head, row, kv_row + kv_len, kv_len, q_end, q_len)

    @triton.jit
    def out_end(self, tile):
        """Packed row where the sequence's rows end in the output."""
        end = tile.q_end
        if self.BROADCAST:
            end = (tile.sequence + 1) * self.q_rows
        return end

    @triton.jit
    def lse_row(self, tile):
        """Offset of the tile's first row in lse: (B, Hq, M) with broadcast-Q, (Hq, Tq) with packed Q."""
        if self.BROADCAST:
            start = (tile.sequence.to(tl.int64) * self.HEADS + tile.head) * self.q_rows
        else:
            start = tile.head.to(tl.int64) * self.q_rows + tile.q_end - tile.q_len
        return start + tile.row

    @triton.jit
    def blocks(self, tile):
        """Blocks of keys that some row of the tile sees: the last one, and how many (at least one).

        A tile that sees no key still walks one block, all of it masked; so no role has an empty case.
        """
        high = tile.kv_len
        low = 0
        shift = tile.kv_len - tile.q_len  # row r is aligned with key r + shift
        if self.RIGHT:
            last_row = tl.minimum(tile.row + self.BLOCK_M, tile.q_len) - 1
            high = tl.minimum(high, last_row + shift + self.right + 1)
        if self.LEFT:
            low = tl.maximum(tile.row + shift - self.left, 0)
        last = tl.maximum(high - 1, 0) // self.BLOCK_N
        return last, tl.maximum(last + 1 - low // self.BLOCK_N, 1)

    @triton.jit
    def unmasked(self, tile, row, ROWS: tl.constexpr):
        """Blocks [first, end) that hide no key from the ROWS rows from ``row`` on."""
        end = tile.kv_len
        first = 0
        shift = tile.kv_len - tile.q_len
        if self.RIGHT:
            end = tl.minimum(end, row + shift + self.right + 1)
        if self.LEFT:
            first = tl.cdiv(tl.maximum(row + ROWS - 1 + shift - self.left, 0), self.BLOCK_N)
        return first, tl.maximum(end, 0) // self.BLOCK_N

    @triton.jit
    def walk(self, tile):
        """The tile's blocks in an order that has all masked ones first (see Walk)."""
        last, count = self.blocks(tile)
        first_bulk, end_bulk = self.unmasked(tile, tile.row, self.BLOCK_M)
        high = tl.minimum(tl.maximum(last + 1 - end_bulk, 1), count)
        low = 0
        if self.LEFT:
            low = tl.minimum(tl.maximum(first_bulk - (last - count + 1), 0), count - high)
        return Walk(last, count, high, high + low, self.LEFT)

    @triton.jit
    def seen(self, tile, rows, columns):
        """Which keys (columns, counted in the sequence) the rows see; (rows, columns) or (1, columns)."""
        shift = tile.kv_len - tile.q_len
        if self.RIGHT:
            end = tl.minimum(rows + (shift + self.right + 1), tile.kv_len)
            mask = columns[None, :] < end[:, None]
        else:
            mask = columns[None, :] < tile.kv_len
        if self.LEFT:
            mask = mask & (columns[None, :] >= (rows + (shift - self.left))[:, None])
        return mask


@triton.aggregate
class Walk:
    """A tile's way over its ``count`` blocks of keys: the high edge downwards, the low edge, then the bulk.

    Blocks 0 to ``masked`` - 1 of the way hide keys from some row (the first may), the others from none.
    """

    last: tl.tensor
    count: tl.tensor
    high: tl.tensor  # blocks of the high edge
    masked: tl.tensor  # blocks of both edges
    LEFT: tl.constexpr

    @triton.jit
    def block(self, j):
        """The j-th block of the way, counted in the sequence."""
        block = self.last - j
        if self.LEFT:
            low = self.masked - self.high
            bulk = self.last - (j - low)
            edge = self.last - self.count + 1 + (j - self.high)
            block = tl.where(j < self.high, block, tl.where(j < self.masked, edge, bulk))
        return block


@triton.aggregate
class Deal:
    """Who takes which item: this CTA, how many there are, the shared counter, the ring of ticket numbers."""

    program: tl.tensor
    programs: tl.tensor
    items: tl.tensor
    counter: tl.tensor
    tickets: tlx.buffered_tensor
    fulls: tlx.mbarrier
    empties: tlx.mbarrier
    CLASSES: tl.constexpr  # (head, query block) pairs that items cycle through


# Each deal is three functions. ``draw(deal, k, before)``: the loader learns this CTA's k-th item, which comes
# after item ``before``. ``publish(deal, k, t)``: it tells the other roles. ``hear(deal, k)``: they learn it.


@triton.jit
def round_robin(deal, k, before=0):
    """Item k * programs + program, in list order."""
    return k * deal.programs + deal.program


@triton.jit
def boustrophedon(deal, k, before=0):
    """Round robin whose odd rounds run backwards: after the longest of one round the shortest of the next."""
    turn = (k & 1) * (deal.programs - 1 - 2 * deal.program)
    return k * deal.programs + deal.program + turn


@triton.jit
def stay_silent(deal, k, t):
    """A static deal needs no message: every role computes it."""


@triton.jit
def draw_ticket(deal, k, before):
    """The first item is the CTA's own number, the others come from one counter that all CTAs share."""
    t = deal.program
    if k > 0:
        t = deal.programs + tl.atomic_add(deal.counter, 1, sem="relaxed")
    return t


@triton.jit
def publish_ticket(deal, k, t):
    """Loader -> readers: the k-th item's number. Two slots, because readers look one item ahead."""
    slot = k % 2
    tlx.barrier_wait(deal.empties[slot], ((k // 2) & 1) ^ 1)
    tlx.local_store(deal.tickets[slot], tl.zeros([1], tl.int32) + t)
    tlx.barrier_arrive(deal.fulls[slot])


@triton.jit
def hear_ticket(deal, k, before=0):
    """Reader: the k-th item's number, as the loader published it."""
    slot = k % 2
    tlx.barrier_wait(deal.fulls[slot], (k // 2) & 1)
    t = tl.max(tlx.local_load(deal.tickets[slot]), 0)
    tlx.barrier_arrive(deal.empties[slot])
    return t


@triton.jit
def draw_same_queries(deal, k, before):
    """Stay with the (head, query block) of item ``before``: items of one class lie CLASSES apart.

    Each class has its counter. The last quarter of the list, the least work, is anyone's: it evens out what
    unequal numbers of CTAs in the classes leave. Every branch follows from an atomic's result, which a warp's
    lanes agree on; a counter that is merely loaded may differ from lane to lane while others add to it.
    """
    t = deal.program
    if k > 0:
        common = (deal.items // (4 * deal.CLASSES) * 3) * deal.CLASSES
        common = tl.maximum(common, tl.cdiv(deal.programs, deal.CLASSES) * deal.CLASSES)
        t = common
        if before < common:
            class_ = before % deal.CLASSES
            first = tl.cdiv(deal.programs - class_, deal.CLASSES)  # CTAs that began with this class
            turn = first + tl.atomic_add(deal.counter + class_, 1, sem="relaxed")
            t = turn * deal.CLASSES + class_
        if t >= common:
            t = common + tl.atomic_add(deal.counter + deal.CLASSES, 1, sem="relaxed")
    return t


@triton.jit
def reload_queries(work, tile, last):
    """Whether ``tile`` needs its queries loaded, given the tile before: always."""
    return True


@triton.jit
def keep_queries(work, tile, last):
    """With broadcast-Q only when head or query block change: Q depends on nothing else."""
    fresh = (tile.head != last.head) | (tile.row != last.row)
    if not work.BROADCAST:
        fresh = fresh | True
    return fresh


@triton.jit
def fill_empty(work, deal, out, lse, first_row, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Rows of sequences without keys: out 0 and lse -inf, ROWS rows from ``first_row`` of each tile."""
    everything = work.all_items()
    rows = first_row + tl.arange(0, ROWS)
    columns = tl.arange(0, HEAD_DIM)
    for t in range(deal.items + deal.program, everything, deal.programs):
        tile = work.fetch(t, everything)
        real = tile.row + rows < tile.q_len
        row = (work.out_end(tile) - tile.q_len + tile.row).to(tl.int64) + rows
        for head in tl.static_range(work.PACK):
            start = lse + work.lse_row(tile) + head * work.q_rows
            tl.store(start + rows, tl.full([ROWS], -float("inf"), tl.float32), real)
            at = (row * work.HEADS + tile.head + head)[:, None] * HEAD_DIM + columns[None, :]
            tl.store(out + at, tl.zeros([ROWS, HEAD_DIM], out.dtype.element_ty), real[:, None])
