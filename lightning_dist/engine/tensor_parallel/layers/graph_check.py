"""See, in the graph of a first loss, that what was apart was put together on the way there.

Inside of a region each rank has features of its own; only the layer that sums up makes of them what
all ranks have. Code around the layers can open other doors: a second output, an attribute that a
loss is made of, a hook, a call of some of the layers. Each rank would train on another loss. So the
graph is walked once, down from the loss, into regions through sums, and out where they begin. It
must not come to features outside of a region, nor inside to a parameter that is whole on each
rank and is not known to meet other features on each: its gradient would be a summand that nobody
adds up. The same goes for the sequence, between where it is joined and where it is cut.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from traceback import extract_tb

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge

from lightning_dist.engine.tensor_parallel.layers.activations import way_of


@dataclass(frozen=True)
class Whole:
    """Parameters that are whole on each rank, by ``id`` and with their names.

    Attributes:
        inside: Those that meet features of a rank's own, so that each has a summand.
        in_blocks: Those that meet a part of the sequence, likewise.
        others: Those that meet the same on all ranks.
    """

    inside: Mapping[int, str]
    in_blocks: Mapping[int, str]
    others: Mapping[int, str]


@dataclass
class ShardedActivationCheck:
    """What a first step has made of the borders of regions.

    Attributes:
        is_noting: Whether it is still to be seen.
        is_open: The layer that has given each rank its own features last, if none has summed up
            over them yet.
    """

    is_noting: bool = True
    is_open: str | None = None
    _is_cut: bool = field(default=False, repr=False)
    _has_backward: bool = field(default=False, repr=False)
    _is_compiled: bool = field(default=False, repr=False)
    _features: dict[Node, str] = field(default_factory=dict, repr=False)

    def begin(self) -> None:
        """Notes that a step begins, whatever has become of the last one."""
        self._is_cut = False
        self.is_open = None

    def begin_backward(self) -> None:
        """Notes that blocks may be called again from now on, the last one first, to recompute."""
        self._has_backward = True

    def end(self) -> None:
        """Notes nothing any more, and lets go of the graph."""
        self.is_noting = False
        self._features.clear()

    def give(self, features: Tensor, layer: str) -> None:
        """Notes features of this rank's own.

        Args:
            features: Just computed.
            layer: Name of the layer that has.
        """
        if torch.compiler.is_compiling():  # no graph of autograd's has what a compiler makes of it
            self._is_compiled = True
        elif self.is_noting:
            self.is_open = layer
            if features.grad_fn is not None:
                self._features[features.grad_fn] = layer

    def sum_up(self) -> None:
        """Notes that a layer sums up over what the last one has given."""
        if self.is_noting and not torch.compiler.is_compiling():
            self.is_open = None

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Explains what goes wrong in a first step with some of the features.

        Yields:
            Nothing.
        """
        try:
            yield
        except (RuntimeError, IndexError) as error:
            is_other = isinstance(error, torch.OutOfMemoryError | torch.distributed.DistError)
            if self.is_open is None or not self.is_noting or is_other or _is_raised_by_user(error):
                raise
            raise ValueError(
                f"Leave {self.is_open!r} and the layers that it goes with out of plan=: it gives"
                " each rank its own features ('colwise'), and before a layer summed up over them"
                f" ('rowwise') the step could not go on: {error}."
            ) from error

    def cut(self) -> None:
        """Notes that each rank has a part of the sequence.

        Raises:
            ValueError: It had one already.
        """
        self._refuse_if(self._is_cut)
        self._is_cut = True

    def join(self) -> None:
        """Notes that the sequence is whole.

        Raises:
            ValueError: It was so before.
        """
        self._refuse_if(not self._is_cut)
        self._is_cut = False

    def check(self, outputs: Iterable[Tensor], whole: Whole) -> None:
        """Checks the graph of a loss, or of what a stage returns.

        Args:
            outputs: Its roots.
            whole: The model's parameters that are whole on each rank.

        Raises:
            ValueError: Something that is apart was not put together, or a gradient would be wrong.
        """
        if self._is_compiled:
            return
        roots = {get_gradient_edge(tensor).node for tensor in outputs if tensor.requires_grad}
        outside, inside = _sides(roots, _SUMS_UP, _ENTERS)
        for node, layer in self._features.items():
            if node in outside:
                raise ValueError(_leak(f"the features of {layer!r}", _REGION))
        for name in _parameters_in(outside, whole.inside):
            raise ValueError(
                f"Leave {name.rpartition('.')[0]!r} out of plan=: the parameter {name!r}, which is"
                " to meet each rank's own features, meets the same on all ranks, so the"
                " ranks' gradients of it would be added up. Only what is between 'colwise' and"
                " 'rowwise' layers is 'local'."
            )
        for name in _parameters_in(inside, whole.others):
            raise ValueError(
                f"Name {name.rpartition('.')[0]!r} 'local' in plan=, or leave the layers around it"
                f" out: the parameter {name!r} meets each rank's own features, {_INSIDE}"
            )
        outside, inside = _sides(roots, _JOINS, _CUTS)
        if any(_CUTS(node) for node in outside):
            raise ValueError(_leak("a part of the sequence", _SEQUENCE))
        for name in _parameters_in(outside if inside else {}, whole.in_blocks):
            raise ValueError(_leak(f"{name!r}, which meets a part of the sequence,", _SEQUENCE))
        for name in _parameters_in(inside, whole.others):
            raise ValueError(f"The parameter {name!r} meets a part of the sequence, {_BETWEEN}")

    def _refuse_if(self, is_wrong: bool) -> None:
        if is_wrong and self.is_noting and not self._has_backward:
            raise ValueError(
                "sequence_parallel=True cuts the sequence before the first of a list of blocks and"
                " joins it behind the last one, but the model's forward calls one of them before"
                " the first, or again before the last. Call them in order, or leave"
                " sequence_parallel out."
            )


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


