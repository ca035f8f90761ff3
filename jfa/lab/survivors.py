"""Mutants that no schedule gives away, and why each is no fault.

EXPLAINED: {kernel: {key of the mutant: reason}}, read from TABLE. There a kernel stands at the margin, then a
reason of REASONS with what is wrong, then the statements behind the names of the functions that lead to them.
The tests fail if a survivor is missing here, or if one of these is detected.
"""

REASONS = {
    "compiler": (
        "The compiler puts a fence before the TMA store of what the same task has written, whatever the "
        "source says (test_emulator_mutate reads it in the PTX)."
    ),
    "waited": (
        "The epilogue of the last tile has waited for its store already; the steps with a staging tile "
        "need this wait."
    ),
    "last turn": (
        "It only takes the last arrival, for which no later turn waits; a CTA's named barriers end with "
        "the CTA."
    ),
    "tickets": (
        "With two buffers of Q: before Q of item t is loaded, ticket t + 1 is published; for that both groups"
        " have heard ticket t - 1, which they hear after their last product with Q of item t - 2."
    ),
    "whole tile": (
        "With one buffer of Q: the wait for it, just before, is for groups that have let go of every K and V "
        "of the tile before."
    ),
    "two stores": (
        "A slice of dQ leaves by two stores in a pair, so that one more in flight is still the last slice's."
    ),
    "peer": (
        "What the peer sends arrives through the asynchronous proxy, and the local half was fenced when "
        "it was written."
    ),
    "only adds": (
        "What it orders are reduce-adds to the same numbers by pairs of one chain, which never race: without "
        "it only the order of the terms is left to chance, and with it the last bit of dK and dV."
    ),
    "ordered": (
        "Measured: in every run all that it waits for lies before it already (vector clocks, Report.waits)."
    ),
    "settled": (
        "With one staging tile each turn waits until its adds have been read; the steps with two staging "
        "tiles need this wait."
    ),
    "one tile": ("A CTA of this grid has one tile, so nobody waits for the slot again."),
    "wait before": (
        "The wait above covers it: it is for a barrier that is signalled later on the same path."
    ),
    "next wait": ("The wait for k_mma_done, next, is for a commit behind the same products."),
    "arrival": (
        "A one-thread arrival on an mbarrier, just before, has a barrier of all warps of the task in "
        "front (seen in the PTX), which is all that this one does."
    ),
    "other copy": (
        "dQ reads another copy of K in a pair; dK's products, waited for above, come behind all that read "
        "this one."
    ),
}

