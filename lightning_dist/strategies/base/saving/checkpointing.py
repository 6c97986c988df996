"""A strategy's part in checkpoints that mean the same under every layout.

Lightning builds the checkpoint dictionary on each rank from the state of
:class:`LayoutFreeCheckpoints`. If a rank holds the whole model, the dictionary is as on a single
device, and the first rank writes the ordinary file. Otherwise it has this rank's weights and this
rank's optimizer state by parameter name, and each rank reads its own part. The formats are those of
:mod:`.checkpoint.files`.
"""

from __future__ import annotations

import os
import warnings
from abc import abstractmethod
from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_dist.engine.checkpoint import files as checkpoints
from lightning_dist.engine.checkpoint import saved_names
from lightning_dist.engine.checkpoint.joint_save import JointSave, path_to_read
from lightning_dist.engine.checkpoint.optimizer_state import (
    GroupNames,
    by_present_names,
    is_named,
    load_by_name,
    name_groups,
    regroup,
    state_by_name,
    to_names,
    to_numbers,
)
from lightning_dist.engine.checkpoint.other_entries import gather_others
from lightning_dist.engine.checkpoint.places import is_local
from lightning_dist.engine.common.device_group import gather_objects
from lightning_dist.engine.splitting.split import PipelineSplit
from lightning_dist.engine.tensors.dtensor import gather, is_dtensor
from lightning_dist.engine.tensors.tree import map_tensors
from lightning_dist.strategies.base.loaders.replica_loaders import (
    keep_loader_states,
    take_loader_states,
)
from lightning_dist.strategies.base.model_checks import check_state_to_save
from lightning_dist.strategies.base.saving.async_saving import AsyncSaving
from lightning_dist.strategies.base.saving.part_warning import warn_of_part, without_warning
from lightning_dist.strategies.base.saving.saved_modules import saved_modules_of
from lightning_dist.strategies.base.saving.whole_file import WholeFileIO


