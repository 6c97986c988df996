"""Find steps that stages get wrong.

A layer may put a loss into an attribute, for the user's step to sum those of all layers: the
balancing loss of a mixture of experts, a codebook's commitment loss, a Bayesian layer's divergence.
The step ends on the last stage, where other stages' layers are missing, so the sum would silently
be too small. Gradients reach such a value from no output of the stage. A stored attention map, in
contrast, lies on the way of the outputs.

A gradient penalty asks in the step for a gradient by the model's input. On the last stage the graph
does not reach so far, so only what the loss has of the input beside the model would be found.

A rank of several stages has weights of an earlier one at hand on the last, where a loss made of
them would have no gradient for them.

Each stage runs the step up to the call of the pipelined module. So all stages must call the module
with the same values, which :class:`ModuleCalls` compares in the first batches. They do not if a
step keeps something for the next one behind that call, as memory, or changes it on the way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from lightning_dist.engine.pipeline.split_backward import node_of, nodes_beneath
from lightning_dist.engine.tensors.fingerprints import projection
from lightning_dist.engine.tensors.patch import Undo
from lightning_dist.engine.tensors.remote_tensor import RemoteTensor
from lightning_dist.engine.tensors.tree import tensors_in

# What is kept in a batch is used in the next. With batches in flight that may be a few later.
_NUM_COMPARED = 4
_ROUNDING = 1e-4


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
    beneath = nodes_beneath(node_of(t) for t in tensors_in(output) if t.requires_grad)
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
    """Refuses gradients by the arguments of the pipelined module's call, if a step asks for them.

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


def refuse_other_stages(loss: Tensor, stage: nn.Module, others: Sequence[nn.Module]) -> None:
    """Refuses a loss that is computed with weights of other stages that this rank has.

    Its gradient by them would be lost, and on other ranks they are not there to be used.

    Args:
        loss: The loss of a micro-batch, with its autograd graph.
        stage: The layers of the last stage.
        others: The layers of the rank's other stages.

    Raises:
        ValueError: The loss is such a one.
    """
    own = {id(parameter) for parameter in stage.parameters()}
    named = [pair for other in others for pair in other.named_parameters()]
    apart = [(name, p) for name, p in named if p.requires_grad and id(p) not in own]
    if not apart or not loss.requires_grad:
        return
    beneath = nodes_beneath([node_of(loss)])
    for name, parameter in apart:
        if node_of(parameter) in beneath:
            raise ValueError(
                f"The step uses the parameter {name!r} of an earlier stage for its loss, on the"
                " last stage, whose backward has no gradient of it. Let the layer that has it"
                " compute what the loss needs, or share the parameter with a layer of the last"
                " stage; for a penalty use `weight_decay`."
            )


def refuse_parameters_beside(loss: Tensor, stage: nn.Module) -> None:
    """Refuses a loss that is computed with trainable parameters that no stage has.

    Each micro-batch's backward would add to their ``grad`` at once, whole, not as a share.

    Args:
        loss: The loss of a micro-batch, with its autograd graph.
        stage: The layers of the last stage.

    Raises:
        ValueError: The loss is such a one.
    """
    if not loss.requires_grad:
        return
    own = {id(parameter) for parameter in stage.parameters()}
    leaves = (getattr(node, "variable", None) for node in nodes_beneath([node_of(loss)]))
    for leaf in leaves:
        if isinstance(leaf, nn.Parameter) and id(leaf) not in own:
            raise ValueError(
                "Give a module that holds all parameters to `find_split`, and its `layers` to"
                " `Pipeline`; or freeze what is not trained with `requires_grad_(False)`. The step"
                f" uses a trainable parameter of shape {tuple(leaf.shape)} for its loss, outside of"
                " the pipelined module, whose gradient would be a wrong one."
            )


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
