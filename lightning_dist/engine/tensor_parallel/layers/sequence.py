"""Sequence parallelism: between the regions each rank has a part of the sequence.

(Korthikanti et al., *Reducing Activation Recomputation in Large Transformer Models*, 2022,
section 4.2.2.) The sequence is cut where the first of a stack of blocks begins, and joined where
the last one ends, so that embeddings, positions and the head need not know of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import groupby
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_dist.engine.tensor_parallel.layers import activations
from lightning_dist.engine.tensor_parallel.layers.graph_check import ShardedActivationCheck
from lightning_dist.engine.tensor_parallel.layers.rng import RegionRandomness
from lightning_dist.engine.tensor_parallel.layers.styles import Style
from lightning_dist.engine.tensors.repeated_blocks import repeated_blocks
from lightning_dist.engine.tensors.tree import tensors_in

SEQUENCE_DIM = 1
_ACTIVATION_KEYWORDS = ("hidden_states", "x", "input")


def find_stacks(module: nn.Module) -> list[list[str]]:
    """Returns the stacks of blocks that an activation passes one after the other."""
    blocks = repeated_blocks(module)
    if not blocks:
        raise ValueError(
            "sequence_parallel=True cuts the sequence between the blocks that a model repeats, but"
            " none were found. Put them into an nn.Sequential or nn.ModuleList."
        )
    return [list(stack) for _, stack in groupby(blocks, key=lambda name: name.rpartition(".")[0])]


def cut_sequence(
    first: nn.Module,
    last: nn.Module,
    mesh: DeviceMesh,
    randomness: RegionRandomness,
    crossings: ShardedActivationCheck,
) -> None:
    """Shards the sequence from one block's input to another block's output."""

    def cut(x: Tensor) -> Tensor:
        length, tp_size = x.shape[SEQUENCE_DIM], mesh.size()
        if length % tp_size:
            raise ValueError(
                f"A sequence of {length} cannot be cut into tp_size={tp_size} equal parts, as"
                f" sequence_parallel=True wants it. Pad it to {-(-length // tp_size) * tp_size}, or"
                " leave sequence_parallel out."
            )
        if first.training:
            randomness.enter()
        crossings.mark_sequence(is_cut=True)
        return activations.split(x, mesh, SEQUENCE_DIM)

    def join(_: nn.Module, args: Any, output: Any) -> Any:
        randomness.leave()
        crossings.mark_sequence(is_cut=False)
        first, *rest = (output,) if isinstance(output, Tensor) else output
        whole = activations.gather(first, mesh, SEQUENCE_DIM, of_sequence=True)
        return whole if isinstance(output, Tensor) else (whole, *rest)

    change_activation(first, cut)
    last.register_forward_hook(join)


def change_activation(module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """Changes the activation, the first argument or a usual keyword, of a module's calls."""

    def changed(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        candidates = [*args[:1], *(kwargs.get(keyword) for keyword in _ACTIVATION_KEYWORDS)]
        activation = next((value for value in candidates if isinstance(value, Tensor)), None)
        if activation is not None:
            # The gradient of a second tensor would be partial on each rank.
            if any(t.requires_grad and t is not activation for t in tensors_in((args, kwargs))):
                raise ValueError(
                    f"sequence_parallel=True cuts the sequence for a {type(module).__name__}, but"
                    " it is called with a second tensor that has a gradient, as for"
                    " cross-attention. Leave sequence_parallel out."
                )
            new = change(activation)
            # It can be query, key and value at once.
            args = tuple(new if value is activation else value for value in args)
            return args, {k: new if v is activation else v for k, v in kwargs.items()}
        raise ValueError(
            f"A {type(module).__name__} is called without an activation: neither its first argument"
            f" nor one of the keywords {_ACTIVATION_KEYWORDS} is a tensor. Leave sequence_parallel"
            " out."
        )

    module.register_forward_pre_hook(changed, with_kwargs=True)


def check_blocks(module: nn.Module, blocks: list[str], styles: Mapping[str, Style]) -> None:
    """Checks that no layer in the blocks mixes the positions of a sharded sequence."""
    for block in blocks:
        for inner, part in module.get_submodule(block).named_modules(prefix=block):
            is_known = any(inner == name or inner.startswith(f"{name}.") for name in styles)
            has_matrix = any(p.dim() > 1 for p in part.parameters(recurse=False))
            if has_matrix and not is_known:
                raise ValueError(
                    f"sequence_parallel=True cuts the sequence in {block!r}, but {inner!r} is not"
                    " sharded and may look at all of it. Shard it, or name it 'replicate' if it"
                    " treats each position by itself, or leave sequence_parallel out."
                )
