"""Checkpoints that mean the same under every layout.

A checkpoint is either one ordinary Lightning ``.ckpt`` file, or a directory. If ranks hold parts of
the model, each rank writes its part to the directory:

.. code-block:: text

    epoch=3.ckpt/
      README.txt          how to make one file of it
      lightning.pt        the Lightning checkpoint without its tensors (loads with weights_only)
      .metadata, *.distcp torch distributed checkpoint: model.<name>, optimizer.<i>.<name>.<key>,
                          with a number for the key of what is in a container;
                          current.<name> where the model's are averages;
                          outer_momentum.<name> of an outer optimizer; replica_optimizer.<i>.<...>
                          of replicas that step by themselves

Tensors are keyed by the model's own parameter names, which no layout changes. So any number of
ranks with any partition can read the tensors it needs.
"""

from __future__ import annotations

import io
import os
import shlex
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from fsspec.core import url_to_fs
from torch import Tensor

from lightning_dist.engine.checkpoint import directory, saved_names
from lightning_dist.engine.checkpoint.damaged import naming_damaged_file
from lightning_dist.engine.checkpoint.joint_save import JointSave
from lightning_dist.engine.checkpoint.optimizer_state import join_entries, split_entries, to_numbers
from lightning_dist.engine.checkpoint.places import MARKER, is_local, place_of
from lightning_dist.engine.common.device_group import gather_objects
from lightning_dist.engine.tensors.dtensor import storable

_README = """\
This directory is one checkpoint of lightning_dist: each rank has written the part that it held.
torch.load and load_from_checkpoint read files, and so end with IsADirectoryError here. For one
file, in the directory around this one:

    {command}

Or, in Python: lightning_dist.checkpoint.load_full(path). trainer.fit(module, ckpt_path=path) reads
the directory as it is, with any strategy of lightning_dist and any number of ranks.
"""
SECTIONS = {
    "state_dict": "model",
    "current_model_state": "current",
    "outer_momentum": "outer_momentum",
}
"""Entries with a tensor for a parameter's name: the weights, the latest weights if those are
averages, and the momentum of DiLoCo's outer optimizer."""
REPLICAS = "replica_optimizer_states"
"""The states of the optimizers of all replicas but the first, one replica behind the other, if
replicas step by themselves."""
OPTIMIZERS = {"optimizer_states": "optimizer", REPLICAS: "replica_optimizer"}
"""Entries with a list of optimizers' states."""


def is_sharded(path: str | os.PathLike[str]) -> bool:
    """Returns whether a checkpoint is a directory of shards."""
    return place_of(path).has_checkpoint()


def merge_command(path: str | os.PathLike[str]) -> str:
    """Returns the command line that makes one file of a sharded checkpoint."""
    words = ("python", "-m", "lightning_dist", "merge", os.fspath(path), "whole.ckpt")
    return shlex.join(words)


def load_full(path: str | os.PathLike[str], *, weights_only: bool | None = True) -> dict[str, Any]:
    """Loads a checkpoint of either form in one process.

    Args:
        path: An ordinary Lightning checkpoint file, or a sharded one's directory; or a URL.
        weights_only: As for :func:`torch.load`.

    Returns:
        The ordinary Lightning checkpoint dictionary, tensors on the CPU. It is what
        ``L.Trainer(devices=1)`` writes for the same model.

    Raises:
        FileNotFoundError: There is no checkpoint.
        ValueError: It is damaged.
    """
    if not is_sharded(path):
        files, place = url_to_fs(os.fspath(path if not is_local(path) else directory.resolve(path)))
        if not files.isfile(place):
            raise FileNotFoundError(
                f"{os.fspath(path)!r} is no checkpoint: neither a file nor a directory with"
                f" {MARKER!r}."
            )
        with naming_damaged_file(path), files.open(place, "rb") as file:
            loaded: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=weights_only)
        return loaded
    checkpoint = load_sharded(path, lambda _: True, weights_only=weights_only)
    for key in _present(OPTIMIZERS, checkpoint):
        checkpoint[key] = [to_numbers(state) for state in checkpoint[key]]
    return checkpoint


