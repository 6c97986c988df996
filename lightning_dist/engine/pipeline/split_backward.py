"""A backward in two parts: gradients of the inputs first, those of the weights when there is time.

The nodes on a way from the outputs to an input are the *chain*. The first part runs the chain, and
keeps the gradients that arrive where ways to the weights leave it (*joints*), or at outputs
beside it. The second part goes on from there. Parameters whose ways begin at the same nodes are one
*branch*, for which the gradients at those nodes suffice. Private functions of
``torch.distributed.pipelining`` lose gradients of parameters that only an output beside the chain
depends on, and fail where a layer stands between two uses of a weight.

Code that torch has compiled is one node, which computes the gradients of its weights with those of
its inputs. So the first part keeps these gradients, and the second part only adds them. To run the
node again would double its work.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle


@dataclass(slots=True, eq=False)
class _Branch:
    """Parameters, and where the ways to them begin: joints, and nodes of outputs off the chain."""

    parameters: list[int]  # indices
    beginnings: dict[Node, None]  # as keys, in order
    # Where the second part goes on instead, if the first part has run these nodes for the weights.
    done: list[tuple[GradientEdge, Tensor]] = field(default_factory=list)


class _BackwardGraph:
    """The nodes between outputs and inputs in the autograd graph."""

    def __init__(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        self._roots = dict.fromkeys(map(node_of, outputs))
        self.parents = _parents_of_all(self._roots)
        self.chain: dict[Node, None] = {}
        waiting = deque(map(node_of, inputs))
        while waiting:
            node = waiting.popleft()
            if node not in self.chain:
                self.chain[node] = None
                waiting += self.parents.get(node, [])

    def branches(self, parameters: Sequence[Tensor]) -> list[_Branch]:
        """Sorts parameters by where the ways to them begin; unused ones are in no branch."""
        found: dict[Node, _Branch] = {}
        for i, parameter in enumerate(parameters):
            branch = _Branch([i], self._beginnings(node_of(parameter)))
            met = {id(known): known for node in branch.beginnings if (known := found.get(node))}
            for known in met.values():
                branch.parameters += known.parameters
                branch.beginnings |= known.beginnings
            found.update(dict.fromkeys(branch.beginnings, branch))
        return list({id(branch): branch for branch in found.values()}.values())

    def _beginnings(self, leaf: Node) -> dict[Node, None]:
        beginnings: dict[Node, None] = {}
        seen = {leaf}
        waiting = deque([leaf])
        while waiting:
            node = waiting.popleft()
            if node in self.chain or node in self._roots:
                beginnings[node] = None
            if node not in self.chain:
                above = dict.fromkeys(self.parents.get(node, []))
                waiting += [parent for parent in above if parent not in seen]
                seen.update(above)
        return beginnings


def node_of(tensor: Tensor) -> Node:
    """Returns the node at which a tensor's gradient arrives."""
    return get_gradient_edge(tensor).node


def nodes_beneath(roots: Iterable[Node]) -> Collection[Node]:
    """Returns all nodes that a backward from some nodes reaches, these included."""
    return _parents_of_all(roots).keys()


def _parents_of_all(roots: Iterable[Node]) -> dict[Node, list[Node]]:
    parents: dict[Node, list[Node]] = {root: [] for root in roots}
    waiting = deque(parents)
    while waiting:
        node = waiting.popleft()
        for child, _ in node.next_functions:
            if child is None:
                continue
            if child not in parents:
                parents[child] = []
                waiting.append(child)
            parents[child].append(node)
    return parents


Arrived = tuple[Tensor | None, ...]


