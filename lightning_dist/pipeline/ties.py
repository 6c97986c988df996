"""Parameters that several stages use, such as an embedding that is also the head.

Each stage needs such a parameter at the same moment as the others, so each rank with one of these
stages has a copy. What keeps the copies equal is :mod:`lightning_dist.pipeline.tied_sums`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from lightning_dist.pipeline.cut import stage_of_layers, structure_of
from lightning_dist.pipeline.layers import Layers, layers_in


@dataclass(frozen=True, slots=True)
class Tie:
    """A parameter that several stages use.

    Attributes:
        names: Its first name on each of these stages, in the pipelined module, by ascending stage.
    """

    names: Mapping[int, str]

    def __str__(self) -> str:
        """Lists the names and their stages."""
        return " and ".join(f"{name!r} (stage {stage})" for stage, name in self.names.items())

    def ranks(self, rank_of_stage: Sequence[int]) -> tuple[int, ...]:
        """Lists the ranks that have a copy, that of the first of the stages first.

        Args:
            rank_of_stage: The rank of each stage.
        """
        return tuple(dict.fromkeys(rank_of_stage[stage] for stage in self.names))

    def name_on(self, rank: int, rank_of_stage: Sequence[int]) -> str:
        """Gives its first name on one of these ranks.

        Args:
            rank: The rank.
            rank_of_stage: The rank of each stage.
        """
        return next(name for stage, name in self.names.items() if rank_of_stage[stage] == rank)


def find_ties(module: nn.Sequential | Layers, layers_per_stage: Sequence[int]) -> tuple[Tie, ...]:
    """Finds the parameters that several stages use; the same ones on each rank.

    Args:
        module: The pipelined module, cut or not, or its layers.
        layers_per_stage: The partition.
    """
    found: dict[int, dict[int, str]] = {}
    stages = stage_of_layers(layers_per_stage)
    for part in layers_in(module).parts():
        stage = stages[part.layer_index]
        for name, parameter in structure_of(part.module).named_parameters():
            found.setdefault(id(parameter), {}).setdefault(stage, f"{part.name}.{name}")
    return tuple(Tie(names) for names in found.values() if len(names) > 1)
