"""Weights of a checkpoint in the formats that other programs read.

``python -m lightning_dist export IN OUT --format safetensors`` writes the model of any checkpoint.
The weights are mapped from files, so that a process needs the memory of one shard, not that of the
model. ``onnx`` is different: it holds the model.
"""

from __future__ import annotations

import argparse
import importlib
import io
import json
import os
import pickle
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from lightning_dist.engine.checkpoint import directory
from lightning_dist.engine.checkpoint.mapped import load_mapped
from lightning_dist.engine.checkpoint.metadata import reason_of


@dataclass(frozen=True, slots=True)
class Export:
    """What a format's writer is to write.

    Attributes:
        weights: Mapped tensors by name, without the prefix; names of a tied parameter have one.
        checkpoint: The whole checkpoint, without its optimizers' states.
        module: The checkpoint's module, if one was named.
        options: The arguments of the command.
    """

    weights: dict[str, Tensor]
    checkpoint: Mapping[str, Any]
    module: pl.LightningModule | None
    options: argparse.Namespace

    @property
    def ties(self) -> dict[str, str]:
        """First names of tensors by their other names, which share the memory."""
        firsts: dict[Any, str] = {}
        ties = {}
        for name, tensor in self.weights.items():
            place = (tensor.data_ptr(), tensor.shape, tensor.stride())
            first = firsts.setdefault(place if tensor.numel() else name, name)
            if first != name:
                ties[name] = first
        return ties


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command to a parser."""
    add = parser.add_argument
    add("source", metavar="IN", help="a checkpoint: a file, a directory of shards, or a URL")
    add("target", metavar="OUT", help="the file to write; the directory, for hf")
    add("--format", required=True, choices=_WRITERS, help="the format of OUT")
    add("--prefix", default="", help="keep the names with this prefix, and remove it: model.")
    add(
        "--module",
        metavar="recipes.gpt:GPT",
        help="IN's LightningModule; for onnx, and to check IN",
    )
    add(
        "--example",
        metavar="2x128:int64",
        action="append",
        default=[],
        help="shape and dtype of an input of forward, for onnx, once for each input; the first"
        " size, that of the batch, stays open",
    )
    add("--config", type=Path, help="directory of the model's config.json, for hf")
    add("--unpickle", action="store_true", help="trust IN, and load any object that it holds")
    add("--force", action="store_true", help="overwrite OUT if it exists")


def run_export(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """Exports, and returns the exit code."""
    target = Path(options.target)
    if os.path.lexists(target) and not options.force:
        parser.error(f"{target} exists. Name another place, or add --force to overwrite it.")
    if not target.absolute().parent.is_dir():
        parser.error(f"The directory of {target} does not exist. Create it first.")
    for name, needed in _NEEDS.get(options.format, {}).items():
        if not getattr(options, name):
            parser.error(f"--format {options.format} needs --{name}: {needed}.")
    try:
        print(_export(options, target))
    except (ImportError, OSError, ValueError) as error:
        parser.error(str(error))
    except pickle.UnpicklingError as error:
        parser.error(
            f"{options.source} holds other objects than weights (in its hyperparameters, say):"
            f" {reason_of(error)} If you trust it, add --unpickle."
        )
    return 0


def _export(options: argparse.Namespace, target: Path) -> str:
    """Writes under a temporary name, which then becomes the target's; returns what was done."""
    scratch = target.absolute().parent
    checkpoint = load_mapped(options.source, scratch, weights_only=not options.unpickle)
    state = checkpoint["state_dict"]
    module = _build(options, checkpoint) if options.module else None
    export = Export(_select(state, options), checkpoint, module, options)
    temporary = directory.temporary_name(target)
    directory.remove(temporary)
    with directory.removed_on_failure(temporary):
        _WRITERS[options.format](export, temporary)
        directory.publish(temporary, target)
    num_tied, num_left = len(export.ties), len(state) - len(export.weights)
    return (
        f"Wrote {target}: {len(export.weights) - num_tied} tensors. {num_tied} more names are tied"
        f" to one of them, {num_left} entries of the checkpoint were left out."
    )


def _select(state: Mapping[str, Any], options: argparse.Namespace) -> dict[str, Tensor]:
    prefix = options.prefix
    weights = {
        name.removeprefix(prefix): value
        for name, value in state.items()
        if name.startswith(prefix) and isinstance(value, Tensor)
    }
    if not weights:
        raise ValueError(
            f"{options.source} has no tensor whose name begins with --prefix {prefix!r}. Names:"
            f" {', '.join(list(state)[:3]) or 'none'}."
        )
    return weights


