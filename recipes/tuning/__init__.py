"""The parts of :mod:`recipes.tune`: the search, the study, the ranks, and a trial's training."""
