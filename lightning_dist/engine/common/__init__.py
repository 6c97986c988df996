"""Sizes, names and tables that everything else uses."""
