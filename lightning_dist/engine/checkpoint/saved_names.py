"""Names in checkpoints that are not those of parameters.

Hooks of modules may rename: a module that was once written otherwise has hooks that give its
tensors their old names in checkpoints, and take these names back
(``register_state_dict_post_hook``, ``register_load_state_dict_pre_hook``).

And a tied parameter has several names. On one device it is one tensor with several names in a state
dict, and has one entry in the optimizer's state. If two ranks hold a copy each, under different
names, a checkpoint must still have one. So a tensor is written under the parameter's *first name*
in the whole model. The other names are listed beside it, and are restored when the checkpoint is
read.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping
from typing import Any, cast

from torch import Tensor, nn

from lightning_dist.engine.tensors.dtensor import is_dtensor, shard_like

_TIED = "tied_names"

FirstNames = Mapping[str, str]
"""First names of tied parameters, by each of their other names."""


def names_of_saved(module: nn.Module) -> dict[str, str]:
    """Returns the parameter's or buffer's name for each tensor of a whole module's state dict."""
    names: dict[int, list[str]] = {}
    for name, tensor in (
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ):
        names.setdefault(id(tensor), []).append(name)
    found = {}
    for key, value in module.state_dict(keep_vars=True).items():
        own = names.get(id(value), [key])
        found[key] = key if key in own else own[0]
    return found


def with_own_values(
    state: Mapping[str, Any], present: Mapping[str, Any], names: Collection[str]
) -> dict[str, Any]:
    """Returns a state in which some tensors are left as they are.

    Nor are their parts converted from an older version. That adds what is missing: BatchNorm a
    count of batches, where its tensors are away.

    Args:
        state: The state to load, without these tensors.
        present: The module's own ``state_dict()``. Its ``_metadata`` has the versions; torch's
            ``load_state_dict`` takes them from there, and no public name has them.
        names: The names of these tensors in a whole state dict.
    """
    parts = {name.rpartition(".")[0] for name in names}
    versions: dict[str, Any] = getattr(present, "_metadata", {})
    found: Any = OrderedDict(state)
    found.update({name: present[name] for name in present.keys() & names})
    found._metadata = {part: versions[part] for part in parts & versions.keys()}
    return cast("dict[str, Any]", found)


def take_whole_tensors(module: nn.Module) -> None:
    """Lets sharded parameters take whole tensors in ``load_state_dict``, by hooks that stay.

    They shard behind earlier hooks, which may rename, and without communication.
    """
    for part in module.modules():
        if any(map(is_dtensor, part.parameters(recurse=False))):
            part.register_load_state_dict_pre_hook(_shard)


def _shard(part: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for name, parameter in part.named_parameters(recurse=False):
        value = state.get(prefix + name)
        if isinstance(value, Tensor):
            state[prefix + name] = shard_like(value, parameter)


def first_names(module: nn.Module) -> dict[str, str]:
    """Returns the first names of the parameters that have several names in the whole model."""
    firsts: dict[int, str] = {}
    every = module.named_parameters(remove_duplicate=False)
    pairs = [(name, firsts.setdefault(id(parameter), name)) for name, parameter in every]
    return {name: first for name, first in pairs if name != first}


def fold(
    checkpoint: Mapping[str, Any], sections: Iterable[str], firsts: FirstNames
) -> dict[str, Any]:
    """Returns a checkpoint, of the whole model or a part, with one name for each tied parameter."""
    if not firsts:
        return dict(checkpoint)
    folded: dict[str, Any] = {key: {} for key in sections if key in checkpoint}
    for key, state in folded.items():
        for name, value in checkpoint[key].items():
            state.setdefault(firsts.get(name, name), value)  # a part may have several of the names
    return {**checkpoint, **folded, _TIED: dict(firsts)}


def unfold(checkpoint: dict[str, Any], sections: Iterable[str]) -> None:
    """Restores all names of each tied parameter, on one tensor; undoes :func:`fold` in place."""
    firsts = checkpoint.pop(_TIED, {})
    for key in checkpoint.keys() & set(sections):
        state = checkpoint[key]
        state.update({name: state[first] for name, first in firsts.items() if first in state})


def with_other_names(checkpoint: Mapping[str, Any]) -> dict[str, list[str]]:
    """Lists the other names of tied parameters by first name, from a result of :func:`fold`."""
    others: dict[str, list[str]] = {}
    for name, first in checkpoint.get(_TIED, {}).items():
        others.setdefault(first, []).append(name)
    return others
