"""Sharded data parallelism with real gloo processes."""