class SplitBackward:
    """The backward of one micro-batch on one stage; see :meth:`.HeldGradients.run`."""

    def __init__(
        self,
        outputs: Sequence[Tensor],
        gradients: Sequence[Tensor],
        inputs: Sequence[Tensor],
        parameters: Mapping[str, Tensor],
    ) -> None:
        self._outputs = list(outputs)
        self._gradients = list(gradients)
        self._inputs = list(inputs)
        self._parameters = list(parameters.values())
        self._branches: list[_Branch] = []
        self._arrived: dict[Node, Arrived] = {}
        self._beside: list[tuple[GradientEdge, Tensor]] = []

    @property
    def given(self) -> list[Tensor]:
        """The gradients that the second part begins with; other code may hold their memory."""
        arrived = [g for at_node in self._arrived.values() for g in at_node if g is not None]
        found = [edge for branch in self._branches for edge in branch.done] + self._beside
        return [*self._gradients, *arrived, *(gradient for _, gradient in found)]

    def run_inputs(self) -> list[Tensor | None]:
        """Runs the first part; returns one gradient for each input."""
        if not self._inputs or not self._outputs:
            return [None] * len(self._inputs)
        graph = _BackwardGraph(self._outputs, self._inputs)
        self._branches = graph.branches(self._parameters)
        joints = [n for branch in self._branches for n in branch.beginnings if n in graph.chain]
        results: dict[Node, Arrived] = {}
        compiled = [node for node in joints if _is_compiled(node)]
        with _hooked(n.register_hook(partial(_note_computed, results, n)) for n in compiled):
            found = self._run_chain(graph, joints)
        self._end_compiled(graph, results)
        kept = {node for branch in self._branches for node in branch.beginnings}
        for output in self._outputs:
            # Other code still holds the output, whose graph is not needed any more.
            if not graph.parents[node_of(output)] and node_of(output) not in kept:
                _cut_off(output)
        self._outputs, self._gradients = [], []
        return found

    def run_weights(self) -> None:
        """Runs the second part, or all if there are no inputs; adds to the parameters' ``grad``."""
        if not self._inputs:
            if self._outputs and self._parameters:
                torch.autograd.backward(self._outputs, self._gradients, inputs=self._parameters)
            return
        # A branch with several joints runs the chain between them, whose buffers the other
        # branches still need: such branches come first, and free nothing.
        for branch in sorted(self._branches, key=lambda b: len(b.beginnings), reverse=True):
            self._run_branch(branch)
        self._branches, self._beside = [], []
        self._arrived.clear()

    def _end_compiled(self, graph: _BackwardGraph, results: Mapping[Node, Arrived]) -> None:
        """Lets branches that begin at compiled nodes only go on behind these nodes."""
        for branch in self._branches:
            if branch.beginnings.keys() <= results.keys():
                branch.done = [
                    (GradientEdge(behind, index), gradient)
                    for node in branch.beginnings
                    for (behind, index), gradient in zip(
                        node.next_functions, results[node], strict=True
                    )
                    if behind is not None and gradient is not None and behind not in graph.chain
                ]
                for node in branch.beginnings:
                    self._arrived.pop(node, None)
                branch.beginnings = {}

    def _run_chain(self, graph: _BackwardGraph, joints: Sequence[Node]) -> list[Tensor | None]:
        outputs: list[Tensor] = []
        gradients: list[Tensor] = []
        for output, gradient in zip(self._outputs, self._gradients, strict=True):
            if node_of(output) in graph.chain:
                outputs.append(output)
                gradients.append(gradient)
            else:
                self._beside.append((get_gradient_edge(output), gradient))
        if not outputs:
            return [None] * len(self._inputs)
        with _hooked(n.register_prehook(partial(self._arrived.__setitem__, n)) for n in joints):
            return list(
                torch.autograd.grad(
                    outputs, self._inputs, gradients, retain_graph=True, allow_unused=True
                )
            )

    def _run_branch(self, branch: _Branch) -> None:
        arrived = {n: self._arrived[n] for n in branch.beginnings if n in self._arrived}
        roots = [
            (GradientEdge(node, i), gradient)
            for node, gradients in arrived.items()
            for i, gradient in enumerate(gradients)
            if gradient is not None
        ]
        roots += branch.done
        roots += [(e, gradient) for e, gradient in self._beside if e.node in branch.beginnings]
        if not roots:
            return
        # What arrives at these nodes again is replaced with the gradients of the first part.
        with _hooked(n.register_prehook(partial(_replaced, g)) for n, g in arrived.items()):
            torch.autograd.backward(
                [edge for edge, _ in roots],
                [gradient for _, gradient in roots],
                retain_graph=len(arrived) > 1,
                inputs=[self._parameters[i] for i in branch.parameters],
            )


def _is_compiled(node: Node) -> bool:
    # torch has no public name for it.
    return type(node).__name__ == "CompiledFunctionBackward"


def _note_computed(results: dict[Node, Arrived], node: Node, computed: Arrived, _: Arrived) -> None:
    results[node] = computed


def _replaced(known: Arrived, _: Arrived) -> Arrived:
    return known


@contextmanager
def _hooked(handles: Iterable[RemovableHandle]) -> Iterator[None]:
    """Registers hooks, and removes them at its end."""
    registered = list(handles)
    try:
        yield
    finally:
        for handle in registered:
            handle.remove()


def _cut_off(output: Tensor) -> None:
    # Autograd detaches no view in place, and a leaf would not require grad any more.
    if not output._is_view() and not output.is_leaf:
        output.detach_()
