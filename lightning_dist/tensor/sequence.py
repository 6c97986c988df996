"""Sequence parallelism: between the regions each rank has a part of the sequence.

(Korthikanti et al., *Reducing Activation Recomputation in Large Transformer Models*, 2022,
section 4.2.2.) The sequence is cut where the first of a stack of blocks begins, and joined where
the last one ends, so that embeddings, positions and the head need not know of it.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_dist.repeated_blocks import repeated_blocks
from lightning_dist.tensor import boundary
from lightning_dist.tensor.randomness import RegionRandomness

SEQUENCE_DIM = 1
_ACTIVATION_KEYWORDS = ("hidden_states", "x", "input")


def find_stacks(module: nn.Module) -> list[list[str]]:
    """Finds the stacks of blocks that an activation goes through one after the other.

    Args:
        module: The model.

    Returns:
        Names of the blocks of each stack.

    Raises:
        ValueError: The model repeats no block.
    """
    blocks = repeated_blocks(module)
    if not blocks:
        raise ValueError(
            "sequence_parallel=True cuts the sequence between the blocks that a model repeats, but"
            " none were found. Put them into an nn.Sequential or nn.ModuleList."
        )
    return [list(stack) for _, stack in groupby(blocks, key=lambda name: name.rpartition(".")[0])]


def cut_sequence(
    first: nn.Module, last: nn.Module, mesh: DeviceMesh, randomness: RegionRandomness
) -> None:
    """Gives each rank a part of the sequence from one block's input to another one's output.

    Args:
        first: Where the sequence is cut.
        last: Where it is joined.
        mesh: The tensor-parallel ranks.
        randomness: Of this rank.
    """

    def cut(x: Tensor) -> Tensor:
        check_length(x.shape[SEQUENCE_DIM], mesh.size())
        if first.training:
            randomness.enter()
        return boundary.split(x, mesh, SEQUENCE_DIM)

    def join(_: nn.Module, args: Any, output: Any) -> Any:
        randomness.leave()
        first, *rest = (output,) if isinstance(output, Tensor) else output
        whole = boundary.gather(first, mesh, SEQUENCE_DIM).clone()  # FSDP2 wants no view of a unit
        return whole if isinstance(output, Tensor) else (whole, *rest)

    change_activation(first, cut)
    last.register_forward_hook(join)


def check_length(length: int, tp_size: int) -> None:
    """Checks that a sequence can be cut.

    Args:
        length: Of the sequence.
        tp_size: Tensor-parallel ranks.

    Raises:
        ValueError: It cannot.
    """
    if length % tp_size:
        raise ValueError(
            f"A sequence of {length} cannot be cut into tp_size={tp_size} equal parts, as"
            f" sequence_parallel=True wants it. Pad it to {-(-length // tp_size) * tp_size}, or"
            " leave sequence_parallel out."
        )


def change_activation(module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """Changes the activation that a module is called with.

    Args:
        module: Takes it as its first argument, or by one of the usual keywords.
        change: Given the activation.
    """

    def changed(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args and isinstance(args[0], Tensor):
            return (change(args[0]), *args[1:]), kwargs
        for keyword in _ACTIVATION_KEYWORDS:
            if isinstance(kwargs.get(keyword), Tensor):
                return args, {**kwargs, keyword: change(kwargs[keyword])}
        raise ValueError(
            f"A {type(module).__name__} is called without an activation: neither its first argument"
            f" nor one of the keywords {_ACTIVATION_KEYWORDS} is a tensor. Leave sequence_parallel"
            " out."
        )

    module.register_forward_pre_hook(changed, with_kwargs=True)
