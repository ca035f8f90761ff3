"""Traces charged with rates: dependencies hold, nothing serves two at once, and rings hide copies."""

import dataclasses

import pytest

from jfa import emulator, steps
from jfa.kernels.hopper import backward_compute, forward
from jfa.lab import course, faults, figures, ladder, memory, pipeline

HOPPER = steps.FORWARD["hopper"][0]


def overlaps(spans):
    spans = sorted(spans, key=lambda span: span["start"])
    return [b for a, b in zip(spans, spans[1:]) if b["start"] < a["end"] - 1e-6]


@pytest.fixture(scope="module")
def spans():
    return pipeline.specialized(HOPPER, 712.0, blocks=3, head_dim=64)


def test_a_replay_keeps_the_work_and_serves_one_at_a_time(spans):
    lanes = {lane: [s for s in spans if s["lane"] == lane] for lane in ("tensor cores", "group 0", "group 1")}
    worked = sum(span["end"] - span["start"] for span in lanes["tensor cores"])
    assert worked == pytest.approx(2 * 3 * 4 * 128 * 128 * 64 / 4096)  # two tiles of three blocks
    for lane in lanes.values():
        assert overlaps(lane) == []
    softmax = [span for span in spans if span["kind"] == "softmax"]
    assert overlaps(softmax) == []  # the groups share the issue slots
    assert 0 < pipeline.busy(spans) < 1


def test_a_product_waits_for_its_copy_and_a_softmax_for_its_product(spans):
    first_k = min(span["end"] for span in spans if span["label"] == "K")
    products = [span for span in spans if span["kind"] == "mma"]
    assert products[0]["label"] == "S 0"
    assert products[0]["start"] >= first_k
    softmax = next(span for span in spans if span["kind"] == "softmax")
    assert softmax["start"] >= products[0]["end"]


def test_deeper_rings_and_faster_memory_never_take_longer():
    rule = HOPPER.tiling
    ends = {}
    for depth in (1, 3):
        sized = {"K_DEPTH": depth, "V_DEPTH": depth}
        step = dataclasses.replace(HOPPER, tiling=lambda problem, sized=sized: rule(problem) | sized)
        for speed in (20.0, 32.0):
            run = pipeline.specialized(step, 712.0, speed)
            ends[depth, speed] = max(span["end"] for span in run)
    assert ends[3, 32.0] < ends[1, 32.0] < ends[1, 20.0]
    assert ends[3, 32.0] < ends[3, 20.0]


def test_turns_add_up_and_do_not_overlap():
    spans = pipeline.in_turns(tensor=2000, rest=1000, finish=100, blocks=3, tiles=2)
    busy = [s for s in spans if s["kind"] in ("mma", "softmax")]
    assert overlaps(busy) == []
    assert sum(s["end"] - s["start"] for s in busy) == 2 * 3 * 3000


@pytest.mark.skipif(course.compiler_missing() is not None, reason=str(course.compiler_missing()))
def test_the_inner_loop_is_one_block_of_keys():
    loop = pipeline.inner_loop(ladder.compiled(HOPPER).text("sass"))
    kinds = [instruction.kind for instruction in loop]
    assert kinds.count("tensor core") == 2 * 128 // 16  # S and P V, 16 deep each
    assert 64 <= kinds.count("exponential") <= 70  # 64 x 128 scores for 128 threads, and the rescaling
    with pytest.raises(ValueError, match="no loop"):
        pipeline.inner_loop("        /*0000*/                   EXIT ;\n")


TTGIR = """
    %q = ttg.local_alloc : () -> !ttg.memdesc<2x64x128xbf16, #shared1, #smem, mutable> loc(#loc1)
    %q_9 = ttg.local_alloc : () -> !ttg.memdesc<2xi64, #shared2, #smem, mutable> loc(#loc2)
    %alias = ttng.tmem_alloc : () -> !ttg.memdesc<128x256xi32, #tmem, #ttng.tensor_memory, mutable> loc(#l)
    %acc = ttng.tmem_alloc : () -> !ttg.memdesc<2x128x128xf32, #tmem1, #ttng.tensor_memory, mutable> loc(#l)
"""


