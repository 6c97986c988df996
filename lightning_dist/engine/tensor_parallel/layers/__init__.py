"""Layers whose parameters are sharded over ranks."""
