"""Train the recipe's GPT once, and look at its validation loss now and then.

All trials of a seed begin with the same weights and read the same windows of text in the same
order. A look takes the whole model as it was when each stage had made the same number of updates.
The pipeline is not drained for a look, for draining would spare the weights their staleness.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recipes.gpt import build_gpt, warmup_and_decay
from recipes.staleness.lockstep import Lockstep
from recipes.staleness.optimizers import LEARNING_RATE, OPTIMIZERS
from recipes.staleness.replicas import Replicas, ServedWorkers
from recipes.staleness.trial import Trial
from recipes.text import load_text, split_text

_WARMUP_SHARE = 0.1
_CORRECTED_SHARE = 0.25
_VALIDATION_WINDOWS = 128


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of a training and of its model.

    Attributes:
        num_updates: Number of updates of a trial.
        num_looks: Number of looks at the validation loss, at equal distances, the last at the end.
        batch_size: Windows per update.
        sequence_length: Bytes per window.
        width: Width of the model.
        depth: Number of blocks of the model; a multiple of the numbers of stages.
    """

    num_updates: int
    num_looks: int
    batch_size: int = 8
    sequence_length: int = 64
    width: int = 32
    depth: int = 8

    @property
    def batch_tokens(self) -> int:
        """Number of tokens per update."""
        return self.batch_size * self.sequence_length

    @property
    def looks(self) -> tuple[int, ...]:
        """Numbers of updates after which to look."""
        count = min(self.num_looks, self.num_updates)
        return tuple(self.num_updates * (k + 1) // count for k in range(count))


@dataclass(frozen=True, slots=True)
class Look:
    """One point of a curve.

    Attributes:
        num_updates: Number of updates of the weights.
        bits_per_byte: Validation loss; infinite if the training has diverged.
    """

    num_updates: int
    bits_per_byte: float


def train(trial: Trial, sizes: Sizes) -> list[Look]:
    """Runs a trial.

    Args:
        trial: The trial.
        sizes: The sizes of the training.
    """
    torch.manual_seed(trial.seed)
    model = build_gpt(width=sizes.width, depth=sizes.depth)
    train_text, val_text = split_text(load_text())
    gallery = _Gallery(model, val_text, sizes)
    warmup = max(1, round(_WARMUP_SHARE * sizes.num_updates))

    def rate(update: int) -> float:
        peak = LEARNING_RATE * trial.rate_factor
        return peak * warmup_and_decay(update, warmup, sizes.num_updates)

    method = trial.method
    how = OPTIMIZERS[trial.optimizer], next_byte_loss, rate, gallery.add
    ranks: Lockstep | Replicas | ServedWorkers
    if method.local is not None:
        ranks = Replicas(model, trial.num_stages, method.local, *how)
    elif method.has_server:
        ranks = ServedWorkers(model, trial.num_stages, *how)
    else:
        config = method.config(max(1, round(_CORRECTED_SHARE * sizes.num_updates)))
        ranks = Lockstep(model, config, layers_of_stages(sizes.depth, trial.num_stages), *how)
    for batch in _batches(train_text, trial.seed, sizes):
        ranks.train_batch(batch)
        if gallery.has_diverged:
            return gallery.looks
    if isinstance(ranks, Lockstep):
        ranks.drain()
    return gallery.looks


def layers_of_stages(depth: int, num_stages: int) -> list[int]:
    """Shares the blocks equally; the embedding goes with the first ones, the head with the last.

    Args:
        depth: Number of blocks.
        num_stages: Number of stages.

    Raises:
        ValueError: The stages do not divide the blocks.
    """
    if depth % num_stages:
        raise ValueError(f"stages={num_stages} must divide the {depth} blocks of the model.")
    counts = [depth // num_stages] * num_stages
    counts[0] += 1
    counts[-1] += 1
    return counts


def next_byte_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Returns the mean loss of a batch in nats.

    Args:
        model: Maps ``(B, T)`` bytes to ``(B, T, 256)`` logits.
        batch: Inputs and targets, ``(B, T)`` each.
    """
    inputs, targets = batch
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def _batches(text: Tensor, seed: int, sizes: Sizes) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(sizes.num_updates):
        last = len(text) - sizes.sequence_length
        yield _windows(text, torch.randint(last, (sizes.batch_size,), generator=generator), sizes)


def _windows(text: Tensor, starts: Tensor, sizes: Sizes) -> tuple[Tensor, Tensor]:
    windows = text[starts[:, None] + torch.arange(sizes.sequence_length + 1)]
    return windows[:, :-1], windows[:, 1:]


class _Gallery:
    """Puts the stages' weights of one number of updates together, and looks at the model."""

    def __init__(self, model: nn.Sequential, text: Tensor, sizes: Sizes) -> None:
        self._model = build_gpt(width=sizes.width, depth=sizes.depth)
        self._names = set(dict(model.named_parameters()))
        starts = torch.linspace(0, len(text) - sizes.sequence_length - 1, _VALIDATION_WINDOWS)
        self._batch = _windows(text, starts.long(), sizes)
        self._due = set(sizes.looks)
        self._parts: dict[int, dict[str, Tensor]] = {}
        self.looks: list[Look] = []

    @property
    def has_diverged(self) -> bool:
        return bool(self.looks) and math.isinf(self.looks[-1].bits_per_byte)

    def add(self, num_updates: int, weights: dict[str, Tensor]) -> None:
        if num_updates not in self._due:
            return
        parts = self._parts.setdefault(num_updates, {})
        parts.update({name: weight.clone() for name, weight in weights.items()})
        if parts.keys() == self._names:
            self._model.load_state_dict(self._parts.pop(num_updates))
            self.looks.append(Look(num_updates, self._bits_per_byte()))

    @torch.no_grad()
    def _bits_per_byte(self) -> float:
        loss = float(next_byte_loss(self._model, self._batch)) / math.log(2)
        return loss if math.isfinite(loss) else math.inf
