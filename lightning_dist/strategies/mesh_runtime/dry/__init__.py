"""A training step tried in one process, on tensors without values."""
