"""Tensor parallelism: one layer's weights, and the work with them, spread over ranks."""
