"""The optimizers of the study, for the layers of one stage.

Muon (Jordan et al. 2024; ``torch.optim.Muon``) orthogonalises the momentum of matrices. As its
authors do, embedding, head and norms go with AdamW, so it is two optimizers, which
``PipelineStrategy`` does not take yet; a plain loop does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from torch import nn
from torch.optim import AdamW, Muon, NAdam, Optimizer

from recipes.gpt import Block

LEARNING_RATE = 4e-3
"""Learning rate of all three: Muon's updates are scaled to the size of Adam's."""

_BETAS = (0.9, 0.95)
_WEIGHT_DECAY = 0.1


def adamw(layers: nn.Module) -> list[Optimizer]:
    """Creates AdamW as :class:`recipes.gpt.GPT` does."""
    return [AdamW(_groups(layers), lr=LEARNING_RATE, betas=_BETAS)]


def nadam(layers: nn.Module) -> list[Optimizer]:
    """Creates AdamW with Nesterov's momentum, which looks one update ahead."""
    groups = _groups(layers)
    return [NAdam(groups, lr=LEARNING_RATE, betas=_BETAS, decoupled_weight_decay=True)]


def muon(layers: nn.Module) -> list[Optimizer]:
    """Creates Muon for the matrices of blocks, and AdamW for the rest."""
    blocks = [module for module in layers.modules() if isinstance(module, Block)]
    matrices = [p for block in blocks for p in block.parameters() if p.ndim == 2]
    taken = {id(p) for p in matrices}
    found: list[Optimizer] = []
    if matrices:
        found.append(
            Muon(
                matrices,
                lr=LEARNING_RATE,
                weight_decay=_WEIGHT_DECAY,
                adjust_lr_fn="match_rms_adamw",
            )
        )
    rest = _groups(layers, taken)
    return [*found, *([AdamW(rest, lr=LEARNING_RATE, betas=_BETAS)] if rest else [])]


OPTIMIZERS: Mapping[str, Callable[[nn.Module], list[Optimizer]]] = MappingProxyType(
    {"adamw": adamw, "nadam": nadam, "muon": muon}
)


def _groups(layers: nn.Module, without: set[int] | frozenset[int] = frozenset()) -> list[dict]:
    parameters = [p for p in layers.parameters() if id(p) not in without]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": _WEIGHT_DECAY},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