def _required(package: str, module: str, extra: str = "export") -> Any:
    """Imports a module of a package that an extra brings.

    Raises:
        ImportError: The package is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"This format needs {package}. Use `pip install 'lightning-dist[{extra}]'`."
        ) from error


# --- the module ----------------------------------------------------------------------------------


def _build(options: argparse.Namespace, checkpoint: Mapping[str, Any]) -> pl.LightningModule:
    """Builds the checkpoint's module as ``load_from_checkpoint`` does, on the mapped weights."""
    path, _, name = options.module.partition(":")
    try:
        cls = getattr(importlib.import_module(path), name)
    except (AttributeError, ImportError, ValueError) as error:
        raise ValueError(f"--module {options.module}: {error}. Use package.file:Class.") from error
    rest = io.BytesIO()
    torch.save({**checkpoint, "state_dict": {}}, rest)
    rest.seek(0)
    # Where the module runs, it needs the buffers that are in no checkpoint, too.
    device = torch.device("cpu" if options.format == "onnx" else "meta")
    try:
        with device, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there are no weights
            module: pl.LightningModule = cls.load_from_checkpoint(
                rest, strict=False, weights_only=False
            )
    except TypeError as error:
        raise ValueError(
            f"--module {options.module} cannot be built from the hyperparameters in"
            f" {options.source}: {error}. Call `self.save_hyperparameters()` in its __init__, or"
            " name the module that was trained."
        ) from error
    _fill(module, checkpoint["state_dict"], options.source)
    return module


def _fill(module: nn.Module, weights: Mapping[str, Any], source: str) -> None:
    """Makes mapped weights a module's own, without a copy.

    Raises:
        ValueError: The weights are those of another model.
    """
    try:
        module.load_state_dict(weights, assign=True)
    except RuntimeError as error:
        lines = [line.strip()[:300] for line in str(error).splitlines()[1:4]]
        raise ValueError(
            f"{source} is a checkpoint of another model than {type(module).__name__}:"
            f" {' '.join(lines)}"
        ) from error


# --- formats -------------------------------------------------------------------------------------


def _write_safetensors(export: Export, target: Path) -> None:
    library = _required("safetensors", "safetensors.torch")
    ties = export.ties
    weights = {n: t.contiguous() for n, t in export.weights.items() if n not in ties}
    saved = export.checkpoint.get(pl.LightningModule.CHECKPOINT_HYPER_PARAMS_KEY, {})
    plain = {
        name: value
        for name, value in saved.items()
        if isinstance(value, bool | int | float | str) and not name.startswith("_")
    }
    # Other names of tied tensors as safetensors' own `save_model` writes them.
    metadata = {"format": "pt", **ties, "hyper_parameters": json.dumps(plain)}
    try:
        library.save_file(weights, target, metadata=metadata)
    except RuntimeError as error:
        raise ValueError(f"safetensors cannot store these tensors: {error}") from error


def _write_torch(export: Export, target: Path) -> None:
    ties = export.ties  # one object each, or a mapped tensor would be written once for each name
    weights = {name: export.weights[ties.get(name, name)] for name in export.weights}
    directory.write(target, lambda file: torch.save(weights, file))


def _write_hf(export: Export, target: Path) -> None:
    transformers = _required("transformers", "transformers", extra="bert")
    folder = export.options.config
    if not (folder / "config.json").is_file():
        raise ValueError(f"--config {folder} has no config.json.")
    config = transformers.AutoConfig.from_pretrained(folder)
    architecture = (config.architectures or ["none"])[0]
    if not hasattr(transformers, architecture):
        raise ValueError(
            f"{folder}/config.json names the architecture {architecture!r}, which transformers does"
            " not have. Write one into it, such as 'GPT2LMHeadModel'."
        )
    with torch.device("meta"):
        model = getattr(transformers, architecture)(config)
    _fill(model, export.weights, export.options.source)
    model.save_pretrained(target)


def _write_onnx(export: Export, target: Path) -> None:
    _required("onnx", "onnx")
    _required("onnxscript", "onnxscript")
    assert export.module is not None
    num_bytes = sum(t.nbytes for n, t in export.weights.items() if n not in export.ties)
    if num_bytes >= _ONNX_BYTES:
        raise ValueError(
            f"The weights take {num_bytes:,} bytes, and a file of ONNX holds fewer than"
            f" {_ONNX_BYTES:,}. Use --format safetensors, or torch.export.save."
        )
    inputs = tuple(map(_example, export.options.example))
    export.module.eval()
    export.module.to_onnx(
        target,
        inputs,
        dynamo=True,
        dynamic_shapes=[{0: torch.export.Dim.DYNAMIC} for _ in inputs],
        external_data=False,
    )


def _example(text: str) -> Tensor:
    """Creates an input of zeros from text such as ``"2x128:int64"``."""
    sizes, _, dtype_name = text.partition(":")
    dtype = getattr(torch, dtype_name or "float32", None)
    numbers = sizes.split("x")
    if not isinstance(dtype, torch.dtype) or not all(n.isdigit() and int(n) for n in numbers):
        raise ValueError(f"--example {text}: use sizes and a dtype, such as 2x128:int64.")
    if int(numbers[0]) < 2:
        raise ValueError(f"--example {text}: use a batch of 2 or more; that of 1 stays fixed.")
    return torch.zeros([int(n) for n in numbers], dtype=dtype)


_WRITERS: Mapping[str, Callable[[Export, Path], None]] = MappingProxyType(
    {
        "safetensors": _write_safetensors,
        "torch": _write_torch,
        "onnx": _write_onnx,
        "hf": _write_hf,
    }
)
_NEEDS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "onnx": {"module": "recipes.gpt:GPT, say", "example": "2x128:int64, say"},
        "hf": {"config": "a directory with the model's config.json"},
    }
)
_ONNX_BYTES = 2**31  # a file of protobuf's is smaller
