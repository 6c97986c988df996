"""Finds the two projections of an MLP by their usual names, or by their order in an nn.Sequential.

The modules between them must treat each feature by itself. An ``nn.Sequential`` shows these
modules. Elsewhere no other parameter may be as wide as the hidden features, or be a single number,
as that of a learned activation: its gradient would be partial on each rank.
"""

from __future__ import annotations

from torch import nn

from lightning_dist.engine.tensor_parallel.layers.projection import (
    input_size,
    is_projection,
    output_size,
)
from lightning_dist.engine.tensor_parallel.layers.styles import Style
from lightning_dist.engine.tensors.module_tree import dotted

_PAIRS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("gate_proj", "up_proj"), "down_proj"),
    (("gate_up_proj",), "down_proj"),
    (("up_proj",), "down_proj"),
    (("gate", "up"), "down"),
    (("gate_up",), "down"),
    (("up",), "down"),
    (("w1", "w3"), "w2"),
    (("w1",), "w2"),
    (("wi_0", "wi_1"), "wo"),
    (("wi",), "wo"),
    (("Wi",), "Wo"),
    (("c_fc_0", "c_fc_1"), "c_proj"),
    (("c_fc",), "c_proj"),
    (("fc1",), "fc2"),
    (("fc_in",), "fc_out"),
    (("linear1",), "linear2"),
    (("linear_fc1",), "linear_fc2"),
    (("lin1",), "lin2"),
    (("dense_h_to_4h",), "dense_4h_to_h"),
    (("intermediate.dense",), "output.dense"),
)
_STACKS_GATE = ("gate_up_proj", "gate_up", "Wi")
_FEATUREWISE = (
    nn.GELU,
    nn.ReLU,
    nn.ReLU6,
    nn.SiLU,
    nn.Mish,
    nn.Tanh,
    nn.Sigmoid,
    nn.ELU,
    nn.SELU,
    nn.LeakyReLU,
    nn.Hardswish,
    nn.Softplus,
    nn.Dropout,
    nn.Identity,
)


def is_mlp_projection(own_name: str) -> bool:
    """Returns whether a layer's own name is that of the first projection of an MLP."""
    return any(own_name in ups for ups, _ in _PAIRS)


def find_mlp(root: nn.Module, name: str) -> tuple[dict[str, Style], dict[str, str]]:
    """Returns the styles of an MLP's projections, or else why not, by layer name.

    Both are empty for no MLP.
    """
    mlp = root.get_submodule(name)
    if isinstance(mlp, nn.Sequential):
        ups, down = _in_sequence(mlp)
    else:
        ups, down = next((pair for pair in _PAIRS if _holds(mlp, *pair)), ((), ""))
    if not ups:
        return {}, {}
    if not _sizes_agree(mlp, ups, down):
        reason = f"{' and '.join(ups)} do not give what {down} takes, or not as it takes it"
    elif not isinstance(mlp, nn.Sequential) and not _is_featurewise(mlp, ups, down):
        reason = f"other parameters beside {ups[0]} and {down} may be of hidden features"
    else:
        styles = {dotted(name, up): Style.COLWISE for up in ups}
        return styles | {dotted(name, down): Style.ROWWISE}, {}
    return {}, {dotted(name, layer): reason for layer in (*ups, down)}


def _is_featurewise(mlp: nn.Module, ups: tuple[str, ...], down: str) -> bool:
    """Returns whether no other parameter in a module seems to belong to the hidden features."""
    parts = dict(mlp.named_modules())
    hidden, width = input_size(parts[down]), output_size(parts[down])
    own = {parameter for name in (*ups, down) for parameter in parts[name].parameters()}
    for name, parameter in mlp.named_parameters():
        if parameter in own or "att" in name.rpartition(".")[0].lower():
            continue
        is_of_width = parameter.shape == (width,) and width != hidden
        if not is_of_width and (parameter.dim() < 2 or hidden in parameter.shape):
            return False
    return True


def _holds(mlp: nn.Module, ups: tuple[str, ...], down: str) -> bool:
    parts = dict(mlp.named_modules())
    return all(name in parts and is_projection(parts[name]) for name in (*ups, down))


def _in_sequence(mlp: nn.Sequential) -> tuple[tuple[str, ...], str]:
    names, parts = list(mlp._modules), list(mlp)
    places = [index for index, part in enumerate(parts) if is_projection(part)]
    if len(places) != 2:
        return (), ""
    first, second = places
    between = parts[first + 1 : second]
    if not all(type(part) in _FEATUREWISE for part in between):
        return (), ""
    return (names[first],), names[second]


def _sizes_agree(mlp: nn.Module, ups: tuple[str, ...], down: str) -> bool:
    hidden = input_size(mlp.get_submodule(down))
    width = output_size(mlp.get_submodule(down))
    wanted = 2 * hidden if ups[0] in _STACKS_GATE else hidden
    layers = [mlp.get_submodule(up) for up in ups]
    return all(output_size(up) == wanted and input_size(up) == width for up in layers)
