"""The study of stale weights that :mod:`recipes.study_staleness` runs."""
