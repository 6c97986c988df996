"""Modules among a module's hyperparameters, as on a single device.

``save_hyperparameters()`` keeps a network that is an argument of the LightningModule, and each
checkpoint has it whole, to build the module anew. During a run the network is sharded, cut or
wrapped, so it can be pickled no more. Its structure is copied ahead of that, and gets the values of
the checkpoint when it is saved.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, cast

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from lightning_dist.engine.tensors.patch import replacement
from lightning_dist.engine.tensors.skeleton import skeleton_of

_ATTRIBUTE = "_lightning_dist_saved_modules"
_KEY = pl.LightningModule.CHECKPOINT_HYPER_PARAMS_KEY


class SavedModule:
    """A network among the hyperparameters, before it is changed."""

    def __init__(self, network: nn.Module, names: Mapping[int, list[str]]) -> None:
        tensors = {id(tensor): tensor for tensor in (*network.parameters(), *network.buffers())}
        stand_ins: dict[int, Tensor] = {}
        if not any(True for _ in network.parameters()):  # a metric, which may show values
            stand_ins |= {key: tensor.detach().clone() for key, tensor in tensors.items()}
        self._skeleton = skeleton_of(network, stand_ins)
        self._names = {id(stand_ins[key]): names[key] for key in tensors if key in names}
        # What no state dict has: masks and the like, and what is no part of the LightningModule.
        self._kept = {id(stand_ins[k]): tensor for k, tensor in tensors.items() if k not in names}
        self._stand_ins = {id(stand_ins[key]): stand_ins[key] for key in tensors}

    def filled(self, state: Mapping[str, Any]) -> nn.Module:
        """Returns a copy with the values of a whole state dict, or NaN where it has none."""
        values: dict[int, Tensor] = {}
        for key, empty in self._stand_ins.items():
            found = (state[name] for name in self._names.get(key, ()) if name in state)
            value = next(found, self._kept.get(key))
            if value is None:
                value = torch.full_like(
                    empty, torch.nan if empty.is_floating_point() else 0, device="cpu"
                )
            values[key] = (
                replacement(empty, value.detach()) if isinstance(empty, nn.Parameter) else value
            )
        return skeleton_of(self._skeleton, values)


class SavedModules:
    """The networks among the hyperparameters of a module."""

    def __init__(self, module: pl.LightningModule) -> None:
        own = {id(part) for part in module.modules()}
        self._saved: dict[int, SavedModule] = {}

        def keep(network: nn.Module) -> nn.Module:
            if id(network) in own:
                with suppress(Exception):  # what cannot be copied is saved as it is, if it can be
                    self._saved[id(network)] = SavedModule(network, _names_by_id(module))
            return network

        self._held: dict[str, Any] = {}  # hyperparameters with such networks
        for key, value in dict(module.hparams).items():
            count = len(self._saved)
            _map_modules(keep, value)
            if len(self._saved) > count:
                self._held[key] = value

    def restore(self, module: pl.LightningModule) -> None:
        """Puts back what Lightning removes at the start of a later run, as no longer picklable."""
        for key in self._held.keys() - module.hparams.keys():
            module.hparams[key] = self._held[key]

    def __deepcopy__(self, memo: object) -> SavedModules:
        """Returns itself: a copy of the module has the same hyperparameters."""
        return self

    def put_into(self, checkpoint: dict[str, Any], state: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a checkpoint whose hyperparameters have copies of the networks.

        Their values are those of a whole state dict, which is empty if it is not at hand.
        """

        def replaced(network: nn.Module) -> nn.Module:
            saved = self._saved.get(id(network))
            return network if saved is None else saved.filled(state)

        if not self._saved or _KEY not in checkpoint:
            return checkpoint
        return {**checkpoint, _KEY: _map_modules(replaced, checkpoint[_KEY])}


def saved_modules_of(module: pl.LightningModule) -> SavedModules:
    """Returns the networks among a module's hyperparameters, as they are at the first call."""
    if _ATTRIBUTE not in vars(module):
        vars(module)[_ATTRIBUTE] = SavedModules(module)
    return cast("SavedModules", vars(module)[_ATTRIBUTE])


def _names_by_id(module: nn.Module) -> dict[int, list[str]]:
    names: dict[int, list[str]] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        names.setdefault(id(tensor), []).append(name)
    return names


def _map_modules(change: Callable[[nn.Module], nn.Module], value: Any) -> Any:
    if isinstance(value, nn.Module):
        return change(value)
    if type(value) is dict:
        return {key: _map_modules(change, each) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_map_modules(change, each) for each in value)
    return value
