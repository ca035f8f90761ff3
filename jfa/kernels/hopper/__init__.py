"""Warp-specialized kernels for Hopper (sm_90)."""
