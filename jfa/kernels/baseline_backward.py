"""The baseline's backward kernels: delta, dK and dV with the keys at rest, dQ with the queries at rest.

With P = exp(scale * Q K^T - lse), dP = dO V^T and delta = rowsum(out * dO) - dlse, the gradients are
dV = P^T dO, dS = P * (dP - delta), dK = scale * dS^T Q and dQ = scale * dS K.
"""

import triton
import triton.language as tl

from jfa.kernels.baseline_forward import RUN_TIME_SIZES
from jfa.kernels.baseline_parts import (
    add_dot,
    add_tile,
    dot_rows,
    find_queries,
    find_query_tile,
    find_rows,
    find_tile,
    first_tile,
    key_range,
    load_log_sum,
    load_tile,
    narrow,
    probabilities,
    query_range,
    store_tile,
)


@triton.jit(do_not_specialize=["total_q"])
def delta_kernel(
    out, dout, dlse, delta, total_q, stride_ob, stride_oh, stride_dob, stride_doh,
    ROW_O: tl.constexpr, ROW_DO: tl.constexpr,
    HEADS_Q: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr, HAS_DLSE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """delta = rowsum(out * dout) - dlse, shaped like lse."""
    head = (tl.program_id(0) % HEADS_Q).to(tl.int64)
    tile = tl.program_id(0) // HEADS_Q
    blocks = tl.cdiv(total_q, BLOCK_M)
    slab = (tile // blocks).to(tl.int64)
    first = (tile % blocks).to(tl.int64) * BLOCK_M
    rows = total_q - first
    out_row = out + slab * stride_ob + first * ROW_O + head * stride_oh
    do_row = dout + slab * stride_dob + first * ROW_DO + head * stride_doh
    out_tile = load_tile(out_row, ROW_O, rows, BLOCK_M, DV, BLOCK_DV).to(tl.float32)
    do_tile = load_tile(do_row, ROW_DO, rows, BLOCK_M, DV, BLOCK_DV).to(tl.float32)
    total = tl.sum(out_tile * do_tile, 1)
    row = tl.arange(0, BLOCK_M)
    stat = (slab * HEADS_Q + head) * total_q + first + row
    if HAS_DLSE:
        total -= tl.load(dlse + stat, mask=row < rows, other=0.0)
    tl.store(delta + stat, total, mask=row < rows)


@triton.jit(do_not_specialize=RUN_TIME_SIZES)
def dkdv_kernel(
    q, k, v, dout, lse, delta, dk, dv, dq, kv_offsets, q_offsets, batch, total_q, total_kv,
    scale, unit, left, right, stride_qh, stride_kh, stride_vh, stride_dob, stride_doh,
    ROW_Q: tl.constexpr, ROW_K: tl.constexpr, ROW_V: tl.constexpr, ROW_DO: tl.constexpr,
    HEADS_Q: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, PACKED_Q: tl.constexpr, PRESCALE: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, PRECISION: tl.constexpr,
    WITH_DK: tl.constexpr, WITH_DV: tl.constexpr, ADD_DQ: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dK and dV of BLOCK_N keys of one head, summed in registers over its query heads and their rows.

    ADD_DQ also adds scale-less dQ tiles to a float32 sum in memory, in whatever order programs get there.
    """
    HEADS_KV: tl.constexpr = HEADS_Q // GROUP
    head_kv = (tl.program_id(0) % HEADS_KV).to(tl.int64)
    sequence, first = find_tile(kv_offsets, tl.program_id(0) // HEADS_KV, batch, BLOCK_N)
    kv_start, kv_len = find_rows(kv_offsets, sequence, batch, total_kv)
    if first >= kv_len:
        return
    kv_row = kv_start + first
    keys = kv_len - first
    k_tile = load_tile(k + kv_row * ROW_K + head_kv * stride_kh, ROW_K, keys, BLOCK_N, D, BLOCK_D)
    v_tile = load_tile(v + kv_row * ROW_V + head_kv * stride_vh, ROW_V, keys, BLOCK_N, DV, BLOCK_DV)
    q_start, q_len, slab = find_queries(q_offsets, sequence, batch, total_q, PACKED_Q)
    q_len = tl.where(sequence < batch, q_len, 0)  # rows past the last sequence get gradient 0
    shift = kv_len - q_len
    # Rows that see no key at all come before low: whatever their gradients hold, NaN included, is not read.
    low, high = query_range(first, BLOCK_N, shift, q_len, left, right, HAS_LEFT, HAS_RIGHT)
    blocks = tl.cdiv(tl.maximum(high - low, 0), BLOCK_M)

    key = tl.arange(0, BLOCK_N)[:, None]  # tiles of scores lie transposed here: a row a key
    query = tl.arange(0, BLOCK_M)[None, :]
    dk_sum = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv_sum = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    # One loop over heads and rows, so that loads run ahead across both. Invariants stay inside: hoisted, they
    # would take registers that the two sums need.
    for step in tl.range(0, GROUP * blocks, disable_licm=True):
        head = head_kv * GROUP + step // blocks
        block = low + step % blocks * BLOCK_M
        row = q_start + block
        rows = q_len - block
        stat = (slab * HEADS_Q + head) * total_q + row
        q_tile = load_tile(q + row * ROW_Q + head * stride_qh, ROW_Q, rows, BLOCK_M, D, BLOCK_D)
        do_row = dout + slab * stride_dob + row * ROW_DO + head * stride_doh
        do_tile = load_tile(do_row, ROW_DO, rows, BLOCK_M, DV, BLOCK_DV)
        log_sum = load_log_sum(lse + stat, rows, BLOCK_M, PRECISION)[None, :]
        diagonal = block.to(tl.int64) + shift - first
        mask = narrow(key < keys, key, query, -diagonal, right, left, HAS_RIGHT, HAS_LEFT)
        p = probabilities(k_tile, q_tile, log_sum, scale, unit, PRESCALE, PRECISION)
        p = tl.where(mask, p, 0.0)
        if WITH_DV:
            dv_sum = add_dot(dv_sum, p.to(do_tile.dtype), do_tile, PRECISION)
        if WITH_DK or ADD_DQ:
            dp = dot_rows(v_tile, do_tile, PRECISION)
            dp -= tl.load(delta + stat + query, mask=query < rows, other=0.0)
            ds = (p * dp).to(q_tile.dtype)
        if WITH_DK:
            dk_sum = add_dot(dk_sum, ds, q_tile, PRECISION)
        if ADD_DQ:
            dq_tile = tl.dot(tl.trans(ds), k_tile, input_precision=PRECISION)
            add_tile(dq + (row * HEADS_Q + head) * D, HEADS_Q * D, rows, dq_tile, BLOCK_M, D, BLOCK_D)

    if WITH_DK:
        dk_row = dk + (kv_row * HEADS_KV + head_kv) * D
        store_tile(dk_row, HEADS_KV * D, keys, dk_sum * scale, BLOCK_N, D, BLOCK_D)
    if WITH_DV:
        dv_row = dv + (kv_row * HEADS_KV + head_kv) * DV
        store_tile(dv_row, HEADS_KV * DV, keys, dv_sum, BLOCK_N, DV, BLOCK_DV)


@triton.jit(do_not_specialize=[*RUN_TIME_SIZES, "shares"])
def dq_kernel(
    q, k, v, dout, lse, delta, dq, kv_offsets, q_offsets, batch, total_q, total_kv, shares,
    scale, unit, left, right, stride_qh, stride_kh, stride_vh, stride_dob, stride_doh,
    ROW_Q: tl.constexpr, ROW_K: tl.constexpr, ROW_V: tl.constexpr, ROW_DO: tl.constexpr,
    HEADS_Q: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, PACKED_Q: tl.constexpr, PRESCALE: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dQ of BLOCK_M queries of one head, summed in registers.

    With packed Q over the keys of their sequence, with broadcast-Q over one of ``shares`` equal parts of all
    key tiles: dq is then float32 (shares, M, Hq, D), not yet scaled, and ``sum_kernel`` adds the parts up.
    """
    head = (tl.program_id(0) % HEADS_Q).to(tl.int64)
    tile = tl.program_id(0) // HEADS_Q
    blocks = tl.cdiv(total_q, BLOCK_M)
    if PACKED_Q:
        share = tile * 0
        sequence, first = find_query_tile(q_offsets, tile, batch, total_q, BLOCK_M, PACKED_Q)
        tile_now = first_tile(kv_offsets, sequence, BLOCK_N)
        tile_end = first_tile(kv_offsets, tl.minimum(sequence + 1, batch), BLOCK_N)
    else:
        share = tile // blocks
        first = tile % blocks * BLOCK_M
        tiles = (total_kv // BLOCK_N + batch + 1).to(tl.int64)
        tile_now = (share * tiles // shares).to(tl.int32)
        tile_end = ((share + 1) * tiles // shares).to(tl.int32)
        sequence, skipped = find_tile(kv_offsets, tile_now, batch, BLOCK_N)
    q_start, q_len, slab = find_queries(q_offsets, sequence, batch, total_q, PACKED_Q)
    if first >= q_len:
        return
    q_row = q_start + first
    rows = q_len - first
    q_tile = load_tile(q + q_row * ROW_Q + head * stride_qh, ROW_Q, rows, BLOCK_M, D, BLOCK_D)

    query = tl.arange(0, BLOCK_M)[:, None]
    key = tl.arange(0, BLOCK_N)[None, :]
    dq_sum = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    while (tile_now < tile_end) & (sequence < batch):
        kv_start, kv_len = find_rows(kv_offsets, sequence, batch, total_kv)
        q_start, q_len, slab = find_queries(q_offsets, sequence, batch, total_q, PACKED_Q)
        shift = kv_len - q_len
        low, high = key_range(first, BLOCK_M, shift, kv_len, left, right, HAS_LEFT, HAS_RIGHT)
        own_tile = first_tile(kv_offsets, sequence, BLOCK_N)
        low = tl.maximum(low, (tile_now - own_tile) * BLOCK_N)
        high = tl.minimum(high.to(tl.int64), (tile_end - own_tile).to(tl.int64) * BLOCK_N).to(tl.int32)

        do_row = dout + slab * stride_dob + q_row * ROW_DO + head * stride_doh
        do_tile = load_tile(do_row, ROW_DO, rows, BLOCK_M, DV, BLOCK_DV)
        stat = (slab * HEADS_Q + head) * total_q + q_row
        log_sum = load_log_sum(lse + stat, rows, BLOCK_M, PRECISION)[:, None]
        own_delta = tl.load(delta + stat + query, mask=query < rows, other=0.0)
        k_head = k + kv_start * ROW_K + (head // GROUP) * stride_kh
        v_head = v + kv_start * ROW_V + (head // GROUP) * stride_vh
        for start in range(low, high, BLOCK_N):
            row = start.to(tl.int64)
            k_tile = load_tile(k_head + row * ROW_K, ROW_K, kv_len - start, BLOCK_N, D, BLOCK_D)
            v_tile = load_tile(v_head + row * ROW_V, ROW_V, kv_len - start, BLOCK_N, DV, BLOCK_DV)
            keys = high - start
            diagonal = first.to(tl.int64) + shift - start
            mask = narrow(key < keys, query, key, diagonal, left, right, HAS_LEFT, HAS_RIGHT)
            p = probabilities(q_tile, k_tile, log_sum, scale, unit, PRESCALE, PRECISION)
            dp = dot_rows(do_tile, v_tile, PRECISION)
            ds = tl.where(mask, p * (dp - own_delta), 0.0).to(k_tile.dtype)
            dq_sum = add_dot(dq_sum, ds, k_tile, PRECISION)
        sequence += 1
        tile_now = first_tile(kv_offsets, sequence, BLOCK_N)

    if PACKED_Q:
        dq_sum = dq_sum * scale
    dq_row = (share.to(tl.int64) * total_q + q_row) * HEADS_Q + head
    store_tile(dq + dq_row * D, HEADS_Q * D, rows, dq_sum, BLOCK_M, D, BLOCK_D)


@triton.jit(do_not_specialize=["shares", "size"])
def sum_kernel(partial, dq, shares, size, scale, BLOCK: tl.constexpr):
    """dq = scale * the sum of float32 shares, added in their order."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for share in range(0, shares):
        total += tl.load(partial + share.to(tl.int64) * size + index, mask=index < size, other=0.0)
    tl.store(dq + index, (total * scale).to(dq.dtype.element_ty), mask=index < size)
