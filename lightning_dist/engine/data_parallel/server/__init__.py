"""A parameter server: shards of the weights, what updates them, and the workers that train."""
