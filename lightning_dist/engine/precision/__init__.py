"""Half precision: casts, loss scale, overflow."""
