"""The wheel's attention kernels with inputs and answers, as targets of the emulator's tests."""

import functools

import torch

from jfa.emulator.target import Target
from jfa.lab.mx import dequantized, quantize, tile_scales
from jfa.lab.tutorials import host, load, share_of_budget

SCALE = 0.3
DIM = 128
PERSISTENT = "blackwell_fa_ws_pipelined_persistent"


def normal(*shape, seed=0, dtype=torch.bfloat16):
    """A tensor of standard normal values, the same for the same seed."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=draw).to(dtype)


def attention(q, k, v, scale, causal, dtype=torch.float64, round_p=lambda p: p):
    """softmax(q k^T * scale) v over the last two dimensions, in dtype; the weights pass `round_p`."""
    q, k, v = (x.to(dtype) for x in (q, k, v))
    scores = q @ k.mT * scale
    if causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -torch.inf)
    return round_p(scores.softmax(-1)) @ v


def answers(q, k, v, causal, scale=SCALE):
    """The exact answer, and PyTorch's with the weights in the dtype of v as the tensor core needs them."""
    low = attention(q, k, v, scale, causal, torch.float32, lambda p: p.to(v.dtype).float())
    return attention(q, k, v, scale, causal), low.to(q.dtype)


def forward(name, rows=256, heads=1, causal=None):
    """Runs `_attention.apply` (or `attention`) of a tutorial; causal None: it takes no such argument."""

    def make():
        module = load(name)
        q, k, v = (normal(1, heads, rows, DIM, seed=i) for i in range(3))
        exact, low = answers(q, k, v, bool(causal))
        call = module._attention.apply if hasattr(module, "_attention") else module.attention
        more = () if causal is None else (causal,)

        def run():
            with host():
                return share_of_budget(call(q, k, v, SCALE, *more), exact, low)

        return run

    return make


def with_value(name, value):
    """Picks the first configuration of an autotuned kernel with this value, or the first of all."""

    def pick(configs):
        return next((c for c in configs if c.kwargs.get(name, value) == value), configs[0])

    return pick


def gradients(q, k, v, dout, causal, scale, dtype, round_operand=lambda x: x):
    """dq, dk, dv by the formulas that the kernels use; P and dS pass `round_operand` before a product."""
    q, k, v, dout = (x.to(dtype) for x in (q, k, v, dout))
    scores = q @ k.mT * scale
    if causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -torch.inf)
    p = scores.softmax(-1)
    delta = (dout * (round_operand(p) @ v)).sum(-1, keepdim=True)
    ds = p * (dout @ v.mT - delta)
    return round_operand(ds) @ k * scale, round_operand(ds).mT @ q * scale, round_operand(p).mT @ dout


def backward(rows=256, causal=False):
    """Backward of the pipelined persistent kernel; the forward pass runs once."""

    def make():
        from jfa.emulator import emulate

        module = load(PERSISTENT)
        leaves = [normal(1, 1, rows, DIM, seed=i).requires_grad_() for i in range(3)]
        dout = normal(1, 1, rows, DIM, seed=3)
        scale = 0.1
        plain = [x.detach() for x in leaves]
        exact = gradients(*plain, dout, causal, scale, torch.float64)
        low = gradients(*plain, dout, causal, scale, torch.float32, lambda x: x.bfloat16().float())
        low = [x.bfloat16() for x in low]
        with host(), emulate(policy="eager"):
            out = module._attention.apply(*leaves, scale, causal)

        def run():
            with host():
                found = torch.autograd.grad(out, leaves, dout, retain_graph=True)
            return max(map(share_of_budget, found, exact, low))

        return run

    return make


