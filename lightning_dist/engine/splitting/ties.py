"""Parameters that several stages use, such as an embedding that is also the head.

Each stage needs such a parameter at the same moment as the others, so each rank with one of these
stages has a copy. What keeps the copies equal is :mod:`.pipeline.tied_gradients`.

In the structure of the layers that live elsewhere this rank's copy stands for the others', so that
the whole model is tied there, too (:mod:`.splitting.cut`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from lightning_dist.engine.splitting.cut import ForeignLayer, stage_of_layers, structure_of
from lightning_dist.engine.splitting.layers import Layers, layers_in


@dataclass(frozen=True, slots=True)
class Tie:
    """A parameter that several stages use.

    Attributes:
        names: Its names on each of these stages, in the pipelined module, by ascending stage.
    """

    names: Mapping[int, tuple[str, ...]]

    def __str__(self) -> str:
        """Lists the names and their stages."""
        firsts = {stage: names[0] for stage, names in self.names.items()}
        return " and ".join(f"{name!r} (stage {stage})" for stage, name in firsts.items())

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
        return next(names[0] for stage, names in self.names.items() if rank_of_stage[stage] == rank)


def find_ties(module: nn.Sequential | Layers, layers_per_stage: Sequence[int]) -> tuple[Tie, ...]:
    """Finds the parameters that several stages use; the same ones on each rank.

    Args:
        module: The pipelined module, cut or not, or its layers.
        layers_per_stage: The partition.
    """
    found: dict[int, dict[int, list[str]]] = {}
    stages = stage_of_layers(layers_per_stage)
    for part in layers_in(module).parts():
        stage = stages[part.layer_index]
        for name, parameter in _named_parameters(structure_of(part.module)):
            names = found.setdefault(id(parameter), {}).setdefault(stage, [])
            names.append(f"{part.name}.{name}")
    return tuple(
        Tie({stage: tuple(names) for stage, names in by_stage.items()})
        for by_stage in found.values()
        if len(by_stage) > 1
    )


def tie_again(layers: Layers, ties: Sequence[Tie]) -> None:
    """Shows this rank's copies in the structure of layers that live elsewhere.

    Whatever shards a layer gives it new parameters, and does not find that structure.

    Args:
        layers: Of the pipelined module, which has been cut.
        ties: All of the pipeline, found while the old parameters were in place.
    """
    parts = layers.parts()
    foreign = {p.name: p.module.skeleton for p in parts if isinstance(p.module, ForeignLayer)}
    own = {
        f"{part.name}.{name}": parameter
        for part in parts
        if part.name not in foreign
        for name, parameter in _named_parameters(part.module)
    }
    for tie in ties:
        names = [name for of_stage in tie.names.values() for name in of_stage]
        copies = [own[name] for name in names if name in own]
        for part_name, skeleton in foreign.items():
            for name in names if copies else ():
                if name.startswith(f"{part_name}."):
                    _put(skeleton, name.removeprefix(f"{part_name}."), copies[0])


def _named_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return module.named_parameters(remove_duplicate=False)


def _put(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    path, _, attribute = name.rpartition(".")
    setattr(module.get_submodule(path), attribute, parameter)
