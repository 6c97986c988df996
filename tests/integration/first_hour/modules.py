"""Modules as people write them: nothing in this file knows of stages, shards or ranks.

Each is float64 in the test, with its dropout and its noise off, and small enough to train in a
tenth of a second. What is typical is kept: parts as attributes, fused projections, tied weights,
losses computed by the model itself, outputs of several tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.integration.first_hour.networks import (
    CNN,
    VAE,
    NanoGPT,
    Recurrent,
    ResNet,
    ResNet18,
    UNet,
)


class Supervised(L.LightningModule):
    """What most scripts have: a network, cross entropy, Adam and a validation loss."""

    def __init__(self, net: nn.Module, lr: float = 1e-2) -> None:
        super().__init__()
        self.net = net
        self.lr = lr

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", F.cross_entropy(self(x), y))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.lr)


class MLP(L.LightningModule):
    """The first example of every tutorial, with BatchNorm and Dropout."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.fc1 = nn.Linear(16, 32)
        self.bn1 = nn.BatchNorm1d(32)
        self.fc2 = nn.Linear(32, 32)
        self.bn2 = nn.BatchNorm1d(32)
        self.drop = nn.Dropout(dropout)
        self.out = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(F.relu(self.bn1(self.fc1(x))))
        x = self.drop(F.relu(self.bn2(self.fc2(x))))
        return self.out(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", F.cross_entropy(self(x), y))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class LitGPT(L.LightningModule):
    """Trains it, with parameter groups by shape."""

    def __init__(self) -> None:
        super().__init__()
        self.model = NanoGPT()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        _, loss = self.model(*batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        _, loss = self.model(*batch)
        self.log("val_loss", loss)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        decay = [p for p in self.parameters() if p.dim() >= 2]
        rest = [p for p in self.parameters() if p.dim() < 2]
        groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95))


class LitVAE(L.LightningModule):
    """Reconstruction and Kullback-Leibler terms."""

    def __init__(self) -> None:
        super().__init__()
        self.vae = VAE()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, _ = batch
        recon, mu, log_var = self.vae(x)
        kl = -0.5 * torch.mean(1 + log_var - mu.pow(2) - log_var.exp())
        loss = F.mse_loss(recon, x) + 0.1 * kl
        self.log_dict({"train_loss": loss, "kl": kl})
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


class Segmenter(L.LightningModule):
    """A class for each pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.unet = UNet()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, _ = batch
        loss = F.cross_entropy(self.unet(x), (x[:, 0] > 0).long())
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Siamese(L.LightningModule):
    """Two views through one encoder, concatenated so that it is called once."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = CNN()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, _ = batch
        both = self.encoder(torch.cat([x, x.flip(-1)]))
        first, second = both.chunk(2)
        loss = 1 - F.cosine_similarity(first, second).mean() + 0.1 * both.pow(2).mean()
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


class HuggingFace(L.LightningModule):
    """A model of transformers that computes its own loss."""

    def __init__(self, kind: str, **options: Any) -> None:
        super().__init__()
        import transformers

        model_class = getattr(transformers, kind)
        self.model = model_class(model_class.config_class(**options))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.model(**batch).loss
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


TINY = {
    "vocab_size": 24,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 16,
}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def gpt2() -> L.LightningModule:
    sizes = {"vocab_size": 24, "n_embd": 16, "n_layer": 3, "n_head": 4, "n_positions": 16}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return HuggingFace("GPT2LMHeadModel", **sizes, **dropout, bos_token_id=0, eos_token_id=0)


def llama() -> L.LightningModule:
    return HuggingFace("LlamaForCausalLM", **TINY)


def bert() -> L.LightningModule:
    return HuggingFace("BertForSequenceClassification", **TINY, **NO_DROPOUT, num_labels=4)


def t5() -> L.LightningModule:
    sizes = {"vocab_size": 24, "d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 2}
    heads = {"num_heads": 4, "dropout_rate": 0.0, "decoder_start_token_id": 0}
    return HuggingFace("T5ForConditionalGeneration", **sizes, **heads)


def vit() -> L.LightningModule:
    sizes = {name: TINY[name] for name in TINY if name.endswith(("_size", "_layers", "_heads"))}
    del sizes["vocab_size"]
    image = {"image_size": 8, "patch_size": 4, "num_channels": 1, "num_labels": 4}
    return HuggingFace("ViTForImageClassification", **sizes, **NO_DROPOUT, **image)


def _pixels(generator: torch.Generator) -> Any:
    image = torch.randn(1, 8, 8, generator=generator, dtype=torch.float64)
    return image, int(torch.randint(0, 4, (), generator=generator))


def _vector(generator: torch.Generator) -> Any:
    vector = torch.randn(16, generator=generator, dtype=torch.float64)
    return vector, int(torch.randint(0, 4, (), generator=generator))


def _sequence(generator: torch.Generator) -> Any:
    tokens = torch.randint(1, 20, (8,), generator=generator)
    return tokens, int(torch.randint(0, 4, (), generator=generator))


def _text(generator: torch.Generator) -> Any:
    tokens = torch.randint(1, 24, (9,), generator=generator)
    return tokens[:-1], tokens[1:]


def _causal(generator: torch.Generator) -> Any:
    tokens = torch.randint(1, 24, (8,), generator=generator)
    return {"input_ids": tokens, "labels": tokens}


def _labelled(generator: torch.Generator) -> Any:
    tokens, label = _sequence(generator)
    return {"input_ids": tokens, "labels": label}


def _labelled_pixels(generator: torch.Generator) -> Any:
    image, label = _pixels(generator)
    return {"pixel_values": image, "labels": label}


Sample = Callable[[torch.Generator], Any]

MODULES: dict[str, tuple[Callable[[], L.LightningModule], Sample]] = {
    "MLP, BatchNorm": (MLP, _vector),
    "CNN": (lambda: Supervised(CNN()), _pixels),
    "ResNet, attributes": (lambda: Supervised(ResNet()), _pixels),
    "LSTM": (lambda: Supervised(Recurrent(nn.LSTM)), _sequence),
    "GRU": (lambda: Supervised(Recurrent(nn.GRU)), _sequence),
    "nanoGPT": (LitGPT, _text),
    "VAE": (LitVAE, _vector),
    "U-Net": (Segmenter, _pixels),
    "Siamese": (Siamese, _pixels),
    "ResNet-18": (lambda: Supervised(ResNet18()), _pixels),
    "GPT-2": (gpt2, _causal),
    "Llama": (llama, _causal),
    "BERT": (bert, _labelled),
    "T5": (t5, _causal),
    "ViT": (vit, _labelled_pixels),
    "random data": (lambda: Supervised(CNN()), _pixels),
}
