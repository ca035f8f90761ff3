"""Replays of backward kernels, live registers, reduce-adds, and edges: what notebooks 05 to 07 rest on."""

import dataclasses
import types

import pandas
import pytest

from jfa import emulator
from jfa.lab import course, drawings_staging, edges, figures, ladder, live, reduction, replay, staging

COMPILES = course.compiler_missing() is None and live.missing() is None
needs_compiler = pytest.mark.skipif(not COMPILES, reason=str(course.compiler_missing() or live.missing()))


@pytest.fixture(scope="module")
def events():
    return {
        arch: replay.recorded_run(staging.ladder_of(arch)["dq_staged"], 256, tiles=1, head_dim=64).events
        for arch in ("hopper", "blackwell")
    }


def replayed(events, arch, **rates):
    pace = dataclasses.replace(replay.PACES[arch], operation=1e-3, **rates)
    return replay.Replay(events[arch], arch, pace)


@pytest.mark.parametrize("arch", ["hopper", "blackwell"])
def test_a_replay_keeps_the_work_and_serves_one_at_a_time(events, arch):
    run = replayed(events, arch)
    for lane in ("tensor cores", "adds to dQ"):
        spans = sorted((s["start"], s["end"]) for s in run.spans if s["lane"] == lane)
        assert spans and all(b[0] >= a[1] - 1e-6 for a, b in zip(spans, spans[1:]))
    mine = [e for e in events[arch] if e[1] == (0, 0, 0)]
    dq_bytes, flops = staging.added_bytes(mine)
    assert dq_bytes == 256 * 64 * 4  # one tile meets 256 rows
    assert flops == 5 * 2 * 256 * 128 * 64
    worked = sum(s["end"] - s["start"] for s in run.spans if s["lane"] == "tensor cores")
    assert worked == pytest.approx(flops / replay.PACES[arch].tensor_flops)
    added = sum(s["end"] - s["start"] for s in run.spans if s["lane"] == "adds to dQ")
    assert added == pytest.approx(dq_bytes / replay.PACES[arch].add)


@pytest.mark.parametrize("arch", ["hopper", "blackwell"])
def test_products_are_named_after_what_they_make(events, arch):
    names = [s["label"] for s in replayed(events, arch).spans if s["lane"] == "tensor cores"]
    assert set(names) == {"S", "dP", "dV", "dK", "dQ"}
    assert names[0] == "S"


def test_faster_adds_never_take_longer_and_dq_keeps_its_columns_for_less(events):
    ends = [max(replayed(events, "blackwell", add=rate).ends.values()) for rate in (5.0, 15.0, 60.0)]
    assert ends == sorted(ends, reverse=True) and ends[0] > ends[-1]
    kept = [
        [
            s["end"] - s["start"]
            for s in replayed(events, "blackwell", add=rate).spans
            if s["label"] == "dQ" and s["lane"] == "columns"
        ]
        for rate in (5.0, 60.0)
    ]
    assert sum(kept[0]) > sum(kept[1]) > 0


def test_a_trace_that_ends_in_a_wait_is_refused(events):
    cut = [e for e in events["hopper"] if not (e[3] == "arrive" and "full" in str(e[4]))]
    with pytest.raises(RuntimeError, match="never resolve"):
        replayed({"hopper": cut}, "hopper")


def test_what_a_turn_moves():
    for arch in ("hopper", "blackwell"):
        assert staging.turn_flops(arch) / staging.turn_bytes(arch) == 320
        assert staging.turn_flops(arch, keys=256) / staging.turn_bytes(arch) == 640


@pytest.mark.parametrize("what", ["reduce-add", "atomics"])
@pytest.mark.parametrize(("destinations", "tile"), [(1, (64, 64)), (5, (128, 32)), (20, (64, 64))])
def test_adds_add_up_at_every_destination(what, destinations, tile):
    with emulator.emulate(arch="sm_90") as machine:
        got, wanted = reduction.sums(what, tile, 2, destinations, ctas=3, turns=4)
    assert machine.errors() == []
    assert got.shape == (destinations, tile[0] * tile[1])
    assert int(wanted.sum()) == 12
    assert (got == wanted[:, None]).all()


def test_stores_instead_of_adds_are_seen():
    with emulator.emulate(arch="sm_90") as machine:
        assert reduction.right("store", (64, 64), 2, 2, ctas=3, turns=3)
    assert machine.errors()[0].kind == "global race"


def test_destinations_of_a_shared_block():
    assert [reduction.destinations_of(rows) for rows in (1, 64, 65, 128, 512)] == [8, 8, 16, 16, 64]


def recording():
    """Rows such as a GPU would record, with numbers that no GPU gave: only to draw from."""
    rows = []
    for what, (rows_, columns), depth in reduction.variants():
        for destinations in reduction.DESTINATIONS:
            row = {"what": what, "tile_rows": rows_, "tile_columns": columns, "in_flight": depth}
            rows.append(
                row | {"destinations": destinations, "gb_s": 100.0 * min(destinations, 32) + 10 * depth}
            )
    return pandas.DataFrame(rows)


