"""The private names of Lightning by which this package takes part in reading batches.

All others are in :mod:`.lightning_internals`, which says how they are kept in order.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from copy import copy
from typing import Any, Literal, TypeAlias

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.data import _set_sampler_epoch
from lightning.pytorch.trainer.connectors.data_connector import _request_dataloader
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils.data import DataLoader

from lightning_dist.engine.tensors.patch import Undo, surround_method

CombinedMode: TypeAlias = Literal["max_size_cycle", "sequential"]


def keep_users_samplers(trainer: pl.Trainer) -> None:
    """Keeps Lightning from putting in a ``DistributedSampler``, which would shuffle besides.

    With one data replica there is nothing to share out. ``use_distributed_sampler`` is an argument
    of the Trainer that cannot be changed later, and a strategy only chooses a sampler's arguments.
    """
    assert hasattr(trainer._accelerator_connector, "use_distributed_sampler")
    trainer._accelerator_connector.use_distributed_sampler = False


def copy_of_loader(loader: DataLoader[Any], name: str, value: Any) -> DataLoader[Any]:
    """Returns a copy of a loader with another attribute; plain assignment refuses samplers.

    To build another loader would take the arguments that the user's class was built with.
    ``_iterator`` holds the loader's workers.
    """
    copied = copy(loader)
    copied.__dict__.update({name: value, "_iterator": None})
    return copied


def is_iterated_by_loop() -> bool:
    """Returns whether the caller, an ``__iter__``, was called by Lightning's loops.

    The loops iterate loaders only in the module of :class:`CombinedLoader`, whose iterators are
    private. A user's hook that iterates a loader of the Trainer does not go through that module.
    """
    caller = sys._getframe(2)
    return caller.f_globals.get("__name__") == CombinedLoader.__module__


def replace_loader_hooks(
    trainer: pl.Trainer,
    wrap: Callable[[Callable[[], Any]], Callable[[], Any]],
    *,
    only_training: bool = False,
) -> Undo:
    """Wraps the calls of ``train_dataloader`` and ``val_dataloader``, of modules and data modules.

    Nothing public comes before these hooks; ``_data_source`` calls them.
    """
    loop, undo = trainer.fit_loop, ExitStack()
    sources: list[Any] = [loop._data_source]
    if not only_training:
        sources.append(loop.epoch_loop.val_loop._data_source)
    for source in sources:
        source.dataloader = wrap(source.dataloader)
        # Of all wrappers, for a run ends as a whole.
        undo.callback(source.__dict__.pop, "dataloader", None)
    return undo.close


def request_loaders(trainer: pl.Trainer) -> tuple[Any, CombinedMode] | None:
    """Requests the loaders of a run before it begins.

    ``setup_data`` of a loop is public, but it is done once: a resumed run would find its loaders
    made before the state that belongs to them. ``_data_source`` knows which hook to call, and
    ``_request_dataloader`` how, for loaders that Lightning has to make anew.

    Returns:
        The loaders, and how the loop combines them; None where there are none.
    """
    loops: dict[TrainerFn, Any] = {
        TrainerFn.FITTING: trainer.fit_loop,
        TrainerFn.VALIDATING: trainer.validate_loop,
        TrainerFn.TESTING: trainer.test_loop,
        TrainerFn.PREDICTING: trainer.predict_loop,
    }
    assert trainer.state.fn is not None
    source = loops[trainer.state.fn]._data_source
    if not source.is_defined():
        return None
    fits = trainer.state.fn == TrainerFn.FITTING
    return _request_dataloader(source), "max_size_cycle" if fits else "sequential"


def to_step(trainer: pl.Trainer, batch: Any, device: torch.device) -> Any:
    """Returns a loader's batch as a step gets it, after ``_on_before_batch_transfer``."""
    batch = trainer.precision_plugin.convert_input(batch)
    batch = trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx=0)
    return trainer.strategy.batch_to_device(batch, device, dataloader_idx=0)


def set_sampler_epoch(trainer: pl.Trainer, dataloader: object) -> None:
    """Sets the epoch of a training loader's sampler, before workers ask the sampler for indices.

    Lightning calls ``_set_sampler_epoch`` when an epoch begins. A run that is resumed has started
    the workers by then, and would read its first epoch in the order of epoch 0.
    """
    epoch = getattr(trainer.fit_loop.epoch_progress.current, "processed")  # noqa: B009
    if epoch:
        _set_sampler_epoch(dataloader, epoch)


def resume_early_loader(trainer: pl.Trainer) -> Undo:
    """Lets a training loader that was set up too early go on where the checkpoint says.

    A module that asks for ``estimated_stepping_batches`` in ``configure_optimizers`` has Lightning
    set up the loader before the loops' state is loaded. Lightning drops the loader's state then,
    and reads the epoch from its beginning.
    """
    loop = trainer.fit_loop

    def resume() -> None:
        early, fetcher = loop._combined_loader, loop._data_fetcher
        if loop.restarting and early is not None and loop._combined_loader_states_to_load:
            assert fetcher is not None
            loop._load_combined_loader_states()
            for loader in early.flattened:
                set_sampler_epoch(trainer, loader)
            iter(fetcher)

    return surround_method(loop, "setup_data", before=resume)


def batches_read(trainer: pl.Trainer) -> tuple[int, int | None, bool]:
    """Returns how far the training loader has been read in this epoch.

    The loop counts the batches that it has trained on. ``_data_fetcher`` counts those it has read.

    Returns:
        Batches read, the loader's length if it has one, and whether it has ended.
    """
    fetcher = trainer.fit_loop._data_fetcher
    assert fetcher is not None
    return fetcher.fetched, fetcher.length, fetcher.done
