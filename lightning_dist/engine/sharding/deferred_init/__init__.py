"""How a constructor is recorded and its tensors are made; see ``deferred_init``."""
