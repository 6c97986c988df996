"""Parallel training of ordinary modules, in a plain PyTorch loop without Lightning."""
