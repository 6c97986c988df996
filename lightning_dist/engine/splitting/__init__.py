"""A module split into the layers of a pipeline."""
