"""Hold a stage's gradients between the backwards of a round and the optimizer.

The backwards run inside of the user's step, before the training loop clears ``p.grad``. So their
gradients are held until the loop installs them. Autograd adds to the ``grad`` of leaves while a
gradient is in the cache, so held gradients are in the leaves for each backward. The leaves of an
asynchronous stage are versions of its weights, not parameters.

Autograd gives a leaf the arriving gradient without a copy if nothing else holds that tensor, even
if another tensor shares its memory: in ``x + p[None]`` the gradients of ``p`` and ``x`` are views
of the one that the next stage has sent. An addition to the one would change the other on its way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn

from lightning_dist.engine.tensors.dtensor import local_part
from lightning_dist.engine.tensors.patch import add_gradient, has_gradient_hooks, with_hooks


def have_shared_memory(
    gradients: Sequence[Tensor | None], others: Sequence[Tensor | None]
) -> list[bool]:
    """Returns for each gradient whether it shares memory with another one, or with others."""
    users = Counter(_memory_of(tensor) for tensor in (*gradients, *others) if tensor is not None)
    return [g is not None and users[_memory_of(g)] > 1 for g in gradients]


def _memory_of(tensor: Tensor) -> object:
    # A storage is the same object for all its tensors, as long as one reference to it is held. An
    # address would not do: tensors without values have none.
    return tensor if tensor.is_sparse else local_part(tensor).untyped_storage()


Backward = Callable[[Sequence[Tensor], Sequence[Tensor]], None]


class HeldGradients:
    """The gradients of one stage, by update, from its backwards until they are installed.

    Gradients are in the leaves of a graph while a backward adds to them.

    Args:
        dtype: Data type in which gradients are summed; None keeps their own.

    Attributes:
        runs_hooks: Whether autograd runs the parameters' hooks in each backward; otherwise the
            caller runs the hooks once for each batch.
    """

    runs_hooks = False

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        self._dtype = dtype
        self._held: dict[int, dict[str, Tensor]] = {}

    def begin_round(self, num_backwards: int) -> None:
        """Prepares for some calls of :meth:`run` and :meth:`adding` before :meth:`end_round`."""

    def end_round(self) -> None:
        """Completes the held gradients."""

    def held(self, update: int) -> dict[str, Tensor]:
        """Returns the gradients for an update by parameter name, and keeps them."""
        return self._held.get(update, {})

    def hold(self, update: int, gradients: Mapping[str, Tensor]) -> None:
        """Replaces gradients for an update, or adds some, by parameter name."""
        self._held.setdefault(update, {}).update(gradients)

    def run_hooks(self, update: int, parameters: Mapping[str, nn.Parameter]) -> None:
        """Replaces gradients for an update with the results of the parameters' hooks."""
        held = self.held(update) if not self.runs_hooks else {}
        for name, parameter in parameters.items():
            if name in held and has_gradient_hooks(parameter):
                gradient = with_hooks(parameter, held.pop(name))
                if gradient is not None:
                    held[name] = gradient

    def take(self, update: int) -> dict[str, Tensor]:
        """Removes and returns the gradients for an update by parameter name."""
        return self._held.pop(update, {})

    def clear(self) -> None:
        """Drops everything, after a failure."""
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
        before, count = self._held_before(parameters, update), len(inputs)
        leaves = [*inputs, *parameters.values()]
        with _in_leaves(leaves, [*([None] * count), *before]) as found:
            if outputs:
                backward(outputs, gradients)
        of_inputs = found[:count]
        self._keep(parameters, before, found[count:], [*gradients, *of_inputs], update)
        return of_inputs

    def input_backward(
        self, parameters: Mapping[str, Tensor]
    ) -> AbstractContextManager[Mapping[str, Tensor]]:
        """Returns a context manager for a backward to the inputs alone.

        Yields:
            The leaves of its graph.
        """
        return nullcontext(parameters)

    @contextmanager
    def adding(
        self, parameters: Mapping[str, Tensor], given: Sequence[Tensor], update: int
    ) -> Iterator[None]:
        """Wraps the weights' part of a backward, which adds to the leaves' ``grad``.

        Other code may hold the memory of the gradients that are ``given`` to the part.
        """
        before = self._held_before(parameters, update)
        with _in_leaves([*parameters.values()], before) as found:
            yield
        self._keep(parameters, before, found, given, update)

    def _held_before(self, parameters: Mapping[str, Tensor], update: int) -> list[Tensor | None]:
        if self._dtype is not None:  # autograd adds gradients of the leaf's own dtype only
            return [None] * len(parameters)
        return [self.held(update).get(name) for name in parameters]

    def _keep(
        self,
        parameters: Mapping[str, Tensor],
        before: Sequence[Tensor | None],
        found: Sequence[Tensor | None],
        others: Sequence[Tensor | None],
        update: int,
    ) -> None:
        new = [
            (name, parameter, gradient, earlier)
            for (name, parameter), gradient, earlier in zip(
                parameters.items(), found, before, strict=True
            )
            if gradient is not None and gradient is not earlier
        ]
        if not new:  # autograd has added to the held ones, as it does behind an update's first
            return
        held = self._held.setdefault(update, {})
        # Held gradients are added to and clipped in place, so they must share no memory.
        are_shared = have_shared_memory([gradient for *_, gradient, _ in new], others)
        for (name, parameter, gradient, earlier), is_shared in zip(new, are_shared, strict=True):
            dtype = self._dtype or gradient.dtype
            # The gradient is a new sum already where one of both is sparse, the other is not.
            if name in held and earlier is None:
                held[name] = add_gradient(gradient, held[name])
            elif is_shared or not (gradient.is_sparse or gradient.stride() == parameter.stride()):
                held[name] = torch.empty_like(parameter, dtype=dtype).copy_(gradient).detach()
            else:
                held[name] = gradient.to(dtype)


