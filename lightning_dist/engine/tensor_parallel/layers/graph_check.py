"""Checks, in the autograd graph of a first loss, that sharded activations were summed or gathered.

Code around the layers can bypass the layer that sums up: by a second output, an attribute that
enters the loss, a hook, or a call of some of the layers. Then each rank would train on another
loss. So the graph is walked once, down from the loss, into regions at their sums, and out at their
beginnings. The walk must not reach sharded features outside of a region. Nor may it reach, inside,
a replicated parameter whose partial gradients would not be all-reduced. The same goes for the
sequence, between its gather and its split.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge

from lightning_dist.engine.tensor_parallel.layers.activations import Redistribution


@dataclass(frozen=True)
class ReplicatedParameters:
    """The replicated parameters by ``id``, with their names."""

    inside: dict[int, str]  # meet a rank's own features, so that their gradients are partial
    in_blocks: dict[int, str]  # meet a part of the sequence, with partial gradients, too
    others: dict[int, str]  # meet the same activation on all ranks


class ShardedActivationCheck:
    """Records the borders of regions in a first step, and checks the autograd graph.

    Attributes:
        is_noting: Whether the first step has not ended.
    """

    def __init__(self) -> None:
        self.is_noting = True
        self._is_cut = False
        self._has_backward = False
        self._is_compiled = False
        self._features: dict[Node, str] = {}

    def begin(self) -> None:
        """Begins a step; the last one may have failed."""
        self._is_cut = False

    def begin_backward(self) -> None:
        """Begins the backward, in which blocks may be recomputed, the last block first."""
        self._has_backward = True

    def end(self) -> None:
        """Stops recording, and frees the graph."""
        self.is_noting = False
        self._features.clear()

    def give(self, features: Tensor, layer: str) -> None:
        """Records sharded features."""
        if self.is_noting and features.grad_fn is not None:
            self._features[features.grad_fn] = layer

    def skip(self) -> None:
        """Checks nothing: in compiled code one node of the autograd graph stands for many."""
        self._is_compiled = True

    def mark_sequence(self, *, is_cut: bool) -> None:
        """Records that the sequence is sharded, or gathered; `ValueError` if it was already."""
        if self._is_cut is is_cut and self.is_noting and not self._has_backward:
            raise ValueError(
                "sequence_parallel=True cuts the sequence before the first of a list of blocks and"
                " joins it behind the last one, but the model's forward calls one of them before"
                " the first, or again before the last. Call them in order, or leave"
                " sequence_parallel out."
            )
        self._is_cut = is_cut

    def check(self, outputs: Iterable[Tensor], replicated: ReplicatedParameters) -> None:
        """Checks the autograd graph of a loss, or of a stage's outputs.

        Raises:
            ValueError: A sharded activation was not summed or gathered, or a gradient would be
                wrong.
        """
        if self._is_compiled:
            return
        roots = {get_gradient_edge(tensor).node for tensor in outputs if tensor.requires_grad}
        outside, inside = _sides(roots, lambda r: r.sums_up, lambda r: r.enters)
        for node, layer in self._features.items():
            if node in outside:
                raise ValueError(_leak(f"the features of {layer!r}", _REGION))
        for name in _parameters_in(outside, replicated.inside):
            raise ValueError(
                f"Leave {name.rpartition('.')[0]!r} out of plan=: the parameter {name!r}, which is"
                " to meet each rank's own features, meets the same on all ranks, so the"
                " ranks' gradients of it would be added up. Only what is between 'colwise' and"
                " 'rowwise' layers is 'local'."
            )
        for name in _parameters_in(inside, replicated.others):
            raise ValueError(
                f"Name {name.rpartition('.')[0]!r} 'local' in plan=, or leave the layers around it"
                f" out: the parameter {name!r} meets each rank's own features, {_INSIDE}"
            )
        outside, inside = _sides(roots, lambda r: r.joins, lambda r: r.cuts)
        if any(there is not None and there.cuts for there in map(_redistribution_of, outside)):
            raise ValueError(_leak("a part of the sequence", _SEQUENCE))
        for name in _parameters_in(outside if inside else {}, replicated.in_blocks):
            raise ValueError(_leak(f"{name!r}, which meets a part of the sequence,", _SEQUENCE))
        for name in _parameters_in(inside, replicated.others):
            raise ValueError(f"The parameter {name!r} meets a part of the sequence, {_BETWEEN}")


_REGION = (
    "Leave the layers out of plan=, or make the loss of what the module returns",
    "Each rank has some of the features only, and only the layer that sums up may take them: no"
    " second output, attribute, hook, or call of some of the layers.",
)
_SEQUENCE = (
    "Make the loss of what the last block returns, or leave sequence_parallel out",
    "With sequence_parallel=True only that is whole.",
)
_INSIDE = (
    "between a 'colwise' and a 'rowwise' layer, and the plan does not say so: the ranks' gradients"
    " of it would not be added up."
)
_BETWEEN = (
    "but is in no block, so the ranks' gradients of it would not be added up. Move what uses it"
    " into the blocks or behind the last one, or leave sequence_parallel out."
)


def _leak(what: str, words: tuple[str, str]) -> str:
    fix, why = words
    return f"{fix}: the loss depends on {what} by a way around the sum over the ranks. {why}"


def _redistribution_of(node: Node) -> Redistribution | None:
    found = getattr(node, "redistribution", None)
    return found if isinstance(found, Redistribution) else None


def _sides(
    roots: Collection[Node],
    goes_in: Callable[[Redistribution], bool],
    comes_out: Callable[[Redistribution], bool],
) -> tuple[dict[Node, None], dict[Node, None]]:
    """Returns the nodes that are reached outside of regions, and those reached inside."""
    outside: dict[Node, None] = dict.fromkeys(roots)
    inside: dict[Node, None] = {}
    waiting = [(root, outside) for root in roots]
    while waiting:
        node, side = waiting.pop()
        there = _redistribution_of(node)
        if there is not None:
            side = inside if goes_in(there) else outside if comes_out(there) else side
        for child, _ in node.next_functions:
            if child is not None and child not in side:
                side[child] = None
                waiting.append((child, side))
    return outside, inside


def _parameters_in(nodes: Mapping[Node, None], names: Mapping[int, str]) -> list[str]:
    variables = (getattr(node, "variable", None) for node in nodes)
    return [names[id(variable)] for variable in variables if id(variable) in names]
