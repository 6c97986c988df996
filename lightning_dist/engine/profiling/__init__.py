"""The profile of a training step's time, messages and memory: measured per rank, joined on one."""
