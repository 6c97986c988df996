"""Predictions from sizes and costs: partitions, balance, memory and traffic, without torch."""