class LayoutFreeCheckpoints(AsyncSaving):
    """Saves and loads by parameter name; see the module's docstring."""

    _group_names: tuple[GroupNames, ...] = ()
    _first_names: saved_names.FirstNames = MappingProxyType({})
    _has_printed_form = False

    @property
    def writes_one_file(self) -> bool:
        """Whether a checkpoint is one ordinary file, not a directory of shards."""
        return self.holds_whole_model if self._save_full is None else self._save_full

    @property
    def has_plain_state(self) -> bool:
        """Whether this rank's state dicts are those of a single device."""
        return self.holds_whole_model and not any(map(is_dtensor, self.module.parameters()))

    @property
    def replicas_step_alone(self) -> bool:
        """Whether each data replica's optimizers have a state of their own."""
        return False

    # --- this rank's part --------------------------------------------------------------------

    @abstractmethod
    def lay_out_once(self) -> None:
        """Places the model, once per run. Collective: every rank must call it.

        A checkpoint is read behind it and before the rest of ``setup``. So, as on a single device,
        ``configure_optimizers`` and ``on_fit_start`` see the loaded values.
        """

    def warn_of_part(self) -> None:
        """Lets the module warn if a script takes its state dict for the whole model's."""
        if not self.has_plain_state:
            warn_of_part(self.module)

    @property
    def split(self) -> PipelineSplit | None:
        """This rank's part of a model that is cut into stages; None if no model is."""
        return None

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        return self._own_state()  # of what stages share, too, for hooks see it on one device

    def _own_state(self) -> dict[str, Any]:
        with without_warning(self.module):
            split = self.split
            return self.module.state_dict() if split is None else split.state_dict(self.module)

    # --- plugins -----------------------------------------------------------------------------

    @property
    @override
    def checkpoint_io(self) -> CheckpointIO:
        if self._checkpoint_io is None:
            self._checkpoint_io = WholeFileIO()
        return super().checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO | None) -> None:
        self._checkpoint_io = io

    @override
    def set_world_ranks(self) -> None:
        super().set_world_ranks()
        if not isinstance(self.checkpoint_io, TorchCheckpointIO) and not self.writes_one_file:
            raise ValueError(
                f"{type(self.checkpoint_io).__name__} would not be asked: ranks with parts of the"
                " model write a directory, in a format of this package. Give the strategy"
                " `save_full=True`, or leave the plugin out."
            )

    # --- names -------------------------------------------------------------------------------

    def name_optimizer_groups(self) -> None:
        """Remembers the names of the optimizers' parameters while the module is whole."""
        module = self.module
        self._group_names = tuple(name_groups(optimizer, module) for optimizer in self.optimizers)
        self._first_names = saved_names.first_names(module)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        if self.has_plain_state:
            return super().optimizer_state(optimizer)
        self.check_group_names(together=True)
        names = self._group_names[self.optimizers.index(optimizer)]
        return state_by_name(optimizer, self.module, names, self._first_names)

    def check_group_names(self, *, together: bool = False) -> None:
        """Checks that the optimizers' groups are still those that have names, or names them anew.

        Args:
            together: Look at the groups of all ranks, so that all raise; collective, unless a rank
                has failed.

        Raises:
            ValueError: The groups have changed, and other ranks have parameters of them.
        """
        if self.mesh.pp == 1:
            self.name_optimizer_groups()
            return
        found = [len(optimizer.param_groups) for optimizer in self.optimizers]
        if together and self.is_running:
            self.check_peers()
            found = [*map(max, *gather_objects(found, self.world_group))]
        for num_groups, names in zip(found, self._group_names, strict=True):
            if num_groups != len(names):
                raise ValueError(
                    f"The optimizer has {num_groups} parameter groups, but"
                    f" `configure_optimizers` made {len(names)}: some were added later, by"
                    " BaseFinetuning say, and ranks do not know each other's. Make all groups in"
                    " `configure_optimizers`, or train without checkpoints and without moving"
                    " layers."
                )

    def regroup_optimizers(self) -> None:
        """Puts the parameters that this rank has now into the optimizers."""
        for optimizer, names in zip(self.optimizers, self._group_names, strict=True):
            regroup(optimizer, self.module, names, self._first_names)

    def remote_names(self) -> set[str]:
        """Returns the names of the whole model's state that other ranks hold."""
        split = self.split
        return set() if split is None else split.remote_names()

    # --- state of the strategy ---------------------------------------------------------------

    def extra_state(self) -> dict[str, Any]:
        """Returns the entries of a checkpoint that are this strategy's own, alike on all ranks."""
        return {}

    def load_extra_state(self, checkpoint: Mapping[str, Any]) -> None:
        """Takes this strategy's own entries from a checkpoint, if it has them."""

    # --- saving ------------------------------------------------------------------------------

    @override
    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        filepath: str | os.PathLike[str],
        storage_options: Any | None = None,
    ) -> None:
        path = os.fspath(filepath)
        if dist.is_initialized():
            if not self.is_running:
                warnings.warn(f"A rank has failed, so {path} was not written.", stacklevel=2)
                return
            # Ranks may have different names for the file, or different working directories.
            path = self.broadcast(os.path.abspath(path) if is_local(path) else path)
        self.finish_save()
        checkpoint |= self.extra_state()
        if dist.is_initialized() and self.mesh.data_size > 1:
            keep_loader_states(checkpoint, self.data_group)
        with self.file_work(f"saving {path}"):
            self._save(checkpoint, path, storage_options)
        self._newest_save = path

    def _save(self, checkpoint: dict[str, Any], path: str, storage_options: Any | None) -> None:
        if not self.writes_one_file and storage_options is not None:
            raise ValueError(
                f"{path}: shards are written without storage_options={storage_options!r}. Set what"
                " the file system needs in its configuration (fsspec reads ~/.config/fsspec), or"
                " give the strategy `save_full=True`, which writes one file."
            )
        if not dist.is_initialized() and not self.is_global_zero:
            return  # no run has begun: the first rank has the whole module, and writes it alone
        world = self.world_group if dist.is_initialized() else None
        if world is not None and not self.has_plain_state:
            check_state_to_save(self.optimizers, self.module, world)
            gather_others(checkpoint)
        if not self.writes_one_file:
            named = saved_modules_of(self.module).put_into(self._by_name(checkpoint), {})
            parts = checkpoints.split_parts(named, world)
            self.write_state(path, parts, partial(checkpoints.write_parts, path))
            if not self._has_printed_form:
                self._has_printed_form = True
                _print_form(path)
            return
        whole: dict[str, Any] | None = checkpoint
        if not self.has_plain_state or (world is not None and self.replicas_step_alone):
            whole = self._gather(self._by_name(checkpoint))
        elif not self.is_global_zero:
            whole = None
        if whole is not None:
            whole = saved_modules_of(self.module).put_into(whole, whole["state_dict"])

        def write(group: dist.ProcessGroup | None, whole: dict[str, Any] | None) -> None:
            def write_file() -> None:
                if whole is not None:  # on the first rank
                    self.checkpoint_io.save_checkpoint(whole, path, storage_options)

            if self.world_size == 1:
                write_file()
            else:
                JointSave(path, group).step(write_file)

        self.write_state(path, whole, write)

    def _by_name(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Renames optimizer states by parameter, and keeps one name of each tied parameter."""
        checkpoint = checkpoint if self.split is None else self.split.share_of(checkpoint)
        is_plain = self.has_plain_state
        firsts = saved_names.first_names(self.module) if is_plain else self._first_names
        folded = saved_names.fold(checkpoint, checkpoints.SECTIONS, firsts)
        if "optimizer_states" in checkpoint and is_plain:
            names = (name_groups(optimizer, self.module) for optimizer in self.optimizers)
            pairs = zip(checkpoint["optimizer_states"], names, strict=True)
            folded["optimizer_states"] = [to_names(state, groups) for state, groups in pairs]
        if "optimizer_states" in checkpoint and self.replicas_step_alone:
            replica, states = self._replica_index, folded["optimizer_states"]
            first, *others = (
                [state if index == replica else {**state, "state": {}} for state in states]
                for index in range(self.mesh.dp_replicate)
            )
            folded |= {"optimizer_states": first, checkpoints.REPLICAS: sum(others, [])}
        return folded

    @property
    def _replica_index(self) -> int:
        return self.mesh.coordinates(self.global_rank)["dp_replicate"]

    def _gather(self, checkpoint: dict[str, Any]) -> dict[str, Any] | None:
        """Returns the ordinary checkpoint on rank 0. Collective: every rank must call it."""
        place = self.mesh.coordinates(self.global_rank)
        merged = {"pp", "dp_replicate"} if self.replicas_step_alone else {"pp"}
        keep = not any(index for axis, index in place.items() if axis not in merged)
        names = (*checkpoints.SECTIONS, *checkpoints.OPTIMIZERS)
        whole = {key: gather(checkpoint[key], keep=keep) for key in names if key in checkpoint}
        if is_sent := dist.is_initialized() and (self.mesh.pp > 1 or self.replicas_step_alone):
            whole = map_tensors(Tensor.cpu, whole)  # else it would come to a GPU of that number
        part = ({**checkpoint, **whole} if self.is_global_zero else whole) if keep else None
        if keep and place["dp_replicate"] > 0:  # the other entries are the first replica's, too
            part = {key: whole[key] for key in checkpoints.OPTIMIZERS if key in whole}
        parts: list[Any] = [part]
        if is_sent:
            parts = [None] * self.world_size
            gathered = parts if self.is_global_zero else None
            dist.gather_object(part, gathered, dst=0, group=self.world_group)
        if not self.is_global_zero:
            return None
        return checkpoints.merge_parts(part for part in parts if part is not None)

    # --- loading -----------------------------------------------------------------------------

    @override
    def load_checkpoint(
        self, checkpoint_path: str | os.PathLike[str], weights_only: bool | None = None
    ) -> dict[str, Any]:
        self.finish_save()
        has_begun = self._guard is not None  # else no run is under way
        if has_begun:
            self.lay_out_once()
        path = os.fspath(checkpoint_path)
        with self.file_work(f"loading {path}"):
            checkpoint = self._load(path, weights_only)
        if has_begun:
            self.load_extra_state(checkpoint)
        take_loader_states(checkpoint, self.mesh.data_index(self.global_rank), self.mesh.data_size)
        return checkpoint

    def _load(self, path: str, weights_only: bool | None) -> dict[str, Any]:
        if is_local(path) and dist.is_initialized() and self.is_running:
            path = path_to_read(os.path.abspath(path), self.world_group)
        if not checkpoints.is_sharded(path):
            return super().load_checkpoint(path, weights_only)
        parameters = dict(self.module.named_parameters(remove_duplicate=False))
        own = parameters.keys() | self._own_state().keys()
        remote = self.remote_names()
        # Names that no rank has are loaded too, for `load_state_dict` to complain about.
        return checkpoints.load_sharded(
            path,
            lambda name: name in own or name not in remote,
            parameters=parameters,
            weights_only=weights_only,
            replica=self._replica_index if self.replicas_step_alone else 0,
        )

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        remote = self.remote_names()
        own = {n: value for n, value in checkpoint["state_dict"].items() if n not in remote}
        if remote:  # a module that has not been cut yet keeps its own values of them
            own = saved_names.with_own_values(own, self._own_state(), remote)
        self.module.load_state_dict(own, strict=strict)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        # An ordinary checkpoint without an optimizer has an empty state.
        own = self._states_of_replica(checkpoint)
        if not own:  # a hook has dropped them, to begin with fresh optimizers
            return
        states = [{"state": {}, "param_groups": [], **state} for state in own]
        if any(map(is_named, states)) or not self.has_plain_state:
            if self.mesh.pp == 1:  # a callback that finetunes may have added groups
                self.name_optimizer_groups()
            states = by_present_names(states, self._group_names)
        if self.has_plain_state:
            numbered = [to_numbers(state) if is_named(state) else state for state in states]
            super().load_optimizer_state_dict({"optimizer_states": numbered})
            return
        for optimizer, state in zip(self.optimizers, states, strict=True):
            load_by_name(optimizer, self.module, state, self._first_names)

    def _states_of_replica(self, checkpoint: Mapping[str, Any]) -> list[Any]:
        """Returns this replica's own states; the first one's if there were other replicas."""
        first: list[Any] = checkpoint["optimizer_states"]
        if not self.replicas_step_alone:
            return first
        every, count = [*first, *checkpoint.get(checkpoints.REPLICAS, [])], self.mesh.dp_replicate
        if len(every) == len(first) * count:
            begin = len(first) * self._replica_index
            return every[begin : begin + len(first)]
        if len(every) > len(first):
            rank_zero_info(
                f"The checkpoint has the optimizer states of {len(every) // len(first)} replicas,"
                f" and this run has {count}: each begins with the first one's."
            )
        return first


def _print_form(path: str) -> None:
    near = os.path.relpath(path) if is_local(path) else path
    shown = path if near.startswith(os.pardir) else near
    rank_zero_info(
        "Checkpoints are directories, for `ckpt_path`; `load_from_checkpoint` wants one"
        f" file: save_full=True, or `{checkpoints.merge_command(shown)}`."
    )
