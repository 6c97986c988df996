"""Layers found by tracing a module."""
