"""The interpreter: runs each action of a rank's schedule.

The order of the work is data, created in :mod:`.schedules.orders`, completed by :func:`.lower` and
cut into rounds in :mod:`.schedules.rounds`. What is left is one method for each kind of action.
``STEP``, and a ``REDUCE_GRAD`` right before it, belong to the optimizer's owner.

When an action fails, the exception keeps its type and gets a note: which action, on which rank and
stage, with which shapes, and where in the schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lightning_dist.engine.comms.channel import TensorInfo
from lightning_dist.engine.comms.links import Links
from lightning_dist.engine.pipeline.loss_checks import (
    Reductions,
    compares_samples,
    warn_of_comparison,
)
from lightning_dist.engine.pipeline.loss_weights import LossWeights
from lightning_dist.engine.pipeline.microbatch import Loss, Microbatch
from lightning_dist.engine.pipeline.stage import Step
from lightning_dist.engine.pipeline.stages import OwnStages
from lightning_dist.engine.pipeline.step_checks import (
    NO_INPUT_GRADIENTS,
    refuse_other_stages,
    refuse_parameters_beside,
)
from lightning_dist.engine.profiling.meters.recorder import Recorder
from lightning_dist.engine.schedules.actions import Action, ActionKind
from lightning_dist.engine.schedules.timeline import SpanKind
from lightning_dist.engine.tensors.tree import tensors_in

Place = tuple[int, int]
"""A stage and a micro-batch."""

_MOST_STAGES = 1 << 20

Handler = Callable[[Place, "Work | None"], None]


@dataclass(frozen=True, slots=True)
class Work:
    """One batch for the runtime.

    Attributes:
        microbatches: Micro-batches, by the index that the actions of this batch use.
        step: The user's step.
        gradient_scale: Multiplies all gradients of the batch, besides each micro-batch's weight.
        seed: Integers that name the batch for the random numbers.
        loss_scale: Multiplies the loss, so that small gradients survive in half precision.
    """

    microbatches: Mapping[int, Microbatch]
    step: Step
    gradient_scale: float
    seed: tuple[int, ...]
    loss_scale: float = 1.0


@dataclass(frozen=True, slots=True)
class WeightedGradients:
    """The message from a stage to the stage before."""

    gradients: list[Tensor | None]  # one for each received tensor that requires grad
    weight: Tensor | None = None  # of the loss, zero-dim and float64; None if the samples count


class Runtime:
    """Runs the actions of one rank.

    The gradients of ``microbatches_per_update`` are applied together; None means those of all.
    ``on_complete`` is called with an update whose gradients are complete before the update is due.
    """

    def __init__(
        self,
        stages: OwnStages,
        links: Links,
        recorder: Recorder,
        loss_weights: LossWeights,
        *,
        microbatches_per_update: int | None,
        on_complete: Callable[[int], None],
    ) -> None:
        self._stages = stages
        self._links = links
        self._recorder = recorder
        self._loss_weights = loss_weights
        self._microbatches_per_update = microbatches_per_update
        self._on_complete = on_complete
        self._received: dict[Place, Any] = {}
        self._results: dict[Place, Any] = {}
        self._gradients_in: dict[Place, WeightedGradients] = {}
        self._gradients_out: dict[Place, WeightedGradients] = {}
        # The first activation of a batch, by the stage before its boundary. Users freeze and thaw
        # layers between batches, and only the sending stage sees it.
        self._first: dict[int, tuple[TensorInfo, ...]] = {}
        self._has_stale_messages = False
        self._reductions = Reductions()
        self._shapes: dict[int, tuple[Hashable, ...]] = {}  # of a micro-batch's tensors
        # Of the gradients that a stage will send, and receive, for a micro-batch in flight.
        self._keys_out: dict[Place, Hashable] = {}
        self._keys_in: dict[Place, Hashable] = {}
        compute, wait, communication = SpanKind.COMPUTE, SpanKind.WAIT, SpanKind.COMMUNICATION
        self._handlers: dict[ActionKind, tuple[Handler, SpanKind]] = {
            ActionKind.RECV_F: (self._receive_activation, wait),
            ActionKind.FORWARD: (self._forward, compute),
            ActionKind.SEND_F: (self._send_activation, communication),
            ActionKind.RECV_B: (self._receive_gradient, wait),
            ActionKind.BACKWARD: (self._backward, compute),
            ActionKind.BACKWARD_INPUT: (self._backward_input, compute),
            ActionKind.BACKWARD_WEIGHT: (self._backward_weight, compute),
            ActionKind.SEND_B: (self._send_gradient, communication),
            ActionKind.REDUCE_GRAD: (self._complete, communication),
        }

    def run(self, actions: Iterable[Action], work: Work | None = None) -> list[Any]:
        """Runs actions of this rank in order, without updates, and the forwards on a batch.

        Returns:
            The user's step's results on the last stage, in the order of the micro-batches; empty
            on ranks without the last stage.

        Raises:
            ValueError: A batch has failed before.
        """
        if self._has_stale_messages:
            raise ValueError(
                "Close the channels, and open new ones for a new `Pipeline`: messages of the batch"
                " that has failed before `clear()` are in them still, and would be taken for"
                " those of the next one."
            )
        self._first.clear()
        self._shapes.clear()
        start = self._recorder.mark()
        for action in actions:
            place = (action.stage_index, action.microbatch_index)
            handle, span_kind = self._handlers[action.kind]
            try:
                handle(place, work)
            except BaseException as error:
                error.add_note(self._describe_failure(error, action, work))
                raise
            start = self._recorder.record(span_kind, action, start)
        self._reductions.compare()
        results, self._results = self._results, {}
        own = {i: result for (s, i), result in results.items() if self._stages[s].is_last}
        return [own[index] for index in sorted(own)]

    def clear(self, *, failed: bool) -> None:
        """Forgets everything in flight; after a failure messages may be left in the channels."""
        self._has_stale_messages |= failed and self._stages.shape.num_ranks > 1
        stores = (self._received, self._results, self._gradients_in, self._gradients_out)
        for store in (*stores, self._keys_out, self._keys_in):
            store.clear()
        self._reductions = Reductions()
        for stage in self._stages.values():
            stage.clear()

    def _receive_activation(self, place: Place, work: Work | None) -> None:
        stage, index = place
        assert work is not None
        tag, key = self._tag(stage - 1, index), self._activation_key(stage - 1, index, work)
        received = self._links.incoming[stage - 1, stage].receive(tag=tag, key=key)
        self._received[place] = received
        if torch.is_grad_enabled():
            self._keys_out[place] = self._note_activation(stage - 1, received)

    def _forward(self, place: Place, work: Work | None) -> None:
        assert work is not None
        number, index = place
        stage, microbatch = self._stages[number], work.microbatches[index]
        self._shapes_of(index, work)  # now, for the step may change the batch
        seed = (*work.seed, microbatch.index)
        received = self._received.pop(place, None)
        self._results[place] = stage.forward(index, microbatch, received, work.step, seed)
        if torch.is_grad_enabled() and stage.is_last:
            self._begin_backward(place, work)

    def _begin_backward(self, place: Place, work: Work) -> None:
        """Takes the gradients of a loss, where the other stages receive theirs."""
        number, index = place
        stage, microbatch = self._stages[number], work.microbatches[index]
        loss = Loss.of(self._results[place])
        flight, num_samples = stage.in_flight[index], microbatch.num_samples
        if stage.compares_samples is None:
            stage.compares_samples = compares_samples(
                loss.value, flight.outputs, flight.inputs, num_samples
            )
            others = [other.layers for other in self._stages.values() if other is not stage]
            refuse_other_stages(loss.value, stage.layers, others)
            if self._stages.found.stands_alone:
                refuse_parameters_beside(loss.value, stage.layers)
            if stage.compares_samples and microbatch.weight < 1.0:
                warn_of_comparison("`training_step`", num_samples)
        if loss.weight is None and microbatch.weight < 1.0:
            self._reductions.note(loss.value, num_samples, flight.outputs)
        share = microbatch.weight * work.gradient_scale
        weight = share if loss.weight is None else loss.weight
        roots = stage.set_loss(index, loss.value, weight * work.loss_scale)
        given = None if loss.weight is None else torch.tensor(loss.weight, dtype=torch.float64)
        self._take_gradients(place, WeightedGradients(roots, given))

    def _send_activation(self, place: Place, work: Work | None) -> None:
        stage, index = place
        activation = self._results.pop(place)
        assert work is not None
        tag, key = self._tag(stage, index), self._activation_key(stage, index, work)
        self._links.outgoing[stage, stage + 1].send(activation, tag=tag, key=key)
        if torch.is_grad_enabled():
            self._keys_in[place] = self._note_activation(stage, activation)

    def _activation_key(self, before: int, index: int, work: Work) -> Hashable:
        """Returns the key under which both ends know an activation's shapes; None if unknown.

        Unknown are the first activation of a training batch, and those of a batch of an unknown
        class, whose tensors are not found.
        """
        shapes = self._shapes_of(index, work)
        if not shapes:
            return None
        key = (self._stages.shape.layers_per_stage, torch.is_grad_enabled(), *shapes)
        if not torch.is_grad_enabled():
            return key
        first = self._first.get(before)
        return None if first is None else (key, first)

    def _shapes_of(self, index: int, work: Work) -> tuple[Hashable, ...]:
        if index not in self._shapes:
            tensors = tensors_in(work.microbatches[index].content)
            self._shapes[index] = tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors)
        return self._shapes[index]

    def _note_activation(self, before: int, activation: Any) -> Hashable:
        """Notes the first activation of a batch; returns what both ends know of its gradients."""
        infos = tuple(TensorInfo.of(tensor) for tensor in tensors_in(activation))
        self._first.setdefault(before, infos)
        return infos

    def _receive_gradient(self, place: Place, _: Work | None) -> None:
        stage, index = place
        tag, key = self._tag(stage, index), self._keys_in.pop(place)
        received = self._links.incoming[stage + 1, stage].receive(tag=tag, key=key)
        self._take_gradients(place, received)

    def _take_gradients(self, place: Place, gradients: WeightedGradients) -> None:
        self._loss_weights.note(self._update_of(place[1]), place[1], gradients.weight)
        self._gradients_in[place] = gradients

    def _backward(self, place: Place, _: Work | None) -> None:
        stage, index = place
        given = self._gradients_in.pop(place)
        found = self._stages[stage].backward(index, given.gradients, self._update_of(index))
        self._keep_gradients(place, replace(given, gradients=found))

    def _backward_input(self, place: Place, _: Work | None) -> None:
        stage, index = place
        given = self._gradients_in.pop(place)
        found = self._stages[stage].backward_input(index, given.gradients)
        self._keep_gradients(place, replace(given, gradients=found))

    def _keep_gradients(self, place: Place, gradients: WeightedGradients) -> None:
        if not self._stages[place[0]].is_first:
            self._gradients_out[place] = gradients

    def _backward_weight(self, place: Place, _: Work | None) -> None:
        stage, index = place
        self._stages[stage].backward_weight(index, self._update_of(index))

    def _send_gradient(self, place: Place, _: Work | None) -> None:
        stage, index = place
        gradients = self._gradients_out.pop(place)
        tag, key = self._tag(stage - 1, index), self._keys_out.pop(place)
        self._links.outgoing[stage, stage - 1].send(gradients, tag=tag, key=key)

    def _complete(self, place: Place, _: Work | None) -> None:
        self._on_complete(place[1])

    def _update_of(self, index: int) -> int:
        size = self._microbatches_per_update
        return 0 if size is None else index // size

    @staticmethod
    def _tag(stage: int, index: int) -> int:
        """Returns the tag of messages across the boundary after a stage, in both directions."""
        return index * _MOST_STAGES + stage

    def _describe_failure(self, error: BaseException, action: Action, work: Work | None) -> str:
        index = action.microbatch_index
        place = (action.stage_index, index)
        lines = [
            f"While rank {self._recorder.rank} ran action {action} (stage {action.stage_index},"
            f" {action.kind.name.lower()}, micro-batch {index})."
        ]
        if work is not None and index in work.microbatches:
            lines.append(f"  micro-batch: {_describe(work.microbatches[index].content)}")
        for name, store in (("received", self._received), ("gradients", self._gradients_in)):
            if place in store:
                lines.append(f"  {name}: {_describe(store[place])}")
        if index in self._stages[action.stage_index].in_flight:
            flight = self._stages[action.stage_index].in_flight[index]
            lines.append(f"  layer input: {_describe(flight.layer_input)}")
        if action.stage_index > 0 and "differentiated Tensor" in str(error):  # torch's own words
            lines.append(f"  {NO_INPUT_GRADIENTS}")
        # Only here, since all ranks' actions are many more than this one's.
        schedule = self._stages.shape.build()
        # A later micro-batch is drawn at an equal one's place.
        mark = replace(action, microbatch_index=min(index, schedule.num_microbatches - 1))
        lines.append(f"Schedule {schedule.name}, one row per rank:")
        return "\n".join([*lines, schedule.format_grid(mark=mark)])


def _describe(tree: Any) -> str:
    return ", ".join(f"{tuple(t.shape)} {t.dtype}" for t in tensors_in(tree)) or "no tensors"
