"""Dataloaders of a data replica, read by its first rank."""
