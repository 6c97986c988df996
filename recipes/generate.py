"""Greedy generation with a cache of keys and values, on one device, tensor-parallel or in stages.

.. code-block:: bash

    python -m lightning_dist export IN gpt.safetensors --format safetensors --prefix model.
    python -m recipes.generate gpt.safetensors "The statement"
    torchrun --nproc-per-node 2 -m recipes.generate gpt.safetensors "The statement" "A class"

Under torchrun each process is a stage, and reads its own layers only. The prompts are split into
micro-batches, which are at different stages at the same time. No stage waits for a whole batch: a
micro-batch's next token goes back to the first stage as soon as it is known.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import override

from lightning_dist.engine.planning.partition import partition_layers
from recipes.gpt import GPT, Attention, KeyValueCache, build_gpt


@torch.no_grad()
def generate(model: nn.Module, prompts: Tensor, num_tokens: int) -> Tensor:
    """Extends prompts by the likeliest tokens.

    Args:
        model: Maps ``(B, T)`` tokens to ``(B, T, vocab_size)`` logits, with :class:`.Attention`.
        prompts: ``(B, T)`` int64.
        num_tokens: Tokens to add to each prompt.

    Returns:
        The new tokens, ``(B, num_tokens)``.
    """
    caches = new_caches(model, prompts.shape[1] + num_tokens)
    tokens, found = prompts, []
    with caching(model, caches):
        for _ in range(num_tokens):
            tokens = model(tokens)[:, -1:].argmax(dim=-1)
            found.append(tokens)
    return torch.cat(found, dim=1)


@torch.no_grad()
def generate_in_stages(
    stage: nn.Sequential, prompts: Tensor, num_tokens: int, num_microbatches: int
) -> Tensor:
    """Extends prompts by the likeliest tokens, with a stage on each rank. Collective.

    Args:
        stage: This rank's layers, of a model as in :func:`generate`. The first rank has the first.
        prompts: ``(B, T)`` int64, the same on all ranks.
        num_tokens: Tokens to add to each prompt.
        num_microbatches: Parts of the prompts; as many as stages keep all of them at work.

    Returns:
        The new tokens, ``(B, num_tokens)``, on each rank.
    """
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    if not last:
        return generate(stage, prompts, num_tokens)
    first = next(stage.parameters())  # behind the first stage, that of a norm: ``(width,)``
    parts = prompts.chunk(num_microbatches)
    length = prompts.shape[1]
    caches = [new_caches(stage, length + num_tokens) for _ in parts]
    found = torch.empty(len(prompts), num_tokens, dtype=torch.int64)
    columns = found.split([len(part) for part in parts])
    sends: list[Any] = [None] * len(parts)
    for step in range(num_tokens):
        for index, part in enumerate(parts):
            if rank == 0:
                x = part if step == 0 else _receive((len(part), 1), torch.int64, last)
            else:
                shape = (len(part), length if step == 0 else 1, len(first))
                x = _receive(shape, first.dtype, rank - 1)
            with caching(stage, caches[index]):
                x = stage(x)
            if rank == last:
                x = x[:, -1:].argmax(dim=-1)
                columns[index][:, step : step + 1] = x
                if step == num_tokens - 1:
                    continue
            if sends[index] is not None:  # it has arrived: this micro-batch has been around
                sends[index].wait()
            sends[index] = dist.isend(x.contiguous(), (rank + 1) % (last + 1))
    for send in sends:
        if send is not None:
            send.wait()
    dist.broadcast(found, src=last)
    return found


def _receive(shape: tuple[int, ...], dtype: torch.dtype, source: int) -> Tensor:
    received = torch.empty(shape, dtype=dtype)
    dist.recv(received, source)
    return received


def new_caches(model: nn.Module, num_positions: int) -> list[KeyValueCache]:
    """Creates an empty cache for each attention of a model."""
    return [KeyValueCache(num_positions) for _ in _attentions(model)]


@contextmanager
def caching(model: nn.Module, caches: Sequence[KeyValueCache]) -> Iterator[None]:
    """Returns a context manager in which a model's attentions go on behind their caches."""
    attentions = _attentions(model)
    for attention, cache in zip(attentions, caches, strict=True):
        attention.cache = cache
    try:
        yield
    finally:
        for attention in attentions:
            attention.cache = None


def _attentions(model: nn.Module) -> list[Attention]:
    return [module for module in model.modules() if isinstance(module, Attention)]


class TextGenerator(GPT):
    """A GPT whose predictions are what follows its inputs.

    Args:
        num_tokens: Tokens to add to each input.
        sizes: Arguments of :class:`.GPT`.
    """

    def __init__(self, num_tokens: int = 64, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.num_tokens = num_tokens

    @override
    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return generate(self.model, batch[0], self.num_tokens)


def load_exported(path: str | Path, stage: int = 0, num_stages: int = 1) -> nn.Sequential:
    """Reads a GPT that ``export --format safetensors --prefix model.`` has written.

    Args:
        path: The file.
        stage: The part of the layers to read.
        num_stages: Parts, which have about equally many parameters.

    Raises:
        ImportError: safetensors is not installed.
        ValueError: The file is no exported GPT, or has fewer layers than stages.
    """
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise ImportError(
            "An exported model needs safetensors. Use `pip install 'lightning-dist[export]'`."
        ) from error
    if not Path(path).is_file():
        raise ValueError(f"There is no file {path}.")
    try:
        with safe_open(path, framework="pt") as file:
            saved = json.loads((file.metadata() or {}).get("hyper_parameters", "{}"))
            sizes = {name: saved[name] for name in ("width", "depth", "num_heads")}
            with torch.device("meta"):
                model = build_gpt(**sizes)
            counts = [sum(p.numel() for p in layer.parameters()) for layer in model]
            parts = partition_layers(counts, num_stages)
            first = sum(parts[:stage])
            layers = model[first : first + parts[stage]]
            own = {name: file.get_tensor(name) for name in layers.state_dict()}
        layers.load_state_dict(own, assign=True)
    except (KeyError, RuntimeError, SafetensorError) as error:
        raise ValueError(
            f"{path} is no GPT of this recipe: {str(error).splitlines()[0]}. Export a checkpoint of"
            " one with --format safetensors --prefix model."
        ) from error
    return layers.eval()


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(prog="python -m recipes.generate")
    parser.add_argument("model", help="a GPT that was exported as safetensors")
    parser.add_argument("prompts", nargs="+", help="texts; cut to the length of the shortest")
    parser.add_argument("--tokens", type=int, default=80, help="bytes to add to each")
    options = parser.parse_args(arguments)
    num_stages, stage = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    texts = [text.encode() for text in options.prompts]
    length = min(map(len, texts))
    if not length or options.tokens < 1:
        parser.error("Each prompt needs a byte or more, and so do --tokens.")
    prompts = torch.tensor([list(text[:length]) for text in texts])
    if num_stages > 1:
        dist.init_process_group("gloo")
    try:
        layers = load_exported(options.model, stage, num_stages)
    except (ImportError, ValueError) as error:
        parser.error(str(error))
    if num_stages > 1:
        found = generate_in_stages(layers, prompts, options.tokens, num_stages)
        dist.destroy_process_group()
    else:
        found = generate(layers, prompts, options.tokens)
    if stage == 0:
        for text in torch.cat([prompts, found], dim=1).tolist():
            print(bytes(text).decode(errors="replace"), end="\n\n")


if __name__ == "__main__":
    main()
