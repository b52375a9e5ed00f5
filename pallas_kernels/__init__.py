"""Attention and matrix kernels for NVIDIA GPUs, written in Pallas. Depends on jax alone."""
