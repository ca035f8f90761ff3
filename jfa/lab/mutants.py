"""The kernels that mutation tests and clean runs work on: this project's own and those of the wheel."""

from unittest import mock

import torch

import jfa
from jfa import jagged, steps
from jfa.emulator.target import Target
from jfa.kernels import launch
from jfa.lab import check, tutorial_attention, tutorial_matrix
from jfa.lab.survivors import EXPLAINED  # noqa: F401  (part of the registry)

LENGTHS = (0, 1, 130, 64, 840)


def inputs(query, lengths=LENGTHS, heads=2, heads_kv=None, dim=64, seed=7):
    """q, k, v in bfloat16 and offsets. query: rows of a shared query block, or a length for each sequence."""
    draw = torch.Generator().manual_seed(seed)
    rows = query if isinstance(query, int) else sum(query)
    kv_heads = heads_kv or heads
    q = torch.randn(rows, heads, dim, generator=draw).bfloat16()
    k, v = (torch.randn(sum(lengths), kv_heads, dim, generator=draw).bfloat16() for _ in range(2))
    q_offsets = None if isinstance(query, int) else jagged.lengths_to_offsets(torch.tensor(query))
    return q, k, v, jagged.lengths_to_offsets(torch.tensor(lengths)), q_offsets


def forward(backend, step, calls):
    """Forward pass of a step; `calls`: pairs (arguments of `inputs`, rule of the attention)."""

    def make():
        wanted = [check.expected(*inputs(**facts), gradients=False, **rule) for facts, rule in calls]

        def run():
            return max(_share(one, backend, step) for one in wanted)

        return run

    return make


def backward(backend, step, calls):
    """Backward pass of a step, after a forward pass that ran once. ``sms``: what the device has instead."""

    def make():
        from jfa.emulator import emulate

        prepared = []
        for facts, rule in calls:
            facts = dict(facts)
            sms = facts.pop("sms", launch.EMULATED_SMS)
            wanted = check.expected(*inputs(**facts), **rule)
            one = wanted.inputs
            leaves = [x.clone().requires_grad_() for x in (one.q, one.k, one.v)]
            with emulate(policy="eager"):
                out = jfa.jagged_flash_attention(
                    *leaves, one.kv_offsets, one.q_offsets, backend=backend, step=step, return_lse=True,
                    **one.rule,
                )  # fmt: skip
            prepared.append((wanted, out, leaves, sms))

        def run():
            worst = 0.0
            for wanted, out, leaves, sms in prepared:
                incoming = [wanted.inputs.dout, wanted.inputs.dlse]
                with mock.patch.object(launch, "EMULATED_SMS", sms):
                    grads = torch.autograd.grad(out, leaves, incoming, retain_graph=True)
                table = wanted.check(dict(zip(("dq", "dk", "dv"), grads)))
                worst = max(worst, table.worst.ratio)
            return worst

        return run

    return make


def _share(wanted, backend, step):
    found = check.results_of(jfa.jagged_flash_attention, wanted.inputs, backend=backend, step=step)
    return wanted.check(found).worst.ratio


# One sequence has more blocks of keys than any ring has slots; several items fall to every CTA.
BROADCAST = ({"query": 136, "heads": 1}, {})
WINDOW = ({"query": 150, "lengths": (200, 0, 260, 20), "heads": 1}, {"window": (90, 20)})
PACKED = ({"query": (3, 70, 0, 260), "lengths": (70, 200, 5, 300), "heads_kv": 1}, {"causal": True})
MANY_ROWS = ({"query": 300, "lengths": (1, 200, 300), "heads": 1}, {})
ALONE = ({"query": 72, "lengths": (300, 1, 129), "heads": 1}, {})
SEQUENCES = ({"query": 136, "lengths": (1, 130, 5, 60, 70, 700), "heads": 1}, {})
CHAIN = ({"query": 300, "lengths": (1, 130, 5), "heads": 1, "sms": 4}, {})  # two pairs at once on Hopper
# One query tile an item; several tiles of one block in a row.
FEW_ROWS = ({"query": 72, "lengths": (300, 1, 127, 128, 129, 5, 64), "heads": 2, "dim": 128}, {})
# Blocks of 64 keys whose ring turns over between two tiles: four blocks and more, but short on average.
FOUR_BLOCKS = ({"query": 72, "lengths": (250, 200, 240, 10, 1, 60, 5, 30, 20), "heads": 1, "dim": 128}, {})
MANY_SEQUENCES = ({"query": 136, "lengths": (1, 130, 64, 0, 5, 60, 300, 20, 7, 200), "heads": 1}, {})
PAIRS = ({"query": (130, 70, 0, 260), "lengths": (600, 200, 5, 300), "heads": 1}, {"causal": True})
SHARED_KEYS = ({"query": 70, "lengths": (300, 40, 200), "heads": 4, "heads_kv": 2}, {})


