"""What the roles of a KV-stationary backward kernel know of their work: key tiles, query ranges, masks.

An item is a key tile of one KV head, or in the first step a whole sequence of one. ``Keys`` is the list with
the facts of the call; ``Keys.tile`` gives one block of an item as a ``KeyTile``. A tile is walked once for
every query head of its group, over the blocks of query rows that see it.
"""

import triton
import triton.language as tl

FIELDS = tl.constexpr(4)  # int32 numbers in a record of a tile list


@triton.aggregate
class KeyTile:
    """BLOCK_N keys of one KV head of one sequence."""

    sequence: tl.tensor
    head: tl.tensor  # KV head
    key: tl.tensor  # first key, counted in the sequence
    kv_end: tl.tensor  # packed row where the sequence's keys end
    kv_len: tl.tensor
    q_end: tl.tensor  # packed row where the sequence's queries end in q and dQ
    dout_end: tl.tensor  # and in dO
    q_len: tl.tensor
    stat: tl.tensor  # first row of the sequence in the row statistics


@triton.aggregate
class Keys:
    """The list of key tiles and the facts of the call. ``items`` counts list entries times KV heads."""

    records: tl.tensor
    counts: tl.tensor
    kv_offsets: tl.tensor
    q_offsets: tl.tensor
    batch: tl.tensor
    query_len: tl.tensor
    padded_len: tl.tensor
    left: tl.tensor
    right: tl.tensor
    HEADS: tl.constexpr  # KV heads
    GROUP: tl.constexpr  # query heads of a KV head
    BROADCAST: tl.constexpr
    LEFT: tl.constexpr
    RIGHT: tl.constexpr
    BLOCK_M: tl.constexpr
    BLOCK_N: tl.constexpr  # keys of a tile, which a pair of CTAs shares
    KEYS: tl.constexpr  # keys of a CTA
    mine: tl.tensor  # first of this CTA's keys in the tile

    @triton.jit
    def at(self, sequence, head, key, kv_row, kv_len):
        """The tile from ``key`` on of a sequence whose keys start at packed row ``kv_row``.

        A list also holds the keys behind the last offset, as one more sequence; they meet no query.
        """
        if self.BROADCAST:
            q_end = self.query_len
            dout_end = (sequence + 1) * self.query_len
            q_len = self.query_len
            stat = sequence * self.padded_len
        else:
            start = tl.load(self.q_offsets + sequence).to(tl.int32)
            q_end = tl.load(self.q_offsets + sequence + 1).to(tl.int32)
            dout_end = q_end
            q_len = q_end - start
            stat = (start // self.BLOCK_M + sequence) * self.BLOCK_M
        q_len = tl.where(sequence < self.batch, q_len, 0)
        return KeyTile(sequence, head, key, kv_row + kv_len, kv_len, q_end, dout_end, q_len, stat)

    @triton.jit
    def query_blocks(self, tile):
        """Blocks [low, high) of query rows that see some key of the tile."""
        low = 0
        high = tile.q_len
        shift = tile.kv_len - tile.q_len  # row r is aligned with key r + shift
        if self.RIGHT:
            low = tl.maximum(tile.key - shift - self.right, 0) // self.BLOCK_M
        if self.LEFT:
            high = tl.minimum(high, tile.key + self.BLOCK_N - shift + self.left)
        return low, tl.maximum(tl.cdiv(tl.maximum(high, 0), self.BLOCK_M), low)

    @triton.jit
    def bulk_blocks(self, tile, low, high):
        """Blocks [first, end) within [low, high) whose rows all see every key of the tile."""
        first = low
        end = high
        shift = tile.kv_len - tile.q_len
        if self.RIGHT:
            behind = tile.key + self.BLOCK_N - 1 - shift - self.right
            first = tl.maximum(first, tl.cdiv(tl.maximum(behind, 0), self.BLOCK_M))
        if self.LEFT:
            ahead = tile.key - shift + self.left + 1
            end = tl.minimum(end, tl.maximum(ahead, 0) // self.BLOCK_M)
        if tile.key + self.BLOCK_N > tile.kv_len:
            end = first
        first = tl.minimum(first, high)
        return first, tl.maximum(end, first)

    @triton.jit
    def seen(self, tile, keys, rows):
        """Which query rows see which keys, both counted in the sequence: (keys, rows)."""
        mask = keys[:, None] < tile.kv_len
        shift = tile.kv_len - tile.q_len
        if self.RIGHT:
            mask = mask & (keys[:, None] <= rows[None, :] + (shift + self.right))
        if self.LEFT:
            mask = mask & (keys[:, None] >= rows[None, :] + (shift - self.left))
        return mask


# A span says which key tiles an item has: ``count`` of them, and the i-th one.


@triton.jit
def sequence_items(keys):
    """An item is a whole sequence of one head."""
    return keys.batch * keys.HEADS


@triton.jit
def sequence_count(keys, t):
    """Key tiles of item t: all of its sequence."""
    sequence = t // keys.HEADS
    start = tl.load(keys.kv_offsets + sequence).to(tl.int32)
    return tl.cdiv(tl.load(keys.kv_offsets + sequence + 1).to(tl.int32) - start, keys.BLOCK_N)


@triton.jit
def sequence_tile(keys, t, i):
    """The i-th key tile of item t, a whole sequence."""
    sequence = t // keys.HEADS
    start = tl.load(keys.kv_offsets + sequence).to(tl.int32)
    length = tl.load(keys.kv_offsets + sequence + 1).to(tl.int32) - start
    return keys.at(sequence, t % keys.HEADS, i * keys.BLOCK_N, start, length)


@triton.jit
def listed_items(keys):
    """An item is one key tile of one head, from the list of those that exist.

    With packed Q the list's tail is walked as well: keys that no query sees get their zeros there.
    """
    if keys.BROADCAST:
        count = tl.load(keys.counts)
    else:
        count = tl.load(keys.counts + 1)
    return count * keys.HEADS


@triton.jit
def listed_count(keys, t):
    """Key tiles of item t: itself."""
    return 1


@triton.jit
def listed_tile(keys, t, i):
    """Item t, numbered by sequence, then head, then key block: neighbours share dO and the head's Q in L2."""
    place = t // keys.HEADS  # a record of the right sequence
    record = keys.records + FIELDS * place
    kv_len = tl.load(record + 3)
    blocks = tl.maximum(tl.cdiv(kv_len, keys.BLOCK_N), 1)
    inside = t - (place - tl.load(record + 1)) * keys.HEADS
    head = inside // blocks % keys.HEADS
    block = inside % blocks
    return keys.at(tl.load(record), head, block * keys.BLOCK_N, tl.load(record + 2), kv_len)
