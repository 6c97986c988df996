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
from torch.distributed.fsdp import FSDPModule
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

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


class Experts(nn.Module):
    """A linear layer for each sample, and one for the few that have a large first feature."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, FEATURES)
        self.rare = nn.Linear(FEATURES, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        y = x + torch.tanh(self.linear(x))
        is_rare = x[:, 0] > 1.0
        if is_rare.any():
            y = y.index_add(0, is_rare.nonzero()[:, 0], self.rare(x[is_rare]).to(y.dtype))
        return y


class Recomputed(Block):
    """A block that keeps no activations of its forward."""

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return result


class InPlace(nn.Module):
    """Writes into its input, once it is behind a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        return F.elu(x, inplace=True) + self.linear(x).mul_(0.5)


class Drawn(Block):
    """Scales by a number that is drawn once, and saved with the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = float(torch.rand(()))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale

    def get_extra_state(self) -> dict[str, float]:
        return {"scale": self.scale}

    def set_extra_state(self, state: dict[str, float]) -> None:
        self.scale = state["scale"]


class Renamed(Block):
    """Has other names in a checkpoint, as a model that was once written otherwise."""

    def __init__(self) -> None:
        super().__init__(_layer_norm)
        self.register_state_dict_post_hook(_to_old_names)
        self.register_load_state_dict_pre_hook(_to_new_names)


def _rename(state: dict[str, Any], prefix: str, name: str, other: str) -> None:
    for key in [key for key in state if key.startswith(f"{prefix}{name}.")]:
        state[f"{prefix}{other}." + key.removeprefix(f"{prefix}{name}.")] = state.pop(key)


def _to_old_names(_: nn.Module, state: dict[str, Any], prefix: str, *__: Any) -> None:
    _rename(state, prefix, "linear", "projection")


def _to_new_names(_: nn.Module, state: dict[str, Any], prefix: str, *__: Any) -> None:
    _rename(state, prefix, "projection", "linear")


class Masked(nn.Module):
    """Passes a mask, numbers and the model's input on to each layer, beside what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, FEATURES)

    def forward(self, given: Any) -> dict[str, Any]:
        if isinstance(given, Tensor):
            given = {"x": given, "first": given, "mask": given > 0.0, "more": (None, 0.5)}
        x, (_, scale) = given["x"], given["more"]
        y = torch.tanh(self.linear(x)).masked_fill(given["mask"], 0.0) + scale * given["first"]
        return {**given, "x": x + y}


class MaskedHead(nn.Linear):
    """Gives logits of what the masked layers computed."""

    def forward(self, given: Any) -> Tensor:
        return super().forward(given["x"])


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

    def __init__(self, *, sparse: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, FEATURES, sparse=sparse)

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


def _experts() -> nn.Sequential:
    layers = [Block(), Experts(), Block(), Block(), Experts()]
    return nn.Sequential(*layers, nn.Linear(FEATURES, CLASSES))


def _repeated() -> nn.Sequential:
    """Runs one block three times."""
    again = Block(_layer_norm)
    return nn.Sequential(again, Block(), again, Block(), again, nn.Linear(FEATURES, CLASSES))


def _in_place() -> nn.Sequential:
    layers = [Block(), InPlace(), InPlace(), Block(), InPlace()]
    return nn.Sequential(*layers, nn.Linear(FEATURES, CLASSES))


def _masked() -> nn.Sequential:
    return nn.Sequential(*(Masked() for _ in range(5)), MaskedHead(FEATURES, CLASSES))


def _recomputed() -> nn.Sequential:
    return nn.Sequential(*(Recomputed(_layer_norm) for _ in range(5)), nn.Linear(FEATURES, CLASSES))


def _compiled() -> nn.Sequential:
    model = _norms()
    for layer in model[:5]:
        layer.compile(backend="aot_eager")
    return model


def _weight_norm() -> nn.Sequential:
    model = _mlp()
    for index in (0, 2, 4):
        weight_norm(model[index].linear)  # type: ignore[arg-type]
    return model


def _extra_state() -> nn.Sequential:
    return nn.Sequential(*(Drawn() for _ in range(5)), nn.Linear(FEATURES, CLASSES))


def _renamed() -> nn.Sequential:
    layers = [Block(), Renamed(), Block(), Renamed(), Block()]
    return nn.Sequential(*layers, nn.Linear(FEATURES, CLASSES))


def _sparse() -> nn.Sequential:
    return nn.Sequential(Pool(sparse=True), *(Block() for _ in range(4)), TiedHead())


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
    "experts": (_experts, _classify),
    "repeated": (_repeated, _classify),
    "in_place": (_in_place, _classify),
    "masked": (_masked, _classify),
    "recomputed": (_recomputed, _classify),
    "compiled": (_compiled, _classify),
    "weight_norm": (_weight_norm, _classify),
    "sparse": (_sparse, _classify),
    "extra_state": (_extra_state, _classify),
    "renamed": (_renamed, _classify),
}
OF_TOKENS = ("tokens", "tied", "sparse")
OF_SHARED_PARAMETERS = ("tied", "repeated")
OF_UNUSED_PARAMETERS = ("experts",)
"""Models whose steps may leave parameters out."""
SENDS_ZEROS = hasattr(FSDPModule, "set_reduce_scatter_unused_params")  # since torch 2.13
"""Whether FSDP2 counts these parameters' gradients as zeros."""


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
