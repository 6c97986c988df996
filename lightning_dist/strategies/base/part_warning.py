"""Warn where a script takes what one rank holds of a model for the whole.

Behind ``trainer.fit(module)`` a script may do ``torch.save(module.state_dict(), path)``. On a stage
of a pipeline that has the layers of the stage and no others, and with shards it has DTensors, which
no single process can load. Neither looks wrong until the file is needed.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

_ATTRIBUTE = "_lightning_dist_part_warning"
_LEVEL_OF_CALLER = 3  # behind the hook and torch's `state_dict`


class PartWarning:
    """Warns the first time that a state dict is asked for; copied and pickled with the module.

    Attributes:
        is_muted: Whether it is asked for by what knows that it is a part.
    """

    def __init__(self) -> None:
        self.is_muted = False
        self._is_due = True

    def __call__(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        """Is called by torch before it makes the state dict of a module."""
        if prefix or self.is_muted or not self._is_due:  # what is around it may know better
            return
        self._is_due = False
        warnings.warn(
            "module.state_dict() has what this rank holds: the layers of its stage, or DTensors of"
            " its shards. A file of it has no whole model. Instead, on all ranks:"
            " trainer.save_checkpoint('some.ckpt'), with the strategy's save_full=True if it is to"
            " be one file, or `python -m lightning_dist merge some.ckpt whole.ckpt` afterwards.",
            stacklevel=_LEVEL_OF_CALLER,
        )


def warn_of_part(module: nn.Module) -> None:
    """Lets a module warn when it is asked for its state dict.

    Args:
        module: The user's, of which this rank holds a part from now on.
    """
    if _ATTRIBUTE not in vars(module):
        warning = PartWarning()
        module.register_state_dict_pre_hook(warning)
        setattr(module, _ATTRIBUTE, warning)


@contextmanager
def without_warning(module: nn.Module) -> Iterator[None]:
    """Lets a state dict be taken for the part that it is.

    Args:
        module: The user's.

    Yields:
        Nothing.
    """
    warning = vars(module).get(_ATTRIBUTE)
    if not isinstance(warning, PartWarning):
        yield
        return
    before, warning.is_muted = warning.is_muted, True
    try:
        yield
    finally:
        warning.is_muted = before
