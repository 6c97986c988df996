"""Mixed precision as a plain loop: no hooks, no versions, nothing of the package."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

Batch = tuple[Tensor, Tensor]


class NormInSingle(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float()).to(x.dtype)


@contextmanager
def one_thread() -> Iterator[None]:
    """The order of a sum depends on the threads, and with it the last digit."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def keep_norms(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.__class__ = NormInSingle


def half_weights(model: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    """Leaves in half precision, but for norms."""
    return {
        name: (p if "norm" in name else p.to(dtype)).detach().clone().requires_grad_()
        for name, p in model.named_parameters()
    }


def make_half(model: nn.Module, dtype: torch.dtype) -> None:
    """Makes parameters half themselves, but for norms."""
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data if "norm" in name else parameter.data.to(dtype)


@dataclass
class Scale:
    """Halved by each overflow, doubled after some good steps in a row."""

    value: float = 1.0
    interval: int = 10**9
    num_good: int = 0
    num_skipped: int = 0

    def note(self, overflowed: bool) -> None:
        self.num_skipped += overflowed
        self.num_good = 0 if overflowed else self.num_good + 1
        if overflowed:
            self.value /= 2
        elif self.num_good == self.interval:
            self.value, self.num_good = self.value * 2, 0


class Optimizer(Protocol):
    def step(self) -> object: ...


class ByPieces:
    """Updates each parameter in pieces along its first dimension, as ranks update their shards.

    The last elements of a piece are computed otherwise than those that fill a vector register, so
    in half precision a digit depends on where pieces end.
    """

    def __init__(
        self, make: Callable[[list[nn.Parameter]], Optimizer], model: nn.Module, num_pieces: int
    ) -> None:
        self._pieces = [
            (nn.Parameter(piece.clone()), parameter, place)
            for parameter in model.parameters()
            for place, piece in enumerate(parameter.detach().chunk(num_pieces))
        ]
        self._num_pieces = num_pieces
        self._optimizer = make([piece for piece, _, _ in self._pieces])

    @torch.no_grad()
    def step(self) -> None:
        for piece, parameter, place in self._pieces:
            piece.grad = parameter.grad.chunk(self._num_pieces)[place].clone()
        self._optimizer.step()
        for piece, parameter, place in self._pieces:
            parameter.chunk(self._num_pieces)[place].copy_(piece)


@dataclass
class Reference:
    """Trains a model in place, step by step; micro-batches are slices of each rank's batch."""

    model: nn.Module
    optimizer: Optimizer
    dtype: torch.dtype = torch.bfloat16
    num_microbatches: int = 1
    scale: Scale = field(default_factory=Scale)
    clip: float | None = None
    accumulate: int = 1
    num_batches: int = 0
    master_weights: bool = True

    def __post_init__(self) -> None:
        keep_norms(self.model)

    def gradients(self, batch: Batch) -> dict[str, Tensor]:
        x, y = batch
        weights = half_weights(self.model, self.dtype)
        total: dict[str, Tensor] = {}
        pieces = zip(x.chunk(self.num_microbatches), y.chunk(self.num_microbatches), strict=True)
        for inputs, targets in pieces:
            logits = functional_call(self.model, weights, inputs.to(self.dtype)).float()
            loss = F.cross_entropy(logits, targets)
            weight = len(targets) / len(y) / self.accumulate * self.scale.value
            root = torch.tensor(weight, device=loss.device)
            found = torch.autograd.grad(loss, list(weights.values()), root)
            for name, gradient in zip(weights, found, strict=True):
                first = gradient.float() if self.master_weights else gradient
                total[name] = total[name] + gradient if name in total else first
        return {name: gradient / self.scale.value for name, gradient in total.items()}

    def step(self, batches: Sequence[Batch]) -> None:
        """Takes in the batches of the data ranks, and updates if they were the last to wait for."""
        self.num_batches += 1
        shares = [self.gradients(batch) for batch in batches]
        is_first = self.num_batches % self.accumulate == 1 % self.accumulate
        for name, parameter in self.model.named_parameters():
            gradient = sum((s[name] for s in shares[1:]), shares[0][name]) / len(shares)
            parameter.grad = gradient if is_first else parameter.grad + gradient
        if self.num_batches % self.accumulate == 0:
            self.update()

    def update(self) -> None:
        is_finite = finite(self.model)
        if self.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        if is_finite:
            self.optimizer.step()
        self.scale.note(not is_finite)


def finite(model: nn.Module) -> bool:
    return all(bool(p.grad.isfinite().all()) for p in model.parameters())
