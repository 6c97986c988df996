"""Tensors, trees of them, and modules."""
