"""Layers that move between stages while a run goes on."""
