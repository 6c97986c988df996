"""A pipeline at work under Lightning."""
