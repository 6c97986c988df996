"""What a case may name: models, data, optimizers, callbacks, strategies."""