TABLE = """
hopper_forward_first
    compiler: delete fence
        finish_through_queries > store: tlx.fence('async_shared')
    waited: delete store wait
        consume: tlx.async_descriptor_store_wait(0)
    waited: weaken store wait
        consume: tlx.async_descriptor_store_wait(0)
    last turn: delete named barrier wait
        consume > Group.await_turn: tlx.named_barrier_wait(9 + self.ME, 256)
    whole tile: delete wait
        load > Ring.fill > Ring.claim #3: tlx.barrier_wait(self.empties[slot], parity ^ 1)
        load > Ring.fill > Ring.claim #4: tlx.barrier_wait(self.empties[slot], parity ^ 1)
hopper_forward
    compiler: delete fence
        finish_staged > store: tlx.fence('async_shared')
    last turn: delete named barrier wait
        consume > Group.await_turn: tlx.named_barrier_wait(9 + self.ME, 256)
    tickets: delete wait
        load > Ring.fill > Ring.claim #2: tlx.barrier_wait(self.empties[slot], parity ^ 1)
hopper_forward_stationary
    compiler: delete fence
        finish_staged > store: tlx.fence('async_shared')
    last turn: delete named barrier wait
        consume > Group.await_turn: tlx.named_barrier_wait(9 + self.ME, 256)
hopper_backward_peeled
    compiler: delete fence
        store: tlx.fence('async_shared')
hopper_backward_two_cta
    compiler: delete fence
        store: tlx.fence('async_shared')
hopper_backward_ds_buffered
    compiler: delete fence
        store: tlx.fence('async_shared')
    settled: delete store wait
        reduce: tlx.async_descriptor_store_wait(0)
    settled: weaken store wait
        reduce: tlx.async_descriptor_store_wait(0)
blackwell_backward_two_cta
    two stores: weaken store wait
        drain_early > add_slice > stage #2: tlx.async_descriptor_store_wait(STAGES - 1)
hopper_backward_stationary
    compiler: delete fence
        flush: tlx.fence('async_shared')
    only adds: delete store wait
        write > pass_on > await_visible #2: return tl.inline_asm_elementwise('cp.async.bulk.wait_...
    only adds: delete fence
        write > pass_on > await_visible #2: return tl.inline_asm_elementwise('cp.async.bulk.wait_...
    only adds: weaken store wait
        write > pass_on > await_visible #2: return tl.inline_asm_elementwise('cp.async.bulk.wait_...
fa_ws
    ordered: delete wait
        _attn_fwd_ws: tlx.barrier_wait(alpha_empties[qk_bufIdx], qk_phase ^ 1)
fa_pipelined
    one tile: drop signal kv_empties[v_bufIdx]
        _attn_fwd_ws: tlx.async_dot(p_tiles[3], kv_tiles[v_bufIdx], acc_til...
    ordered: delete wait
        _attn_fwd_ws: tlx.barrier_wait(k_empty, k_phase ^ 1)
        _attn_fwd_ws: tlx.barrier_wait(v_empty, v_phase ^ 1)
        _attn_fwd_ws > _softmax_inner_loop: tlx.barrier_wait(tlx.local_view(alpha_empties, qk_buf...
fa_persistent_causal
    ordered: delete wait
        _attn_fwd_ws: tlx.barrier_wait(o_empties[cid], phase ^ 1)
        _attn_fwd_ws: tlx.barrier_wait(k_empty, k_phase ^ 1)
        _attn_fwd_ws: tlx.barrier_wait(v_empty, v_phase ^ 1)
        _attn_fwd_ws > _softmax_inner_loop: tlx.barrier_wait(tlx.local_view(alpha_empties, cid), ...
        _attn_fwd_ws > _softmax_inner_loop #2: tlx.barrier_wait(tlx.local_view(alpha_empties, cid), ...
    wait before: delete wait
        _attn_fwd_ws #2: tlx.barrier_wait(q_empties[q_bufIdx], q_phase ^ 1)
fa_backward_1cta_causal
    one tile: delete arrive
        _attn_bwd_ws: tlx.barrier_arrive(dv_empties[kv_buf_id])
        _attn_bwd_ws: tlx.barrier_arrive(k_empties[kv_buf_id])
        _attn_bwd_ws: tlx.barrier_arrive(dk_empties[kv_buf_id])
    one tile: arrive twice
        _attn_bwd_ws: tlx.barrier_arrive(dv_empties[kv_buf_id])
        _attn_bwd_ws: tlx.barrier_arrive(k_empties[kv_buf_id])
        _attn_bwd_ws: tlx.barrier_arrive(dk_empties[kv_buf_id])
    next wait: delete wait
        _attn_bwd_ws: tlx.barrier_wait(dk_fulls[kv_buf_id], kv_phase)
    arrival: delete named barrier wait
        _attn_bwd_ws > _bwd_compute_inner_loop #2: tlx.named_barrier_wait(DP_READ_DONE_BAR, NUM_COMPUTE_...
        _attn_bwd_ws > _bwd_compute_inner_loop #3: tlx.named_barrier_wait(DP_READ_DONE_BAR, NUM_COMPUTE_...
    ordered: delete wait
        _attn_bwd_ws > _bwd_mma_dots_1cta: tlx.barrier_wait(qk_empties[tmem_buf_id], tmem_phase ...
        _attn_bwd_ws > _bwd_mma_dots_1cta: tlx.barrier_wait(dp_empties[tmem_buf_id], tmem_phase ...
        _attn_bwd_ws > _bwd_mma_dots_1cta: tlx.barrier_wait(dv_empties[kv_buf_id], kv_phase ^ 1)
        _attn_bwd_ws > _bwd_mma_dots_1cta: tlx.barrier_wait(dk_empties[kv_buf_id], kv_phase ^ 1)
        _attn_bwd_ws > _bwd_mma_dots_1cta #2: tlx.barrier_wait(qk_empties[tmem_buf_id], tmem_phase ...
        _attn_bwd_ws > _bwd_mma_dots_1cta: tlx.barrier_wait(ds_fulls[ds_buf_id_prev], ds_phase_p...
        _attn_bwd_ws > _bwd_mma_dots_1cta #2: tlx.barrier_wait(dp_empties[tmem_buf_id], tmem_phase ...
        _attn_bwd_ws > _bwd_mma_dots_1cta: tlx.barrier_wait(ds_fulls[ds_buf_id], ds_phase)
        _attn_bwd_ws > _bwd_load_1cta: tlx.barrier_wait(k_empties[kv_buf_id], kv_phase ^ 1)
        _attn_bwd_ws > _bwd_load_1cta: tlx.barrier_wait(q_empties[q_buf_id], q_phase ^ 1)
        _attn_bwd_ws > _bwd_load_1cta: tlx.barrier_wait(m_empties[m_buf_id], m_phase ^ 1)
        _attn_bwd_ws > _bwd_load_1cta: tlx.barrier_wait(do_empties[do_buf_id], do_phase ^ 1)
        _attn_bwd_ws > _bwd_load_1cta: tlx.barrier_wait(d_empties[d_buf_id], d_phase ^ 1)
        _attn_bwd_ws > _bwd_load_1cta #2: tlx.barrier_wait(m_empties[m_buf_id], m_phase ^ 1)
        _attn_bwd_ws > _bwd_load_1cta #2: tlx.barrier_wait(d_empties[d_buf_id], d_phase ^ 1)
    one tile: drop signal q_empties[q_buf_id]
        _attn_bwd_ws > _bwd_mma_dots_1cta: tlx.async_dot(dsT_tmem_tiles[ds_buf_id], q_tiles[q_bu...
fa_backward_2cta_causal
    one tile: delete arrive
        _attn_bwd_ws: tlx.barrier_arrive(dv_empties[kv_buf_id], 1, remote_c...
        _attn_bwd_ws: tlx.barrier_arrive(dk_empties[kv_buf_id], 1, remote_c...
    one tile: arrive twice
        _attn_bwd_ws: tlx.barrier_arrive(dv_empties[kv_buf_id], 1, remote_c...
        _attn_bwd_ws: tlx.barrier_arrive(dk_empties[kv_buf_id], 1, remote_c...
    next wait: delete wait
        _attn_bwd_ws: tlx.barrier_wait(dk_fulls[kv_buf_id], kv_phase)
    other copy: delete wait
        _attn_bwd_ws: tlx.barrier_wait(k_mma_done[kv_buf_id], kv_phase)
    peer: delete fence
        _attn_bwd_ws: tlx.fence('async_shared')
    arrival: delete named barrier wait
        _attn_bwd_ws > _bwd_compute_inner_loop: tlx.named_barrier_wait(DP_READ_DONE_BAR, NUM_COMPUTE_...
    ordered: delete wait
        _attn_bwd_ws > _bwd_mma_dots_2cta: tlx.barrier_wait(qk_empties[tmem_buf_id], tmem_phase ...
        _attn_bwd_ws > _bwd_mma_dots_2cta: tlx.barrier_wait(dv_empties[kv_buf_id], kv_phase ^ 1)
        _attn_bwd_ws > _bwd_mma_dots_2cta: tlx.barrier_wait(dk_empties[kv_buf_id], kv_phase ^ 1)
        _attn_bwd_ws > _bwd_mma_dots_2cta #2: tlx.barrier_wait(qk_empties[tmem_buf_id], tmem_phase ...
        _attn_bwd_ws > _bwd_mma_dots_2cta #2: tlx.barrier_wait(kt_fulls[kv_buf_id], kv_phase)
        _attn_bwd_ws > _bwd_load_2cta: tlx.barrier_wait(k_empties[kv_buf_id], kv_phase ^ 1)
        _attn_bwd_ws > _bwd_load_2cta: tlx.barrier_wait(qt_empties[q_buf_id], q_phase ^ 1)
        _attn_bwd_ws > _bwd_load_2cta: tlx.barrier_wait(m_empties[m_buf_id], m_phase ^ 1)
        _attn_bwd_ws > _bwd_load_2cta: tlx.barrier_wait(do_empties[do_buf_id], do_phase ^ 1)
        _attn_bwd_ws > _bwd_load_2cta: tlx.barrier_wait(dot_empties[do_buf_id], do_phase ^ 1)
        _attn_bwd_ws > _bwd_load_2cta: tlx.barrier_wait(d_empties[d_buf_id], d_phase ^ 1)
        _attn_bwd_ws > _bwd_load_2cta: tlx.barrier_wait(kt_empties[kv_buf_id], kv_phase ^ 1)
        _attn_bwd_ws > _bwd_load_2cta: tlx.barrier_wait(q_empties[prev_q_buf_id], prev_q_pha...
        _attn_bwd_ws > _bwd_load_2cta #2: tlx.barrier_wait(d_empties[d_buf_id], d_phase ^ 1)
    wait before: delete wait
        _attn_bwd_ws > _bwd_mma_dots_2cta #2: tlx.barrier_wait(p_fulls[tmem_buf_id], tmem_phase)
    one tile: drop signal q_empties[q_buf_id]
        _attn_bwd_ws > _bwd_mma_dots_2cta: tlx.async_dot(dsT_tmem_tiles[ds_buf_id], q_tiles[q_bu...
    one tile: drop signal dp_empties[ds_buf_id]
        _attn_bwd_ws > _bwd_mma_dots_2cta: tlx.async_dot(dsT_tmem_tiles[ds_buf_id], q_tiles[q_bu...
    one tile: delete commit
        _attn_bwd_ws > _bwd_mma_dots_2cta: tlx.tcgen05_commit(kt_empties[kv_buf_id], two_ctas=True)
        _attn_bwd_ws > _bwd_mma_dots_2cta: tlx.tcgen05_commit(k_empties[kv_buf_id], two_ctas=True)
fa_hopper_pingpong
    one tile: delete arrive
        _attn_fwd_ws_pipelined_pingpong #2: tlx.barrier_arrive(v_empties[v_buf_id], 1)
    one tile: arrive twice
        _attn_fwd_ws_pipelined_pingpong #2: tlx.barrier_arrive(v_empties[v_buf_id], 1)
gemm_clc
    ordered: delete wait
        matmul_kernel_tma_ws_blackwell_clc: tlx.barrier_wait(tmem_empty_bars[cur_tmem_buf], tmem_...
"""


def explained(table=TABLE, reasons=REASONS):
    """{kernel: {key: reason}} of such a table."""
    found = {}
    keys = None
    reason = kind = ""
    for line in table.splitlines():
        text = line.strip()
        depth = (len(line) - len(line.lstrip())) // 4
        if not text:
            continue
        if depth == 0:
            keys = found.setdefault(text, {})
        elif depth == 1:
            reason, _, kind = text.partition(": ")
        else:
            keys[f"{text} | {kind}"] = reasons[reason]
    return found


EXPLAINED = explained()
