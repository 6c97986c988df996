"""What a strategy writes into checkpoints, and takes from them."""
