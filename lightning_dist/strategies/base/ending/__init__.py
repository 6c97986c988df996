"""How a run ends: stops, signals and failures, on all ranks together."""
