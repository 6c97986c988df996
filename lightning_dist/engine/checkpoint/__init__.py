"""Checkpoints, as one file or as a directory of shards."""
