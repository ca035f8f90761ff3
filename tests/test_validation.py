"""What the public function takes and refuses: kinds of tensors and numbers, and steps that cannot go on."""

import dataclasses
import gc
import types
import weakref

import numpy as np
import pytest
import torch

import jfa
from jfa import attention, steps
from jfa.jagged import lengths_to_offsets


def inputs(grad=False, heads=2, dtype=torch.bfloat16):
    draw = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(n, h, 64, generator=draw).to(dtype) for n, h in ((5, 2), (12, heads), (12, heads)))
    return [x.requires_grad_(grad) for x in (q, k, v)], lengths_to_offsets([5, 7])


# ---------------------------------------------------------------------------------------------------- tensors


@pytest.mark.parametrize("name", ["q", "k", "v", "kv_offsets", "q_offsets"])
def test_sparse_tensors_are_refused_by_name(name):
    (q, k, v), offsets = inputs()
    tensors = {"q": q, "k": k, "v": v, "kv_offsets": offsets, "q_offsets": torch.tensor([0, 2, 5])}
    tensors[name] = tensors[name].to_sparse()
    with pytest.raises(TypeError, match=rf"^{name}: expected a dense tensor .* got layout torch.sparse_coo"):
        jfa.jagged_flash_attention(**tensors)


@pytest.mark.parametrize("backend", ["auto", "reference", "triton", "hopper", "blackwell"])
@pytest.mark.parametrize("packed", [False, True], ids=["broadcast", "packed"])
def test_meta_tensors_give_shapes(backend, packed):
    tensors, offsets = inputs()
    tensors = [x.to("meta").requires_grad_() for x in tensors]
    q_offsets = torch.tensor([0, 2, 5], device="meta") if packed else None
    out, lse = jfa.jagged_flash_attention(
        *tensors, offsets.to("meta"), q_offsets, backend=backend, return_lse=True
    )
    assert out.device.type == "meta" and out.dtype == torch.bfloat16 and lse.dtype == torch.float32
    assert out.shape == ((5, 2, 64) if packed else (2, 5, 2, 64))
    assert lse.shape == ((2, 5) if packed else (2, 2, 5))
    out.sum().backward()
    assert [x.grad.shape for x in tensors] == [x.shape for x in tensors]
    with pytest.raises(ValueError, match="k: expected the head dimension of q"):
        jfa.jagged_flash_attention(tensors[0][:, :, :32], *tensors[1:], offsets.to("meta"))


@pytest.mark.parametrize("backend", ["triton", "hopper", "blackwell"])
def test_offsets_with_a_stride(backend):
    """The first column of a table; the roles that read offsets themselves must not find the second."""
    tensors, offsets = inputs(grad=True)
    column = torch.stack([offsets, offsets + 1000], 1)[:, 0]
    step = None if backend == "triton" else "warp_specialized"
    found = []
    for cuts in (column, offsets):
        out = jfa.jagged_flash_attention(*tensors, cuts, backend=backend, step=step)
        found.append((out, *torch.autograd.grad(out.float().square().sum(), tensors)))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=2**-6, atol=2**-6)


# ---------------------------------------------------------------------------------------------------- numbers


@pytest.mark.parametrize(
    "given, plain",
    [
        ({"window": (np.int64(3), np.int32(1))}, {"window": (3, 1)}),
        ({"scale": np.float32(0.5)}, {"scale": 0.5}),
        ({"scale": np.float64(0.5)}, {"scale": 0.5}),
        ({"scale": np.int64(1)}, {"scale": 1.0}),
        ({"scale": np.float16(0.5)}, {"scale": 0.5}),
        ({"max_kv_len": np.int32(9)}, {"max_kv_len": 9}),
    ],
    ids=str,
)
def test_numpy_scalars_are_numbers(given, plain):
    tensors, offsets = inputs()
    wanted = jfa.jagged_flash_attention(*tensors, offsets, **plain)
    assert torch.equal(jfa.jagged_flash_attention(*tensors, offsets, **given), wanted)


