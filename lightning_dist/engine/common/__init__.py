"""Sizes, names and tables that all other packages use."""
