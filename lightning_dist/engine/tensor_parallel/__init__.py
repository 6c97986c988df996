"""Tensor parallelism: one layer's weights and computation, sharded over ranks."""
