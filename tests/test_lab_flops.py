"""FLOPs and bytes by their definitions, against brute force."""

import numpy as np
import pytest
import torch

from jfa import reference
from jfa.lab import flops

LENGTHS = [0, 1, 5, 63, 64, 65, 200]
MASKS = [(False, (None, None)), (True, (None, None)), (False, (3, 2)), (True, (7, None)), (False, (-1, 4))]


def test_forward_and_backward_of_the_definition():
    total = sum(LENGTHS)
    forward = flops.attention_flops(LENGTHS, 96, 4, 128)
    assert forward == 4 * 96 * total * 4 * 128
    assert flops.attention_flops(LENGTHS, 96, 4, 128, "backward") == 2.5 * forward
    assert flops.attention_flops(LENGTHS, 96, 4, 128, "both") == 3.5 * forward
    assert flops.attention_flops(torch.tensor(LENGTHS), 96, 4, 128) == forward
    assert flops.attention_flops([], 96, 4, 128) == 0


def test_published_shape():
    # B = 1152 sequences of 256, H = 4, D = 128: 4 * 256 * 256 * 4 * 128 * 1152
    assert flops.attention_flops([256] * 1152, [256] * 1152, 4, 128) == pytest.approx(154.6e9, rel=1e-3)


def test_other_width_of_values():
    pairs = 10 * 30
    assert flops.attention_flops([30], 10, 2, 64, Dv=32) == 2 * pairs * 2 * (64 + 32)
    assert flops.attention_flops([30], 10, 2, 64, "backward", Dv=32) == 2 * pairs * 2 * (3 * 64 + 2 * 32)


@pytest.mark.parametrize("causal, window", MASKS)
@pytest.mark.parametrize("query", [1, 40, "packed"])
def test_visible_counts_against_the_reference_mask(causal, window, query):
    queries = LENGTHS[::-1] if query == "packed" else [query] * len(LENGTHS)
    left, right = (None if side == -1 else side for side in window)
    right = 0 if causal else right
    pairs = keys = 0
    for rows, count in zip(queries, LENGTHS):
        seen = reference.visible_keys(rows, count, left, right)
        pairs += int(seen.sum())
        keys += int(seen.any(0).sum())
    given = queries if query == "packed" else query
    assert flops.visible_pairs(LENGTHS, given, causal, window) == pairs
    assert flops.visible_keys(LENGTHS, given, causal, window) == keys
    if window == (None, None) and not causal:
        assert pairs == sum(np.multiply(queries, LENGTHS))


def test_bytes_move_every_tensor_once():
    batch, rows, total = 7, 96, sum(LENGTHS)
    q, kv, out, lse = (
        rows * 8 * 64 * 2,
        2 * total * 2 * 64 * 2,
        batch * rows * 8 * 64 * 2,
        batch * rows * 8 * 4,
    )
    assert flops.least_bytes(LENGTHS, rows, 8, 64, Hkv=2) == q + kv + out + lse
    backward = flops.least_bytes(LENGTHS, rows, 8, 64, "backward", Hkv=2)
    assert backward == 2 * q + 2 * kv + 2 * out + lse
    assert flops.least_bytes(LENGTHS, rows, 8, 64, "backward", Hkv=2, separate_delta=True) == backward + out
    packed = flops.least_bytes([10, 20], [10, 20], 4, 32, itemsize=4)
    assert packed == 4 * 30 * 4 * 32 * 4 + 30 * 4 * 4
    unseen = flops.least_bytes([1000], 10, 4, 32, window=(5, 0)), flops.least_bytes([15], 10, 4, 32)
    assert unseen[0] == unseen[1]


def test_roofline_takes_the_larger_time():
    short = flops.roofline([512] * 768, 128, 4, 128)
    assert short.bound == "memory" and short.seconds == short.memory_seconds == short.bytes / 4.3e12
    # 103.1 GFLOP; 0.1 MB of q, 805.3 MB of k and v, 100.7 MB of out and 1.6 MB of lse at 4.3 TB/s
    assert short.tflops == pytest.approx(103.1e9 / (907.7e6 / 4.3e12) / 1e12, rel=1e-3)
    long = flops.roofline([4096] * 768, 512, 4, 128)
    assert long.bound == "compute" and long.tflops == pytest.approx(790)
    assert flops.roofline([4096] * 768, 512, 4, 128, kind="spec").tflops == pytest.approx(989)
    assert flops.roofline([256] * 8, 256, 4, 128, machine="B200").seconds < short.seconds
    assert flops.roofline([], 256, 4, 128).tflops == 0


def test_machine_tables_say_where_they_come_from():
    for machine in flops.MACHINES.values():
        for kind in ("spec", "measured"):
            for what in ("flops", "bytes"):
                rate = getattr(machine, f"{what}_{kind}")
                assert rate.kind == kind and len(rate.source) > 10 and rate.value > 1e12
        assert machine.flops_measured.value < machine.flops_spec.value
        assert machine.bytes_measured.value < machine.bytes_spec.value


def test_wrong_requests_are_named():
    with pytest.raises(ValueError, match="direction"):
        flops.attention_flops([1], 1, 1, 1, "sideways")
    with pytest.raises(ValueError, match="negative"):
        flops.attention_flops([-1], 1, 1, 1)
    with pytest.raises(ValueError, match="one per sequence"):
        flops.attention_flops([1, 2], [1], 1, 1)
    with pytest.raises(ValueError, match="machine"):
        flops.roofline([1], 1, 1, 1, machine="A100")
