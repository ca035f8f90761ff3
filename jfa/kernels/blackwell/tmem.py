"""What the roles of the Blackwell forward kernel pass to each other in tensor memory, and its deals."""

import triton
import triton.language as tl
import triton.language.extra.tlx as tlx

from jfa.kernels.parts import Ring

NO_ITEM = tl.constexpr(1 << 30)
ROWS = tl.constexpr(128)  # query rows of a softmax group: one row a thread, one TMEM lane a row


@triton.aggregate
class Streams:
    """Two streams of score blocks, one for each softmax group, and their accumulators.

    The blocks that a CTA works on are numbered through all its tiles: block ``u`` belongs to group u & 1, as
    its (u >> 1)-th block, and that number's parity is the phase of every barrier that passes once a block.
    Barriers that pass once a tile have the parity of the CTA's ``turn``.

    ``scores`` (128, BLOCK_N) float32, ``weights`` (the same in the input's dtype) and the statistics alias:
    scores are dead once a group has them in registers, weights are dead once P V has read them.
    """

    scores: tlx.buffered_tensor
    weights: tlx.buffered_tensor
    factor: tlx.buffered_tensor  # what the accumulator must be multiplied by before the next P V
    row_sum: tlx.buffered_tensor
    row_max: tlx.buffered_tensor
    acc: tlx.buffered_tensor
    score_full: tlx.mbarrier  # mma -> softmax: scores are there
    factor_full: tlx.mbarrier  # softmax -> correction: factor is there
    ready: tlx.mbarrier  # softmax (weights are there) and correction (accumulator is rescaled) -> mma
    total_full: tlx.mbarrier  # softmax -> correction: row_sum and row_max of the tile are there
    total_free: tlx.mbarrier  # correction -> mma and softmax: it has read them
    acc_full: tlx.mbarrier  # mma -> correction: the tile's last P V is done
    scale: tl.tensor  # of scores, to log2 units
    TILES: tl.constexpr  # query tiles of an item: 2 that share keys, or 1 whose keys the groups take in turn
    HEAD_DIM: tl.constexpr
    SLICE: tl.constexpr  # accumulator columns that the correction group holds at a time


@triton.jit
def make_ring(ROWS, COLUMNS, DTYPE, DEPTH: tl.constexpr, READERS: tl.constexpr):
    """A ring of DEPTH tiles (ROWS, COLUMNS) in shared memory that READERS let go of."""
    tiles = tlx.local_alloc((ROWS, COLUMNS), DTYPE, DEPTH)
    fulls = tlx.alloc_barriers(DEPTH)
    empties = tlx.alloc_barriers(DEPTH, arrive_count=READERS)
    return Ring(tiles, fulls, empties, DEPTH, ROWS * COLUMNS * 2)


@triton.jit
def make_streams(scale, BLOCK_N, HEAD_DIM, DTYPE, TILES, SLICE):
    """TMEM, columns of 128 lanes x 4 B: scores 2 x BLOCK_N, acc 2 x HEAD_DIM; 512 at 128 and 128.

    A scores buffer of 128 columns later holds weights (64), factor, row_sum and row_max.
    """
    alias = tlx.storage_alias_spec(storage=tlx.storage_kind.tmem)
    scores = tlx.local_alloc((ROWS, BLOCK_N), tl.float32, 2, tlx.storage_kind.tmem, reuse=alias)
    weights = tlx.local_alloc((ROWS, BLOCK_N), DTYPE, 2, tlx.storage_kind.tmem, reuse=alias)
    factor = tlx.local_alloc((ROWS, 1), tl.float32, 2, tlx.storage_kind.tmem, reuse=alias)
    row_sum = tlx.local_alloc((ROWS, 1), tl.float32, 2, tlx.storage_kind.tmem, reuse=alias)
    row_max = tlx.local_alloc((ROWS, 1), tl.float32, 2, tlx.storage_kind.tmem, reuse=alias)
    alias.set_buffer_overlap(
        tlx.reuse_group(
            scores,
            tlx.reuse_group(weights, factor, row_sum, row_max, group_type=tlx.reuse_group_type.distinct),
            group_type=tlx.reuse_group_type.shared,
        )
    )
    acc = tlx.local_alloc((ROWS, HEAD_DIM), tl.float32, 2, tlx.storage_kind.tmem)
    score_full = tlx.alloc_barriers(2)
    factor_full = tlx.alloc_warp_barrier(2, num_warps=4)  # every thread of a group arrives: no sync before
    ready = tlx.alloc_warp_barrier(2, num_warps=4, num_arrivals=2)
    total_full = tlx.alloc_warp_barrier(2, num_warps=4)
    total_free = tlx.alloc_warp_barrier(2, num_warps=4)
    acc_full = tlx.alloc_barriers(1)
    stats = (factor, row_sum, row_max)
    barriers = (score_full, factor_full, ready, total_full, total_free, acc_full)
    return Streams(scores, weights, *stats, acc, *barriers, scale, TILES, HEAD_DIM, SLICE)


@triton.aggregate
class Turns:
    """A static deal: this CTA, how many there are, how many items."""

    program: tl.tensor
    programs: tl.tensor
    items: tl.tensor
    CLASSES: tl.constexpr


@triton.aggregate
class LaunchControl:
    """The dynamic deal: the grid has a CTA an item, and a running CTA cancels one that has not started."""

    program: tl.tensor
    programs: tl.tensor
    items: tl.tensor
    context: tlx.CLCPipelineContext
    CLASSES: tl.constexpr  # (head, query block) pairs that items cycle through
    PAIR: tl.constexpr  # CTAs that share an item: all of a cluster leave together and get the same answer


def _let_answers_be_arguments():
    """Give CLC answers their true type: fbtriton 3.7.4 declares them int64 where it allocates 128-bit words.

    Without this a context cannot be an argument of a jit function, and every role here is one.
    """
    create = tlx.clc_response.__init__

    def remember(self, handle, num, layout):
        create(self, handle, num, layout)
        self.type.ir_type = handle.get_type()

    tlx.clc_response.__init__ = remember
    tlx.clc_response_type.to_ir = lambda self, builder: self.ir_type


if hasattr(tlx, "clc_response"):  # the emulator's stand-in for tlx has no such types
    _let_answers_be_arguments()


@triton.jit
def request_launches(deal, HEAR: tl.constexpr):
    """Producer: ask for a CTA to cancel, one item ahead of the slowest reader, until none is left."""
    k = 0
    t = HEAR(deal, k)
    while t < deal.items:
        # The slot is free when all readers have read the answer before the last one; two answers are kept.
        tlx.clc_producer(deal.context, ((k >> 1) & 1) ^ 1, k=k & 1, multi_ctas=deal.PAIR > 1)
        k += 1
        t = HEAR(deal, k)


@triton.jit
def hear_launch(deal, k):
    """Reader: the CTA's own number first, then the numbers of the CTAs that it cancelled; or of pairs."""
    t = deal.program
    if k > 0:
        t = tlx.clc_consumer(deal.context, ((k - 1) >> 1) & 1, k=(k - 1) & 1, multi_ctas=deal.PAIR > 1)
        t = tl.where(t < 0, NO_ITEM, t // deal.PAIR)
    return t


@triton.jit
def hear_by_class(deal, k):
    """As ``hear_launch``, renumbered so that items of one (head, query block) follow each other.

    With broadcast-Q every sequence in the list has all CLASSES of them, so there are items / CLASSES of each.
    """
    t = hear_launch(deal, k)
    if t < deal.items:
        each = deal.items // deal.CLASSES
        t = t % each * deal.CLASSES + t // each
    return t