def mx_forward(rows=256, causal=False):
    """MXFP8 forward: e4m3 inputs with a power of two for every 32 values; P is quantized in the kernel."""

    def make():
        module = load("blackwell_fa_ws_pipelined_persistent_mxfp8")
        q, k, v = (quantize(normal(rows, DIM, seed=i)) for i in range(3))
        v = quantize(dequantized(v).T)  # along the keys
        exact, low = (
            attention(dequantized(q), dequantized(k), dequantized(v).T, SCALE, causal, dtype, round_p)
            for dtype, round_p in (
                (torch.float64, lambda p: p),
                (torch.float32, lambda p: dequantized(quantize(p))),
            )
        )
        data = [x.values[None, None] for x in (q, k)] + [v.values.T.contiguous()[None, None]]
        scales = [tile_scales(x.scales) for x in (q, k, v)]

        def run():
            with host():
                out = module._attention.apply(*data, *scales, SCALE, causal)
            return share_of_budget(out[0, 0], exact, low.bfloat16())

        return run

    return make


def mx_backward(rows=256, causal=False):
    """MXFP8 backward: every operand is quantized along the dimension that its product sums over."""

    def make():
        module = load("blackwell_fa_ws_pipelined_persistent_mxfp8")
        scale = 0.2
        q, k, v, dout = (normal(rows, DIM, seed=i) for i in range(4))
        exact = gradients(q, k, v, dout, causal, scale, torch.float64)
        along = [quantize(x.float()) for x in (q, k, v, dout)]
        across = [quantize(x.float().T) for x in (q, k, dout)]
        low = _mx_gradients(along, across, causal, scale)
        out = attention(q, k, v, scale, causal).bfloat16()[None, None]
        top = _log2_sums(dequantized(along[0]), dequantized(along[1]), causal, scale)[None, None]
        qa, ka, va, da = (x.values[None, None] for x in along)
        qc, kc, dc = (x.values.T.contiguous()[None, None] for x in across)
        qs, ks, vs, ds = (tile_scales(x.scales) for x in along)
        qcs, kcs, dcs = (tile_scales(x.scales) for x in across)

        def run():
            with host():
                found = module.attention_bwd(
                    da, dc, qa, qc, ka, kc, va, out, top, qs, qcs, ks, kcs, vs, ds, dcs, scale,
                    do_bf16=dout[None, None], causal=causal,
                )  # fmt: skip
            return max(share_of_budget(f[0, 0], e, w) for f, e, w in zip(found, exact, low))

        return run

    return make


def _log2_sums(q, k, causal, scale):
    """log2 of the row sums of exp(q k^T * scale): what the forward kernel hands on."""
    scores = (q @ k.mT).float() * scale
    if causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -torch.inf)
    return scores.logsumexp(-1) * 1.4426950408889634


def _mx_gradients(along, across, causal, scale):
    """The gradients with every operand quantized, in float32."""
    q, k, v, dout = map(dequantized, along)
    q_across, k_across, dout_across = (dequantized(x).T for x in across)
    scores = q @ k.mT * scale
    if causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -torch.inf)
    p = scores.softmax(-1)
    delta = (dout * (p @ v)).sum(-1, keepdim=True)
    ds = p * (dout @ v.mT - delta)
    rows = dequantized(quantize(ds))
    columns = dequantized(quantize(ds.mT.contiguous()))
    weights = dequantized(quantize(p.mT.contiguous()))
    return rows @ k_across * scale, columns @ q_across * scale, weights @ dout_across


LENGTHS = ((40, 200), (130, 64), (70, 130))  # queries and keys of each sequence


@functools.cache
def _packed(of, heads=2):
    """Offsets, and packed tensors of rows (rows, heads, DIM), of the queries (of=0) or keys (of=1)."""
    lengths = torch.tensor([pair[of] for pair in LENGTHS])
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    return offsets, [normal(int(offsets[-1]), heads, DIM, seed=10 * of + i) * 0.3 for i in range(2)]


