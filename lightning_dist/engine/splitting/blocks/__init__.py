"""Layers that are the blocks of a model, run by its own forward."""