@contextmanager
def _in_leaves(
    leaves: Sequence[Tensor], gradients: Sequence[Tensor | None]
) -> Iterator[list[Tensor | None]]:
    """Puts gradients into leaves for a while; yields a list that at the end has the new ones."""
    found: list[Tensor | None] = []
    before = [leaf.grad for leaf in leaves]
    for leaf, gradient, own in zip(leaves, gradients, before, strict=True):
        if gradient is not own:  # often there is neither
            leaf.grad = gradient
    try:
        yield found
        found.extend(leaf.grad for leaf in leaves)
    finally:
        for leaf, gradient in zip(leaves, before, strict=True):
            leaf.grad = gradient


def install(
    gradients: Mapping[str, Tensor],
    parameters: Mapping[str, nn.Parameter],
    hooked: dict[nn.Parameter, Tensor],
    unhooked: Collection[nn.Parameter] | None,
) -> None:
    """Adds a stage's gradients to ``p.grad``, or to ``hooked`` where the parameter's hooks come.

    Args:
        gradients: The gradients, by name.
        parameters: The parameters that an update may change, by name.
        hooked: Gains the sums of gradients on which hooks must run yet.
        unhooked: Parameters whose hooks run elsewhere; None if those of all do.
    """
    for name, parameter in parameters.items():
        if (gradient := gradients.get(name)) is None:
            continue
        if unhooked is not None and parameter not in unhooked and has_gradient_hooks(parameter):
            # Stages of one rank may share the parameter.
            found = hooked.get(parameter)
            hooked[parameter] = gradient if found is None else add_gradient(gradient, found)
        elif parameter.grad is not None:
            parameter.grad = add_gradient(gradient, parameter.grad)
        else:
            parameter.grad = gradient


class EarlierGradients:
    """Sets apart what an earlier update has left in ``p.grad``, while new gradients are summed.

    What comes of a batch may have to be divided, by the weights of its losses, or summed over the
    copies of a parameter. That must not happen to what the user keeps of earlier updates a second
    time. Where gradients are cleared after each update, there is nothing to set apart.
    """

    def __init__(self) -> None:
        self._earlier: dict[nn.Parameter, Tensor] = {}
        self._incomplete: set[nn.Parameter] = set()

    def set_apart(self, parameters: Iterable[nn.Parameter]) -> None:
        """Takes earlier gradients away, before a batch's gradients are installed."""
        for parameter in parameters:
            if parameter.grad is None:
                self._earlier.pop(parameter, None)  # the user has cleared it between two batches
            elif parameter not in self._incomplete:
                self._earlier[parameter], parameter.grad = parameter.grad, None

    def keep(self, parameters: Iterable[nn.Parameter]) -> None:
        """Restores earlier gradients of parameters that the batch did not use.

        Call it where more batches follow before the update.
        """
        self._incomplete = {p for p in parameters if p.grad is not None}
        for parameter in self._earlier.keys() - self._incomplete:
            parameter.grad = self._earlier.pop(parameter)

    @torch.no_grad()
    def add(self) -> None:
        """Adds complete gradients to earlier ones, into the earlier tensors, as autograd does."""
        for parameter, earlier in self._earlier.items():
            new = parameter.grad
            parameter.grad = earlier if new is None else add_gradient(new, earlier)
        self._earlier, self._incomplete = {}, set()