def cross_attention(variant):
    """Jagged cross attention with SiLU in place of the softmax."""

    def make():
        module = load("blackwell-cross-attention")
        q_offsets, (q, _) = _packed(0)
        kv_offsets, (k, v) = _packed(1)
        exact = torch.zeros(q.shape, dtype=torch.float64)
        low = torch.zeros_like(q)
        for b in range(len(LENGTHS)):
            rows = slice(*q_offsets[b : b + 2].tolist())
            keys = slice(*kv_offsets[b : b + 2].tolist())
            parts = [x[at].transpose(0, 1) for x, at in ((q, rows), (k, keys), (v, keys))]
            exact[rows] = _silu_attention(*parts, torch.float64, lambda p: p)
            low[rows] = _silu_attention(*parts, torch.float32, lambda p: p.bfloat16().float()).bfloat16()

        def run():
            with host():
                out = module.triton_hstu_cross_attn_fwd(
                    256, 0.1, q, k, v, kv_offsets, q_offsets, 140, torch.ones(()), variant
                )
            return share_of_budget(out, exact, low)

        return run

    return make


def _silu_attention(q, k, v, dtype, round_p):
    scores = q.to(dtype) @ k.to(dtype).mT * 0.1
    return (round_p(torch.nn.functional.silu(scores)) @ v.to(dtype) / 256).transpose(0, 1)


def gdpa():
    """gelu(q k) v as the kernel computes it: it multiplies with k untransposed, 128 keys to 128 columns."""
    module = load("blackwell-gdpa")
    batch, heads, rows = 2, 1, 256
    q, k, v = (normal(batch * rows, heads, DIM, seed=i) * 0.3 for i in range(3))
    offsets = torch.arange(batch + 1, dtype=torch.int32) * rows
    exact = torch.zeros(q.shape, dtype=torch.float64)
    low = torch.zeros(q.shape)
    for b in range(batch):
        at = slice(b * rows, (b + 1) * rows)
        for out, dtype in ((exact, torch.float64), (low, torch.float32)):
            for first in range(0, rows, DIM):
                block = slice(at.start + first, at.start + first + DIM)
                s = q[at, 0].to(dtype) @ k[block, 0].to(dtype)
                p = s * torch.tanh((0.0356774081 * s * s + 0.7978845608) * s) + s
                out[at, 0] += (p.bfloat16() if dtype is torch.float32 else p).to(dtype) @ v[block, 0].to(
                    dtype
                )

    def run():
        with host():
            found = module.gdpa_forward_tlx(q, k, v, offsets, offsets, rows, rows)
        return share_of_budget(found, exact, low.bfloat16())

    return run


def _targets():
    flash = "blackwell_fa_"
    yield Target("fa_ws", forward(flash + "ws", 256, 1))
    for causal in (False, True):
        suffix = "_causal" if causal else ""
        yield Target("fa_pipelined" + suffix, forward(flash + "ws_pipelined", 512, 1, causal))
        yield Target("fa_persistent" + suffix, forward(flash + "ws_persistent", 512, 2, causal))
        yield Target("fa_pipelined_persistent" + suffix, forward(PERSISTENT, 512, 2, causal))
        yield Target("fa_clc" + suffix, forward(flash + "clc", 512, 2, causal))
        yield Target("fa_mxfp8" + suffix, mx_forward(256, causal))
        yield Target("fa_mxfp8_backward" + suffix, mx_backward(256, causal), kernel="_attn_bwd_mxf8_ws")
        for ctas in (1, 2):
            yield Target(
                f"fa_backward_{ctas}cta{suffix}",
                backward(256 * ctas, causal),
                kernel="_attn_bwd_ws",
                options={"pick": with_value("NUM_CTAS", ctas)},
            )
    hopper = "hopper_fa_ws"
    yield Target("fa_hopper", forward(hopper, 256, 1))
    yield Target("fa_hopper_pipelined", forward(hopper + "_pipelined", 256, 1))
    yield Target("fa_hopper_pingpong", forward(hopper + "_pipelined_pingpong", 256, 1))
    yield Target("fa_hopper_pingpong_persistent", forward(hopper + "_pipelined_pingpong_persistent", 512, 2))
    for variant in ("triton", "triton_dyn_spec", "tlx_single_q", "tlx_pipeline"):
        yield Target("cross_attention_" + variant, cross_attention(variant))
    yield Target("gdpa", gdpa, known=("race", "unwaited mma", "unwaited store"))


TARGETS = list(_targets())
