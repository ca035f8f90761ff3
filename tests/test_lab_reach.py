"""What a GPU reaches, the rates that the roofline divides by."""

import pandas
import pytest

from jfa.lab import drawings_clocks, flops, reach, results
from jfa.lab.targets import Target

WAYS = (reach.Way("rested", 0, 1, 0.01), reach.Way("settled", 1, 1, 0))


def test_every_work_is_counted_and_timed_in_every_way():
    sizes = {"side": 64, "count": 1 << 12, "device": "cpu", "ours": {}}
    rows = list(reach.recorded(2, WAYS, sizes, graph=False, host_clock=True))
    assert [(row["name"], row["way"]) for row in rows] == [
        (name, way.name) for name in ("product", "product of zeros", "copy", "read", "write") for way in WAYS
    ]
    amounts = {row["name"]: row["amount"] for row in rows}
    assert amounts["product"] == amounts["product of zeros"] == 2 * 64**3
    assert (amounts["copy"], amounts["read"], amounts["write"]) == (1 << 15, 1 << 14, 1 << 14)
    for row in rows:
        assert row["rate"] == pytest.approx(row["amount"] / row["ms_p50"] / 1e9, abs=0.006) and row["timer"]


def test_works_do_what_they_are_called():
    found = {name: function for name, function, _, _ in reach.works(16, 8, "cpu", {})}
    assert found["product"]().abs().max() > 1 and not found["product of zeros"]().any()
    copied = found["copy"]()
    assert copied.any() and found["read"]() == pytest.approx(-copied.sum().item(), abs=1e-5)
    assert (found["write"]() == 1).all() and copied.data_ptr() == found["write"]().data_ptr()


def test_text_has_shares_of_the_product_and_the_clock_that_power_leaves():
    numbers = {"product": (800.0, 600.0), "copy": (4.25, 4.25), "our forward pass": (600.0, 480.0)}
    rows = pandas.DataFrame(
        {"name": name, "way": way.name, "rate": rate, "unit": "TB/s" if name == "copy" else "TFLOPS"}
        | {"sm_clock_mhz": 1500.0, "power_w": 690.0}
        for name, rates in numbers.items()
        for way, rate in zip((reach.RESTED, reach.LONG), rates, strict=True)
    )
    lines = reach.text(rows).splitlines()
    assert lines[1].split()[-6:] == ["800", "600", "1.50", "GHz,", "690", "W"]
    assert lines[2].split()[2:4] == ["4.25", "4.25"] and lines[-1].split()[-2:] == ["0.75", "0.80"]
    assert drawings_clocks.slowed(rows).to_dict() == {"our forward pass": 0.8, "product": 0.75}


def test_the_roofline_divides_by_what_was_recorded():
    rows = pandas.DataFrame(results.load(results.REACH))
    found = reach.table(rows).loc
    machine = flops.MACHINES["H200"]
    assert found["product", "rested"] * 1e12 == pytest.approx(machine.flops_measured.value, rel=0.02)
    assert found["copy", "rested"] * 1e12 == pytest.approx(machine.bytes_measured.value, rel=0.03)
    assert set(rows["timer"]) == {"cuda-graph"} and rows["gpu"].nunique() == rows["commit"].nunique() == 1


@pytest.mark.gpu
def test_on_a_gpu_our_passes_are_timed_beside_the_product():
    ours = {"forward": Target("forward", "staged", N=512)}
    rows = list(reach.recorded(2, (reach.SETTLED,), {"side": 1024, "count": 1 << 20, "ours": ours}))
    assert [row["name"] for row in rows][-1] == "our forward pass"
    assert all(row["timer"] == "cuda-graph" and 0 < row["rate"] < 1000 for row in rows)
    assert not any(row["error"] for row in rows)
