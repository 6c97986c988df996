"""Training data that is read as a stream from shards on a disk, and batches that weigh alike."""