def load_sharded(
    path: str | os.PathLike[str],
    is_wanted: Callable[[str], bool],
    *,
    parameters: Mapping[str, Tensor] | None = None,
    weights_only: bool | None = True,
    replica: int | None = None,
) -> dict[str, Any]:
    """Loads a part of a sharded checkpoint, without communication.

    Args:
        path: The checkpoint's directory, or its URL.
        is_wanted: Returns whether to load the tensors of a parameter or buffer, by name.
        parameters: Parameters by name; for a DTensor only this rank's shard is read.
        weights_only: As for :func:`torch.load`.
        replica: The replica whose optimizers' states are read beside the first one's, if replicas
            have their own; None reads those of all.

    Returns:
        The Lightning checkpoint dictionary, with optimizer states by parameter name.
    """
    from lightning_dist.engine.checkpoint.shards import empty_like, read_shards  # late, as there

    checkpoint, folder = place_of(path).load_marker(weights_only)
    others = saved_names.with_other_names(checkpoint)
    num_optimizers = len(checkpoint.get("optimizer_states", []))
    by_name = parameters or {}

    def is_key_wanted(key: str) -> bool:
        section, name, _ = _split_key(key)
        kind, _, index = section.rpartition(".")
        is_others = replica is not None and kind == OPTIMIZERS[REPLICAS]
        if is_others and int(index) // num_optimizers + 1 != replica:
            return False
        return any(map(is_wanted, (name, *others.get(name, ()))))

    tensors = read_shards(
        folder, is_key_wanted, lambda key, info: empty_like(info, by_name.get(_split_key(key)[1]))
    )
    found: dict[str, dict[str, dict[str, Tensor]]] = {}
    for key, tensor in tensors.items():
        section, name, entry = _split_key(key)
        found.setdefault(section, {}).setdefault(name, {})[entry] = tensor
    for key in _present(SECTIONS, checkpoint):
        extra = {name: value for name, value in checkpoint[key].items() if is_wanted(name)}
        own = found.get(SECTIONS[key], {})
        checkpoint[key] = {name: entries[""] for name, entries in own.items()} | extra
    for key in _present(OPTIMIZERS, checkpoint):
        for index, state in enumerate(checkpoint[key]):
            rest, tensors_of = state["state"], found.get(f"{OPTIMIZERS[key]}.{index}", {})
            own = {name: tensors_of.get(name, {}) for name in (*rest, *tensors_of)}
            state["state"] = {
                n: join_entries(entries, rest.get(n, {})) for n, entries in own.items()
            }
    saved_names.unfold(checkpoint, SECTIONS)
    return checkpoint


Parts: TypeAlias = tuple[dict[str, Tensor], dict[str, Any]]
"""This rank's tensors, keyed as in the files, and the checkpoint without tensors, of all ranks."""


def save_sharded(
    checkpoint: Mapping[str, Any], path: str | os.PathLike[str], group: dist.ProcessGroup | None
) -> None:
    """Writes the checkpoint of all ranks, or none. Collective: every rank must call it.

    Args:
        checkpoint: This rank's Lightning checkpoint dictionary, optimizer states by name.
        path: The checkpoint's directory or URL, the same on all ranks.
        group: Group of all ranks that save, for CPU tensors; None for a single process.

    Raises:
        NotSavedError: A rank could not write.
        RuntimeError: A rank failed otherwise.
        ValueError: A rank does not see the first rank's disk.
    """
    write_parts(path, group, split_parts(checkpoint, group))


def split_parts(checkpoint: Mapping[str, Any], group: dist.ProcessGroup | None) -> Parts:
    """Returns the parts to write of a checkpoint, as :func:`save_sharded` does. Collective."""
    tensors, rest = _split(checkpoint)
    if group is None:
        return tensors, rest
    lists = _present(OPTIMIZERS, rest)
    own = {key: rest[key] for key in _present(SECTIONS, rest)}
    own |= {key: [{"state": state["state"]} for state in rest[key]] for key in lists}
    whole = _merge(gather_objects(own, group))  # the few entries that are not tensors
    for key in lists:
        pairs = zip(rest[key], whole[key], strict=True)
        whole[key] = [{**state, **merged} for state, merged in pairs]
    return tensors, {**rest, **whole}


