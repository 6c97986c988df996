"""Failures and hangs of other ranks."""
