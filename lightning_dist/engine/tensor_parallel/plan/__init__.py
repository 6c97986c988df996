"""Plans of tensor parallelism: found, given, and proven."""
