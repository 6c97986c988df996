"""Find steps that micro-batches or stages get wrong.

A layer may put a loss into an attribute, for the user's step to sum those of all layers: the
balancing loss of a mixture of experts, a codebook's commitment loss, a Bayesian layer's divergence.
The step ends on the last stage, where other stages' layers are missing, so the sum would silently
be too small. Gradients reach such a value from no output of the stage. A stored attention map, in
contrast, lies on the way of the outputs.

A contrastive loss compares each sample with all others that it sees, and a micro-batch shows it
fewer. So do a root of a mean, or a normalisation over the batch. Of a loss that is a mean over
samples, the gradient of one sample does not depend on another sample. That is what
:func:`compares_samples` asks, by a second derivative: no step is run again for it.

A mean over targets that are not ignored, or over their class weights, is none over samples either,
and a mean of such means is another one than that of the whole batch. :class:`Divisors` compares
what micro-batches divide by.

A gradient penalty asks in the step for a gradient by the model's input. On the last stage the graph
does not reach so far, so only what the loss has of the input beside the model would be found.

Each stage runs the step up to the call of the pipelined module. So all stages must call the module
with the same values, which :class:`ModuleCalls` compares in the first batches. They do not if a
step keeps something for the next one behind that call, as memory, or changes it on the way.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import get_gradient_edge

from lightning_dist.engine.pipeline.split_backward import nodes_beneath
from lightning_dist.engine.tensors.fingerprints import projection
from lightning_dist.engine.tensors.patch import Undo, has_gradient_hooks
from lightning_dist.engine.tensors.remote_tensor import RemoteTensor
from lightning_dist.engine.tensors.tree import tensors_in

# Logits of a large vocabulary have more, and need several times their memory to be looked at.
_MOST_ELEMENTS = 1 << 20

# What is kept in a batch is used in the next. With batches in flight that may be a few later.
_NUM_COMPARED = 4
_ROUNDING = 1e-4

# From a loss down to its sums all values are numbers, and these combine them.
_OF_NUMBERS = frozenset(
    f"{name}Backward" for name in ("Add", "Div", "Mul", "Neg", "Sub", "ToCopy", "View")
)
_CROSS_ENTROPIES = frozenset({"NllLossBackward0", "NllLoss2DBackward0"})
_MEAN = 1  # as autograd has it of `reduction="mean"`


def check_no_side_losses(layers: nn.Module, stage_index: int, output: Any) -> None:
    """Checks that no attribute of a stage's layers holds a loss that the last stage would miss.

    Their forward is over, and has returned the output with its autograd graph.

    Raises:
        ValueError: An attribute holds a tensor with an autograd graph of its own.
    """
    held = [
        (f"{name}.{attribute}".lstrip("."), tensor)
        for name, part in layers.named_modules()
        for attribute, value in (*part.named_buffers(recurse=False), *vars(part).items())
        if attribute != "_parameters"  # for a step these may be casts, which have a graph
        for tensor in _held_tensors(value)
        if tensor.grad_fn is not None
    ]
    if not held:
        return
    beneath = nodes_beneath([t for t in tensors_in(output) if t.requires_grad])
    for name, tensor in held:
        if tensor.grad_fn not in beneath:
            raise ValueError(
                f"The forward of a layer on stage {stage_index} leaves a tensor with gradients in"
                f" {name!r}. Your step ends on the last stage, where that layer is not, so a loss"
                " made of it would be left out there, and the layer trained without it. Let the"
                " layer return it with its activations, or store its `.detach()` if no loss is made"
                " of it."
            )


NO_INPUT_GRADIENTS = (
    "A stage's graph ends at what it has received, so a step can have no gradient by what the"
    " pipelined module is called with, as for a gradient penalty. Such losses need the whole model"
    " on each rank: use DDPStrategy or FSDPStrategy."
)


def refuse_input_gradients(arguments: Any) -> Undo:
    """Lets a step fail that asks for gradients by what it calls the pipelined module with.

    They would lack the part through the module, on a later stage than the first.

    Returns:
        What ends the refusal, before the backward.
    """

    def refuse(_: Tensor) -> None:
        raise ValueError(NO_INPUT_GRADIENTS)

    given = [t for t in tensors_in(arguments) if t.requires_grad and type(t) is not RemoteTensor]
    handles = [tensor.register_hook(refuse) for tensor in given]

    def end() -> None:
        for handle in handles:
            handle.remove()

    return end


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


class Divisors:
    """Compares what the losses of a batch's micro-batches are means over, in the first batches."""

    def __init__(self) -> None:
        self._num_left = _NUM_COMPARED
        self._now: dict[int, list[list[Tensor]]] = {}

    def note(self, loss: Tensor, num_samples: int) -> None:
        """Notes what a micro-batch's loss, with its autograd graph, is divided by."""
        if self._num_left > 0 and loss.requires_grad:
            known = [d for d in _divisors_of(loss) if type(d) is Tensor and not d.is_meta]
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


