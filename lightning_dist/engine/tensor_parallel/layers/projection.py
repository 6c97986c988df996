"""Layers that can be sharded by rows or columns: ``nn.Linear``, GPT-2's ``Conv1D``, embeddings.

The matrix of a ``Conv1D`` is transposed: its rows are the input features. Either can have low-rank
adapters by peft beside it, ``base(x) + scale * lora_B(lora_A(x))``, and is one projection with
them: ``lora_B`` is cut like the base by output features, or ``lora_A`` by input features. The other
one is replicated, with partial gradients, so that an adapter needs no collective in a step.
"""

from __future__ import annotations

import re
from copy import copy
from typing import Any, TypeGuard

import torch.nn.functional as F
from torch import Tensor, nn


def is_token_table(module: nn.Module) -> TypeGuard[nn.Embedding]:
    """Returns whether a module looks each token up by itself, so that its rows can be sharded."""
    if not isinstance(module, nn.Embedding) or "weight" not in module._parameters:
        return False
    # Transformers has embeddings that scale their output, and others that shift the positions
    # in their input.
    is_plain = type(module).forward is nn.Embedding.forward or "Scaled" in type(module).__name__
    # These look at all tokens together, or write to the table.
    return is_plain and not (module.max_norm or module.scale_grad_by_freq or module.sparse)


def look_up(table: nn.Embedding, tokens: Tensor, rows: Tensor, first: int) -> Tensor:
    """Looks tokens up in some rows, with the table's own forward.

    Tokens are indices into these rows, the first of which has the index ``first`` in the table.
    """
    stand_in: Any = copy(table)
    stand_in._parameters = {}
    stand_in.__dict__["weight"] = rows  # it is no parameter
    padding = -1 if table.padding_idx is None else table.padding_idx - first
    stand_in.padding_idx = padding if 0 <= padding < rows.shape[0] else None
    found: Tensor = type(table).forward(stand_in, tokens)
    return found


def is_projection(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Returns whether a module can be sharded by rows or columns."""
    if is_adapted(module):
        return True
    if "weight" not in module._parameters:  # computed, by a parametrization
        return False
    if isinstance(module, nn.Linear):
        # One that computes something else, with an adapter for instance, would lose that.
        is_plain = type(module).forward is nn.Linear.forward
        return is_plain or type(module).__name__ == "FalconLinear"
    return _lies_across(module)


def has_own_forward(module: nn.Module) -> bool:
    """Returns whether a module has a forward of its own instance, as adapters set it."""
    parts = module.modules() if is_adapted(module) else (module,)
    return any("forward" in vars(part) for part in parts)


def is_adapted(module: nn.Module) -> bool:
    """Returns whether a module is a projection with low-rank adapters by peft."""
    # By name, for peft need not be installed. Its other layers compute something else.
    kind = type(module)
    if (kind.__module__, kind.__name__) != ("peft.tuners.lora.layer", "Linear"):
        return False
    ends = map(module.get_submodule, ("lora_A", "lora_B"))
    adapters = [adapter for end in ends for adapter in end.children()]
    are_plain = all(is_projection(part) for part in (module.get_submodule("base_layer"), *adapters))
    # A variant, as DoRA, has a forward of its own. A bias of lora_B would be added on each rank.
    has_variant = bool(vars(module).get("lora_variant"))
    return are_plain and not has_variant and all(part.bias is None for part in adapters)


def projection_name(path: str) -> str:
    """Returns the name of the projection that a layer is, or that it is a part of."""
    return re.sub(r"\.(base_layer|lora_[AB]\.[^.]+)$", "", path)


def cut_parts(layer: nn.Module, *, by_output: bool) -> dict[str, nn.Linear]:
    """Returns the layers whose matrices are cut with a projection, by their paths inside of it.

    A projection without adapters is its only part, with an empty path.
    """
    base: Any = layer._modules.get("base_layer")
    if base is None:
        assert is_projection(layer)
        return {"": layer}
    end = "lora_B" if by_output else "lora_A"
    adapters: Any = layer.get_submodule(end).named_children()
    return {"base_layer": base} | {f"{end}.{name}": adapter for name, adapter in adapters}


def output_dim(layer: nn.Module) -> int:
    """Returns the weight's dim of the output features."""
    return 1 if _lies_across(layer) else 0


def input_dim(layer: nn.Module) -> int:
    """Returns the weight's dim of the input features."""
    return 1 - output_dim(layer)


def output_size(layer: nn.Module) -> int:
    """Returns the number of output features."""
    return _size(layer, output_dim(layer))


def input_size(layer: nn.Module) -> int:
    """Returns the number of input features."""
    return _size(layer, input_dim(layer))


def project(layer: nn.Module, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Returns the output ``(..., out)`` for an input ``(..., in)`` with another weight and bias.

    The layer's class decides whether the weight is transposed.
    """
    return F.linear(x, weight.T if _lies_across(layer) else weight, bias)


def _size(layer: nn.Module, dim: int) -> int:
    assert is_projection(layer)
    return int(layer.weight.shape[dim])


def _lies_across(module: nn.Module) -> bool:
    module = module._modules.get("base_layer") or module
    # By name, for transformers need not be installed.
    return type(module).__name__ == "Conv1D" and isinstance(getattr(module, "nf", None), int)