def _own():
    """This project's kernels: the last step of every ladder, and steps that synchronize in other ways."""
    calls = [BROADCAST, WINDOW, PACKED, FEW_ROWS, FOUR_BLOCKS, SHARED_KEYS]
    first = forward("hopper", "warp_specialized", [BROADCAST])
    yield Target("hopper_forward_first", first, kernel="kernel")
    yield Target("hopper_forward", forward("hopper", None, calls), kernel="kernel", fast=True)
    stationary = forward("hopper", "stationary", calls)
    yield Target("hopper_forward_stationary", stationary, kernel="kernel", fast=True)
    few = {"resident": 2}  # launch control needs CTAs that have not started: then one CTA takes many items
    everything = forward("blackwell", None, calls)
    yield Target("blackwell_forward", everything, kernel="kernel", fast=True, options=few)
    calls = {
        "peeled": [PACKED],
        "two_cta": [PAIRS],
        "ds_buffered": [PACKED],
        "stationary": [ALONE, SEQUENCES, CHAIN],
    }
    for arch in ("hopper", "blackwell"):
        if arch == "blackwell":
            calls["stationary"] = [BROADCAST, MANY_SEQUENCES, MANY_ROWS]
        for step in steps.BACKWARD[arch]:
            if step.name in calls:
                wide = [(facts | {"dim": 128}, rule) for facts, rule in calls[step.name]]
                resident = {"resident": 1 if step.name == "two_cta" else 2} if arch == "blackwell" else {}
                yield Target(
                    f"{arch}_backward_{step.name}",
                    backward(arch, step.name, wide),
                    kernel="kernel",
                    options=resident,
                    fast=step.name != "peeled",
                )


def _of_wheel():
    """Kernels of the wheel, with enough blocks for their rings to wrap around."""
    ctas = [{"pick": tutorial_attention.with_value("NUM_CTAS", n)} for n in (1, 2)]
    blackwell, hopper = "blackwell_fa_ws", "hopper_fa_ws_pipelined_pingpong"
    attend, backward = tutorial_attention.forward, tutorial_attention.backward
    multiply = tutorial_matrix.gemm
    yield Target("fa_ws", attend(blackwell, 768), fast=True)
    yield Target("fa_pipelined", attend(blackwell + "_pipelined", 768, 1, False))
    yield Target("fa_persistent_causal", attend(blackwell + "_pipelined_persistent", 768, 1, True))
    yield Target("fa_backward_1cta_causal", backward(512, True), kernel="_attn_bwd_ws", options=ctas[0])
    yield Target("fa_backward_2cta_causal", backward(512, True), kernel="_attn_bwd_ws", options=ctas[1])
    yield Target("fa_hopper_pingpong", attend(hopper, 768), fast=True)
    yield Target("gemm_2cta", multiply("blackwell_gemm_2cta", "matmul", 512, 256, 512), fast=True)
    yield Target("gemm_clc", multiply("blackwell_gemm_clc", "matmul", 512, 512, 256))


TARGETS = [*_own(), *_of_wheel()]
FAULTY = ("gdpa",)  # its answer depends on luck, see tests/test_emulator_wheel.py
_TUTORIALS = tutorial_attention.TARGETS + tutorial_matrix.TARGETS
_NAMES = {target.name for target in TARGETS} | set(FAULTY)
CLEAN = TARGETS + [target for target in _TUTORIALS if target.name not in _NAMES]
