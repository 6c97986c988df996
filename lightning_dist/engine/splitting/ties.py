"""Parameters that several stages use, such as an embedding that is also the head.

Each stage needs such a parameter at the same moment as the others, so each rank with one of these
stages has a copy. :mod:`.pipeline.tied_gradients` keeps the copies equal.

In the structure of remote layers, this rank's copy stands for the other copies, so that the whole
model's structure is tied, too (:mod:`.splitting.cut`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

from torch import nn
from torch.distributed.tensor import Placement

from lightning_dist.engine.planning.partition import stage_of_layers
from lightning_dist.engine.splitting.cut import structure_of
from lightning_dist.engine.splitting.layers import Layers, Part, layers_in
from lightning_dist.engine.splitting.remote_layer import RemoteLayer
from lightning_dist.engine.tensors.module_tree import dotted, set_attribute


@dataclass(frozen=True, slots=True)
class Tie:
    """A parameter that several stages use.

    Attributes:
        names: The parameter's names in the pipelined module by stage, in ascending order. The first
            one is that by which the stage's module lists the parameter.
    """

    names: Mapping[int, tuple[str, ...]]

    def __str__(self) -> str:
        """Returns the first name on each stage, as text."""
        firsts = {stage: names[0] for stage, names in self.names.items()}
        return " and ".join(f"{name!r} (stage {stage})" for stage, name in firsts.items())

    def ranks(self, rank_of_stage: Sequence[int]) -> tuple[int, ...]:
        """Returns the ranks that have a copy, in the order of the stages."""
        return tuple(dict.fromkeys(rank_of_stage[stage] for stage in self.names))

    def name_on(self, rank: int, rank_of_stage: Sequence[int]) -> str:
        """Returns the parameter's first name on a rank that has a copy."""
        return next(names[0] for stage, names in self.names.items() if rank_of_stage[stage] == rank)


def find_ties(module: nn.Sequential | Layers, layers_per_stage: Sequence[int]) -> tuple[Tie, ...]:
    """Returns the parameters that several stages of a pipelined module use, on all ranks alike."""
    found: dict[int, dict[int, list[str]]] = {}
    stages = stage_of_layers(layers_per_stage)
    parts = layers_in(module).parts()
    for stage, of_stage in groupby(parts, lambda part: stages[part.layer_index]):
        for part in _in_walk_order([*of_stage]):
            structure = structure_of(part.module)
            for name, parameter in structure.named_parameters(remove_duplicate=False):
                names = found.setdefault(id(parameter), {}).setdefault(stage, [])
                names.append(f"{part.name}.{name}")
    return tuple(
        Tie({stage: tuple(names) for stage, names in by_stage.items()})
        for by_stage in found.values()
        if len(by_stage) > 1
    )


def _in_walk_order(parts: Sequence[Part]) -> list[Part]:
    """Sorts parts as a module with them lists its parameters: each holder's parts together."""
    paths = [[*accumulate(part.name.split("."), dotted)] for part in parts]
    first: dict[str, int] = {}
    for index, path in enumerate(paths):
        for holder in path:
            first.setdefault(holder, index)
    order = sorted(range(len(parts)), key=lambda index: [first[holder] for holder in paths[index]])
    return [parts[index] for index in order]


def cut_differently(ties: Sequence[Tie], path: str, cuts: Mapping[str, Placement]) -> list[Tie]:
    """Returns the ties whose parameters tensor parallelism does not cut alike on each stage.

    Args:
        ties: The ties.
        path: Path of the pipelined module.
        cuts: Placement of each parameter that is cut, by its name in the whole model.
    """

    def cuts_on(names: Iterable[str]) -> set[Placement]:
        full = (dotted(path, name) for name in names)
        return {cuts[name] for name in full if name in cuts}

    pieces = ((tie, [cuts_on(names) for names in tie.names.values()]) for tie in ties)
    return [tie for tie, (first, *others) in pieces if any(other != first for other in others)]


def tie_again(layers: Layers, ties: Sequence[Tie]) -> None:
    """Puts this rank's copies into the structure of remote layers.

    Sharding replaces a layer's parameters, but not those in the structure of remote layers. The
    ties are those found before.
    """
    parts = layers.parts()
    remote = {p.name: p.module.skeleton for p in parts if isinstance(p.module, RemoteLayer)}
    own = {
        f"{part.name}.{name}": parameter
        for part in parts
        if part.name not in remote
        for name, parameter in part.module.named_parameters(remove_duplicate=False)
    }
    for tie in ties:
        names = [name for of_stage in tie.names.values() for name in of_stage]
        copies = [own[name] for name in names if name in own]
        for part_name, skeleton in remote.items():
            for name in names if copies else ():
                if name.startswith(f"{part_name}."):
                    set_attribute(skeleton, name.removeprefix(f"{part_name}."), copies[0])
