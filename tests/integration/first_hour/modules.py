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


class CNN(nn.Module):
    """LeNet-like."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 4, 3, padding=1)
        self.conv2 = nn.Conv2d(4, 8, 3, padding=1)
        self.fc1 = nn.Linear(8 * 2 * 2, 16)
        self.fc2 = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = x.view(x.size(0), -1)
        return self.fc2(F.relu(self.fc1(x)))


class Residual(nn.Module):
    """A residual block without norms."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.conv2(F.relu(self.conv1(x))))


class ResNet(nn.Module):
    """Residual blocks as attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 6, 3, padding=1)
        self.block1 = Residual(6)
        self.block2 = Residual(6)
        self.block3 = Residual(6)
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        x = self.block3(self.block2(self.block1(x)))
        return self.head(x.mean(dim=(2, 3)))


class Recurrent(nn.Module):
    """A classifier of sequences of tokens: embedding, LSTM or GRU, last state, linear."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.rnn = kind(8, 12, num_layers=2, batch_first=True)
        self.fc = nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        output, _ = self.rnn(self.embedding(x))
        return self.fc(output[:, -1])


class CausalSelfAttention(nn.Module):
    """As in nanoGPT: query, key and value in one projection, split by width."""

    def __init__(self, n_embd: int, n_head: int) -> None:
        super().__init__()
        self.c_attn = nn.Linear(n_embd, 3 * n_embd)
        self.c_proj = nn.Linear(n_embd, n_embd)
        self.n_head = n_head
        self.n_embd = n_embd

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = y.transpose(1, 2).contiguous().view(B, T, C)
        return self.c_proj(y)


class FeedForward(nn.Module):
    """nanoGPT's MLP."""

    def __init__(self, n_embd: int) -> None:
        super().__init__()
        self.c_fc = nn.Linear(n_embd, 4 * n_embd)
        self.gelu = nn.GELU()
        self.c_proj = nn.Linear(4 * n_embd, n_embd)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(self.gelu(self.c_fc(x)))


class Block(nn.Module):
    """nanoGPT's block."""

    def __init__(self, n_embd: int, n_head: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(n_embd)
        self.attn = CausalSelfAttention(n_embd, n_head)
        self.ln_2 = nn.LayerNorm(n_embd)
        self.mlp = FeedForward(n_embd)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class NanoGPT(nn.Module):
    """A ModuleDict of parts, the head tied to the embedding, the loss inside of forward."""

    def __init__(
        self, vocab: int = 24, n_embd: int = 16, n_head: int = 4, n_layer: int = 3
    ) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(vocab, n_embd),
                "wpe": nn.Embedding(8, n_embd),
                "h": nn.ModuleList([Block(n_embd, n_head) for _ in range(3)]),
                "ln_f": nn.LayerNorm(n_embd),
            }
        )
        self.lm_head = nn.Linear(n_embd, vocab, bias=False)
        self.transformer.wte.weight = self.lm_head.weight

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        pos = torch.arange(0, idx.size(1), dtype=torch.long, device=idx.device)
        x = self.transformer.wte(idx) + self.transformer.wpe(pos)
        for block in self.transformer.h:
            x = block(x)
        x = self.transformer.ln_f(x)
        logits = self.lm_head(x)
        if targets is None:
            return logits, None
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))
        return logits, loss


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


class VAE(nn.Module):
    """An encoder with two heads."""

    def __init__(self, noise: float = 0.0) -> None:
        super().__init__()
        self.encoder = nn.Linear(16, 12)
        self.fc_mu = nn.Linear(12, 4)
        self.fc_var = nn.Linear(12, 4)
        self.decoder1 = nn.Linear(4, 12)
        self.decoder2 = nn.Linear(12, 16)
        self.noise = noise

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = torch.tanh(self.encoder(x))
        mu, log_var = self.fc_mu(h), self.fc_var(h)
        z = mu + self.noise * torch.randn_like(mu) * torch.exp(0.5 * log_var)
        return self.decoder2(torch.tanh(self.decoder1(z))), mu, log_var


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


class DoubleConv(nn.Module):
    """Two convolutions."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.conv2(F.relu(self.conv1(x))))


class UNet(nn.Module):
    """Lists of its ways down and up, skips between them."""

    def __init__(self) -> None:
        super().__init__()
        self.downs = nn.ModuleList([DoubleConv(1, 4), DoubleConv(4, 8)])
        self.bottom = DoubleConv(8, 8)
        self.ups = nn.ModuleList([DoubleConv(16, 4), DoubleConv(8, 4)])
        self.out = nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for down in self.downs:
            x = down(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.bottom(x)
        for up in self.ups:
            x = F.interpolate(x, scale_factor=2)
            x = up(torch.cat([x, skips.pop()], dim=1))
        return self.out(x)


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


class BasicBlock(nn.Module):
    """torchvision's, without its arguments."""

    def __init__(self, inputs: int, planes: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, planes, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(planes, planes, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.downsample: nn.Module | None = None
        if stride != 1 or inputs != planes:
            self.downsample = nn.Sequential(
                nn.Conv2d(inputs, planes, 1, stride, bias=False), nn.BatchNorm2d(planes)
            )

    def forward(self, x: Tensor) -> Tensor:
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


class ResNet18(nn.Module):
    """torchvision's ResNet-18 written out, eight times narrower."""

    def __init__(self, num_classes: int = 4, width: int = 8) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, width, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        self.layer1 = nn.Sequential(BasicBlock(width, width), BasicBlock(width, width))
        self.layer2 = self._make_layer(width, 2 * width)
        self.layer3 = self._make_layer(2 * width, 4 * width)
        self.layer4 = self._make_layer(4 * width, 8 * width)
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(8 * width, num_classes)

    def _make_layer(self, inputs: int, planes: int) -> nn.Sequential:
        return nn.Sequential(BasicBlock(inputs, planes, 2), BasicBlock(planes, planes))

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(torch.flatten(self.avgpool(x), 1))


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
