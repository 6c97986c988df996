"""Finds the layers of a plan that form a region: those that open it, and the one that ends it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile

from torch import nn

from lightning_dist.engine.tensor_parallel.layers.projection import input_size, output_size
from lightning_dist.engine.tensor_parallel.layers.styles import Style
from lightning_dist.engine.tensor_parallel.plan.mlp import is_mlp_projection

Styles = Mapping[str, Style]

# Their weight has the query, key and value of one head next to each other, so that a contiguous
# piece of it is whole heads.
_INTERLEAVED = ("query_key_value",)


def partner_of(styles: Styles, name: str) -> str | None:
    """Returns the layer that sums over the sharded features of another layer.

    It is the nearest by name, for a module may list its layers in any order. Of equally near layers
    it is the next one.
    """
    places = {other: place for place, other in enumerate(styles)}
    parts = name.split(".")

    def distance(other: str) -> tuple[int, bool, int]:
        after = places[other] - places[name]
        return -len(_shared(parts, other.split("."))), after < 0, abs(after)

    return min((other for other in styles if styles[other].sums_up), key=distance, default=None)


def stacked_in(module: nn.Module, styles: Styles, name: str) -> int:
    """Returns the number of matrices that a layer's weight stacks.

    Each matrix has as many output features as the layer that sums up has input features.

    Raises:
        ValueError: The matrices are not of one size, so that heads cannot be sharded.
    """
    path, _, own = name.rpartition(".")
    if styles[name] is not Style.COLWISE or own in _INTERLEAVED:
        return 1
    partner = partner_of(styles, name)
    if partner is None:
        return 1
    features = output_size(module.get_submodule(name))
    taken = input_size(module.get_submodule(partner))
    if features > taken and features % taken:
        raise ValueError(
            f"Leave both out of plan=, or split the layer: the {features} output features of"
            f" {name!r} are no multiple of the {taken} input features of {partner!r}, and queries,"
            " keys and values of different sizes in one layer cannot be cut between heads."
        )
    return max(1, features // taken)


def attentions(styles: Styles) -> list[str]:
    """Lists the modules with projections to heads: those that are not surely of an MLP.

    A block can hold the layers of its MLP beside heads that are not sharded.
    """
    cut = [name.rpartition(".") for name, style in styles.items() if style is Style.COLWISE]
    return list(dict.fromkeys(parent for parent, _, own in cut if not is_mlp_projection(own)))


def head_features(module: nn.Module, styles: Styles, attention: str) -> int:
    """Returns the width of all heads of an attention; 0 if no layer sums over the heads."""
    first = next(
        name
        for name, style in styles.items()
        if style is Style.COLWISE and name.rpartition(".")[0] == attention
    )
    partner = partner_of(styles, first)
    return 0 if partner is None else input_size(module.get_submodule(partner))


def holders(module: nn.Module, styles: Styles) -> dict[str, list[str]]:
    """Returns the smallest modules that run whole regions."""
    found: dict[str, list[str]] = {}
    for name, style in styles.items():
        partner = partner_of(styles, name) if style is Style.COLWISE else None
        if partner is None:
            continue
        shared = _shared(name.split("."), partner.split("."))
        while shared and _only_holds(module.get_submodule(".".join(shared))):
            shared.pop()
        holder = ".".join(shared)
        found.setdefault(holder, []).extend([name, partner])
    return {holder: list(dict.fromkeys(names)) for holder, names in found.items()}


def opens_early(root: nn.Module, parent: str, blocks: Sequence[str]) -> bool:
    """Returns whether the module around some layers gets the whole sequence, and not each layer.

    Such a module may read the length of its input. A block has norms to compute before, and a mere
    container is never called.
    """
    return parent not in blocks and not _only_holds(root.get_submodule(parent))


def _only_holds(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList | nn.ModuleDict)


def _shared(parts: list[str], others: list[str]) -> list[str]:
    pairs = zip(parts, others, strict=False)
    return [part for part, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)]