def _is_raised_by_user(error: Exception) -> bool:
    """Whether an error is of a ``raise`` outside of torch, and not of torch's own code."""
    last = extract_tb(error.__traceback__)[-1]
    is_of_torch = f"{os.sep}torch{os.sep}" in last.filename
    return not is_of_torch and (last.line or "").startswith("raise")


def _leak(what: str, words: tuple[str, str]) -> str:
    fix, why = words
    return f"{fix}: the loss depends on {what} by a way around the sum over the ranks. {why}"


def _is(kind: str) -> Callable[[Node], bool]:
    def is_of_kind(node: Node) -> bool:
        way = way_of(node)
        return way is not None and getattr(way, kind)

    return is_of_kind


_SUMS_UP, _ENTERS, _CUTS, _JOINS = map(_is, ("sums_up", "enters", "cuts", "joins"))


def _sides(
    roots: Collection[Node], goes_in: Callable[[Node], bool], comes_out: Callable[[Node], bool]
) -> tuple[dict[Node, None], dict[Node, None]]:
    """Gives the nodes beneath some that are come to outside of regions, and those inside.

    Args:
        roots: Outside.
        goes_in: Whether what is beneath a node is inside.
        comes_out: Whether what is beneath a node is outside.
    """
    sides: tuple[dict[Node, None], dict[Node, None]] = (dict.fromkeys(roots), {})
    waiting = [(root, 0) for root in roots]
    while waiting:
        node, side = waiting.pop()
        beneath = 1 if goes_in(node) else 0 if comes_out(node) else side
        for child, _ in node.next_functions:
            if child is not None and child not in sides[beneath]:
                sides[beneath][child] = None
                waiting.append((child, beneath))
    return sides


def _parameters_in(nodes: Mapping[Node, None], names: Mapping[int, str]) -> list[str]:
    variables = (getattr(node, "variable", None) for node in nodes)
    return [names[id(variable)] for variable in variables if id(variable) in names]
