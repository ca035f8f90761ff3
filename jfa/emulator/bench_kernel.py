"""The kernel that bench.py times: warp-specialized attention forward for one query tile (Blackwell)."""

import triton
import triton.language as tl
import triton.language.extra.tlx as tlx


@triton.jit
def attention(q_desc, k_desc, v_desc, o_desc, blocks, scale, BLOCK: tl.constexpr, DEPTH: tl.constexpr):
    """out = softmax(q k^T scale) v for BLOCK rows; scale includes log2(e)."""
    q_tile = tlx.local_alloc((BLOCK, BLOCK), tl.bfloat16, 1)
    kv_tiles = tlx.local_alloc((BLOCK, BLOCK), tl.bfloat16, DEPTH)
    scores = tlx.local_alloc((BLOCK, BLOCK), tl.float32, 1, tlx.storage_kind.tmem)
    probs = tlx.local_alloc((BLOCK, BLOCK), tl.bfloat16, 1, tlx.storage_kind.tmem, reuse=scores)
    acc = tlx.local_alloc((BLOCK, BLOCK), tl.float32, 1, tlx.storage_kind.tmem)
    q_full = tlx.alloc_barriers(1)
    kv_full = tlx.alloc_barriers(DEPTH)
    kv_empty = tlx.alloc_barriers(DEPTH)
    s_full = tlx.alloc_barriers(1)
    p_full = tlx.alloc_barriers(1)
    acc_full = tlx.alloc_barriers(1)
    with tlx.async_tasks():
        with tlx.async_task("default"):  # softmax, correction and epilogue
            m = tl.full([BLOCK], -float("inf"), tl.float32)
            row_sum = tl.zeros([BLOCK], tl.float32)
            for i in range(blocks):
                tlx.barrier_wait(s_full[0], i & 1)
                s = tlx.local_load(scores[0]) * scale
                m_new = tl.maximum(m, tl.max(s, 1))
                alpha = tl.math.exp2(m - m_new)
                p = tl.math.exp2(s - m_new[:, None])
                row_sum = row_sum * alpha + tl.sum(p, 1)
                m = m_new
                if i > 0:
                    tlx.barrier_wait(acc_full[0], (i - 1) & 1)
                    tlx.local_store(acc[0], tlx.local_load(acc[0]) * alpha[:, None])
                tlx.local_store(probs[0], p.to(tl.bfloat16))
                tlx.barrier_arrive(p_full[0])
            tlx.barrier_wait(acc_full[0], (blocks - 1) & 1)
            out = tlx.local_load(acc[0]) / row_sum[:, None]
            tlx.local_store(q_tile[0], out.to(tl.bfloat16))
            tlx.fence("async_shared")
            tlx.async_descriptor_store(o_desc, q_tile[0], [0, 0])
            tlx.async_descriptor_store_wait(0)
        with tlx.async_task(num_warps=1, registers=24):  # mma
            tlx.barrier_wait(q_full[0], 0)
            for i in range(blocks):
                k = (2 * i) % DEPTH
                tlx.barrier_wait(kv_full[k], (2 * i // DEPTH) & 1)
                tlx.async_dot(
                    q_tile[0],
                    tlx.local_trans(kv_tiles[k]),
                    scores[0],
                    use_acc=False,
                    mBarriers=[s_full[0], kv_empty[k]],
                )
                v = (2 * i + 1) % DEPTH
                tlx.barrier_wait(kv_full[v], ((2 * i + 1) // DEPTH) & 1)
                tlx.barrier_wait(p_full[0], i & 1)
                tlx.async_dot(
                    probs[0], kv_tiles[v], acc[0], use_acc=i > 0, mBarriers=[acc_full[0], kv_empty[v]]
                )
        with tlx.async_task(num_warps=1, registers=24):  # loader
            tlx.barrier_expect_bytes(q_full[0], 2 * BLOCK * BLOCK)
            tlx.async_descriptor_load(q_desc, q_tile[0], [0, 0], q_full[0])
            for i in range(2 * blocks):
                b = i % DEPTH
                tlx.barrier_wait(kv_empty[b], ((i // DEPTH) & 1) ^ 1)
                tlx.barrier_expect_bytes(kv_full[b], 2 * BLOCK * BLOCK)
                if i % 2 == 0:
                    tlx.async_descriptor_load(k_desc, kv_tiles[b], [i // 2 * BLOCK, 0], kv_full[b])
                else:
                    tlx.async_descriptor_load(v_desc, kv_tiles[b], [i // 2 * BLOCK, 0], kv_full[b])
