"""Tile lists: the kernel and PyTorch's operators agree, every tile is there once, and the order is right."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch

from jfa import emulator
from jfa.jagged import lengths_to_offsets
from jfa.kernels import tiles
from jfa.kernels.problem import Problem
from jfa.schedule import ORDERS, Schedule, capacities, make_schedule

RAGGED = [0, 5, 64, 129, 1, 128, 0, 70]
QUERIES = [3, 0, 200, 1, 77, 300, 0, 9]
KINDS = list(itertools.product(ORDERS, (False, True)))


def offsets(lengths, dtype=torch.int32):
    return None if lengths is None else lengths_to_offsets(torch.tensor(lengths, dtype=torch.int64), dtype)


def rows_of(lengths, queries, slack=3):
    kv = sum(lengths) + slack
    return (192 if queries is None else sum(queries) + slack), kv


def records(tiles_, counts):
    return tiles_[: int(counts[1])].tolist()


def listed(lengths, queries, order, pruned, **options):
    shapes = rows_of(lengths, queries)
    return make_schedule(
        shapes, offsets(lengths), offsets(queries), 128, 64, order=order, pruned=pruned, **options
    )


@pytest.mark.parametrize("order,pruned", KINDS)
@pytest.mark.parametrize("queries", [None, QUERIES], ids=["broadcast", "packed"])
@pytest.mark.parametrize("lengths", [RAGGED, [0] * 8, [70000] + 7 * [2]], ids=["ragged", "empty", "giant"])
def test_kernel_and_operators_make_the_same_lists(lengths, queries, order, pruned):
    args = (offsets(lengths), offsets(queries), *rows_of(lengths, queries), 128, 64, order, pruned)
    expected = tiles._listed(*args)
    with emulator.emulate(policy="random", seed=5) as emulation:
        found = tiles.ranked(*args)
    assert [str(finding) for report in emulation.reports for finding in report.errors()] == []
    for at in (0, 2):
        assert torch.equal(expected[at + 1], found[at + 1])
        assert records(*expected[at : at + 2]) == records(*found[at : at + 2])
    assert torch.equal(expected[4], found[4])


@pytest.mark.parametrize("order,pruned", KINDS)
@pytest.mark.parametrize("queries", [None, QUERIES], ids=["broadcast", "packed"])
def test_every_tile_is_listed_once_with_its_rows(queries, order, pruned):
    schedule = listed(RAGGED, queries, order, pruned)
    starts = offsets(RAGGED).tolist()
    own = 8 * [192] if queries is None else [*queries, 3]
    expected = {
        (b, i, starts[b], RAGGED[b] if b < 8 else 0)
        for b, length in enumerate(own)
        for i in range(-(-length // 128))
    }
    found = records(schedule.q_tiles, schedule.q_counts)
    assert len(found) == len(expected) and set(map(tuple, found)) == expected
    keys = [*RAGGED, 3]
    expected = {(b, i, starts[b], keys[b]) for b in range(9) for i in range(-(-keys[b] // 64))}
    found = records(schedule.kv_tiles, schedule.kv_counts)
    assert len(found) == len(expected) and set(map(tuple, found)) == expected


def test_sorted_descends_by_blocks_of_work_and_keeps_equals_in_order():
    found = records(
        *[getattr(listed(RAGGED, None, "sorted", True), name) for name in ("q_tiles", "q_counts")]
    )
    work = [-(-record[3] // 64) for record in found]
    assert work == sorted(work, reverse=True) and work[0] == 3
    assert [record[:2] for record in found if -(-record[3] // 64) == 1] == [
        [1, 1],
        [1, 0],
        [2, 1],
        [2, 0],
        [4, 1],
        [4, 0],
    ]


def test_key_tiles_stand_in_their_sequences_order_whatever_the_sequences_order_is():
    """Under a causal mask the first key block has the most work; equal work keeps the natural order."""
    found = {}
    for order in ORDERS:
        schedule = listed([200, 130, 5], [1, 300, 130], order, True)
        found[order] = [record[:2] for record in records(schedule.kv_tiles, schedule.kv_counts)]
    blocks = {0: [[0, i] for i in range(4)], 1: [[1, i] for i in range(3)], 2: [[2, 0]]}
    assert found["natural"] == [*blocks[0], *blocks[1], *blocks[2], [3, 0]]
    assert found["sorted"] == [*blocks[1], *blocks[2], *blocks[0], [3, 0]]
    broadcast = [listed(RAGGED, None, order, True) for order in ORDERS]
    assert records(broadcast[0].kv_tiles, broadcast[0].kv_counts) == records(
        broadcast[1].kv_tiles, broadcast[1].kv_counts
    )


@pytest.mark.parametrize("order", ORDERS)
def test_pruned_counts_only_tiles_with_work_and_puts_them_first(order):
    schedule = listed(RAGGED, QUERIES, order, True)
    busy, everything = schedule.q_counts.tolist()
    found = records(schedule.q_tiles, schedule.q_counts)
    assert 0 < busy < everything and all(record[3] > 0 for record in found[:busy])
    assert all(record[3] == 0 for record in found[busy:])
    busy, everything = schedule.kv_counts.tolist()
    found = records(schedule.kv_tiles, schedule.kv_counts)
    assert all(record[0] < 8 and QUERIES[record[0]] > 0 for record in found[:busy])
    assert all(record[0] == 8 or QUERIES[record[0]] == 0 for record in found[busy:])
    unpruned = listed(RAGGED, QUERIES, order, False)
    assert unpruned.kv_counts.tolist() == [everything, everything]


@pytest.mark.parametrize("queries", [None, QUERIES], ids=["broadcast", "packed"])
def test_capacity_is_known_from_shapes_and_suffices(queries):
    schedule = listed(RAGGED, queries, "sorted", True)
    shapes = rows_of(RAGGED, queries)
    wanted = capacities(8, *shapes, 128, 64, queries is None)
    assert (schedule.q_tiles.shape[0], schedule.kv_tiles.shape[0]) == wanted
    worst = capacities(8, 8, 8, 128, 64, False)
    ones = make_schedule((8, 8), offsets(8 * [1]), offsets(8 * [1]), 128, 64)
    assert int(ones.q_counts[1]) <= worst[0] and int(ones.kv_counts[1]) <= worst[1]


def test_host_and_device_agree_and_tensors_carry_a_schedule():
    device, host = (listed(RAGGED, QUERIES, "sorted", True, where=where) for where in ("device", "host"))
    again = Schedule.from_tensors(device.tensors())
    for name in ("q_tiles", "q_counts", "kv_tiles", "kv_counts", "q_offsets"):
        assert torch.equal(getattr(device, name), getattr(host, name))
        assert torch.equal(getattr(device, name), getattr(again, name))
    assert (again.block_m, again.block_n, again.order, again.pruned) == (128, 64, "sorted", True)


def test_int64_offsets_and_a_problem_give_the_same_lists():
    problem = Problem(8, 2, 2, 64, 64, *rows_of(RAGGED, None), True, 1.0)
    wide = make_schedule(problem, offsets(RAGGED, torch.int64), None, 128, 64)
    narrow = listed(RAGGED, None, "sorted", True)
    assert torch.equal(wide.q_counts, narrow.q_counts) and wide.q_tiles.dtype == torch.int32
    assert records(wide.q_tiles, wide.q_counts) == records(narrow.q_tiles, narrow.q_counts)


def test_no_sequences_and_many_sequences():
    none = make_schedule((5, 3), offsets([]), None)
    assert none.q_counts.tolist() == [0, 0] and none.kv_counts.tolist() == [0, 1]
    many = make_schedule((1, 3 * 9000), offsets(9000 * [3]), None)
    assert many.q_counts.tolist() == [9000, 9000]


def test_unknown_words_are_refused():
    with pytest.raises(ValueError, match="order"):
        make_schedule((1, 1), offsets([1]), None, order="random")
    with pytest.raises(ValueError, match="where"):
        make_schedule((1, 1), offsets([1]), None, where="here")


def good(**changes):
    given = {"shapes": (6, 7), "kv_offsets": torch.tensor([0, 3, 7]), "q_offsets": torch.tensor([0, 6, 6])}
    return make_schedule(**given | changes)


PROBLEM = Problem(2, 2, 2, 64, 64, 6, 7, False, 1.0)
BAD = [
    ({"kv_offsets": [0, 3, 7]}, TypeError, "kv_offsets: expected a torch.Tensor .* got list"),
    ({"q_offsets": (0, 6, 6)}, TypeError, "q_offsets: expected a torch.Tensor .* got tuple"),
    ({"kv_offsets": torch.tensor([0.0, 3, 7])}, TypeError, "kv_offsets: expected dtype .* got torch.float32"),
    ({"kv_offsets": torch.tensor([[0, 3, 7]])}, ValueError, r"kv_offsets: expected one dimension .*\(1, 3\)"),
    ({"kv_offsets": torch.tensor(7)}, ValueError, r"kv_offsets: expected one dimension .*\(\)"),
    (
        {"kv_offsets": torch.tensor([], dtype=torch.int32)},
        ValueError,
        r"kv_offsets: expected B \+ 1 elements",
    ),
    ({"kv_offsets": torch.tensor([0, 3, 7]).to_sparse()}, TypeError, "kv_offsets: expected a dense tensor"),
    ({"kv_offsets": torch.tensor([0, 7, 3])}, ValueError, r"kv_offsets: expected never to decrease"),
    ({"kv_offsets": torch.tensor([1, 3, 7])}, ValueError, r"kv_offsets: expected to start at 0"),
    ({"kv_offsets": torch.tensor([0, 3, 8])}, ValueError, "kv_offsets: expected to end within the 7 packed"),
    ({"q_offsets": torch.tensor([0, 3, 7])}, ValueError, "q_offsets: expected to end within the 6 packed"),
    ({"q_offsets": torch.tensor([0, 6])}, ValueError, "q_offsets: expected as many sequences .* 2, got 1"),
    (
        {"q_offsets": torch.tensor([0, 6, 6], device="meta")},
        ValueError,
        "q_offsets: expected to be on cpu .* meta",
    ),
    ({"block_m": 0}, ValueError, "block_m: expected 1 to 65536, got 0"),
    ({"block_n": -64}, ValueError, "block_n: expected 1 to 65536, got -64"),
    ({"block_n": 64.0}, TypeError, "block_n: expected an int, got float"),
    ({"block_m": True}, TypeError, "block_m: expected an int, got bool"),
    ({"shapes": 6}, TypeError, r"shapes: expected a Problem or \(rows of q, rows of k\), got 6"),
    ({"shapes": (6, 7, 8)}, TypeError, "shapes: expected a Problem or"),
    ({"shapes": (6, "7")}, TypeError, "rows of k in shapes: expected an int, got str"),
    ({"shapes": (-1, 7)}, ValueError, "rows of q in shapes: expected 0 to .* got -1"),
    ({"shapes": dataclasses.replace(PROBLEM, batch=3)}, ValueError, "kv_offsets: expected 3 sequences .* 2"),
    ({"shapes": PROBLEM, "q_offsets": None}, ValueError, "q_offsets: expected some, because shapes has"),
    ({"pruned": 1}, TypeError, "pruned: expected True or False, got 1"),
    ({"check": 0}, TypeError, "check: expected True, False or None, got 0"),
]


@pytest.mark.parametrize("changes, error, words", BAD, ids=[f"{n:02}" for n in range(len(BAD))])
def test_bad_input_is_named(changes, error, words):
    good()
    good(shapes=PROBLEM)
    with pytest.raises(error, match=words):
        good(**changes)


def test_values_are_read_where_nothing_has_to_be_waited_for():
    """Shapes are always looked at; values not with check=False, and on no device that one waits for."""
    falling = torch.tensor([0, 7, 3])
    good(kv_offsets=falling, check=False)
    for where in ("device", "host"):
        with pytest.raises(ValueError, match="never to decrease"):
            good(kv_offsets=falling, where=where)
    lists = make_schedule((6, 7), falling.to("meta"))
    assert lists.q_tiles.device.type == "meta", "reading a value of a meta tensor would have raised"
    with pytest.raises(TypeError, match="kv_offsets: expected dtype"):
        make_schedule((6, 7), falling.to("meta").float())


def test_numbers_and_offsets_of_other_kinds_make_the_same_lists():
    strided = torch.tensor([[0, 9], [3, 9], [7, 9]])[:, 0]
    same = good(shapes=(np.int64(6), np.int32(7)), kv_offsets=strided, block_m=np.int64(128))
    for a, b in zip(same.tensors(), good().tensors(), strict=True):
        assert torch.equal(a, b)


# ------------------------------------------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 768, 3000])
def test_on_a_gpu_the_kernel_agrees_with_the_operators(batch):
    draw = torch.Generator().manual_seed(batch)
    lengths = torch.randint(0, 700, (batch,), generator=draw).tolist()
    queries = torch.randint(0, 300, (batch,), generator=draw).tolist()
    for query, (order, pruned) in itertools.product((None, queries), KINDS):
        shapes = rows_of(lengths, query)
        on_cpu = offsets(lengths), offsets(query)
        on_gpu = [None if x is None else x.cuda() for x in on_cpu]
        a = make_schedule(shapes, *on_cpu, order=order, pruned=pruned)
        b = make_schedule(shapes, *on_gpu, order=order, pruned=pruned)
        for name in ("q_counts", "kv_counts", "q_offsets"):
            assert torch.equal(getattr(a, name), getattr(b, name).cpu())
        assert records(a.q_tiles, a.q_counts) == records(b.q_tiles, b.q_counts)
        assert records(a.kv_tiles, a.kv_counts) == records(b.kv_tiles, b.kv_counts)


@pytest.mark.gpu
def test_on_a_gpu_it_takes_at_most_15_microseconds_and_fits_a_graph():
    lengths = torch.randint(0, 1024, (768,), generator=torch.Generator().manual_seed(0)).tolist()
    kv_offsets = offsets(lengths).cuda()
    shapes = rows_of(lengths, None)
    make_schedule(shapes, kv_offsets, None)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(20):
            schedule = make_schedule(shapes, kv_offsets, None)
    times = []
    for _ in range(20):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 20 * 1e3)
    assert sorted(times)[10] <= 15, times
    kv_offsets.copy_(offsets(lengths[::-1]).cuda())
    graph.replay()
    expected = make_schedule(shapes, offsets(lengths[::-1]), None)
    assert records(schedule.q_tiles, schedule.q_counts) == records(expected.q_tiles, expected.q_counts)


def test_a_schedule_carried_as_tensors_ignores_the_default_device():
    made = good()
    torch.set_default_device("meta")
    try:
        carried = made.tensors()
    finally:
        torch.set_default_device(None)
    assert carried[-1].device.type == "cpu" and type(made).from_tensors(carried).block_m == made.block_m


def test_a_schedule_of_other_packed_queries_or_of_another_device_is_refused():
    q_offsets = torch.tensor([0, 2, 3, 6])
    made = make_schedule((6, 9), torch.tensor([0, 3, 7, 9]), q_offsets)
    problem = Problem(3, 1, 1, 64, 64, 6, 9, False, 1.0)
    made.check(problem, torch.tensor([0, 3, 7, 9]), q_offsets, values=True)
    with pytest.raises(ValueError, match="schedule: expected on meta, got cpu"):
        made.check(problem, torch.tensor([0, 3, 7, 9], device="meta"), q_offsets)
