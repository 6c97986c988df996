"""What a module costs, and what its ranks exchange, measured for a plan."""
