"""Replicas that average their gradients."""
