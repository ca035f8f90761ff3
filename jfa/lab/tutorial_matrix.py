"""The wheel's GEMM and layer normalization kernels with inputs and answers, as targets of the emulator's
tests.
"""

from unittest import mock

import torch

from jfa.emulator.target import Target
from jfa.lab.tutorial_attention import normal, with_value
from jfa.lab.tutorials import SMS, host, load, share_of_budget


def gemm(name, function, m=256, n=256, k=256):
    """a @ b in float16 by a function of a tutorial."""

    def make():
        call = getattr(load(name), function)
        a = normal(m, k, dtype=torch.float16)
        b = normal(k, n, seed=1, dtype=torch.float16)
        exact, low = a.double() @ b.double(), (a.float() @ b.float()).half()

        def run():
            with host():
                return share_of_budget(call(a, b), exact, low)

        return run

    return make


def grouped():
    """Several products of different sizes in one launch."""
    module = load("blackwell-grouped-gemm_test")
    a = [normal(rows, 256, seed=i, dtype=torch.float16) for i, rows in enumerate((256, 384))]
    b = [normal(256, 256, seed=9 + i, dtype=torch.float16) for i in range(2)]
    exact = [x.double() @ y.double() for x, y in zip(a, b)]
    low = [(x.float() @ y.float()).half() for x, y in zip(a, b)]

    def run():
        with host():
            return max(map(share_of_budget, module.group_gemm_tlx_fn(a, b), exact, low))

    return run


def layer_norm(name, function, dtype):
    """Layer normalization of rows that several CTAs of a cluster share."""

    def make():
        module = load(name)
        x = normal(12, 2048, dtype=dtype)
        weight, bias = (normal(2048, seed=i, dtype=dtype) for i in (1, 2))
        exact, low = (
            torch.nn.functional.layer_norm(x.to(d), (2048,), weight.to(d), bias.to(d), 1e-5)
            for d in (torch.float64, torch.float32)
        )

        def run():
            threshold = mock.patch.object(module, "_WS_NARROW_N_THRESHOLD", 0, create=True)
            with host(), threshold, mock.patch.object(module, "NUM_SMS", SMS, create=True):
                out = getattr(module, function)(x, weight, bias, 1e-5)[0]
            return share_of_budget(out, exact, low.to(dtype))

        return run

    return make


def _targets():
    yield Target("gemm_ws", gemm("blackwell_gemm_ws", "matmul", 512, 256, 256))
    yield Target(
        "gemm_ws_2cta",
        gemm("blackwell_gemm_ws", "matmul", 512, 256, 256),
        options={"pick": with_value("NUM_CTAS", 2)},
    )
    yield Target("gemm_pipelined", gemm("blackwell_gemm_pipelined", "matmul"), known=("unwaited store",))
    yield Target("gemm_2cta", gemm("blackwell_gemm_2cta", "matmul", 512, 256, 512))
    yield Target("gemm_clc", gemm("blackwell_gemm_clc", "matmul", 512, 512, 256))
    yield Target("gemm_grouped", grouped)
    for name in ("matmul_2cta", "matmul_2cta_ws", "matmul_2cta_host_tma", "matmul_2cta_host_tma_ws"):
        yield Target("addmm_" + name, gemm("blackwell-triton-addmm-2cta_test", name, 256, 256, 128))
    hopper = "hopper-persistent-gemm-ws-"
    yield Target("gemm_hopper_ws", gemm("hopper_gemm_ws", "matmul", 512, 256, 128))
    yield Target("gemm_hopper_pipelined", gemm("hopper_gemm_pipelined", "matmul"))
    for kind in ("pingpong", "cooperative"):
        yield Target("gemm_hopper_" + kind, gemm(hopper + kind, "matmul_tlx_ws_persistent", 512, 512, 128))
    multi = "blackwell-multi-cta-layernorm_test"
    yield Target("layernorm", layer_norm(multi, "multi_cta_layernorm", torch.float32))
    ws = "blackwell_multi_cta_layernorm_ws_test"
    # Its CTAs store to each other at once, and the compiler lets no cluster meet for that: see visits.py.
    run = layer_norm(ws, "multi_cta_layernorm_ws", torch.bfloat16)
    yield Target("layernorm_ws", run, known=("peer not ready",))


TARGETS = list(_targets())
