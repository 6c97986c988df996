"""What a training step's time, messages and memory go to: measured on each rank, joined on one."""
