"""The steps of the Hopper kernels as data, in the order of the course."""

import dataclasses

from jfa.kernels import keys, parts
from jfa.kernels.hopper import backward, backward_compute, backward_stationary, forward
from jfa.kernels.problem import Problem
from jfa.kernels.step import HopperBackward, HopperForward, HopperStationary

SHORT = 112  # mean rows of keys up to which blocks of 64 keys beat blocks of 128


def one_query_tile(problem: Problem) -> dict[str, int]:
    """Blocks of 128 keys, one Q buffer, as many K and V tiles as fit; the consumers take turns."""
    return {
        "BLOCK_M": 128,
        "BLOCK_N": 128,
        "Q_DEPTH": 1,
        "K_DEPTH": 3,
        "V_DEPTH": 3,
        "STAGING": False,
        "PINGPONG": True,
        "CLASSES": 1,
        "REGISTERS": 232,
    }


def two_query_tiles(problem: Problem) -> dict[str, int]:
    """A second Q buffer in the room of a V tile: the next tile's Q arrives during this one."""
    return one_query_tile(problem) | {"Q_DEPTH": 2, "V_DEPTH": 2}


def by_length(problem: Problem) -> dict[str, int]:
    """Blocks of 64 keys for short sequences."""
    short = problem.total_kv <= SHORT * problem.batch
    return two_query_tiles(problem) | ({"BLOCK_N": 64, "K_DEPTH": 5, "V_DEPTH": 5} if short else {})


def output_tile(problem: Problem) -> dict[str, int]:
    """A tile for O in the room of a K tile of 128 keys, or of one K and one V tile of 64."""
    sizes = by_length(problem) | {"STAGING": True}
    return sizes | ({"K_DEPTH": 4, "V_DEPTH": 4} if sizes["BLOCK_N"] == 64 else {"K_DEPTH": 2})


