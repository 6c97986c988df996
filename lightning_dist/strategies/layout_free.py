"""A strategy's part in checkpoints that mean the same under every layout.

Lightning builds the checkpoint dictionary on each rank from what :class:`LayoutFreeCheckpoints`
gives it: this rank's weights, and this rank's optimizer state by parameter name. Each rank reads
back what it holds. The formats are :mod:`lightning_dist.checkpoint`'s.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_dist import checkpoint as checkpoints
from lightning_dist.named_optimizer import (
    GroupNames,
    load_by_name,
    name_groups,
    regroup,
    state_by_name,
    to_names,
)
from lightning_dist.shards import gather, shard_like
from lightning_dist.strategies.distributed import DistributedStrategy
from lightning_dist.tied_names import FirstNames, first_names, fold


class LayoutFreeCheckpoints(DistributedStrategy):
    """Saves and loads by parameter name; see the module's docstring."""

    _group_names: tuple[GroupNames, ...] = ()
    _first_names: FirstNames = MappingProxyType({})

    @property
    @override
    def checkpoint_io(self) -> CheckpointIO:
        return super().checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO | None) -> None:
        if io is not None and not isinstance(io, TorchCheckpointIO):
            raise ValueError(
                f"{type(io).__name__} would not be asked: checkpoints of this package have a format"
                " of their own. Leave the plugin out."
            )
        self._checkpoint_io = io

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        return True  # only then is it known what this rank holds

    def name_optimizer_groups(self) -> None:
        """Remembers the names of the optimizers' parameters while the module is whole."""
        module = self.module
        self._group_names = tuple(name_groups(optimizer, module) for optimizer in self.optimizers)
        self._first_names = first_names(module)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        self.check_group_names()
        names = self._group_names[self.optimizers.index(optimizer)]
        return state_by_name(optimizer, self.module, names, self._first_names)

    def check_group_names(self) -> None:
        """Checks that the optimizers' groups are still those that have names.

        Raises:
            ValueError: They are not.
        """
        for optimizer, names in zip(self.optimizers, self._group_names, strict=True):
            if len(optimizer.param_groups) != len(names):
                raise ValueError(
                    f"The optimizer has {len(optimizer.param_groups)} parameter groups, but"
                    f" `configure_optimizers` made {len(names)}: some were added later, by"
                    " BaseFinetuning say, and ranks do not know each other's. Make all groups in"
                    " `configure_optimizers`, or train without checkpoints and without moving"
                    " layers."
                )

    def regroup_optimizers(self) -> None:
        """Gives the optimizers the parameters that this rank has now."""
        for optimizer, names in zip(self.optimizers, self._group_names, strict=True):
            regroup(optimizer, self.module, names, self._first_names)

    @override
    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        filepath: str | os.PathLike[str],
        storage_options: Any | None = None,
    ) -> None:
        if storage_options is not None or "://" in os.fspath(filepath):
            raise ValueError(
                f"{filepath} (storage_options={storage_options!r}): checkpoints are written to a"
                " directory of the file system that all ranks share, and nowhere else."
            )
        if not self.is_running:
            warnings.warn(f"A rank has failed, so {filepath} was not written.", stacklevel=2)
            return
        group = self.group(*self.mesh.sizes)
        checkpoint = fold(checkpoint, checkpoints.SECTIONS, self._first_names)
        if not self._save_full:
            checkpoints.save_sharded(checkpoint, filepath, group)
            return
        parts: list[Any] | None = [None] * self.world_size if self.is_global_zero else None
        is_first_replica = self.mesh.data_index(self.global_rank) == 0
        part = self._with_whole_tensors(checkpoint, keep=is_first_replica)
        dist.gather_object(part, parts, dst=0, group=group)
        if parts is not None:
            merged = checkpoints.merge_parts(part for part in parts if part is not None)
            checkpoints.save_full(merged, filepath)

    def _with_whole_tensors(self, checkpoint: dict[str, Any], keep: bool) -> dict[str, Any] | None:
        """Puts sharded tensors together; all ranks must call it."""
        names = ("state_dict", "current_model_state", "optimizer_states")
        sections = [key for key in names if key in checkpoint]
        whole: dict[str, Any] = {key: gather(checkpoint[key], keep=keep) for key in sections}
        return {**checkpoint, **whole} if keep else None

    @override
    def load_checkpoint(
        self, checkpoint_path: str | os.PathLike[str], weights_only: bool | None = None
    ) -> dict[str, Any]:
        only_weights = True if weights_only is None else weights_only
        if not checkpoints.is_sharded(checkpoint_path):
            return self._with_names(
                checkpoints.load_full(checkpoint_path, weights_only=only_weights)
            )
        parameters = self._parameters()
        own = parameters.keys() | self.module.state_dict().keys()
        foreign = self.foreign_names()
        # What nobody has is loaded too, for `load_state_dict` to complain about.
        return checkpoints.load_sharded(
            checkpoint_path,
            lambda name: name in own or name not in foreign,
            parameters=parameters,
            weights_only=only_weights,
        )

    def _with_names(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        if self._group_names and "optimizer_states" in checkpoint:
            pairs = zip(checkpoint["optimizer_states"], self._group_names, strict=True)
            checkpoint["optimizer_states"] = [to_names(state, names) for state, names in pairs]
        return checkpoint

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        module = self.module
        foreign = self.foreign_names()
        parameters = self._parameters()
        own = {
            name: shard_like(value, parameters[name]) if name in parameters else value
            for name, value in checkpoint["state_dict"].items()
            if name not in foreign
        }
        module.load_state_dict(own, strict=strict)

    def _parameters(self) -> dict[str, nn.Parameter]:
        return dict(self.module.named_parameters(remove_duplicate=False))

    def foreign_names(self) -> set[str]:
        """Names of the whole model's state that other ranks hold."""
        return set()

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        module = self.module
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            load_by_name(optimizer, module, state, self._first_names)
