"""Find losses that are other ones where a batch is cut into micro-batches.

A contrastive loss compares each sample with all others that it sees, and a micro-batch shows it
fewer. So do a root of a mean, or a normalisation over the batch. Of a loss that is a mean over
samples, the gradient of one sample does not depend on another sample. That is what
:func:`compares_samples` asks, by a second derivative: no step is run again for it.

A mean over targets that are not ignored, or over their class weights, is none over samples either,
and a mean of such means is another one than that of the whole batch. :class:`Reductions` compares
what micro-batches divide by, and finds sums that nothing divides.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from lightning_dist.engine.pipeline.split_backward import node_of, nodes_beneath
from lightning_dist.engine.tensors.patch import has_gradient_hooks

# Logits of a large vocabulary have more, and need several times their memory to be looked at.
_MOST_ELEMENTS = 1 << 20
_NUM_COMPARED = 4  # batches
_ROUNDING = 1e-4

# From a loss down to its sums all values are numbers, and these combine them.
_OF_NUMBERS = frozenset(
    f"{name}Backward" for name in ("Add", "Div", "Mul", "Neg", "Sub", "ToCopy", "View")
)
_CROSS_ENTROPIES = frozenset({"NllLossBackward0", "NllLoss2DBackward0"})
_MEAN, _SUM = 1, 2  # as autograd has it of `reduction="mean"` and `"sum"`
_OF_PARTS = ("Mean", "Stack")  # of what a sum over other things than samples is made


def compares_samples(
    loss: Tensor, outputs: Sequence[Tensor], inputs: Sequence[Tensor], num_samples: int
) -> bool | None:
    """Finds whether a sample's gradient depends on the other samples of its micro-batch.

    Args:
        loss: The micro-batch's loss, with its autograd graph.
        outputs: What the loss was computed of; those with rows for each sample are looked at.
        inputs: What the stage has received for these samples, and made the outputs of.
        num_samples: Samples of the micro-batch.

    Returns:
        Whether it is known to depend on them. None if the micro-batch cannot tell: it has one
        sample, or no output has a row for each.
    """
    if num_samples < 2 or not loss.requires_grad:
        return None
    rows = [t for t in outputs if _has_rows(t, num_samples) and _depends_on(t, inputs)]
    if not rows:
        return None
    if not _is_twice_differentiable(loss, rows):
        return False
    generator = torch.Generator().manual_seed(0)  # the run's own numbers stay as they are
    try:
        first = torch.autograd.grad(loss, rows, create_graph=True, allow_unused=True)
        products = []
        for gradient in first:
            if gradient is not None and gradient.requires_grad:
                some, _ = _two_groups(len(gradient), num_samples)
                factors = torch.randn(gradient[some].shape, generator=generator)
                products.append((gradient[some] * factors.to(gradient)).sum())
        if not products:  # the loss is linear
            return False
        second = torch.autograd.grad(products, rows, retain_graph=True, allow_unused=True)
        found = [g[_two_groups(len(g), num_samples)[1]] for g in second if g is not None]
        largest = torch.stack([part.abs().amax().double() for part in found])
        return bool((largest.isfinite() & (largest > 0.0)).any())
    except RuntimeError:  # an operation has no second derivative, or a meta tensor no value
        return False


def _two_groups(num_rows: int, num_samples: int) -> tuple[list[int], list[int]]:
    """Returns rows of some samples and rows of others.

    Of several rows for each sample it is not known whether those of a sample follow each other, as
    tokens do, or are as far apart as there are samples, as joined views are. The groups have no
    sample in common either way.
    """
    per_sample, half = num_rows // num_samples, num_samples // 2
    is_early = [(i % num_samples < half, i // per_sample < half) for i in range(num_rows)]
    return (
        [row for row, early in enumerate(is_early) if all(early)],
        [row for row, early in enumerate(is_early) if not any(early)],
    )


def warn_of_comparison(step: str, num_samples: int) -> None:
    """Warns of a step whose loss compares samples, with so many in a micro-batch."""
    warnings.warn(
        "The gradient of a sample depends on the other samples of its batch: the loss compares"
        " samples, normalises over them, or is no mean (a root of one, say). Batches for"
        f" {step} are cut into micro-batches of {num_samples} here, so the loss may be another one"
        " than on one device. Set num_microbatches=1 for the same; schedule='pipedream' has no"
        " bubble then.",
        stacklevel=2,
    )


def _has_rows(output: Tensor, num_samples: int) -> bool:
    if type(output) is not Tensor or output.ndim == 0:
        return False  # other classes may have no second derivatives, or errors of their own
    if has_gradient_hooks(output) or output.retains_grad:
        return False  # hooks gather the shards of a unit, say, and would do it twice
    if not 0 < output.numel() <= _MOST_ELEMENTS or output.shape[0] % num_samples:
        return False
    # If time comes first, as `nn.CTCLoss` takes it, dim 1 has the samples.
    return output.ndim < 3 or output.shape[1] != num_samples


def _depends_on(output: Tensor, inputs: Sequence[Tensor]) -> bool:
    """Returns whether an output depends on the samples, and not on parameters alone."""
    return _reaches(node_of(output), inputs)


def _reaches(node: Any, tensors: Sequence[Tensor]) -> bool:
    """Returns whether a backward from a node reaches one of some tensors."""
    beneath = nodes_beneath([node])
    return any(node_of(tensor) in beneath for tensor in tensors)


def _is_twice_differentiable(loss: Tensor, outputs: Sequence[Tensor]) -> bool:
    """Returns whether only torch's own operations lie between the outputs and the loss.

    A function in Python may hide a value from its second derivative, or talk to other ranks.
    """
    ends = {node_of(output) for output in outputs}
    waiting = [node_of(loss)]
    seen = {*waiting, *ends}
    while waiting:
        node = waiting.pop()
        if issubclass(type(node), BackwardCFunction):
            return False
        following = {child for child, _ in node.next_functions if child is not None} - seen
        seen |= following
        waiting += following
    return True


class Reductions:
    """Looks at what the losses of micro-batches are means or sums over, in the first batches."""

    def __init__(self) -> None:
        self._num_left = _NUM_COMPARED
        self._now: dict[int, list[list[Tensor | int]]] = {}

    def note(self, loss: Tensor, num_samples: int, outputs: Sequence[Tensor] = ()) -> None:
        """Notes what a micro-batch's loss, with its autograd graph, is divided by.

        It warns of a sum over samples. What does not depend on the layers' outputs, if they are
        given, is none: a penalty on weights.
        """
        if self._num_left <= 0 or not loss.requires_grad:
            return
        parts = [*_parts_of(loss)]
        sums = (node for node, scaled in parts if not scaled and _is_sum(node, num_samples))
        if any(not outputs or _reaches(node, outputs) for node in sums):
            self._num_left = 0
            self._now.clear()
            _warn_of_sum(num_samples)
            return
        divisors = (_divisor_of(node) for node, _ in parts)
        known = [d for d in divisors if d is not None and _has_value(d)]
        self._now.setdefault(num_samples, []).append(known)

    def compare(self) -> None:
        """Warns if micro-batches of as many samples divide by different numbers; ends a batch."""
        if not self._now:
            return
        self._num_left -= 1
        noted, self._now = self._now, {}
        for num_samples, of_losses in noted.items():
            for divisors in zip(*of_losses, strict=False):
                values = sorted(map(float, divisors))
                if values[-1] - values[0] > _ROUNDING * max(map(abs, values)):
                    self._num_left = 0
                    _warn_of_divisors(values[0], values[-1], num_samples)
                    return


def _parts_of(loss: Tensor) -> Iterator[tuple[Any, bool]]:
    """Lists the nodes of numbers of which a loss is made, and whether each is divided by others."""
    waiting: list[tuple[Any, bool]] = [(node_of(loss), False)]
    seen = {node for node, _ in waiting}
    while waiting:
        node, scaled = waiting.pop()
        yield node, scaled
        name = node.name().rstrip("01")  # 1 for a number of Python
        if name in _OF_NUMBERS:
            scaled = scaled or name in ("DivBackward", "MulBackward")
            waiting += [(child, scaled) for child in _beneath(node) if child not in seen]
            seen.update(child for child, _ in waiting)


def _beneath(node: Any) -> list[Any]:
    return [child for child, _ in node.next_functions if child is not None]


# Public, by these names: https://docs.pytorch.org/docs/stable/notes/autograd.html


def _divisor_of(node: Any) -> Tensor | int | None:
    """Returns what a quotient divides by, if it has no graph, or a mean.

    A mean of selected elements, ``F.mse_loss(x[mask], y[mask])``, is over as many as there are.
    """
    if node.name().startswith("MeanBackward"):
        return getattr(node, "_saved_self_sym_numel", None)  # none of a mean over some dims
    if node.name() in _CROSS_ENTROPIES and node._saved_reduction == _MEAN:
        return node._saved_total_weight  # type: ignore[no-any-return]
    if getattr(node, "_saved_reduction", None) == _MEAN:
        given = getattr(node, "_saved_self", None)
        return given.numel() if isinstance(given, Tensor) else None
    if node.name() == "DivBackward0" and node.next_functions[1][0] is None:
        return node._saved_other  # type: ignore[no-any-return]
    return None


def _has_value(divisor: Tensor | int) -> bool:
    return isinstance(divisor, int) or (type(divisor) is Tensor and not divisor.is_meta)


def _is_sum(node: Any, num_samples: int) -> bool:
    """Returns whether a node sums over samples."""
    if not node.name().startswith("SumBackward"):
        return getattr(node, "_saved_reduction", None) == _SUM
    if num_samples < 2 or next(iter(node._saved_self_sym_sizes), 1) % num_samples:
        return False
    near = _beneath(node)
    near += [child for node in near for child in _beneath(node)]
    return not any(node.name().startswith(_OF_PARTS) for node in near)


def _warn_of_sum(num_samples: int) -> None:
    warnings.warn(
        "The loss is a sum over samples, and so is its gradient on one device. Here the losses of"
        f" micro-batches, of {num_samples} samples, are averaged. Return a mean, such as"
        " loss / len(x) with a learning rate for it; or set num_microbatches=1 for the same.",
        stacklevel=2,
    )


def _warn_of_divisors(least: float, most: float, num_samples: int) -> None:
    warnings.warn(
        "The loss is a mean over something that micro-batches have different numbers of, as targets"
        f" that are not ignored, or class weights: from {least:g} to {most:g} in micro-batches of"
        f" {num_samples} samples. Here they count by their samples, so gradients are not those of"
        " one device. Return the number beside the loss, as {'loss': loss, 'weight': n}, in"
        " evaluations too. If the loss has other parts as well, num_microbatches=1 alone is exact.",
        stacklevel=2,
    )
