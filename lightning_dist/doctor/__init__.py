"""``python -m lightning_dist doctor``: finds what is wrong with hosts before a run does."""
