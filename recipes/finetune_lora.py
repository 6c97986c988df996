"""Fine-tuning of a pretrained BERT by low-rank adapters (LoRA: Hu et al. 2021), through peft.

The base is frozen. Optimizer, gradients and checkpoints have the adapters and the classifier only,
under each strategy. No code here depends on other processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from recipes.finetune_bert import BertClassifier

_BASE_KEY = "lora_base"


class LoraClassifier(BertClassifier):
    """Trains adapters in a frozen BERT, and a classifier on it.

    Args:
        folder: As for :class:`.BertClassifier`, as the next.
        num_classes: Classes.
        rank: Rank of each adapter: its matrices are ``(rank, in)`` and ``(out, rank)``.
        alpha: An adapter's output is scaled by ``alpha / rank``.
        targets: Names of the linear layers that get an adapter.
        dropout: Probability, of the encoder's activations and attention.
        learning_rate: Peak learning rate; adapters take a larger one than whole weights.
        warmup_steps: Steps until the peak; 0 starts at the peak.
        weight_decay: Weight decay of matrices.

    Raises:
        ImportError: peft, transformers or the weights are not installed.
    """

    def __init__(
        self,
        folder: str | None = None,
        num_classes: int = 4,
        rank: int = 8,
        alpha: float = 16.0,
        targets: Sequence[str] = ("query", "value"),
        dropout: float = 0.1,
        learning_rate: float = 1e-3,
        warmup_steps: int = 10,
        weight_decay: float = 0.01,
    ) -> None:
        super().__init__(folder, num_classes, dropout, learning_rate, warmup_steps, weight_decay)
        self.save_hyperparameters()
        try:
            from peft import LoraConfig, get_peft_model
        except ImportError as error:
            raise ImportError(
                "Adapters need peft. Use `pip install 'lightning-dist[lora]'`."
            ) from error
        encoder = self.model.encoder
        self._base = _digest_of(encoder)  # before a strategy shards it
        config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=list(targets))
        self.model.encoder = get_peft_model(encoder, config)
        self.strict_loading = False  # a checkpoint has no base
        self._trained = {name for name, p in self.named_parameters() if p.requires_grad}

    @override
    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Returns the state of what is trained: of the adapters and the classifier."""
        state = super().state_dict(*args, **kwargs)
        return {name: value for name, value in state.items() if name in self._trained}

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Adds a digest of the base that the adapters belong to."""
        checkpoint[_BASE_KEY] = self._base

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Checks that a checkpoint is of these adapters, on this base.

        Raises:
            ValueError: It is not.
        """
        if checkpoint.get(_BASE_KEY) != self._base:
            raise ValueError(
                "The checkpoint's adapters were trained on another base than that of"
                f" {self.hparams['folder'] or 'the package of MiniLM'}. Pass its folder."
            )
        here = self._trained.intersection(name for name, _ in self.named_parameters())
        missing = sorted(here.difference(checkpoint["state_dict"]))
        if missing:
            raise ValueError(
                f"The checkpoint lacks {missing[0]!r} and {len(missing) - 1} others: its adapters"
                " are in other layers. Pass the targets= that they were trained with."
            )


def _digest_of(module: nn.Module) -> str:
    """Returns a digest of a module's weights, whatever its precision will be."""
    digest = blake2b(digest_size=16)
    for name, tensor in module.state_dict().items():
        digest.update(f"{name} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().to(torch.float32).contiguous().numpy().data)
    return digest.hexdigest()
