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
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from lightning_dist.engine.checkpoint import directory
from lightning_dist.engine.checkpoint.mapped import load_mapped


@dataclass(frozen=True, slots=True)
class Export:
    """What a format's writer is to write: mapped tensors by their names without the prefix."""

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
    """Adds the arguments of the command to a parser, beside IN and OUT."""
    add = parser.add_argument
    add("--format", required=True, choices=_WRITERS, help="the format of OUT")
    add("--prefix", default="", help="keep the names with this prefix, and remove it: model.")
    add("--module", metavar="recipes.gpt:GPT", help="IN's class, for onnx, or to check IN")
    what = "shape and dtype of an input, for onnx; may be repeated; batches stay open"
    add("--example", metavar="2x128:int64", action="append", default=[], help=what)
    add("--config", type=Path, metavar="DIR", help="has the model's config.json, for hf")


def replaceable_files(options: argparse.Namespace) -> Sequence[str]:
    """Returns the patterns of the files of which OUT may consist, if it is a directory."""
    return _HF_FILES if options.format == "hf" else ()


def run_export(options: argparse.Namespace) -> str:
    """Exports under a temporary name, which then becomes the target's; returns what was written.

    Raises:
        ImportError: The format needs a package that is not installed.
        OSError: A file could not be read or written.
        ValueError: The checkpoint or an argument does not suit the format.
    """
    if options.format == "onnx" and not (options.module and options.example):
        raise ValueError("--format onnx needs --module recipes.gpt:GPT and --example 2x128:int64.")
    if options.format == "hf" and not options.config:
        raise ValueError("--format hf needs --config DIR, with the model's config.json.")
    target = Path(options.target)
    scratch = target.absolute().parent
    if not scratch.is_dir():
        raise ValueError(f"There is no directory {scratch}. Create it first.")
    checkpoint = load_mapped(options.source, scratch, weights_only=not options.unpickle)
    state = checkpoint["state_dict"]
    if options.module or options.format == "hf":
        _check_base(state, options.source)
    module = _build(options, checkpoint) if options.module else None
    export = Export(_select(state, options), checkpoint, module, options)
    temporary = directory.temporary_name(target)
    directory.remove(temporary)
    with directory.removed_on_failure(temporary):
        _WRITERS[options.format](export, temporary)
        directory.publish(temporary, target, replaceable_files(options))
    num_tied, num_left = len(export.ties), len(state) - len(export.weights)
    return (
        f"{len(export.weights) - num_tied} tensors. {num_tied} more names are tied to one of them,"
        f" {num_left} entries of the checkpoint were left out"
    )


def _check_base(state: Mapping[str, Any], source: str) -> None:
    """Checks that low-rank adapters have their base beside them."""
    adapter = next((name for name in state if ".lora_A." in name), None)
    if adapter is not None and not any(".base_layer." in name for name in state):
        raise ValueError(
            f"{source} has adapters without their base, such as {adapter!r}. Load them in your"
            " module, call `merge_and_unload()` of its peft model, and save its whole state; or"
            " export the adapters alone, as safetensors or torch and without --module."
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
    """Imports a module of a package that an extra brings."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"This format needs {package}. Use `pip install 'lightning-dist[{extra}]'`."
        ) from error


def _build(options: argparse.Namespace, checkpoint: Mapping[str, Any]) -> pl.LightningModule:
    """Builds the checkpoint's module as ``load_from_checkpoint`` does, on the mapped weights."""
    path, _, name = options.module.partition(":")
    try:
        cls = getattr(importlib.import_module(path), name)
    except (AttributeError, ImportError, ValueError) as error:
        raise ValueError(f"--module {options.module}: {error}. Use package.file:Class.") from error
    if not isinstance(cls, type) or not issubclass(cls, pl.LightningModule):
        raise ValueError(
            f"--module {options.module} is no LightningModule. Name the class that was trained."
        )
    rest = io.BytesIO()
    version = {"pytorch-lightning_version": pl.__version__}
    torch.save({**version, **checkpoint, "state_dict": {}}, rest)
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
    except ValueError as error:  # of Lightning, which reads the class that its command line noted
        raise ValueError(
            f"{options.source} is a checkpoint of another model than {name}:"
            f" {str(error).partition('. ')[0]}."
        ) from error
    _fill(module, checkpoint["state_dict"], options.source)
    return module


def _fill(module: nn.Module, weights: Mapping[str, Any], source: str) -> None:
    """Makes mapped weights a module's own, without a copy; refuses those of another model."""
    try:
        module.load_state_dict(weights, assign=True)
    except RuntimeError as error:
        lines = [line.strip()[:300] for line in str(error).splitlines()[1:4]]
        raise ValueError(
            f"{source} is a checkpoint of another model than {type(module).__name__}:"
            f" {' '.join(lines)}"
        ) from error


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
        raise ValueError(f"--config {folder} has no config.json. Name the model's directory.")
    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
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
    try:
        export.module.to_onnx(
            target,
            inputs,
            dynamo=True,
            dynamic_shapes=[{0: torch.export.Dim.DYNAMIC} for _ in inputs],
            external_data=False,
        )
    except RuntimeError as error:
        cause = error.__cause__ or error
        raise ValueError(
            f"--module {export.options.module} cannot be exported with --example"
            f" {' '.join(export.options.example)}: {str(cause).splitlines()[0]}"
        ) from error


def _example(text: str) -> Tensor:
    """Creates an input of zeros from text such as ``"2x128:int64"``."""
    sizes, _, dtype_name = text.partition(":")
    dtype = getattr(torch, dtype_name or "float32", None)
    numbers = sizes.split("x")
    is_dtype = isinstance(dtype, torch.dtype) and not str(dtype).startswith("torch.q")
    if not is_dtype or not all(n.isdigit() and int(n) for n in numbers):
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
_HF_FILES = ("config.json", "generation_config.json", "model*.safetensors*")  # of save_pretrained
_ONNX_BYTES = 2**31  # a file of protobuf's is smaller
