"""A strategy's part in checkpoints that a thread writes while training goes on.

A save waits for the one before, copies this rank's state, and begins to write. What Lightning asks
for behind it, to remove an older checkpoint or to link to this one, waits in the same thread. A
link to a checkpoint is moved before that is removed, while Lightning asks for the reverse. So at
each instant the last whole checkpoint is there, and where ``ckpt_path="last"`` finds it.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from typing_extensions import override

from lightning_dist.engine.checkpoint import directory
from lightning_dist.engine.checkpoint.background import BackgroundSaves
from lightning_dist.engine.checkpoint.joint_save import JointSave
from lightning_dist.engine.checkpoint.places import is_local
from lightning_dist.strategies.base import lightning_internals
from lightning_dist.strategies.base.distributed import DistributedStrategy


class AsyncSaving(DistributedStrategy):
    """Base class; see the module's docstring."""

    _saves: BackgroundSaves | None = None  # while a run has them
    _newest_save: str | None = None  # the path of the last save, which may be under way

    def __init__(self, async_save: bool = False, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._async_save = async_save

    @override
    def setup_environment(self) -> None:
        if self._async_save and isinstance(self.checkpoint_io, AsyncCheckpointIO):
            raise ValueError(
                "async_save=True and the plugin AsyncCheckpointIO are two threads that write the"
                " same checkpoints. Leave one of them out."
            )
        super().setup_environment()
        if self._async_save:
            group = self.group(*self.mesh.sizes, purpose="saves")
            self._saves = BackgroundSaves(group, self.root_device)
        undo = lightning_internals.replace_links(self.module.trainer, self._link)
        self._undo_callbacks.callback(undo)

    @override
    def annotate(self, exception: BaseException) -> None:
        super().annotate(exception)
        _note_lonely_save(exception)

    def write_state(
        self, path: str, state: Any, write: Callable[[dist.ProcessGroup | None, Any], None]
    ) -> None:
        """Writes a state, or copies it and lets the thread write. Collective.

        ``write`` gets a group of all ranks, or None for a single process.
        """
        world = self.world_group if dist.is_initialized() else None
        saves = self._saves
        if saves is None:
            write(world, state)
            return
        copies: list[Any] = []
        JointSave(path, world).step(lambda: copies.append(saves.copy(state)))
        saves.start(partial(write, saves.group, copies[0]))

    def finish_save(self) -> None:
        """Waits until the last save is done. Collective: every rank must call it.

        Raises:
            NotSavedError: A rank could not write the checkpoint.
            RuntimeError: A rank failed otherwise.
        """
        if self._saves is None:
            return
        try:
            with self.file_work("writing a checkpoint"):
                self._saves.finish()
        except Exception:
            self.check_peers()  # a dead rank ends the save, too
            raise

    @override
    def on_train_end(self) -> None:
        self.finish_save()
        super().on_train_end()

    @override
    def remove_checkpoint(self, filepath: str | Path) -> None:
        if not self.is_global_zero:  # not asked by the thread: a stage's step shows another rank
            return
        newest = self._newest_save
        if newest is not None and is_local(newest) and is_local(filepath):
            self._behind_save(partial(directory.move_links, Path(filepath), Path(newest)))
        self._behind_save(partial(self.checkpoint_io.remove_checkpoint, filepath))

    def _link(self, target: str, path: str) -> None:
        if self.is_global_zero and os.path.abspath(target) != os.path.abspath(path):
            self._behind_save(partial(directory.link, Path(path), Path(target)))
        if self._saves is None:
            self.barrier()

    def _behind_save(self, action: Callable[[], None]) -> None:
        if self._saves is None:
            action()
        else:
            self._saves.then(action)

    @override
    def wait_for_save(self) -> None:
        if self._saves is not None:
            with self.file_work("writing a checkpoint"):
                self._saves.wait()

    @override
    def teardown(self) -> None:
        is_raising = self._guard is not None and self._guard.is_leaving
        super().teardown()
        saves, self._saves = self._saves, None
        if saves is None:
            return
        try:
            saves.close()
        except Exception as error:
            if not is_raising:
                raise
            rank_zero_warn(str(error))  # raised, it would hide the error that has ended the run


def _note_lonely_save(error: BaseException) -> None:
    """Adds advice to the error of a collective inside of ``trainer.save_checkpoint``.

    gloo's own error does not say what was waited for. Its text differs by rank, so the traceback is
    looked at.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    codes = [frame.f_code for frame in frames]
    save = pl.Trainer.save_checkpoint.__code__
    if save not in codes or not isinstance(error, RuntimeError):
        return
    modules = [frame.f_globals.get("__name__", "") for frame in frames[codes.index(save) :]]
    if any(module.startswith("torch.distributed.") for module in modules):
        error.add_note(
            "This rank was waiting for the others in `trainer.save_checkpoint`, which all ranks"
            " must call: do so without `if trainer.is_global_zero` around it."
        )
