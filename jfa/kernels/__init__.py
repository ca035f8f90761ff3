"""Kernels: the compiler-scheduled baseline and the warp-specialized ones for Hopper and Blackwell."""
