"""What data-parallel and sharded strategies share, and their composed module under Lightning."""
