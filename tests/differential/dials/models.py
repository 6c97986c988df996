"""Tiny modules, and the steps that users write around them.

Each is a ``nn.Sequential`` of six layers, so that four stages can be cut from it. Blocks have their
linear layer under one name, by which a tensor-parallel plan finds it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FEATURES = 6
CLASSES = 3
TOKENS = 7

Loss = Callable[[nn.Module, Any, Tensor], Tensor]
"""The loss from the model, what the model returned, and the targets."""


class Block(nn.Module):
    """A linear layer with a skip connection."""

    def __init__(self, norm: Callable[[], nn.Module] = nn.Identity) -> None:
        super().__init__()
        self.norm = norm()
        self.linear = nn.Linear(FEATURES, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class Convolution(nn.Module):
    """A convolution behind a norm, whose weights a stash must keep apart."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(FEATURES)
        self.conv = nn.Conv1d(1, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.conv(self.norm(x).unsqueeze(1)).squeeze(1))


class Head(nn.Module):
    """Gives logits, and has a scale that the step uses."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(FEATURES, CLASSES)
        self.logit_scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x)


class TwoHeads(nn.Module):
    """Gives two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, CLASSES)
        self.second = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.first(x), self.second(x)


class Pool(nn.Module):
    """Embeds tokens and averages them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, FEATURES)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.embedding(tokens).mean(1)


class TiedHead(nn.Module):
    """Gives a logit for each token, with weights of its own or of an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(FEATURES, TOKENS, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x)


def _batch_norm() -> nn.Module:
    return nn.BatchNorm1d(FEATURES)


def _layer_norm() -> nn.Module:
    return nn.LayerNorm(FEATURES)


def _mlp() -> nn.Sequential:
    return nn.Sequential(*(Block() for _ in range(5)), nn.Linear(FEATURES, CLASSES))


def _norms() -> nn.Sequential:
    layers = [Block(_layer_norm), Convolution(), Block(), Convolution(), Block(_layer_norm)]
    return nn.Sequential(*layers, nn.Linear(FEATURES, CLASSES))


def _batch_norms() -> nn.Sequential:
    layers = [Block(), Block(_batch_norm), Block(), Block(_batch_norm), Block()]
    return nn.Sequential(*layers, nn.Linear(FEATURES, CLASSES))


def _scale() -> nn.Sequential:
    return nn.Sequential(*(Block(_layer_norm) for _ in range(5)), Head())


def _two() -> nn.Sequential:
    return nn.Sequential(*(Block() for _ in range(5)), TwoHeads())


def _frozen() -> nn.Sequential:
    model = _norms()
    model[0].requires_grad_(False)
    model[3].requires_grad_(False)
    return model


def _tokens() -> nn.Sequential:
    return nn.Sequential(Pool(), *(Block(_layer_norm) for _ in range(4)), TiedHead())


def _tied() -> nn.Sequential:
    model = _tokens()
    model[5].out.weight = model[0].embedding.weight
    return model


def _classify(model: nn.Module, output: Any, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target)


def _scaled(model: nn.Module, output: Any, target: Tensor) -> Tensor:
    return F.cross_entropy(output * model[-1].logit_scale.exp(), target)  # type: ignore[index]


def _penalized(model: nn.Module, output: Any, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target) + 0.1 * model[-1].weight.square().sum()  # type: ignore[index]


def _of_both(model: nn.Module, output: Any, target: Tensor) -> Tensor:
    first, second = output
    return F.cross_entropy(first, target) + 0.5 * F.cross_entropy(second, target.flip(-1) * 0)


MODELS: dict[str, tuple[Callable[[], nn.Sequential], Loss]] = {
    "mlp": (_mlp, _classify),
    "norms": (_norms, _classify),
    "batch_norms": (_batch_norms, _classify),
    "scale": (_scale, _scaled),
    "penalty": (_mlp, _penalized),
    "two_outputs": (_two, _of_both),
    "frozen": (_frozen, _classify),
    "tokens": (_tokens, _classify),
    "tied": (_tied, _classify),
}
OF_TOKENS = ("tokens", "tied")


def logits_of(output: Any) -> Tensor:
    """Gives the first of several outputs."""
    return output[0] if isinstance(output, tuple) else output


# --- hooks of parameters --------------------------------------------------------------------------


def _halve_gradients(model: nn.Module) -> None:
    """Halves gradients: linear, so that parts of a batch may be halved one by one."""
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.ndim > 1:
            parameter.register_hook(lambda gradient: gradient * 0.5)


def _mask_gradients(model: nn.Module) -> None:
    """Clears a part of accumulated gradients: once or often is the same."""

    def clear(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad[0].zero_()

    for parameter in model.parameters():
        if parameter.requires_grad and parameter.ndim > 1:
            parameter.register_post_accumulate_grad_hook(clear)


def _clamp_gradients(model: nn.Module) -> None:
    """Clamps gradients, and divides by the largest element: of a whole gradient, or it differs."""

    def divide(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.div_(1.0 + 50.0 * parameter.grad.abs().max())

    for parameter in model.parameters():
        if parameter.requires_grad and parameter.ndim > 1:
            parameter.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
            parameter.register_post_accumulate_grad_hook(divide)


PARAMETER_HOOKS: dict[str, Callable[[nn.Module], None]] = {
    "halve": _halve_gradients,
    "mask": _mask_gradients,
    "clamp": _clamp_gradients,
}
