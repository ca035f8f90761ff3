"""Warp-specialized kernels for Blackwell (sm_100)."""
