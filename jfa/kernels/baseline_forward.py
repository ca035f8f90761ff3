"""The baseline's forward kernel: one program a query tile, one warp group, all in program order."""

import triton
import triton.language as tl

from jfa.kernels.baseline_parts import (
    dot_rows,
    find_queries,
    find_query_tile,
    find_rows,
    key_range,
    load_tile,
    log_sum_exp,
    narrow,
    softmax_step,
    store_tile,
)

RUN_TIME_SIZES = ["batch", "total_q", "total_kv", "left", "right"]  # never part of what is compiled


@triton.jit(do_not_specialize=RUN_TIME_SIZES)
def forward_kernel(
    q, k, v, out, lse, kv_offsets, q_offsets, batch, total_q, total_kv,
    scale, unit, left, right, stride_qh, stride_kh, stride_vh,
    ROW_Q: tl.constexpr, ROW_K: tl.constexpr, ROW_V: tl.constexpr,
    HEADS_Q: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, PACKED_Q: tl.constexpr, PRESCALE: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Attention of BLOCK_M queries of one head over the keys of their sequence."""
    # Heads vary fastest: neighbouring programs read neighbouring columns of the same K and V rows.
    head = (tl.program_id(0) % HEADS_Q).to(tl.int64)
    tile = tl.program_id(0) // HEADS_Q
    sequence, first = find_query_tile(q_offsets, tile, batch, total_q, BLOCK_M, PACKED_Q)
    q_start, q_len, slab = find_queries(q_offsets, sequence, batch, total_q, PACKED_Q)
    if first >= q_len:
        return
    kv_start, kv_len = find_rows(kv_offsets, sequence, batch, total_kv)
    kv_len = tl.where(sequence < batch, kv_len, 0)  # rows of q past the last sequence see nothing
    shift = kv_len - q_len
    low, high = key_range(first, BLOCK_M, shift, kv_len, left, right, HAS_LEFT, HAS_RIGHT)

    q_row = q_start + first
    q_rows = tl.where(high > low, q_len - first, 0)
    q_tile = load_tile(q + q_row * ROW_Q + head * stride_qh, ROW_Q, q_rows, BLOCK_M, D, BLOCK_D)
    k_head = k + kv_start * ROW_K + (head // GROUP) * stride_kh
    v_head = v + kv_start * ROW_V + (head // GROUP) * stride_vh

    query = tl.arange(0, BLOCK_M)[:, None]
    key = tl.arange(0, BLOCK_N)[None, :]
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    for start in range(low, high, BLOCK_N):
        row = start.to(tl.int64)
        k_tile = load_tile(k_head + row * ROW_K, ROW_K, kv_len - start, BLOCK_N, D, BLOCK_D)
        v_tile = load_tile(v_head + row * ROW_V, ROW_V, kv_len - start, BLOCK_N, DV, BLOCK_DV)
        s = dot_rows(q_tile, k_tile, PRECISION)
        if PRESCALE:  # scale <= 0: multiply before masking, -inf * 0 is no number
            s = s * scale
        diagonal = first.to(tl.int64) + shift - start
        mask = narrow(key < kv_len - start, query, key, diagonal, left, right, HAS_LEFT, HAS_RIGHT)
        s = tl.where(mask, s, float("-inf"))
        p, alpha, row_max, row_sum = softmax_step(s, unit, row_max, row_sum, PRECISION)
        acc = acc * alpha[:, None]
        acc = tl.dot(p.to(v_tile.dtype), v_tile, acc, input_precision=PRECISION)

    acc = acc / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]
    out_row = slab * total_q + q_row
    store_tile(out + (out_row * HEADS_Q + head) * DV, HEADS_Q * DV, q_len - first, acc, BLOCK_M, DV, BLOCK_DV)
    rows = tl.arange(0, BLOCK_M)
    lse_row = (slab * HEADS_Q + head) * total_q + q_row
    row_lse = log_sum_exp(row_max, row_sum, PRECISION)
    tl.store(lse + lse_row + rows, row_lse, mask=rows < q_len - first)
