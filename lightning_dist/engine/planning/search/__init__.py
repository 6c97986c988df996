"""The search for the fastest layout of a model on a machine, without torch."""
