"""One rank's pipeline: what a training loop calls, Lightning's or your own.

.. code-block:: python

    pipeline = Pipeline(model, layers_per_stage=[2, 2], stage_index=rank, links=links, ...)
    for batch in loader:
        pipeline.train_batch(batch, step=lambda microbatch: loss(model(microbatch.x), microbatch.y))
        if pipeline.has_gradients:
            optimizer.zero_grad()
            pipeline.install_gradients()
            with pipeline.updating():
                optimizer.step()
    for _ in pipeline.drain():
        ...  # the same four lines

Under a synchronous schedule each batch ends with gradients, and :meth:`Pipeline.drain` has nothing
to do. Under ``pipedream`` the first ``num_stages - 1 - stage_index`` batches after a drain only
fill the pipeline; later ones bring the gradients of the minibatch so many batches ago.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import nn

from lightning_dist.pipeline.actions import Action, ActionKind
from lightning_dist.pipeline.cut import cut, own_layers
from lightning_dist.pipeline.fingerprint import fingerprint
from lightning_dist.pipeline.gradients import Gradients, Returned
from lightning_dist.pipeline.microbatch import batch_size_of, split
from lightning_dist.pipeline.recorder import Recorder
from lightning_dist.pipeline.runtime import Links, Runtime, Work, explain_with
from lightning_dist.pipeline.schedules import build_schedule
from lightning_dist.pipeline.shape import PipelineShape
from lightning_dist.pipeline.stage import Stage, Step
from lightning_dist.pipeline.stream import Stream
from lightning_dist.pipeline.timeline import SpanKind
from lightning_dist.pipeline.weight_policy import Current, Stashed, Unstashed, WeightPolicy
from lightning_dist.pipeline.weights import WeightStore
from lightning_dist.rng import python_state_kept

WeightVersions = Literal["stash", "none"]


class Pipeline:
    """Runs batches through one stage of a pipeline.

    Args:
        sequence: The pipelined module; its other stages' layers are taken out of it.
        shape: Which part of which pipeline this is.
        links: Channels to the neighbours.
        weight_versions: ``"stash"`` or ``"none"``; matters for asynchronous schedules only.
        seed: Base of the random numbers; the same on all ranks.
        device: Where the stage computes.
        rank: Name of this rank in the timeline.
        layers: Runs this stage's layers, if something has been made of them that does; else they
            run one after the other.
        gradients: Where they stay until :meth:`install_gradients`; by default they are asked for.
        mark_batches: Whether activations carry a fingerprint of their batch, which needs its
            values.
    """

    def __init__(
        self,
        sequence: nn.Sequential,
        shape: PipelineShape,
        links: Links,
        *,
        weight_versions: WeightVersions = "stash",
        seed: int = 0,
        device: torch.device | None = None,
        rank: int | None = None,
        layers: nn.Module | None = None,
        gradients: Gradients | None = None,
        mark_batches: bool = True,
    ) -> None:
        cut(sequence, shape.layers_per_stage, shape.stage_index)
        device = device or torch.device("cpu")
        self.shape = shape
        self.links = links
        self.recorder = Recorder(shape.stage_index if rank is None else rank, device)
        self._stream = _stream(shape, shape.schedule, shape.num_microbatches)
        self.stage = Stage(
            sequence,
            shape.stage_index,
            shape.num_stages,
            own_layers(sequence) if layers is None else layers,
            _policy(sequence, self._stream.asynchronous, weight_versions),
            gradients or Returned(),
            seed=(seed, shape.replica_index),
            device=device,
        )
        self._runtime = Runtime(self.stage, links, self.recorder, self._explain())
        self._mark_batches = mark_batches
        self._batches_since_drain = 0
        self._num_batches = 0
        self._num_evaluated = 0
        self._microbatch_sizes: tuple[int, ...] = ()
        self._update: Action | None = None
        self._update_start: Any = None
        self._other_rounds: dict[tuple[str, int], tuple[Action, ...]] = {}

    @property
    def asynchronous(self) -> bool:
        """Whether batches overlap, so that gradients come later than their batch."""
        return self._stream.asynchronous

    @property
    def delay(self) -> int:
        """Batches between a batch and its gradients on this stage."""
        return self._stream.delay

    @property
    def batches_since_drain(self) -> int:
        """Batches whose forward has run since the pipeline was last empty."""
        return self._batches_since_drain

    @property
    def microbatch_sizes(self) -> tuple[int, ...]:
        """Samples of each micro-batch of the latest batch."""
        return self._microbatch_sizes

    @property
    def num_batches(self) -> int:
        """Training batches so far."""
        return self._num_batches

    @property
    def has_gradients(self) -> bool:
        """Whether gradients are held that :meth:`install_gradients` has not installed."""
        return self._update is not None

    @property
    def gradients_of_batch(self) -> int:
        """The batch (counted from the first ever) whose gradients are held."""
        assert self._update is not None
        if not self.asynchronous:
            return self._num_batches - 1
        return self._num_batches - self._batches_since_drain + self._update.microbatch_index

    def train_batch(
        self, batch: Any, step: Step, *, gradient_scale: float = 1.0, seed: int | None = None
    ) -> list[Any]:
        """Runs one batch's round of the schedule.

        Args:
            batch: Any tree of tensors with the samples in dim 0, the same on all stages.
            step: Called with each micro-batch; must call the pipelined module once and return the
                loss, a mean over the micro-batch's samples.
            gradient_scale: Multiplies the gradients.
            seed: Names the batch for the random numbers; None counts the batches.

        Returns:
            What the step returned for each micro-batch on the last stage; empty on the others.

        Raises:
            ValueError: The stage before read another batch, or the batch cannot be cut.
        """
        first = self._batches_since_drain if self.asynchronous else 0
        microbatches = split(batch, self._num_pieces(batch))
        self._microbatch_sizes = tuple(m.num_samples for m in microbatches)
        numbered = {first + microbatch.index: microbatch for microbatch in microbatches}
        name = (self._num_batches if seed is None else seed,)
        # The pipeline has to fill then, so that nobody waits because of a look at a device.
        mark = self._mark(batch, read_devices=self._batches_since_drain == 0)
        actions = self._round(len(microbatches))
        with python_state_kept():
            results = self._run(actions, Work(numbered, step, gradient_scale, name, mark))
        self._batches_since_drain += 1
        self._num_batches += 1
        self._num_evaluated = 0
        return [results[index] for index in sorted(results)]

    def drain(self) -> Iterator[None]:
        """Runs the backwards of the batches in flight.

        Yields:
            Once after each backward; install the gradients and step before going on.
        """
        self.recorder.interrupt()
        for actions in self._stream.drain(self._batches_since_drain):
            self._run(actions, None)
            yield
        self.recorder.interrupt()
        self._batches_since_drain = 0

    def evaluate_batch(
        self, batch: Any, step: Step, num_microbatches: int, *, seed: int | None = None
    ) -> list[Any]:
        """Runs a batch forward only.

        Args:
            batch: Any tree of tensors with the samples in dim 0.
            step: Called with each micro-batch.
            num_microbatches: At most how many micro-batches.
            seed: Names the training batch before it for the random numbers; None counts them.

        Returns:
            What the step returned for each micro-batch on the last stage; empty on the others.
        """
        assert not torch.is_grad_enabled()
        self.recorder.interrupt()
        count = max(1, min(num_microbatches, batch_size_of(batch) or 1))
        microbatches = split(batch, count)
        self._microbatch_sizes = tuple(m.num_samples for m in microbatches)
        mark = self._mark(batch, read_devices=True)
        name = (self._num_batches if seed is None else seed, self._num_evaluated)
        work = Work({m.index: m for m in microbatches}, step, 1.0, name, mark)
        self._num_evaluated += 1
        with python_state_kept():
            results = self._runtime.run(self._other_round("forward", count), work)
        return [results[index] for index in sorted(results)]

    def install_gradients(self, reduce: Callable[[], None] | None = None) -> None:
        """Moves the held gradients to ``p.grad``, adding to what is there.

        Args:
            reduce: Averages ``p.grad`` over the data replicas.
        """
        for name, parameter in self.stage.named_parameters().items():
            gradient = self.stage.gradients.held.pop(name, None)
            if gradient is not None and parameter.grad is not None:
                parameter.grad.add_(gradient)
            elif gradient is not None:
                parameter.grad = gradient
        if reduce is not None and self._update is not None:
            action = Action(
                self._update.stage_index, ActionKind.REDUCE_GRAD, self._update.microbatch_index
            )
            with self.recorder.span(SpanKind.COMMUNICATION, action):
                reduce()

    def begin_update(self) -> None:
        """Stashes the weights; the optimizer's writes must come next."""
        assert self._update is not None
        self._update_start = self.recorder.mark()
        self.stage.policy.before_step()

    def end_update(self) -> None:
        """Notes that the optimizer has written."""
        assert self._update is not None
        self.recorder.record(SpanKind.UPDATE, self._update, self._update_start)
        self._update = None

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Wraps the optimizer's writes in :meth:`begin_update` and :meth:`end_update`.

        Yields:
            Nothing.
        """
        self.begin_update()
        yield
        self.end_update()

    def clear(self) -> None:
        """Forgets everything in flight, after a failure."""
        self._runtime.clear()
        self._batches_since_drain = 0
        self._update = None

    def close(self) -> None:
        """Gives the pipelined module its forward back and ends the channels."""
        self.stage.detach()
        self.links.close()

    def _mark(self, batch: Any, *, read_devices: bool) -> int:
        return fingerprint(batch, read_devices=read_devices) if self._mark_batches else 0

    def _num_pieces(self, batch: Any) -> int:
        count = self.shape.num_microbatches
        return min(count, batch_size_of(batch) or 1) if self.shape.may_use_fewer else count

    def _round(self, num_microbatches: int) -> tuple[Action, ...]:
        if num_microbatches == self.shape.num_microbatches:
            return self._stream.round(self._batches_since_drain)
        return self._other_round(self.shape.schedule, num_microbatches)

    def _other_round(self, schedule: str, num_microbatches: int) -> tuple[Action, ...]:
        """Gives a synchronous round of another size or schedule than the stream's."""
        key = (schedule, num_microbatches)
        if key not in self._other_rounds:
            self._other_rounds[key] = _stream(self.shape, schedule, num_microbatches).round(0)
        return self._other_rounds[key]

    def _run(self, actions: Sequence[Action], work: Work | None) -> dict[int, Any]:
        owned = [a for a in actions if a.kind in (ActionKind.REDUCE_GRAD, ActionKind.STEP)]
        assert tuple(owned) == tuple(actions[len(actions) - len(owned) :])
        num_backwards = sum(action.kind is ActionKind.BACKWARD for action in actions)
        if num_backwards:
            self.stage.gradients.begin_round(num_backwards)
        results = self._runtime.run(actions[: len(actions) - len(owned)], work)
        if num_backwards:
            self.stage.gradients.end_round()
        self._update = owned[-1] if owned else None
        return results

    def _explain(self) -> Callable[[Action], str]:
        drawn = 2 * self.shape.num_stages if self.asynchronous else self.shape.num_microbatches
        return explain_with(
            build_schedule(
                self.shape.schedule, num_stages=self.shape.num_stages, num_microbatches=drawn
            )
        )


def _stream(shape: PipelineShape, name: str, num_microbatches: int) -> Stream:
    return Stream(
        name,
        num_stages=shape.num_stages,
        num_microbatches=num_microbatches,
        rank=shape.stage_index,
    )


def _policy(
    sequence: nn.Sequential, asynchronous: bool, weight_versions: WeightVersions
) -> WeightPolicy:
    if not asynchronous:
        return Current()
    if weight_versions == "none":
        return Unstashed()
    return Stashed(WeightStore(sequence.named_parameters()))
