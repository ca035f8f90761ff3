"""The emulated namespace `triton.language.extra.tlx`.

Names that are not here come from the installed tlx when they are jit functions there.
"""

# ruff: noqa: F401

from .tlx_barriers import (
    alloc_barriers,
    alloc_warp_barrier,
    barrier_arrive,
    barrier_expect_bytes,
    barrier_wait,
    cluster_barrier,
    fence,
    fence_async_shared,
    fence_mbarrier_init_cluster,
    named_barrier_arrive,
    named_barrier_wait,
)
from .tlx_buffers import (
    local_alloc,
    local_gather,
    local_load,
    local_reinterpret,
    local_reshape,
    local_scatter,
    local_slice,
    local_store,
    local_trans,
    local_view,
    remote_view,
    reuse_group,
    reuse_group_type,
    storage_alias_spec,
    storage_kind,
    subslice,
)
from .tlx_clc import CLCPipelineContext, clc_consumer, clc_create_context, clc_producer
from .tlx_copies import (
    allocate_tensor_descriptor,
    async_descriptor_load,
    async_descriptor_prefetch_tensor,
    async_descriptor_store,
    async_descriptor_store_wait,
    async_load,
    async_load_commit_group,
    async_load_wait_group,
    async_remote_shmem_copy,
    async_remote_shmem_store,
    async_store,
    make_tensor_descriptor,
    prefetch,
    reinterpret_tensor_descriptor,
    remote_shmem_store,
)
from .tlx_mma import async_dot, async_dot_scaled, async_dot_wait, tcgen05_commit, tmem_copy
from .tlx_tasks import (
    async_task,
    async_task_replica_id,
    async_tasks,
    clock64,
    cluster_cta_rank,
    cluster_size_1d,
    thread_id,
    vote_ballot_sync,
    warp_pipeline_stage,
)
from .tlx_types import (
    assert_same_layout,
    buffered_tensor,
    dtype_of,
    dump_layout,
    get_fp8_format_name,
    layout,
    mbarrier,
    require_layout,
    size_of,
    stoch_round,
    swizzled_layout,
)

__all__ = [name for name in dir() if not name.startswith("_")]


def __getattr__(name):
    from .errors import UnknownConstruct
    from .names import real_tlx

    if not name.startswith("__"):
        try:
            return real_tlx(name)
        except UnknownConstruct:
            pass  # hasattr(tlx, name) is False
    raise AttributeError(f"module 'jfa.emulator.tlx' has no attribute {name!r}")
