"""A server's part of the parameters, and the user's optimizer for it.

A server has whole tensors. So an optimizer that looks at each tensor by itself steps as on one
device, whether by element (AdamW), by rows and columns (Adafactor) or by matrix (Muon).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_dist.engine.stashing.learning_rates import (
    changes_of_groups,
    group_values,
    install_values,
)


class Partition:
    """Which server has which parameters; the same on each rank."""

    def __init__(self, num_servers: int) -> None:
        # The parameters of each server, in the order in which they travel.
        self.shards: list[list[nn.Parameter]] = [[] for _ in range(num_servers)]

    def extend(self, optimizer: Optimizer) -> None:
        """Adds an optimizer's new parameters, each to the server with the fewest elements."""
        known = {p for shard in self.shards for p in shard}
        groups: Iterable[list[nn.Parameter]] = (g["params"] for g in optimizer.param_groups)
        new = [p for group in groups for p in group if p not in known]
        for parameter in sorted(dict.fromkeys(new), key=Tensor.numel, reverse=True):
            sizes = [sum(p.numel() for p in shard) for shard in self.shards]
            self.shards[sizes.index(min(sizes))].append(parameter)


class ShardOptimizer:
    """The weights of a shard, and a copy of the module's optimizer that steps on them."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._copies: dict[Any, nn.Parameter] = {}
        self.weights: list[nn.Parameter] = []  # in the order of the shard
        self._optimizer: Optimizer = object.__new__(type(optimizer))
        vars(self._optimizer).update(vars(optimizer))
        vars(self._optimizer).pop("step", None)  # a scheduler has wrapped that of the other one
        self._optimizer.param_groups = []
        self._optimizer.state = defaultdict(dict)
        # Values of groups that the optimizer itself changes, such as an estimate of a rate.
        self._own_keys: list[set[str]] = []

    @torch.no_grad()
    def follow(self, optimizer: Optimizer, shard: Sequence[nn.Parameter]) -> None:
        """Takes a shard's weights, new groups, and the state that was loaded into an optimizer."""
        for parameter in shard:
            if parameter not in self._copies:
                self._copies[parameter] = nn.Parameter(
                    torch.empty_like(parameter), requires_grad=parameter.requires_grad
                )
            self._copies[parameter].copy_(parameter)
            vars(self._copies[parameter]).update(vars(parameter))  # the optimizer may read them
        self.weights = [self._copies[parameter] for parameter in shard]
        for index, group in enumerate(optimizer.param_groups):
            if index == len(self._own_keys):
                self._own_keys.append(set())
                self._optimizer.param_groups.append(dict(group))
            own = [self._copies[p] for p in group["params"] if p in self._copies]
            self._optimizer.param_groups[index]["params"] = own
        for key, values in optimizer.state.items():
            if key in self._copies or not isinstance(key, Tensor):
                self._optimizer.state[self._copies.get(key, key)] = values
        optimizer.state.clear()

    def reload(self, optimizer: Optimizer, shard: Sequence[nn.Parameter]) -> None:
        """Takes all of a state that was loaded into the optimizer of the whole module."""
        self._optimizer.state.clear()
        self._own_keys = [set() for _ in self._own_keys]
        self.follow(optimizer, shard)
        install_values(self._optimizer, group_values(optimizer))

    def step(self, gradients: Sequence[Tensor | None], groups: Sequence[dict[str, Any]]) -> None:
        """Steps with a worker's gradients and the values of its parameter groups."""
        given = zip(groups, self._own_keys, strict=True)
        values = [{k: v for k, v in group.items() if k not in own} for group, own in given]
        install_values(self._optimizer, values)
        before = group_values(self._optimizer)
        for weight, gradient in zip(self.weights, gradients, strict=True):
            weight.grad = gradient
        self._optimizer.step()
        for weight in self.weights:
            weight.grad = None
        changes = changes_of_groups(before, group_values(self._optimizer))
        for own, changed in zip(self._own_keys, changes, strict=True):
            own.update(changed)

    @property
    def own_values(self) -> list[dict[str, Any]]:
        """The values of each parameter group that the optimizer itself changes."""
        values = zip(group_values(self._optimizer), self._own_keys, strict=True)
        return [{key: group[key] for key in own} for group, own in values]

    def lend(self, optimizer: Optimizer) -> None:
        """Shows this shard's state, and own values of groups, in the module's empty optimizer."""
        parameters: dict[Any, nn.Parameter] = {copy: p for p, copy in self._copies.items()}
        for key, values in self._optimizer.state.items():
            optimizer.state[parameters.get(key, key)] = values
        new = optimizer.param_groups[len(self._own_keys) :]  # since this was opened
        install_values(optimizer, [*self.own_values, *({} for _ in new)])
