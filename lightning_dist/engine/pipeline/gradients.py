"""Where a stage's gradients are between the backwards of a round and the optimizer.

The backwards run inside of the user's step, before the training loop clears ``p.grad``. So their
gradients are held until the loop installs them.

Autograd adds to the ``grad`` of leaves while a gradient is in the cache, without further memory. To
ask autograd for values and add these later is slower. So :class:`HeldGradients` puts the held
gradients into the leaves for each backward. The leaves of an asynchronous stage are versions of its
weights, not parameters. Where hooks need the gradients in the parameters,
:class:`.ParamGradAccumulator` leaves these in ``p.grad`` for a round.

Autograd gives a leaf the arriving gradient without a copy if nothing else holds that tensor, even
if another tensor shares its memory. The gradient of ``p`` in ``x + p[None]`` is a view of the
gradient that the next stage has sent. The gradient of ``x``, which goes to the stage before, is
another view. A later addition to the one would change the other on its way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch
from torch import Tensor

from lightning_dist.engine.tensors.dtensor import local_part


def have_shared_memory(
    gradients: Sequence[Tensor | None], others: Sequence[Tensor | None]
) -> list[bool]:
    """Returns for each gradient whether it shares memory with another tensor.

    Args:
        gradients: Tensors to compare with each other, and with ``others``.
        others: Tensors to compare the gradients with.
    """
    users = Counter(_memory_of(tensor) for tensor in (*gradients, *others) if tensor is not None)
    return [g is not None and users[_memory_of(g)] > 1 for g in gradients]


def _memory_of(tensor: Tensor) -> object:
    # A storage is the same object for all its tensors, as long as one reference to it is held. An
    # address would not do: tensors without values have none.
    return tensor if tensor.is_sparse else local_part(tensor).untyped_storage()


Backward = Callable[[Sequence[Tensor], Sequence[Tensor]], None]


class Gradients(Protocol):
    """Runs the backwards of one stage and holds their gradients, by update.

    Attributes:
        runs_hooks: Whether autograd runs the parameters' hooks in each backward; otherwise the
            caller runs the hooks once for each batch.
    """

    runs_hooks: bool

    def begin_round(self, num_backwards: int) -> None:
        """Prepares for a number of backwards after which the gradients are wanted.

        Args:
            num_backwards: Calls of :meth:`run` and of :meth:`adding` that will come.
        """

    def run(
        self,
        outputs: Sequence[Tensor],
        gradients: Sequence[Tensor],
        inputs: Sequence[Tensor],
        parameters: Mapping[str, Tensor],
        update: int,
        backward: Backward = torch.autograd.backward,
    ) -> list[Tensor | None]:
        """Runs one backward.

        Args:
            outputs: Roots of the autograd graph.
            gradients: One gradient for each output.
            inputs: Leaves that are no parameters.
            parameters: Leaves that stand for the stage's trainable parameters in this graph.
            update: Index of the update that the parameters' gradients are for.
            backward: Runs autograd from the roots, with the weights for layers that recompute.

        Returns:
            One gradient for each input.
        """

    def parting(
        self, parameters: Mapping[str, Tensor]
    ) -> AbstractContextManager[Mapping[str, Tensor]]:
        """Returns the context manager for a backward's inputs' part; it yields the graph's leaves.

        Args:
            parameters: Leaves for the stage's trainable parameters, as for :meth:`run`.
        """

    def adding(
        self, parameters: Mapping[str, Tensor], given: Sequence[Tensor], update: int
    ) -> AbstractContextManager[None]:
        """Returns the context manager for the weights' part, which adds to the leaves' ``grad``.

        Args:
            parameters: Leaves for the stage's trainable parameters, as for :meth:`run`.
            given: Gradients that the part begins with, whose memory other code may hold.
            update: Index of the update that the gradients are for.
        """

    def end_round(self) -> None:
        """Completes the held gradients."""

    def held(self, update: int) -> dict[str, Tensor]:
        """Returns the gradients for an update by parameter name, and keeps them.

        Args:
            update: Index of the update.
        """

    def take(self, update: int) -> dict[str, Tensor]:
        """Removes and returns the gradients for an update by parameter name.

        Args:
            update: Index of the update.
        """

    def clear(self) -> None:
        """Drops everything, after a failure."""


class HeldGradients:
    """Gradients that are in the leaves of a graph while a backward adds to them.

    Args:
        dtype: Data type in which gradients are summed; None keeps their own.
    """

    runs_hooks = False

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        self._dtype = dtype
        self._held: dict[int, dict[str, Tensor]] = {}

    def begin_round(self, num_backwards: int) -> None:
        """Does nothing."""

    def end_round(self) -> None:
        """Does nothing."""

    def held(self, update: int) -> dict[str, Tensor]:
        """Returns the gradients for an update; see :class:`Gradients`."""
        return self._held.get(update, {})

    def take(self, update: int) -> dict[str, Tensor]:
        """Removes and returns the gradients for an update; see :class:`Gradients`."""
        return self._held.pop(update, {})

    def clear(self) -> None:
        """Drops the held gradients."""
        self._held.clear()

    def run(
        self,
        outputs: Sequence[Tensor],
        gradients: Sequence[Tensor],
        inputs: Sequence[Tensor],
        parameters: Mapping[str, Tensor],
        update: int,
        backward: Backward = torch.autograd.backward,
    ) -> list[Tensor | None]:
        """Runs one backward; see :class:`Gradients`."""
        with (
            _in_leaves(inputs, [None] * len(inputs)) as of_inputs,
            _in_leaves([*parameters.values()], self._to_lend(parameters, update)) as found,
        ):
            if outputs:
                backward(outputs, gradients)
        self._take_back(parameters, found, [*gradients, *of_inputs], update)
        return of_inputs

    def parting(
        self, parameters: Mapping[str, Tensor]
    ) -> AbstractContextManager[Mapping[str, Tensor]]:
        """Returns a context manager that yields the same parameters; see :class:`Gradients`."""
        return nullcontext(parameters)

    @contextmanager
    def adding(
        self, parameters: Mapping[str, Tensor], given: Sequence[Tensor], update: int
    ) -> Iterator[None]:
        """Puts the held gradients into the leaves; see :class:`Gradients`."""
        with _in_leaves([*parameters.values()], self._to_lend(parameters, update)) as found:
            yield
        self._take_back(parameters, found, given, update)

    def _to_lend(self, parameters: Mapping[str, Tensor], update: int) -> list[Tensor | None]:
        if self._dtype is not None:  # autograd adds gradients of the leaf's own dtype only
            return [None] * len(parameters)
        return [self.held(update).get(name) for name in parameters]

    def _take_back(
        self,
        parameters: Mapping[str, Tensor],
        found: Sequence[Tensor | None],
        others: Sequence[Tensor | None],
        update: int,
    ) -> None:
        lent = self._to_lend(parameters, update)
        new = [None if g is before else g for g, before in zip(found, lent, strict=True)]
        for name, before, sum_of_both in zip(parameters, lent, new, strict=True):
            if before is not None and sum_of_both is not None:
                # autograd has not added in place: one gradient is sparse, the other is not
                del self._held[update][name]
        self._hold(parameters, new, others, update)

    def _hold(
        self,
        parameters: Mapping[str, Tensor],
        gradients: Sequence[Tensor | None],
        others: Sequence[Tensor | None],
        update: int,
    ) -> None:
        held = self._held.setdefault(update, {})
        # Held gradients are added to and clipped in place, so they must share no memory.
        are_shared = have_shared_memory(gradients, others)
        rows = zip(parameters.items(), gradients, are_shared, strict=True)
        for (name, parameter), gradient, is_shared in rows:
            if gradient is None:
                continue
            dtype = self._dtype or gradient.dtype
            if name in held:
                held[name].add_(gradient)
            elif is_shared or not _is_laid_out_as(parameter, gradient):
                held[name] = torch.empty_like(parameter, dtype=dtype).copy_(gradient).detach()
            else:
                held[name] = gradient.to(dtype)


@contextmanager
def _in_leaves(
    leaves: Sequence[Tensor], gradients: Sequence[Tensor | None]
) -> Iterator[list[Tensor | None]]:
    """Puts gradients into leaves, and restores the earlier ones at the end.

    Args:
        leaves: Leaves of an autograd graph.
        gradients: One gradient or None for each leaf.

    Yields:
        A list that at the end holds the leaves' gradients.
    """
    found: list[Tensor | None] = []
    before = [leaf.grad for leaf in leaves]
    for leaf, gradient in zip(leaves, gradients, strict=True):
        leaf.grad = gradient
    try:
        yield found
        found.extend(leaf.grad for leaf in leaves)
    finally:
        for leaf, gradient in zip(leaves, before, strict=True):
            leaf.grad = gradient


def _is_laid_out_as(parameter: Tensor, gradient: Tensor) -> bool:
    return gradient.is_sparse or gradient.stride() == parameter.stride()
