"""Records a constructor and makes its tensors later; see ``deferred_init``."""
