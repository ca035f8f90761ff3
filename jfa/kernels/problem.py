"""The static facts of one attention call: what a launch decides by, and nothing that lives on a device."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Problem:
    """Shapes and options of one call, all Python values known without asking a device.

    Shapes: broadcast-Q (``broadcast_q`` True) has q (M, Hq, D) shared by all B sequences; packed Q has
    q (Tq, Hq, D). k is (T, Hkv, D), v is (T, Hkv, Dv). ``query_len`` is M with broadcast-Q and None with
    packed Q. ``max_kv_len`` is an upper bound in rows, or None when the caller gave none; no kernel here
    needs it.
    ``window_left`` and ``window_right`` count keys, inclusive; -1 means unbounded. ``causal`` is already
    folded into ``window_right`` (0), so kernels read the window alone. ``scale`` multiplies q . k.
    """

    batch: int
    heads_q: int
    heads_kv: int
    head_dim: int
    head_dim_v: int
    total_q: int
    total_kv: int
    broadcast_q: bool
    scale: float
    window_left: int = -1
    window_right: int = -1
    max_kv_len: int | None = None
    dtype: torch.dtype = torch.bfloat16
    device_type: str = "cpu"

    @property
    def query_len(self) -> int | None:
        """Rows of the shared query block (M), or None with packed Q."""
        return self.total_q if self.broadcast_q else None

    @property
    def group(self) -> int:
        """Query heads that share one key/value head."""
        return self.heads_q // self.heads_kv

    @property
    def masked(self) -> bool:
        """Whether a window (causal is one) hides keys inside a sequence."""
        return self.window_left >= 0 or self.window_right >= 0

    @property
    def out_shape(self) -> tuple[int, ...]:
        """Shape of the output: (B, M, Hq, Dv) with broadcast-Q, (Tq, Hq, Dv) with packed Q."""
        if self.broadcast_q:
            return (self.batch, self.total_q, self.heads_q, self.head_dim_v)
        return (self.total_q, self.heads_q, self.head_dim_v)

    @property
    def lse_shape(self) -> tuple[int, ...]:
        """Shape of lse: (B, Hq, M) with broadcast-Q, (Hq, Tq) with packed Q."""
        if self.broadcast_q:
            return (self.batch, self.heads_q, self.total_q)
        return (self.heads_q, self.total_q)