def write_parts(
    path: str | os.PathLike[str], group: dist.ProcessGroup | None, parts: Parts
) -> None:
    """Writes the parts of all ranks, or none, as :func:`save_sharded` does. Collective.

    No other group is used. So a thread can write with a group of its own.
    """
    from lightning_dist.engine.checkpoint.shards import write_shards  # its docstring says why here

    (tensors, rest), place, save = parts, place_of(path), JointSave(path, group)
    with save.draft(place) as draft:
        save.step(partial(write_shards, tensors, draft.path, group))
        help_text = _README.format(command=merge_command(os.path.basename(path)))
        save.step_of_first(partial(place.publish, draft, rest, help_text))


def save_full(checkpoint: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Writes an ordinary Lightning checkpoint file; on a disk under a temporary name first.

    Raises:
        NotSavedError: The file system could not store the file.
    """
    if not is_local(path):
        content = io.BytesIO()
        torch.save(dict(checkpoint), content)
        files, place = url_to_fs(os.fspath(path))
        files.pipe_file(place, content.getvalue())
        return
    target = Path(path)
    temporary = directory.temporary_name(target)
    with directory.removed_on_failure(temporary):
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            directory.remove(temporary)  # a killed save of shards has left a directory
            directory.write(temporary, partial(torch.save, dict(checkpoint)))
            directory.publish(temporary, target)
        except Exception as error:
            if directory.storage_error(error) is None:
                raise
            raise directory.NotSavedError(directory.describe_failure(target, error)) from error


def merge_parts(parts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Merges the checkpoints of all ranks, optimizer states by name, into the ordinary one.

    The first rank's other entries stay.
    """
    merged = _merge(parts)
    for key in _present(OPTIMIZERS, merged):
        merged[key] = [to_numbers(state) for state in merged[key]]
    saved_names.unfold(merged, SECTIONS)
    return merged


def _merge(parts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for part in parts:
        if not merged:
            merged = {**part, **{key: {} for key in _present(SECTIONS, part)}}
        for key in _present(SECTIONS, part):
            merged[key].update(part[key])
        for key in _present(OPTIMIZERS, part):
            for whole, state in zip(merged[key], part[key], strict=True):
                whole["state"].update(state["state"])
    return merged


def _present(keys: Iterable[str], checkpoint: Mapping[str, Any]) -> list[str]:
    """Returns those keys that a checkpoint has, in an order that is the same on all ranks."""
    return [key for key in keys if key in checkpoint]


def _split(checkpoint: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Separates the model's and the optimizers' tensors, keyed as in the files, from the rest."""
    tensors: dict[str, Tensor] = {}
    rest = dict(checkpoint)
    for key in _present(SECTIONS, checkpoint):
        rest[key] = {}
        for name, value in checkpoint[key].items():
            if isinstance(value, Tensor):
                tensors[f"{SECTIONS[key]}.{name}"] = storable(value)
            else:
                rest[key][name] = value
    for key in _present(OPTIMIZERS, checkpoint):
        rest[key] = []
        for index, state in enumerate(checkpoint[key]):
            kept: dict[str, dict[Any, Any]] = {}
            for name, entries in state["state"].items():
                own, others = split_entries(entries)
                for entry, value in own.items():
                    tensors[f"{OPTIMIZERS[key]}.{index}.{name}.{entry}"] = storable(value)
                if others:
                    kept[name] = others
            rest[key].append({**state, "state": kept})
    return tensors, rest


def _split_key(key: str) -> tuple[str, str, str]:
    """Returns the section, the parameter's name, and the entry of an optimizer's state."""
    section, _, name = key.partition(".")
    if section in SECTIONS.values():
        return section, name, ""
    index, _, name = name.partition(".")
    name, _, entry = name.rpartition(".")
    return f"{section}.{index}", name, entry