def _divisors_of(loss: Tensor) -> Iterator[Tensor]:
    """Lists the numbers that a loss is divided by, and that its cross-entropies divide by."""
    waiting: list[Any] = [get_gradient_edge(loss).node]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        name = node.name()
        # Public, by these names: https://docs.pytorch.org/docs/stable/notes/autograd.html
        if name in _CROSS_ENTROPIES and node._saved_reduction == _MEAN:
            yield node._saved_total_weight
        following = [child for child, _ in node.next_functions]
        if name == "DivBackward0" and following[1] is None:
            yield node._saved_other
        if name.rstrip("01") in _OF_NUMBERS:  # 1 for a number of Python
            waiting += [child for child in following if child is not None and child not in seen]
            seen.update(waiting)


def _warn_of_divisors(least: float, most: float, num_samples: int) -> None:
    warnings.warn(
        "The loss is a mean over something that micro-batches have different numbers of, as targets"
        f" that are not ignored, or class weights: from {least:g} to {most:g} in micro-batches of"
        f" {num_samples} samples. Here they count by their samples, so gradients are not those of"
        " one device. Return the number beside the loss, as {'loss': loss, 'weight': n}, in"
        " evaluations too. If the loss has other parts as well, num_microbatches=1 alone is exact.",
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
    """Whether an output is made of the samples at all, and not of parameters alone."""
    beneath = nodes_beneath([output])
    return any(get_gradient_edge(tensor).node in beneath for tensor in inputs)


def _is_twice_differentiable(loss: Tensor, outputs: Sequence[Tensor]) -> bool:
    """Whether only torch's own operations lie between the outputs and the loss.

    A function in Python may hide a value from its second derivative, or talk to other ranks.
    """
    ends = {get_gradient_edge(output).node for output in outputs}
    waiting = [get_gradient_edge(loss).node]
    seen = {*waiting, *ends}
    while waiting:
        node = waiting.pop()
        if issubclass(type(node), BackwardCFunction):
            return False
        following = {child for child, _ in node.next_functions if child is not None} - seen
        seen |= following
        waiting += following
    return True


def _held_tensors(value: Any) -> Iterator[Tensor]:
    # Not `flatten`, which also rebuilds the containers, and so a user's dataclasses.
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from _held_tensors(list(value.values()))
    elif isinstance(value, list | tuple | set | deque):
        for held in value:
            yield from _held_tensors(held)


@dataclass(frozen=True, slots=True)
class _Note:
    """What is compared of a tensor; ``product`` and ``norm`` are those of :func:`.projection`."""

    shape: tuple[int, ...]
    product: float
    norm: float

    def differs(self, other: _Note) -> bool:
        if self.shape != other.shape:
            return True
        return abs(self.product - other.product) > _ROUNDING * max(self.norm, other.norm)


CallNotes: TypeAlias = Mapping[int, Sequence[Sequence[_Note | None]]]
"""The calls of each micro-batch, one for each stage of a rank; None for what is not compared."""


class ModuleCalls:
    """Notes with what a rank's stages call the pipelined module, in the first training batches."""

    def __init__(self) -> None:
        self._num_left = _NUM_COMPARED
        self._now: dict[int, list[list[_Note | None]]] | None = None

    def begin_batch(self) -> None:
        """Begins to note a batch's calls, if it is one of the first."""
        self._now = {} if self._num_left > 0 else None
        self._num_left -= 1

    def note(self, index: int, call: Any) -> None:
        """Notes the arguments of a micro-batch's call, a tree of tensors."""
        if self._now is not None:
            notes = [_note_of(tensor) for tensor in tensors_in(call)]
            self._now.setdefault(index, []).append(notes)

    def take(self) -> CallNotes | None:
        """Returns the notes of the batch; None if it is none of the first."""
        notes, self._now = self._now, None
        return notes


def check_calls(own: CallNotes, last: CallNotes, stages: Sequence[int]) -> None:
    """Checks that a rank's stages, in order, call the module with the values of the last stage.

    On the last stage's rank that stage's notes come last.

    Raises:
        ValueError: A value differs by more than rounding.
    """
    for index, calls in own.items():
        expected = last[index][-1]
        for stage, notes in zip(stages, calls, strict=True):
            pairs = zip(notes, expected, strict=False)
            known = ((a, b) for a, b in pairs if a is not None and b is not None)
            if len(notes) != len(expected) or any(a.differs(b) for a, b in known):
                raise ValueError(
                    "Change a module's attributes in hooks such as `on_train_batch_start`, which"
                    " run once for each batch, and keep nothing of a step for the next one, as a"
                    f" memory; or use DDPStrategy or FSDPStrategy. On stage {stage} `training_step`"
                    " calls the pipelined module with other values than on the last stage: each"
                    " stage runs the step up to that call, once for each micro-batch, and the last"
                    " stage alone runs the rest. (With read='each' all ranks must draw the same.)"
                )


def _note_of(tensor: Tensor) -> _Note | None:
    # Not of another rank's tensors, nor of shards.
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.is_meta or tensor.is_sparse:
        return None
    real = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor
    return _Note(tuple(tensor.shape), *projection(real))
