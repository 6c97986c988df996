"""Callbacks in real processes."""