def resident_queries(problem: Problem) -> dict[str, int]:
    """Where Q stays (broadcast-Q) one buffer holds it, and K and V get back the room of the other."""
    sizes = output_tile(problem)
    if not problem.broadcast_q:
        return sizes
    sizes |= {"K_DEPTH": 5, "V_DEPTH": 5} if sizes["BLOCK_N"] == 64 else {"K_DEPTH": 3}
    classes = problem.heads_q * -(-problem.total_q // sizes["BLOCK_M"])
    return sizes | {"Q_DEPTH": 1, "CLASSES": classes if classes <= 64 else 1}


WARP_SPECIALIZED = HopperForward(
    name="warp_specialized",
    title="Warp specialization",
    idea="One warp loads by TMA, two warp groups compute and take turns on the tensor cores.",
    arch="hopper",
    direction="forward",
    notebook="03_warp_specialization",
    tiling=one_query_tile,
    load=forward.load,
    consume=forward.consume,
    attend=forward.attend_masked,
    softmax=forward.softmax,
    finish=forward.finish_through_queries,
    draw=parts.round_robin,
    publish=parts.stay_silent,
    hear=parts.round_robin,
    fresh=parts.reload_queries,
)
BALANCED = dataclasses.replace(
    WARP_SPECIALIZED,
    name="balanced",
    title="Sorted tiles, dealt back and forth",
    idea="Tiles without keys leave the list, the rest is sorted by work and dealt boustrophedon.",
    notebook="04_load_balancing",
    order="sorted",
    pruned=True,
    draw=parts.boustrophedon,
    hear=parts.boustrophedon,
)
DYNAMIC = dataclasses.replace(
    BALANCED,
    name="dynamic",
    title="Tiles handed out at run time",
    idea="An atomic counter gives the next tile to whoever is free; the loader draws two items ahead.",
    notebook="04_load_balancing",
    tiling=two_query_tiles,
    draw=parts.draw_ticket,
    publish=parts.publish_ticket,
    hear=parts.hear_ticket,
)
PEELED = dataclasses.replace(
    DYNAMIC,
    name="peeled",
    title="Masks only where they matter",
    idea="The masked block comes first, the bulk of the loop has no mask.",
    notebook="07_loop_peeling",
    tiling=by_length,
    attend=forward.attend_peeled,
)
STAGED = dataclasses.replace(
    PEELED,
    name="staged",
    title="O leaves through a tile of its own",
    idea="O is not stored through the tile of Q, so the next Q and MMAs need not wait for the store.",
    notebook="09_full_kernel",
    tiling=output_tile,
    finish=forward.finish_staged,
)
STATIONARY = dataclasses.replace(
    STAGED,
    name="stationary",
    title="Q stays on chip",
    idea="A CTA keeps to one head and query block, so Q is loaded once.",
    tiling=resident_queries,
    draw=parts.draw_same_queries,
    fresh=parts.keep_queries,
)

FORWARD = [WARP_SPECIALIZED, BALANCED, DYNAMIC, PEELED, STAGED, STATIONARY]


def one_staging_tile(problem: Problem) -> dict[str, int]:
    """128 keys against blocks of 64 query rows, the only tile that needs no spills; Q and dO twice."""
    stages = {"ROW_STAGES": 2, "DS_STAGES": 1, "DQ_STAGES": 1}
    return {"BLOCK_M": 64, "BLOCK_N": 128} | stages | {"PAIR": 1, "REGISTERS": 240}


def two_staging_tiles(problem: Problem) -> dict[str, int]:
    """Room for two blocks of dQ: one is filled while the other is added."""
    return one_staging_tile(problem) | {"DQ_STAGES": 2}


def two_tiles_of_ds(problem: Problem) -> dict[str, int]:
    """One dS is read while the next is written, and a third Q and dO travel: the room of dQ's second tile."""
    return one_staging_tile(problem) | {"ROW_STAGES": 3, "DS_STAGES": 2}


def in_pairs(problem: Problem) -> dict[str, int]:
    """256 keys for two CTAs, 128 each."""
    return two_staging_tiles(problem) | {"BLOCK_N": 256, "PAIR": 2}


def keys_of_64(problem: Problem) -> dict[str, int]:
    """64 keys against 128 query rows of a CTA: what fits beside a dQ in registers."""
    return {"BLOCK_N": 64, "KV_STAGES": 2, "DOUT_STAGES": 2, "REGISTERS": 240}


BACKWARD_WARP_SPECIALIZED = HopperBackward(
    name="warp_specialized",
    title="Warp specialization",
    idea="A loader, two compute groups of 64 keys, and a writer that adds dQ to memory by TMA.",
    arch="hopper",
    direction="backward",
    notebook="03_warp_specialization",
    pruned=True,
    tiling=one_staging_tile,
    load=backward.load,
    load_rows=backward.load_rows,
    compute=backward_compute.compute,
    walk=backward_compute.walk_masked,
    multiply=backward_compute.multiply,
    store=backward_compute.store,
    reduce=backward.reduce,
    settle=backward.settle_at_once,
    items=keys.sequence_items,
    count=keys.sequence_count,
    tile=keys.sequence_tile,
    draw=parts.round_robin,
    publish=parts.stay_silent,
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
    title="Tiles handed out at run time",
    idea="An atomic counter gives the next key tile to whoever is free.",
    notebook="04_load_balancing",
    draw=parts.draw_ticket,
    publish=parts.publish_ticket,
    hear=parts.hear_ticket,
)
DQ_STAGED = dataclasses.replace(
    BACKWARD_DYNAMIC,
    name="dq_staged",
    title="dQ through two staging tiles",
    idea="While one block of dQ is added to memory, the next is staged.",
    notebook="05_dq_staging",
    tiling=two_staging_tiles,
    settle=backward.settle_one_behind,
)
DQ_RELEASED = dataclasses.replace(
    DQ_STAGED,
    name="dq_released",
    title="dQ leaves its registers early",
    idea="dQ is multiplied before dK, so its registers are staged while the tensor cores form dK.",
    notebook="06_tmem_release",
    multiply=backward_compute.multiply_dq_first,
)
BACKWARD_PEELED = dataclasses.replace(
    DQ_RELEASED,
    name="peeled",
    title="Masks only where they matter",
    idea="Only tiles that an edge runs through are masked.",
    notebook="07_loop_peeling",
    walk=backward_compute.walk_peeled,
)
TWO_CTA = dataclasses.replace(
    BACKWARD_PEELED,
    name="two_cta",
    title="Two CTAs share Q and dO",
    idea="A cluster of two takes neighbouring key tiles; each loads half of Q and dO for both (multicast).",
    notebook="08_two_cta",
    tiling=in_pairs,
    load_rows=backward.load_rows_in_pair,
    draw=parts.round_robin,
    publish=parts.stay_silent,
    hear=parts.round_robin,
)
DS_BUFFERED = dataclasses.replace(
    BACKWARD_PEELED,
    name="ds_buffered",
    title="dS twice, rows thrice",
    idea="Room for a second dS and a third Q and dO, not for a second dQ: groups meet once a block of rows.",
    notebook="09_full_kernel",
    tiling=two_tiles_of_ds,
    settle=backward.settle_at_once,
)
BACKWARD_STATIONARY = HopperStationary(
    name="stationary",
    title="dQ stays on chip",
    idea="With a shared query block a CTA keeps its dQ in registers over all sequences: no reduction.",
    arch="hopper",
    direction="backward",
    notebook="09_full_kernel",
    pruned=True,
    tiling=keys_of_64,
    load=backward_stationary.load,
    accumulate=backward_stationary.accumulate,
    score=backward_stationary.score,
    write=backward_stationary.write,
    flush=backward_stationary.flush,
)

BACKWARD = [
    BACKWARD_WARP_SPECIALIZED,
    BACKWARD_BALANCED,
    BACKWARD_DYNAMIC,
    DQ_STAGED,
    DQ_RELEASED,
    BACKWARD_PEELED,
    TWO_CTA,
    DS_BUFFERED,
    BACKWARD_STATIONARY,
]
