"""A composed module at work under Lightning."""