def test_allocations_are_read_from_ttgir():
    made = memory.allocations(TTGIR)
    assert [(a.name, a.memory, a.count, a.bytes) for a in made] == [
        ("q", "shared", 2, 16384),
        ("q", "shared", 2, 8),
        ("alias", "tensor", 1, 131072),
        ("acc", "tensor", 2, 65536),
    ]
    regions = memory.tensor_regions(made)
    assert max(region["start"] + region["size"] for region in regions) == 512
    shared = memory.shared_regions(made, [("Q", "load")])
    assert [(region["name"], region["start"]) for region in shared] == [
        ("Q0", 0),
        ("Q1", 16),
        ("barriers", 32),
    ]


@pytest.mark.skipif(course.compiler_missing() is not None, reason=str(course.compiler_missing()))
def test_the_memory_map_agrees_with_the_compilers_sums():
    for arch, names in (("hopper", memory.HOPPER), ("blackwell", memory.BLACKWELL)):
        made = ladder.compiled(steps.FORWARD[arch][-1])
        regions = memory.shared_regions(memory.allocations(made.text("ttgir")), names)
        total = 1024 * sum(region["size"] for region in regions)
        assert total <= made.shared_bytes < total + 2048


def test_two_roles_never_work_on_the_same_columns():
    spans = memory.owners(blocks=4)
    assert {span["lane"] for span in spans} == set(memory.REGIONS)
    for lane in memory.REGIONS:
        found = [span for span in spans if span["lane"] == lane]
        clashes = [b for b in overlaps(found) if b["kind"] != "mma"]  # products in flight run in order
        assert clashes == []


def test_a_removed_edge_shows_and_leaves_no_trace():
    small = {"lengths": (640,), "heads": 1, "policies": ("eager",)}
    with faults.without(forward.advance, "group.k.release(item)"):
        assert faults.verdict(HOPPER, **small).kind == "deadlock"
    with faults.without(forward.advance, "slot = group.k.await_full(item)", "slot = item % group.k.depth"):
        found = faults.verdict(HOPPER, **small)
    assert found.kind == "race" and "eager" in str(found)
    assert str(faults.verdict(HOPPER, **small)) == "ok"
    with pytest.raises(ValueError, match="found 0"), faults.without(forward.advance, "no such line"):
        pass


def test_a_fence_behind_the_word_that_hands_over_is_warned_of():
    """The writer warp's add may begin with the arrive, so a fence after it comes too late."""
    step = steps.find("hopper", "backward", "ds_buffered")
    small = {"lengths": (300,), "heads": 1, "policies": ("eager",)}
    fence, word = 'tlx.fence("async_shared")', "tlx.barrier_arrive(buffers.dq.fulls[slot])"

    def swapped(source):
        assert source.count(fence) == source.count(word) == 1
        return source.replace(fence, "FENCE").replace(word, fence).replace("FENCE", word)

    for patch in (swapped, lambda source: source.replace(fence, "pass")):
        with emulator.mutated(backward_compute.put, patch):
            found = faults.verdict(step, **small)
        assert found.kind == "ok" and 'no fence("async_shared") between' in found.message
        assert "warning" in str(found)
    assert str(faults.verdict(step, **small)) == "ok"


def test_what_roles_gain_over_the_baseline_is_measured_shape_by_shape():
    gained = pipeline.gained("baseline", "warp_specialized")
    assert len(gained) == 8 and (gained["times"] > 0).all()
    first = gained.iloc[0]
    assert first["times"] == pytest.approx(first["warp_specialized"] / first["baseline"])
    useful = gained[[name for name in gained if name.startswith("useful")]].to_numpy()
    assert ((0 < useful) & (useful < 1)).all()
    assert pipeline.gained("baseline", "no such step") is None


@pytest.mark.parametrize("name", ["03_memory", "03_final"])
def test_the_memory_map_fits_the_memories(name):
    for row in figures.read(name).to_dict("records"):
        assert 0 <= row["start"] and row["start"] + row["size"] <= row["of"] + 1, row
