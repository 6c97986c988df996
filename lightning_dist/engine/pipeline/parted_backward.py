"""A backward in two parts: gradients of the inputs first, those of the weights when there is time.

Asking autograd twice would compute the chain through the layers twice. The first part runs the
chain alone, and keeps what arrives where the ways to the weights leave it; the second goes on from
there. ``torch.distributed.pipelining`` has private functions for that, but they lose the gradients
of what only an output beside the chain depends on, fail where a layer stands between two uses of a
weight, and before torch 2.13 count some gradients of such weights twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from lightning_dist.engine.pipeline.backward_graph import BackwardGraph, Branch, node_of

Arrived = tuple[Tensor | None, ...]


class PartedBackward:
    """The backward of one micro-batch on one stage.

    Args:
        outputs: Roots of the graph.
        gradients: One for each of them.
        inputs: Leaves that are no parameters.
        parameters: The stage's trainable ones by name.
    """

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
        self._branches: list[Branch] = []
        self._arrived: dict[Node, Arrived] = {}
        self._beside: list[tuple[GradientEdge, Tensor]] = []

    @property
    def given(self) -> list[Tensor]:
        """What is left to go on from: gradients that others hold, or have memory of."""
        arrived = [g for at_node in self._arrived.values() for g in at_node if g is not None]
        return [*self._gradients, *arrived, *(gradient for _, gradient in self._beside)]

    def run_inputs(self) -> list[Tensor | None]:
        """Runs the first part.

        Returns:
            One gradient for each input.
        """
        if not self._inputs or not self._outputs:
            return [None] * len(self._inputs)
        graph = BackwardGraph(self._outputs, self._inputs)
        self._branches = graph.branches(self._parameters)
        kept = {node for branch in self._branches for node in branch.beginnings}
        found = self._run_chain(graph, [node for node in kept if graph.is_on_chain(node)])
        for output in self._outputs:
            # Others hold it still, and the graph behind it is not needed any more.
            if graph.is_top(node_of(output)) and node_of(output) not in kept:
                _cut_off(output)
        self._outputs, self._gradients = [], []
        return found

    def run_weights(self) -> None:
        """Runs the second part, which adds to the parameters' ``grad``; without inputs, all."""
        if not self._inputs:
            self._run_whole()
            return
        # From one of several joints a backward passes the chain down to the next, where what the
        # other branches need must still be: these come first, and free nothing.
        for branch in sorted(self._branches, key=lambda b: len(b.beginnings), reverse=True):
            self._run_branch(branch)
        self._branches, self._beside = [], []
        self._arrived.clear()

    def _run_chain(self, graph: BackwardGraph, joints: Sequence[Node]) -> list[Tensor | None]:
        outputs: list[Tensor] = []
        gradients: list[Tensor] = []
        for output, gradient in zip(self._outputs, self._gradients, strict=True):
            if graph.is_on_chain(node_of(output)):
                outputs.append(output)
                gradients.append(gradient)
            else:
                self._beside.append((get_gradient_edge(output), gradient))
        if not outputs:
            return [None] * len(self._inputs)
        with _noted(joints, self._arrived):
            return list(
                torch.autograd.grad(
                    outputs, self._inputs, gradients, retain_graph=True, allow_unused=True
                )
            )

    def _run_branch(self, branch: Branch) -> None:
        arrived = {n: self._arrived[n] for n in branch.beginnings if n in self._arrived}
        roots = [
            (GradientEdge(node, i), gradient)
            for node, gradients in arrived.items()
            for i, gradient in enumerate(gradients)
            if gradient is not None
        ]
        roots += [(e, gradient) for e, gradient in self._beside if e.node in branch.beginnings]
        if not roots:
            return
        with _replaced(arrived):
            torch.autograd.backward(
                [edge for edge, _ in roots],
                [gradient for _, gradient in roots],
                retain_graph=len(arrived) > 1,
                inputs=[self._parameters[i] for i in branch.parameters],
            )

    def _run_whole(self) -> None:
        if self._outputs and self._parameters:
            torch.autograd.backward(self._outputs, self._gradients, inputs=self._parameters)


@contextmanager
def _noted(nodes: Sequence[Node], arrived: dict[Node, Arrived]) -> Iterator[None]:
    """Notes the gradients that arrive at nodes."""

    def note(node: Node, gradients: Arrived) -> None:
        arrived[node] = gradients

    handles = [node.register_prehook(partial(note, node)) for node in nodes]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _replaced(arrived: Mapping[Node, Arrived]) -> Iterator[None]:
    """Lets nodes see what arrived the first time, and nothing that comes down the chain again."""

    def replace(gradients: Arrived, _: Arrived) -> Arrived:
        return gradients

    handles = [node.register_prehook(partial(replace, g)) for node, g in arrived.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _cut_off(output: Tensor) -> None:
    # Autograd cuts no view in place, and a leaf would not require grad any more.
    if not output._is_view() and not output.is_leaf:
        output.detach_()
