"""The structure of a traced module: its parts and their attributes, without values of tensors.

Graphs that are first needed in the middle of a run are traced on it, for by then each rank has the
tensors of its own layers only. Before such a trace the structure gets the present values of the
attributes that forwards read.
"""

from __future__ import annotations

import copy
from collections.abc import Collection

import torch
from torch import nn

from lightning_dist.engine.splitting.cut import skeleton_of
from lightning_dist.engine.splitting.tracing.reads import (
    Held,
    Parts,
    Place,
    alike,
    held_at,
    name_of,
    parts_of_module,
)
from lightning_dist.engine.tensors.patch import hooks_of

_INSTEAD = (
    "Let a hook, such as `on_train_epoch_start`, set an attribute to the number that the forward"
    " needs."
)


class Structure:
    """A module's structure.

    Args:
        module: The module, with all of its tensors.

    Attributes:
        module: The structure, with tensors on the meta device.
        parts: Its parts by their paths.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = skeleton_of(module)
        for hooks in hooks_of(self.module):  # they run around the sequence, as around any other
            hooks.clear()
        self.parts = parts_of_module(self.module)
        # A module may leave things out of its copies, as a LightningModule does its trainer.
        self._left_out = {
            (path, name)
            for path, part in parts_of_module(module).items()
            for name, value in vars(part).items()
            if value is not None and vars(self.parts[path]).get(name) is None
        }

    def made_on(self, device: torch.device) -> nn.Module:
        """Returns a copy with tensors on a device, for one trace."""
        return skeleton_of(self.module).to_empty(device=device)

    def values_at(self, places: Collection[Place]) -> dict[Place, Held]:
        """Returns the values of attributes, which are never written into."""
        return {place: held_at(self.parts, place) for place in places}

    def check(self, parts: Parts) -> None:
        """Checks that a module still has the parts of the structure.

        Raises:
            ValueError: A part has been replaced by one of another class, or removed.
        """
        other = [n for n, part in self.parts.items() if type(parts.get(n)) is not type(part)]
        if other:
            raise ValueError(
                f"{other} of the traced module are not what they were when it was traced. Replace"
                " parts before the run, in `__init__` or `configure_model`."
            )

    def follow(self, places: Collection[Place], parts: Parts) -> None:
        """Sets attributes to copies of a module's present ones.

        Args:
            places: The attributes.
            parts: The parts of the module.

        Raises:
            ValueError: A value cannot be copied.
        """
        copies = _counterparts(parts, self.parts)
        for place in sorted(places):
            path, name = place
            own, present = vars(self.parts[path]), vars(parts[path])
            reason = "copies of the module do not have it" if place in self._left_out else ""
            if name not in present:
                own.pop(name, None)
            elif not reason:
                try:
                    own[name] = copy.deepcopy(present[name], copies)
                except Exception as error:
                    reason = f"it cannot be copied: {error}"
            if reason or not alike(held_at(self.parts, place), held_at(parts, place)):
                kind = type(present.get(name)).__name__
                raise ValueError(
                    f"The forward reads `{name_of(place)}`, a {kind}, which graphs cannot follow:"
                    f" {reason or 'a copy is not equal to it'}. {_INSTEAD}"
                )


def _counterparts(parts: Parts, others: Parts) -> dict[int, object]:
    """Returns what a structure has for each part, parameter and buffer of a module, by ids."""
    found: dict[int, object] = {}
    for path, own in others.items():
        part = parts[path]
        found[id(part)] = own
        for mine, its in ((own._parameters, part._parameters), (own._buffers, part._buffers)):
            found |= {id(t): mine[n] for n, t in its.items() if t is not None and n in mine}
    return found
