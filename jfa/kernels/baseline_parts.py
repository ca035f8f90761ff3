"""Small device functions that the baseline kernels share: find a tile, load it, mask it, one softmax step.

A jagged launch has to say how many tiles there are before it knows any length. Sequence b therefore owns
the tile numbers from ``offsets[b] // BLOCK + b`` on. Two neighbours are at least ``ceil(length / BLOCK)``
numbers apart, so every tile has a number of its own whatever the lengths are, and ``rows // BLOCK + B + 1``
programs are enough: shapes alone give that bound. A program whose number no tile owns returns at once.
"""

import triton
import triton.language as tl
from triton.language.extra import libdevice

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def first_tile(offsets, sequence, BLOCK: tl.constexpr):
    """Return the number of a sequence's first tile."""
    return (tl.load(offsets + sequence) // BLOCK).to(tl.int32) + sequence


@triton.jit
def find_tile(offsets, tile, batch, BLOCK: tl.constexpr):
    """Return (sequence, first row in it) of a tile; the rows past the last sequence are sequence ``batch``.

    A search through ``offsets`` that compares 1024 sequences at once.
    """
    LANES: tl.constexpr = 1024
    low = tile * 0
    count = low + batch + 1
    while count > 1:  # one round for up to 1023 sequences, three for a million
        stride = tl.cdiv(count, LANES)
        lane = tl.arange(0, LANES) * stride
        starts = tl.load(offsets + low + lane, mask=lane < count, other=0) // BLOCK + low + lane
        before = tl.sum(((lane < count) & (starts <= tile)).to(tl.int32), 0)
        skipped = (before - 1) * stride
        low += skipped
        count = tl.minimum(stride, count - skipped)
    return low, (tile - first_tile(offsets, low, BLOCK)) * BLOCK


@triton.jit
def find_rows(offsets, sequence, batch, total):
    """Return (first row as int64, number of rows) of a sequence; sequence ``batch`` ends at total."""
    start = tl.load(offsets + sequence).to(tl.int64)
    stop = tl.load(offsets + tl.minimum(sequence + 1, batch)).to(tl.int64)
    stop = tl.where(sequence < batch, stop, total)
    return start, (stop - start).to(tl.int32)


@triton.jit
def find_query_tile(q_offsets, tile, batch, total_q, BLOCK_M: tl.constexpr, PACKED_Q: tl.constexpr):
    """Return (sequence, first row in it) of a tile of queries."""
    if PACKED_Q:
        return find_tile(q_offsets, tile, batch, BLOCK_M)
    else:
        blocks = tl.cdiv(total_q, BLOCK_M)
        return tile // blocks, (tile % blocks) * BLOCK_M


@triton.jit
def find_queries(q_offsets, sequence, batch, total_q, PACKED_Q: tl.constexpr):
    """Return (first row in q, number of rows, slab) of a sequence's queries.

    out, dout, lse and delta have a slab of total_q rows for each sequence with broadcast-Q, and a single slab
    with packed Q.
    """
    if PACKED_Q:
        start, rows = find_rows(q_offsets, sequence, batch, total_q)
        return start, rows, start * 0
    else:
        slab = sequence.to(tl.int64)
        return slab * 0, total_q, slab


@triton.jit
def load_tile(base, stride, rows, BLOCK: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Load a (BLOCK, BLOCK_D) tile; rows past ``rows`` and columns past D are not read and become zero."""
    row = tl.arange(0, BLOCK)[:, None]
    column = tl.arange(0, BLOCK_D)[None, :]
    mask = row < rows
    if D != BLOCK_D:
        mask = mask & (column < D)
    return tl.load(base + row * stride + column, mask=mask, other=0.0)


@triton.jit
def store_tile(base, stride, rows, tile, BLOCK: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Store the first ``rows`` rows and D columns of a (BLOCK, BLOCK_D) tile in the type of the memory."""
    row = tl.arange(0, BLOCK)[:, None]
    column = tl.arange(0, BLOCK_D)[None, :]
    mask = row < rows
    if D != BLOCK_D:
        mask = mask & (column < D)
    tl.store(base + row * stride + column, tile.to(base.dtype.element_ty), mask=mask)


@triton.jit
def add_tile(base, stride, rows, tile, BLOCK: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Add ``rows`` rows and D columns of a float32 tile to memory that other programs add to as well."""
    row = tl.arange(0, BLOCK)[:, None]
    column = tl.arange(0, BLOCK_D)[None, :]
    mask = row < rows
    if D != BLOCK_D:
        mask = mask & (column < D)
    tl.atomic_add(base + row * stride + column, tile, mask=mask, sem="relaxed")


@triton.jit
def key_range(
    first_query, queries, shift, kv_len, left, right, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr
):
    """Return [low, high): the keys that any of the rows first_query .. first_query + queries - 1 sees."""
    low = kv_len * 0
    high = kv_len
    if HAS_LEFT:  # 64 bits: a window may be as large as an int32 gets
        low = tl.maximum(first_query.to(tl.int64) + shift - left, 0)
        low = tl.minimum(low, kv_len).to(tl.int32)
    if HAS_RIGHT:
        high = first_query.to(tl.int64) + queries + shift + right
        high = tl.minimum(tl.maximum(high, 0), kv_len).to(tl.int32)
    return low, high


@triton.jit
def query_range(first_key, keys, shift, q_len, left, right, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr):
    """Return [low, high): the rows that see any of the keys first_key .. first_key + keys - 1."""
    low = q_len * 0
    high = q_len
    if HAS_RIGHT:
        low = tl.maximum(first_key.to(tl.int64) - shift - right, 0)
        low = tl.minimum(low, q_len).to(tl.int32)
    if HAS_LEFT:
        high = first_key.to(tl.int64) + keys - shift + left
        high = tl.minimum(tl.maximum(high, 0), q_len).to(tl.int32)
    return low, high


@triton.jit
def narrow(mask, row, column, diagonal, before, after, HAS_BEFORE: tl.constexpr, HAS_AFTER: tl.constexpr):
    """Narrow a tile's mask to diagonal - before <= column - row <= diagonal + after.

    row and column are positions inside the tile; ``diagonal`` (int64) is the column that row 0 is aligned
    with, be it inside the tile or not. Each bound is one number a row: an element costs one comparison.
    """
    if HAS_BEFORE:
        first = tl.minimum(tl.maximum(diagonal - before, -65536), 65536).to(tl.int32)
        mask = mask & (column >= row + first)
    if HAS_AFTER:
        last = tl.minimum(tl.maximum(diagonal + after, -65536), 65536).to(tl.int32)
        mask = mask & (column <= row + last)
    return mask


# Exponents are in powers of two, which one instruction evaluates. In float32 (PRECISION "ieee") they stay in
# natural units: rounding lse once more on the way to powers of two would be the largest error of all.


@triton.jit
def power(x, PRECISION: tl.constexpr):
    """2 ** x, or in float32 e ** x, to the last bit."""
    if PRECISION == "ieee":
        p = libdevice.exp(x)
    else:
        p = tl.exp2(x)
    return p


@triton.jit
def log_sum_exp(row_max, row_sum, PRECISION: tl.constexpr):
    """The natural logarithm of a row's sum of exponentials."""
    if PRECISION == "ieee":
        lse = row_max + libdevice.log(row_sum)
    else:
        lse = (row_max + tl.log2(row_sum)) * LN_2
    return lse


@triton.jit
def softmax_step(s, unit, row_max, row_sum, PRECISION: tl.constexpr):
    """Take a tile of scores into the online softmax; return p, the factor for older sums, row_max, row_sum.

    ``unit`` > 0 turns scores into exponents, the unit of row_max. A row that has seen no key yet has
    row_max = -inf and is shifted by 0 instead, so that nothing becomes -inf - -inf.
    """
    new_max = tl.maximum(row_max, tl.max(s, 1) * unit)
    shift = tl.where(new_max == float("-inf"), 0.0, new_max)
    p = power(tl.fma(s, unit, -shift[:, None]), PRECISION)
    alpha = power(row_max - shift, PRECISION)
    return p, alpha, new_max, row_sum * alpha + tl.sum(p, 1)


# In float32 a product is one long chain of additions, and rounds accordingly. Both kinds below cut the chain.
# The parts meet in an fma, because the compiler would turn an addition into one chain again.


@triton.jit
def halve(x):
    """The left and the right half of a tile's columns."""
    HALF: tl.constexpr = x.shape[1] // 2
    return tl.split(tl.permute(tl.reshape(x, [x.shape[0], 2, HALF]), [0, 2, 1]))


@triton.jit
def dot_rows(a, b, PRECISION: tl.constexpr):
    """a b^T, the product of every row of a with every row of b."""
    if PRECISION == "ieee" and a.shape[1] >= 32:
        a_left, a_right = halve(a)
        b_left, b_right = halve(b)
        left = tl.dot(a_left, tl.trans(b_left), input_precision=PRECISION)
        right = tl.dot(a_right, tl.trans(b_right), input_precision=PRECISION)
        product = tl.fma(left, 1.0, right)
    else:
        product = tl.dot(a, tl.trans(b), input_precision=PRECISION)
    return product


@triton.jit
def add_dot(total, a, b, PRECISION: tl.constexpr):
    """total + a b, a sum over tiles."""
    if PRECISION == "ieee":
        total = tl.fma(dot_rows(a, tl.trans(b), PRECISION), 1.0, total)
    else:
        total = tl.dot(a, b, total, input_precision=PRECISION)
    return total


@triton.jit
def probabilities(a, b, log_sum, scale, unit, PRESCALE: tl.constexpr, PRECISION: tl.constexpr):
    """Recompute a tile of P, not masked, from its scores a b^T and its row sums, in the unit of exponents."""
    s = dot_rows(a, b, PRECISION)
    if PRESCALE:
        s = s * scale
    return power(tl.fma(s, unit, -log_sum), PRECISION)


@triton.jit
def load_log_sum(lse, rows, BLOCK_M: tl.constexpr, PRECISION: tl.constexpr):
    """Load lse in the unit of exponents; rows that do not exist get +inf, which makes their p zero."""
    row = tl.arange(0, BLOCK_M)
    log_sum = tl.load(lse + row, mask=row < rows, other=float("inf"))
    if PRECISION != "ieee":
        log_sum = log_sum * LOG2_E
    return log_sum