@pytest.mark.parametrize(
    "given, error, words",
    [
        ({"window": (np.float32(3), None)}, TypeError, "window: expected int .* its left side, got float32"),
        ({"window": (None, np.bool_(True))}, TypeError, "window: expected int .* its right side, got bool"),
        ({"window": (np.int64(-2), None)}, ValueError, "window: expected a number of keys .* got -2"),
        ({"scale": np.bool_(True)}, TypeError, "scale: expected a float or None, got bool"),
        ({"scale": np.float32("nan")}, ValueError, "scale: expected a finite number, got nan"),
        ({"scale": torch.tensor(0.5)}, TypeError, "scale: expected a float or None, got Tensor"),
        ({"scale": 1j}, TypeError, "scale: expected a float or None, got complex"),
        ({"max_kv_len": np.float64(9)}, TypeError, "max_kv_len: expected an int or None, got float64"),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_no_number_is_named(given, error, words):
    tensors, offsets = inputs()
    with pytest.raises(error, match=words):
        jfa.jagged_flash_attention(*tensors, offsets, **given)


# ------------------------------------------------------------------------------------------------------ steps


def test_steps_are_kept_no_longer_than_they_are_used():
    """By the caller, and by a graph that has yet to be differentiated; by nobody else."""
    tensors, offsets = inputs(grad=True)
    step = dataclasses.replace(steps.find("hopper", "backward", "two_cta"), name="kept a while")
    seen = weakref.ref(step)
    out = jfa.jagged_flash_attention(*tensors, offsets, backend="hopper", step=step)
    del step
    gc.collect()
    assert seen() is not None, "the backward pass will ask for it"
    grads = torch.autograd.grad(out.sum(), tensors)
    assert all(bool(x.isfinite().all()) for x in grads)
    del out
    gc.collect()
    assert seen() is None and not any(key.startswith("kept a while#") for key in attention._STEPS)


def test_a_step_without_its_backend():
    """A step object is named as its author did, not by the key that it crosses the operator under."""
    tensors, offsets = inputs()
    step = steps.find("hopper", "forward", "balanced")
    with pytest.raises(ValueError, match="reference.*, which has no steps, got 'balanced'; .*hopper"):
        jfa.jagged_flash_attention(*tensors, offsets, step=step)


def packed(q, k, v, offsets):
    return (q, k, v, offsets, torch.tensor([0, 2, 5])), {}


def windowed(q, k, v, offsets):
    return (q, k, v, offsets), {"window": (3, None)}


def grouped(q, k, v, offsets):
    return (q, k[:, :1], v[:, :1], offsets), {}


@pytest.mark.parametrize("backend", ["hopper", "blackwell"])
@pytest.mark.parametrize("what", [packed, windowed, grouped], ids=lambda what: what.__name__)
def test_a_named_step_that_cannot_go_back_is_refused_in_the_forward_pass(backend, what):
    """Only if gradients are wanted: the forward step of that name can run all of these."""
    tensors, offsets = inputs()
    call, options = what(*tensors, offsets)
    options |= {"backend": backend, "step": "stationary"}
    jfa.jagged_flash_attention(*call, **options)
    forward = options | {"step": steps.find(backend, "forward", "stationary")}
    call = [x.detach().requires_grad_() if x.is_floating_point() else x for x in call]
    with pytest.raises(ValueError, match=f'backend="{backend}" cannot run the backward pass .*stationary'):
        jfa.jagged_flash_attention(*call, **options)
    with torch.no_grad():
        jfa.jagged_flash_attention(*call, **options)
    out = jfa.jagged_flash_attention(*call, **forward)  # names no backward step, so that one is chosen
    assert torch.autograd.grad(out.sum(), call[0])[0].isfinite().all()


@pytest.mark.parametrize("backend", ["hopper", "blackwell"])
def test_a_named_step_that_is_not_deterministic_is_refused(backend):
    tensors, offsets = inputs(grad=True)
    options = {"backend": backend, "deterministic": True}
    with pytest.raises(ValueError, match="deterministic: expected .*dq_staged"):
        jfa.jagged_flash_attention(*tensors, offsets, step="dq_staged", **options)
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(ValueError, match="deterministic: expected .*dq_staged"):
            jfa.jagged_flash_attention(*tensors, offsets, backend=backend, step="dq_staged")
    finally:
        torch.use_deterministic_algorithms(False)
    for step in ("stationary", None, steps.find(backend, "forward", "balanced")):
        out = jfa.jagged_flash_attention(*tensors, offsets, step=step, **options)
        assert torch.autograd.grad(out.sum(), tensors[0])[0].isfinite().all()


def test_autocast_leaves_float64_alone():
    tensors = [torch.randn(rows, 2, 8, dtype=torch.float64) for rows in (3, 5, 5)]
    with torch.autocast("cpu", torch.bfloat16):
        out = jfa.jagged_flash_attention(*tensors, torch.tensor([0, 5]))
    assert out.dtype == torch.float64


def test_a_schedule_is_a_schedule():
    tensors, offsets = inputs()
    with pytest.raises(
        TypeError, match="schedule: expected a jfa.schedule.Schedule or None, got SimpleNamespace"
    ):
        jfa.jagged_flash_attention(*tensors, offsets, schedule=types.SimpleNamespace(tensors=3))
