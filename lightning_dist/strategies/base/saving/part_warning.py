"""Warn if a script takes a rank's part of a model for the whole.

``torch.save(module.state_dict(), path)`` after ``trainer.fit(module)`` makes a file of a stage's
layers, or of DTensors, which no single process can load. Neither looks wrong until it is needed.
The same holds for a network in the module: ``self.model.save_pretrained(path)``, or an average that
a hook keeps of ``self.model.state_dict()``.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from lightning_dist.engine.splitting.cut import is_cut
from lightning_dist.engine.splitting.tracing.split import is_traced
from lightning_dist.engine.tensors.dtensor import is_dtensor

_ATTRIBUTE = "_lightning_dist_part_warning"
_LEVEL_OF_CALLER = 3  # behind the hook and torch's `state_dict`


class PartWarning:
    """Warns the first time that a state dict is made, unless muted; copied with the module."""

    def __init__(self) -> None:
        self.is_muted = False
        self._is_due = True

    def __call__(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        """Warns, if it is due; called by torch before it makes the state dict of a module."""
        if prefix or self.is_muted or not self._is_due:  # an enclosing module may know better
            return
        self._is_due = False
        warnings.warn(
            "module.state_dict() has what this rank holds: the layers of its stage, or DTensors of"
            " its shards. A file of it has no whole model, nor has an average that is kept of it"
            " (use ShardedWeightAveraging). Instead, on all ranks:"
            " trainer.save_checkpoint('some.ckpt'), with the strategy's save_full=True if it is to"
            " be one file, or `python -m lightning_dist merge some.ckpt whole.ckpt` afterwards."
            " `python -m lightning_dist export` makes a folder for `from_pretrained` of either.",
            stacklevel=_LEVEL_OF_CALLER,
        )


def warn_of_part(module: nn.Module) -> None:
    """Registers the warning on a module, and on the cut or sharded networks in it."""
    if _ATTRIBUTE not in vars(module):
        warning = PartWarning()
        for part in module.modules():
            if part is module or _is_in_parts(part):
                part.register_state_dict_pre_hook(warning)
        setattr(module, _ATTRIBUTE, warning)


def _is_in_parts(module: nn.Module) -> bool:
    has_children = any(True for _ in module.children())
    has_shards = any(map(is_dtensor, module.parameters()))
    return has_children and (has_shards or is_cut(module) or is_traced(module))


@contextmanager
def without_warning(module: nn.Module) -> Iterator[None]:
    """Mutes the warning of :func:`warn_of_part`."""
    warning: PartWarning = vars(module).get(_ATTRIBUTE, PartWarning())
    before, warning.is_muted = warning.is_muted, True
    try:
        yield
    finally:
        warning.is_muted = before
