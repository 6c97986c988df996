"""Advice for a rank that saves a checkpoint alone, and so waits for the others until a timeout."""

from __future__ import annotations

import traceback

import lightning.pytorch as pl


def note_lonely_save(error: BaseException) -> None:
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
