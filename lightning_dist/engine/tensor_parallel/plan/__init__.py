"""Plans of tensor parallelism: found automatically or given by the user, and verified."""
