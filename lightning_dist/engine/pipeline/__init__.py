"""Pipelines: schedules as data, and the runtime that interprets them."""
