"""Sharded parameters (FSDP2): wrap policies, recomputation, deferred initialisation."""
