"""Finds the replicated parameters whose gradients are partial on each rank.

A replicated parameter has its whole gradient on each rank, unless it meets sharded activations: the
features of a region, or a part of the sequence. Then its gradient is the sum over the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from torch import Tensor, nn

from lightning_dist.engine.tensor_parallel.layers.projection import is_projection, projection_name
from lightning_dist.engine.tensor_parallel.layers.styles import Style


def find_partial_gradients(
    module: nn.Module, styles: Mapping[str, Style], is_in_block: Callable[[str], bool]
) -> list[str]:
    """Lists the parameters, sharded ones too, whose gradients would be partial if replicated.

    A tied parameter is listed under all names, for a rank's part of the model may lack the first.
    """
    found: list[str] = []
    for name, _ in module.named_parameters(remove_duplicate=False):
        path, _, attribute = name.rpartition(".")
        parts = path.split(".")
        ancestors = {".".join(parts[: i + 1]) for i in range(len(parts))}
        is_local = any(styles.get(ancestor) is Style.LOCAL for ancestor in ancestors)
        projection = projection_name(path)
        style = styles.get(projection)
        is_stacked_bias = attribute == "bias" and style is Style.COLWISE
        # The matrix of an adapter that is not cut, beside one that is.
        ends = path.removeprefix(projection).split(".")[1:2]
        is_beside = ends == ["lora_A"] if style is Style.COLWISE else ends == ["lora_B"]
        is_adapter = style is not None and style.cuts_a_matrix and is_beside
        if is_local or is_stacked_bias or is_adapter or is_in_block(name):
            found.append(name)
    return found


def check_shared(module: nn.Module, would_be_partial: list[str], cuts: Collection[str]) -> None:
    """Checks that no gradient is partial at one of a parameter's uses, and whole at another.

    In the sum of both, the partial part could not be separated.
    """
    names: dict[Tensor, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    for shared in names.values():
        if any(name in cuts for name in shared):
            continue
        partial = [name for name in shared if name in would_be_partial]
        whole = [name for name in shared if name not in would_be_partial]
        if partial and whole:
            raise ValueError(
                "Untie two layers, or leave sequence_parallel or the style 'local' out:"
                f" {partial[0]!r} and {whole[0]!r} are one parameter, but ranks meet different"
                " activations at the first (a part of the features or of the sequence) and the same"
                " ones at the second, so its gradient could not be added up."
            )


def check_tied(module: nn.Module, styles: Mapping[str, Style], cuts: Collection[str]) -> None:
    """Checks that no layer computes with a whole weight that is sharded in another layer."""
    cut = {module.get_parameter(name): name for name in cuts}
    for path, part in module.named_modules():
        computes = is_projection(part) or isinstance(part, nn.Embedding)
        weight = part._parameters.get("weight")
        is_named = path in styles or projection_name(path) in styles
        if computes and not is_named and weight is not None and weight in cut:
            other = cut[weight].rpartition(".")[0]
            style = "vocab" if isinstance(part, nn.Embedding) else "colwise_gather"
            raise ValueError(
                f"Name {path!r} in plan=, too, as {style!r} say, or leave {other!r} out: they have"
                f" one weight, and by the plan each rank has a part of it in {other!r}"
                f" ({styles[other].value!r}) and all of it in {path!r}."
            )
