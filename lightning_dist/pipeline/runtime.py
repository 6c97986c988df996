"""The interpreter: for each action of a rank's schedule, do it.

There is no loop for 1F1B here, nor for any other schedule. The order of the work is data, made in
:mod:`lightning_dist.pipeline.schedules`, lowered in :mod:`lightning_dist.pipeline.lowering` and cut
into rounds in :mod:`lightning_dist.pipeline.stream`; what is left is one method for each kind of
action. ``REDUCE_GRAD`` and ``STEP`` belong to whoever owns the optimizer; the runtime stops there.

When an action fails, the exception keeps its type and gets a note: which action, on which rank and
stage, with which shapes, and where in the schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_dist.pipeline.actions import Action, ActionKind
from lightning_dist.pipeline.channel import Receiver, Sender, StampError
from lightning_dist.pipeline.microbatch import Microbatch
from lightning_dist.pipeline.recorder import Recorder
from lightning_dist.pipeline.schedule import Schedule
from lightning_dist.pipeline.stage import Stage, Step
from lightning_dist.pipeline.timeline import SpanKind
from lightning_dist.tree import flatten


@dataclass(frozen=True, slots=True)
class Links:
    """The channels of one stage; None where there is no neighbour.

    Attributes:
        activations_in: From the stage before.
        activations_out: To the stage after.
        gradients_in: From the stage after.
        gradients_out: To the stage before.
    """

    activations_in: Receiver | None = None
    activations_out: Sender | None = None
    gradients_in: Receiver | None = None
    gradients_out: Sender | None = None

    def interrupt(self, error: BaseException) -> None:
        """Makes each waiting or later receive raise.

        Args:
            error: What to raise.
        """
        for receiver in (self.activations_in, self.gradients_in):
            if receiver is not None:
                receiver.interrupt(error)

    def close(self) -> None:
        """Ends all channels; both ends must call it."""
        for sender in (self.activations_out, self.gradients_out):
            if sender is not None:
                sender.close()
        for receiver in (self.activations_in, self.gradients_in):
            if receiver is not None:
                receiver.close()


@dataclass(frozen=True, slots=True)
class Work:
    """One batch for the runtime.

    Attributes:
        microbatches: By the index that the actions of this batch use.
        step: The user's step.
        gradient_scale: Multiplies all gradients of the batch, beside each micro-batch's weight.
        seed: Integers that name the batch for the random numbers.
        fingerprint: Of the batch; the same on all stages.
    """

    microbatches: Mapping[int, Microbatch]
    step: Step
    gradient_scale: float
    seed: tuple[int, ...]
    fingerprint: int


class Runtime:
    """Runs the actions of one rank.

    Args:
        stage: The rank's stage.
        links: Its channels.
        recorder: Where the spans go.
        explain: Draws the schedule around an action, for errors.
    """

    def __init__(
        self,
        stage: Stage,
        links: Links,
        recorder: Recorder,
        explain: Callable[[Action], str],
    ) -> None:
        self._stage = stage
        self._links = links
        self._recorder = recorder
        self._explain = explain
        self._received: dict[int, Any] = {}
        self._results: dict[int, Any] = {}
        self._scales: dict[int, float] = {}
        self._gradients_in: dict[int, list[Tensor | None]] = {}
        self._gradients_out: dict[int, list[Tensor | None]] = {}
        self._handlers: dict[ActionKind, Callable[[int, Work | None], None]] = {
            ActionKind.RECV_F: self._receive_activation,
            ActionKind.FORWARD: self._forward,
            ActionKind.SEND_F: self._send_activation,
            ActionKind.RECV_B: self._receive_gradient,
            ActionKind.BACKWARD: self._backward,
            ActionKind.SEND_B: self._send_gradient,
        }
        self._span_kinds = {
            kind: SpanKind.COMPUTE if kind.is_compute else SpanKind.COMMUNICATION
            for kind in self._handlers
        } | {ActionKind.RECV_F: SpanKind.WAIT, ActionKind.RECV_B: SpanKind.WAIT}

    def run(self, actions: Iterable[Action], work: Work | None = None) -> dict[int, Any]:
        """Runs actions in order.

        Args:
            actions: Compute and communication of this rank; others must have been taken out.
            work: The batch that the forwards among them are about.

        Returns:
            What the user's step returned, by micro-batch index; empty but on the last stage.
        """
        for action in actions:
            try:
                with self._recorder.span(self._span_kinds[action.kind], action):
                    self._handlers[action.kind](action.microbatch_index, work)
            except BaseException as error:
                error.add_note(self._describe_failure(action, work))
                raise
        results, self._results = self._results, {}
        return results if self._stage.is_last else {}

    def clear(self) -> None:
        """Forgets everything in flight, after a failure."""
        for store in (self._received, self._results, self._gradients_in, self._gradients_out):
            store.clear()
        self._stage.clear()

    def _receive_activation(self, index: int, work: Work | None) -> None:
        assert self._links.activations_in is not None
        assert work is not None
        try:
            self._received[index] = self._links.activations_in.receive(work.fingerprint)
        except StampError:
            raise ValueError(
                "This stage and the one before read different batches. All stages of a pipeline"
                " must draw the same samples and augment them alike: call"
                " `L.seed_everything(seed, workers=True)` first, and let samplers, augmentations"
                " and collate functions use no random numbers that depend on the rank. It also"
                " happens when one rank alone ends an epoch or skips a batch."
            ) from None

    def _forward(self, index: int, work: Work | None) -> None:
        assert work is not None
        microbatch = work.microbatches[index]
        seed = (*work.seed, microbatch.index)
        received = self._received.pop(index, None)
        self._results[index] = self._stage.forward(index, microbatch, received, work.step, seed)
        if not torch.is_grad_enabled():
            return
        if self._stage.is_last:
            scale = microbatch.weight * work.gradient_scale
            loss = _loss_of(self._results[index])
            self._stage.set_loss(index, loss)
            self._gradients_in[index] = [torch.full_like(loss, scale)] if loss.requires_grad else []

    def _send_activation(self, index: int, work: Work | None) -> None:
        assert self._links.activations_out is not None
        assert work is not None
        self._links.activations_out.send(self._results.pop(index), work.fingerprint)

    def _receive_gradient(self, index: int, _: Work | None) -> None:
        assert self._links.gradients_in is not None
        self._gradients_in[index] = self._links.gradients_in.receive()

    def _backward(self, index: int, _: Work | None) -> None:
        self._gradients_out[index] = self._stage.backward(index, self._gradients_in.pop(index))

    def _send_gradient(self, index: int, _: Work | None) -> None:
        assert self._links.gradients_out is not None
        self._links.gradients_out.send(self._gradients_out.pop(index))

    def _describe_failure(self, action: Action, work: Work | None) -> str:
        index = action.microbatch_index
        lines = [
            f"While rank {self._recorder.rank} ran action {action} (stage {action.stage_index},"
            f" {action.kind.name.lower()}, micro-batch {index})."
        ]
        if work is not None and index in work.microbatches:
            lines.append(f"  micro-batch: {_describe(work.microbatches[index].content)}")
        for name, store in (("received", self._received), ("gradients", self._gradients_in)):
            if index in store:
                lines.append(f"  {name}: {_describe(store[index])}")
        if index in self._stage.in_flight:
            flight = self._stage.in_flight[index]
            lines.append(f"  layer input: {_describe(flight.layer_input)}")
        return "\n".join([*lines, self._explain(action)])


def explain_with(schedule: Schedule) -> Callable[[Action], str]:
    """Makes the function that draws a schedule around an action.

    Args:
        schedule: One flush of the schedule; later minibatches are drawn where an equal one stands.
    """

    def explain(action: Action) -> str:
        index = min(action.microbatch_index, schedule.num_microbatches - 1)
        mark = action.shifted(index - action.microbatch_index)
        return f"Schedule {schedule.name}, one row per rank:\n{schedule.format_grid(mark=mark)}"

    return explain


def _loss_of(result: Any) -> Tensor:
    loss = result.get("loss") if isinstance(result, Mapping) else result
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        got = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise ValueError(
            f"A training step must return its loss, a tensor of one element, or a dict with it"
            f" under 'loss', but returned {got}. Skipping a step by returning None is not possible"
            " in a pipeline: return a loss of zero instead."
        )
    return loss


def _describe(tree: Any) -> str:
    tensors = [t for t in flatten(tree)[0] if t is not None]
    return ", ".join(f"{tuple(t.shape)} {t.dtype}" for t in tensors) or "no tensors"
