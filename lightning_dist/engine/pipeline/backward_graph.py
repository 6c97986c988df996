"""Where the ways to the weights leave the way to the inputs, in the graph of a backward.

The nodes on a way from the outputs to an input are the *chain*. A way to a parameter leaves it at a
*joint*, or begins at an output that is not on it. Parameters whose ways begin at the same nodes are
one *branch*: what arrives there in a backward through the chain is enough for all of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge


@dataclass(slots=True, eq=False)
class Branch:
    """Parameters, and where the ways to them begin.

    Attributes:
        parameters: Their places in the list that was asked for.
        beginnings: Joints, and nodes of outputs that are not on the chain; as keys, in order.
    """

    parameters: list[int]
    beginnings: dict[Node, None]

    def absorb(self, other: Branch) -> None:
        """Takes what another has.

        Args:
            other: Has a beginning in common with this one.
        """
        self.parameters += other.parameters
        self.beginnings |= other.beginnings


class BackwardGraph:
    """The nodes between outputs and inputs.

    Args:
        outputs: Roots; each requires grad.
        inputs: Leaves that are no parameters.
    """

    def __init__(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        self._roots = dict.fromkeys(map(node_of, outputs))
        self._parents = _parents_of_all(self._roots)
        self._chain: dict[Node, None] = {}
        waiting = deque(map(node_of, inputs))
        while waiting:
            node = waiting.popleft()
            if node not in self._chain:
                self._chain[node] = None
                waiting += self._parents.get(node, [])

    def is_on_chain(self, node: Node) -> bool:
        """Tells whether gradients of the inputs pass a node.

        Args:
            node: Any.
        """
        return node in self._chain

    def is_top(self, node: Node) -> bool:
        """Tells whether a backward can only begin at a node, and not pass it.

        Args:
            node: Of an output.
        """
        return not self._parents[node]

    def branches(self, parameters: Sequence[Tensor]) -> list[Branch]:
        """Sorts parameters by where the ways to them begin.

        Args:
            parameters: Leaves. One that no output depends on is in no branch.
        """
        found: dict[Node, Branch] = {}
        for i, parameter in enumerate(parameters):
            branch = Branch([i], self._beginnings(node_of(parameter)))
            met = {id(known): known for node in branch.beginnings if (known := found.get(node))}
            for known in met.values():
                branch.absorb(known)
            found.update(dict.fromkeys(branch.beginnings, branch))
        return list({id(branch): branch for branch in found.values()}.values())

    def _beginnings(self, leaf: Node) -> dict[Node, None]:
        beginnings: dict[Node, None] = {}
        seen = {leaf}
        waiting = deque([leaf])
        while waiting:
            node = waiting.popleft()
            if node in self._chain or node in self._roots:
                beginnings[node] = None
            if node not in self._chain:
                above = dict.fromkeys(self._parents.get(node, []))
                waiting += [parent for parent in above if parent not in seen]
                seen.update(above)
        return beginnings


def node_of(tensor: Tensor) -> Node:
    """Gives the node at which a tensor's gradient arrives.

    Args:
        tensor: Requires grad; a leaf, too.
    """
    return get_gradient_edge(tensor).node


def nodes_beneath(outputs: Sequence[Tensor]) -> Collection[Node]:
    """Gives all nodes that a backward comes to, those of the outputs included.

    Args:
        outputs: Roots; each requires grad.
    """
    return _parents_of_all(map(node_of, outputs)).keys()


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