def test_the_reduction_is_drawn_and_its_title_says_what_it_found():
    figure = figures.draw("05_reduction", recording())
    text = " ".join(t.get_text() for t in figure.texts)
    share = drawings_staging.spread(recording())
    assert share == pytest.approx(1620 / 3220)
    assert f"{100 * share:.0f} %" in text
    shown = {t.get_text() for t in figure.axes[0].texts}
    assert {"TMA adds, 1, 2 or 4 tiles in flight", "atomics of the threads", "M=128"} <= shown


def test_the_steps_are_drawn_from_measured_rows_of_one_scope():
    rows = [
        {"direction": way, "scope": scope, "step": step, "M": 128, "N": n, "density": 0.5, "tflops": speed}
        for way in ("forward", "backward")
        for scope in ("call", "kernel")
        for n in (512, 1024)
        for step, speed in (("dynamic", 200.0), ("dq_staged", 200.0 + n / 64), ("peeled", ""))
    ]
    kept = drawings_staging.measured(pandas.DataFrame(rows))
    assert len(kept) == 4 and set(kept["scope"]) == {"call"}
    assert drawings_staging.ratios(kept, "dynamic", "dq_staged") == (1.04, 1.08)
    figures.draw("05_steps", rows)


LISTING = """
.L_x_1:
        /*0010*/                   LDTM.x32 R4, tmem[UR4] ;          // |   44  |   1    |   9   |         |
        /*0020*/              @P0 UTMAREDG.4D.ADD [UR8], [UR10] ;    // |   12  |        |   3   |         |
        /*0030*/                   SYNCS.ARRIVE.TRANS64 RZ, [UR5] ;  // |   40  |        |       |         |
        /*0040*/              @!P0 BRA `(.L_x_1) ;                   // |    7  |   2    |   3   |         |
        /*0050*/                   EXIT ;                            // |       |        |       |         |
.L_x_2:
        /*0060*/                   LDTM.x32 R4, tmem[UR4] ;          // |   99  |        |       |         |
        /*0070*/                   UTMAREDG.4D.ADD [UR8], [UR10] ;   // |   99  |        |       |         |
        /*0080*/                   BRA `(.L_x_2) ;                   // |       |        |       |         |
"""


def test_live_registers_are_read_and_waits_behind_the_end_are_no_loops(monkeypatch):
    monkeypatch.setattr(live, "disassembly", lambda made: LISTING)
    made = types.SimpleNamespace(kernel="kernel", arch="sm_100")
    drain = live.drain_loop(made)
    assert [one.opcode for one in drain][0] == "LDTM.x32" and len(drain) == 4
    assert (live.peak(drain), live.peak(drain, "predicates"), live.peak(drain, "uniform")) == (44, 2, 9)
    assert live.at_release(drain) == 40
    assert live.block_loops(made) == []
    monkeypatch.setattr(live, "disassembly", lambda made: LISTING.replace("UTMAREDG", "UTMASTG"))
    with pytest.raises(ValueError, match="no loop of kernel"):
        live.drain_loop(made)


@needs_compiler
def test_a_slice_that_is_held_costs_its_registers():
    alive = [live.at_release(live.drain_loop(ladder.compiled(staging.holding(count)))) for count in (1, 2)]
    assert alive[1] - alive[0] == 32


@needs_compiler
def test_the_bulk_loop_is_shorter_and_holds_less():
    most = edges.peaks(edges.loop_rows())
    for arch in ("hopper", "blackwell"):
        assert most[arch, "bulk"]["instructions"] < 0.8 * most[arch, "masked"]["instructions"]
        assert most[arch, "bulk"]["predicates"] < most[arch, "masked"]["predicates"]


@needs_compiler
@pytest.mark.parametrize("arch", ["hopper", "blackwell"])
def test_a_walk_without_masks_is_shorter(arch):
    peeled = staging.ladder_of(arch)["peeled"]
    lengths = [
        len(live.block_loops(ladder.compiled(step))[0]) for step in (peeled, edges.without_masks(peeled))
    ]
    assert lengths[1] < lengths[0]
    with pytest.raises(ValueError, match="does not ask"):
        edges.without_masks(staging.ladder_of(arch)["dynamic"])


@pytest.mark.parametrize(
    "facts",
    [*edges.CASES.values(), (1, 1, None, None), (128, 128, 0, 0), (200, 129, None, 3), (5, 300, 127, 0)],
)
def test_no_edge_is_missed_and_no_tile_walked_in_vain(facts):
    found, wanted = edges.tile_map(*facts), edges.needed(*facts)
    assert ((found > 0) >= (wanted > 0)).all()
    assert (found[wanted == edges.EDGE] == edges.EDGE).all()
    assert (found == wanted).float().mean() > 0.7


def test_shares_of_edges_count_tails():
    assert edges.edge_share([128, 256, 0]) == 0
    assert edges.edge_share([1, 129]) == 2 / 3
    assert edges.causal_share([256]) == pytest.approx(2 / 3)
    assert edges.causal_share([0]) == 0


def test_a_gain_needs_bulk():
    assert edges.gain(1.0, (300.0, 200.0)) == 1
    assert edges.gain(0.0, (300.0, 200.0)) == 1.5
    assert 1 < edges.gain(0.5, (300.0, 200.0)) < 1.5
