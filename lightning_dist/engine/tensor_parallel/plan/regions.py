"""Finds the layers of a plan that form a region: those that open it, and the one that ends it.

A plan names layers one by one. Which of them belong together is not in it, and follows from their
names: the layers of an attention or an MLP are near each other in the module tree.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile

from torch import nn

from lightning_dist.engine.tensor_parallel.layers.projection import input_size, output_size
from lightning_dist.engine.tensor_parallel.layers.styles import Style
from lightning_dist.engine.tensor_parallel.plan.mlp import is_mlp_projection

Styles = Mapping[str, Style]

# Their weight has the query, key and value of one head next to each other, so that a contiguous
# piece of it is whole heads.
_INTERLEAVED = ("query_key_value",)


class Partners:
    """The layers that sum over the sharded features of others.

    A layer's partner is the nearest by name, for a module may list its layers in any order. Of
    equally near layers it is the next one.
    """

    def __init__(self, styles: Styles) -> None:
        self.styles = styles
        self._names = list(styles)
        self._places = {name: place for place, name in enumerate(styles)}
        self._inside: defaultdict[str, list[int]] = defaultdict(list)
        for place, (name, style) in enumerate(styles.items()):
            for path in paths(name) if style.sums_up else ():
                self._inside[path].append(place)

    def of(self, name: str) -> str | None:
        """Returns the layer that sums over the sharded features of another layer."""
        near = next((self._inside[path] for path in paths(name) if path in self._inside), [])
        if not near:
            return None
        following = bisect_left(near, self._places[name])
        return self._names[near[following] if following < len(near) else near[-1]]

    def stacked_in(self, module: nn.Module, name: str) -> int:
        """Returns the number of matrices that a layer's weight stacks.

        Each matrix has as many output features as the layer that sums up has input features.

        Raises:
            ValueError: The matrices are not of one size, so that heads cannot be sharded.
        """
        own = name.rpartition(".")[2]
        if self.styles[name] is not Style.COLWISE or own in _INTERLEAVED:
            return 1
        partner = self.of(name)
        if partner is None:
            return 1
        features = output_size(module.get_submodule(name))
        taken = input_size(module.get_submodule(partner))
        if features > taken and features % taken:
            raise ValueError(
                f"Leave both out of plan=, or split the layer: the {features} output features of"
                f" {name!r} are no multiple of the {taken} input features of {partner!r}, and"
                " queries, keys and values of different sizes in one layer cannot be cut between"
                " heads."
            )
        return max(1, features // taken)


def attentions(styles: Styles) -> list[str]:
    """Lists the modules with projections to heads: those that are not surely of an MLP.

    A block can hold the layers of its MLP beside heads that are not sharded.
    """
    cut = [name.rpartition(".") for name, style in styles.items() if style is Style.COLWISE]
    return list(dict.fromkeys(parent for parent, _, own in cut if not is_mlp_projection(own)))


def head_widths(module: nn.Module, styles: Styles) -> dict[str, int]:
    """Returns the width of all heads of each attention; 0 if no layer sums over the heads."""
    partners = Partners(styles)
    first: dict[str, str] = {}
    for name, style in styles.items():
        if style is Style.COLWISE:
            first.setdefault(name.rpartition(".")[0], name)
    found = {attention: partners.of(first[attention]) for attention in attentions(styles)}
    return {
        attention: 0 if partner is None else input_size(module.get_submodule(partner))
        for attention, partner in found.items()
    }


def holders(module: nn.Module, styles: Styles) -> dict[str, list[str]]:
    """Returns the smallest modules that run whole regions."""
    found: dict[str, list[str]] = {}
    partners = Partners(styles)
    for name, style in styles.items():
        partner = partners.of(name) if style is Style.COLWISE else None
        if partner is None:
            continue
        shared = shared_path(name, partner)
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


def paths(name: str) -> Iterator[str]:
    """Lists a module's name and those of the modules around it, up to the whole model."""
    while name:
        yield name
        name = name.rpartition(".")[0]
    yield ""


def shared_path(name: str, other: str) -> list[str]:
    """Returns the parts with which two dotted names begin alike."""
    pairs = zip(name.split("."), other.split("."), strict=False)
    return [part for part, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)]
