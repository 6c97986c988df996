"""Batches that one rank reads for its peers."""
