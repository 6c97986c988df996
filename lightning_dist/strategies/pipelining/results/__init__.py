"""What steps and hooks leave on one stage, made known to all: logs, metrics, state, calls."""
