"""The steps of the Blackwell kernels as data, in the order of the course."""

import dataclasses

from jfa.kernels import keys, parts
from jfa.kernels.blackwell import (
    backward,
    backward_compute,
    backward_pair,
    backward_stationary,
    forward,
    softmax,
    tmem,
)
from jfa.kernels.problem import Problem
from jfa.kernels.step import BlackwellBackward, BlackwellForward, BlackwellStationary


def forward_tiling(problem: Problem, block_m: int | None = None, overlap: bool = False) -> dict[str, int]:
    """How the two softmax groups share the work of a CTA, and what the seven 32 KB slots of SMEM hold.

    Clocks per 128 x 128 block of scores at head dimension 128 (rates: tensor core N / 2 a MMA of K = 16, MUFU
    16, shared memory 128 B): MMA 1024, exp2 1024, operands 768, and TMA 512 for each K/V pair that comes in.
    One query tile a K/V pair makes shared memory the bottleneck (1280), two make it a tie (1024). So:
    - M > 128: an item is two query blocks of one head (BLOCK_M 256), one for each group.
    - M <= 128 with query heads that share keys: two heads of one group (PACK 2), one for each softmax group.
    - else one query tile, whose key blocks the groups take in turn, each with its own accumulator, maximum
      and sum; the epilogue adds the two. HBM is the bottleneck there (2500 clocks), so spare slots hold K/V.
    Packed queries count as long ones. ``block_m`` is that of a schedule that is given; it decides instead.
    """
    pair_rows = (problem.query_len or 256) > 128 if block_m is None else block_m == 256
    pair_heads = not pair_rows and problem.group % 2 == 0
    shared = pair_heads or pair_rows
    small = problem.head_dim == 64
    keeps = overlap and problem.broadcast_q  # Q stays: one set of slots is enough
    block_m = 256 if pair_rows else 128
    if shared:
        depths = {"Q_DEPTH": 2, "KV_DEPTH": 3, "O_DEPTH": 2}
    else:
        depths = {"Q_DEPTH": 1 if keeps else 2, "KV_DEPTH": 5 if keeps else 4, "O_DEPTH": 1}
    if small:  # slots of 16 KB: twice the keys in flight
        depths |= {"KV_DEPTH": 2 * depths["KV_DEPTH"], "O_DEPTH": 2}
    heads = problem.heads_q // (2 if pair_heads else 1)
    return depths | {
        "BLOCK_M": block_m,
        "BLOCK_N": 128,
        "TILES": 2 if shared else 1,
        "PACK": 2 if pair_heads else 1,
        "CLASSES": heads * -(-(problem.query_len or 1) // block_m),
        "SLICE": 16,
        "OVERLAP": overlap,
        "SOFTMAX_REGS": 208,
        "WARP_REGS": 24,
    }


WARP_SPECIALIZED = BlackwellForward(
    name="warp_specialized",
    title="Roles and rings",
    idea="Loads, matrix products, softmax, rescaling and stores run in warps of their own, at the same time.",
    arch="blackwell",
    direction="forward",
    notebook="03_warp_specialization",
    tiling=forward_tiling,
    load=forward.load,
    mma=forward.mma,
    softmax=softmax.softmax,
    walk=softmax.walk,
    weigh=softmax.weigh,
    correction=forward.correction,
    rescale=forward.rescale,
    store=forward.store,
    hear=parts.round_robin,
    fresh=parts.reload_queries,
)
BALANCED = dataclasses.replace(
    WARP_SPECIALIZED,
    name="balanced",
    title="Longest tiles first, back and forth",
    idea="Tiles sorted by their keys, the empty ones left out, dealt to the CTAs in rounds that turn around.",
    notebook="04_load_balancing",
    order="sorted",
    pruned=True,
    hear=parts.boustrophedon,
)
DYNAMIC = dataclasses.replace(
    BALANCED,
    name="dynamic",
    title="Cluster launch control",
    idea="A CTA that is done takes over a CTA that has not started, so nobody waits for a bad deal.",
    notebook="04_load_balancing",
    draw=tmem.request_launches,
    hear=tmem.hear_launch,
)
PEELED = dataclasses.replace(
    DYNAMIC,
    name="peeled",
    title="Masks only at the edges",
    idea="Only blocks with an edge in them (end of the sequence, diagonal, window) pay for a mask.",
    notebook="07_loop_peeling",
    walk=softmax.walk_peeled,
)
STATIONARY = dataclasses.replace(
    PEELED,
    name="stationary",
    title="Q stays, and the tensor core never drains",
    idea="Tiles of the same queries follow each other; S of the next tile runs during this one's epilogue.",
    notebook="09_full_kernel",
    overlap=True,
    mma=forward.mma_across,
    hear=tmem.hear_by_class,
    fresh=parts.keep_queries,
)
LEAN = dataclasses.replace(
    STATIONARY,
    name="lean",
    title="Fewer special functions",
    idea="A quarter of the exponentials by polynomial, two elements an instruction, fewer rescalings.",
    notebook="09_full_kernel",
    weigh=softmax.weigh_lean,
    rescale=forward.rescale_if_needed,
)

FORWARD = [WARP_SPECIALIZED, BALANCED, DYNAMIC, PEELED, STATIONARY, LEAN]


def one_staging_tile(problem: Problem) -> dict[str, int]:
    """128 keys against blocks of 128 query rows; 32 columns of dQ at a time through one staging tile."""
    return {
        "Q_STAGES": 2,
        "DQ_STAGES": 1,
        "SLICE": 32,
        "HELD": 0,
        "PAIR": 1,
        "REGISTERS": 144,
        "WARP_REGISTERS": 80,
    }


def two_staging_tiles(problem: Problem) -> dict[str, int]:
    """Room for two slices of dQ: one is filled while the other is added. Wider ones would not fit."""
    return one_staging_tile(problem) | {"DQ_STAGES": 2}


def two_slices_held(problem: Problem) -> dict[str, int]:
    """The last two slices of dQ leave tensor memory before they leave the CTA."""
    return two_staging_tiles(problem) | {"HELD": 2}


def in_pairs(problem: Problem) -> dict[str, int]:
    """Two CTAs; K takes its room twice, so Q comes once and slices of dQ are half as wide."""
    return two_slices_held(problem) | {"PAIR": 2, "Q_STAGES": 1, "SLICE": 16, "REGISTERS": 160}


def two_tiles_in_flight(problem: Problem) -> dict[str, int]:
    """K and V twice; a second dO fits beside them at a head dimension of 64."""
    stages = (
        {"KV_STAGES": 2, "DOUT_STAGES": 1} if problem.head_dim == 128 else {"KV_STAGES": 3, "DOUT_STAGES": 2}
    )
    return stages | {"REGISTERS": 144, "WARP_REGISTERS": 80}


BACKWARD_WARP_SPECIALIZED = BlackwellBackward(
    name="warp_specialized",
    title="Warp specialization",
    idea="Loads, matrix products, P and dS, and the emptying of tensor memory run in warps of their own.",
    arch="blackwell",
    direction="backward",
    notebook="03_warp_specialization",
    pruned=True,
    tiling=one_staging_tile,
    load=backward.load,
    load_rows=backward.load_rows,
    mma=backward.mma,
    gather=backward.gather,
    compute=backward_compute.compute,
    walk=backward_compute.walk_masked,
    weigh=backward_compute.weigh,
    share=backward_compute.share,
    reduce=backward_compute.reduce,
    drain=backward_compute.drain,
    store=backward_compute.store,
    items=keys.sequence_items,
    count=keys.sequence_count,
    tile=keys.sequence_tile,
    hear=parts.round_robin,
)
BACKWARD_BALANCED = dataclasses.replace(
    BACKWARD_WARP_SPECIALIZED,
    name="balanced",
    title="A list of key tiles",
    idea="Items are the key tiles that exist, not whole sequences; neighbours share a head's rows in L2.",
    notebook="04_load_balancing",
    items=keys.listed_items,
    count=keys.listed_count,
    tile=keys.listed_tile,
)
BACKWARD_DYNAMIC = dataclasses.replace(
    BACKWARD_BALANCED,
    name="dynamic",
    title="Cluster launch control",
    idea="A CTA that is done takes over a CTA that has not started, with its key tile.",
    notebook="04_load_balancing",
    draw=tmem.request_launches,
    hear=tmem.hear_launch,
)
DQ_STAGED = dataclasses.replace(
    BACKWARD_DYNAMIC,
    name="dq_staged",
    title="dQ in narrow slices through two staging tiles",
    idea="While one slice of dQ is added to memory, the next is copied out of tensor memory.",
    notebook="05_dq_staging",
    tiling=two_staging_tiles,
)
DQ_RELEASED = dataclasses.replace(
    DQ_STAGED,
    name="dq_released",
    title="dQ leaves tensor memory early",
    idea="The last slices of dQ wait in registers, so the next dP may take dQ's place while they leave.",
    notebook="06_tmem_release",
    tiling=two_slices_held,
    drain=backward_compute.drain_early,
)
BACKWARD_PEELED = dataclasses.replace(
    DQ_RELEASED,
    name="peeled",
    title="Masks only where they matter",
    idea="Only blocks that an edge runs through are masked.",
    notebook="07_loop_peeling",
    walk=backward_compute.walk_peeled,
)
TWO_CTA = dataclasses.replace(
    BACKWARD_PEELED,
    name="two_cta",
    title="Two CTAs share every product",
    idea="A pair takes 256 keys of one head: wider products, halves of dS exchanged, half as much dQ to add.",
    notebook="08_two_cta",
    tiling=in_pairs,
    gather=backward_pair.gather_in_pair,
    relay=backward_pair.relay,
    share=backward_pair.share_in_pair,
)
BACKWARD_STATIONARY = BlackwellStationary(
    name="stationary",
    title="dQ stays on chip",
    idea="With a shared query block a CTA keeps its dQ in tensor memory over all sequences: no reduction.",
    arch="blackwell",
    direction="backward",
    notebook="09_full_kernel",
    pruned=True,
    tiling=two_tiles_in_flight,
    load=backward_stationary.load,
    mma=backward_stationary.mma,
    compute=backward_stationary.compute,
    weigh=backward_compute.weigh,
    share=backward_compute.share,
    store=backward_stationary.store,
)

BACKWARD = [
    BACKWARD_WARP_SPECIALIZED,
    BACKWARD_BALANCED,
    BACKWARD_DYNAMIC,
    DQ_STAGED,
    DQ_RELEASED,
    BACKWARD_PEELED,
    TWO_CTA,
    BACKWARD_STATIONARY,
]
