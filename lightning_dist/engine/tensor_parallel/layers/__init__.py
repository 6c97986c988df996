"""Layers whose parameters are spread over ranks."""
