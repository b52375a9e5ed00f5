"""C++ kernels for CPUs, called by XLA through `jax.ffi`: optional, compiled at their first use."""
