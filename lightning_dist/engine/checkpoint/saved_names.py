"""Names in a state dict that are not those of parameters: hooks of modules may rename.

A module that was once written otherwise has hooks that give its tensors their old names in
checkpoints, and take these names back (``register_state_dict_post_hook``,
``register_load_state_dict_pre_hook``).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, cast

from torch import Tensor, nn

from lightning_dist.engine.tensors.dtensor import shard_like


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


@contextmanager
def sharding_what_is_loaded(module: nn.Module) -> Iterator[None]:
    """Lets a module take whole tensors for sharded parameters: sharded behind hooks that rename."""
    with ExitStack() as undo:
        for part in module.modules():
            handle = part.register_load_state_dict_pre_hook(_shard)
            undo.callback(handle.remove)
        yield


def _shard(part: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for name, parameter in part.named_parameters(recurse=False):
        value = state.get(prefix + name)
        if isinstance(value, Tensor):
            state[prefix + name] = shard_like(value, parameter)
