"""Runnable LightningModules, LightningDataModules and LightningCLI configurations."""
