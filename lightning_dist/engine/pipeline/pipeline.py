"""One rank's pipeline, to be called by a training loop, Lightning's or your own.

.. code-block:: python

    shape = PipelineShape("1f1b", num_microbatches=4, layers_per_stage=(2, 2), rank=rank)
    pipeline = Pipeline(model, shape, links)
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
to do. Under ``pipedream`` the first ``num_stages - 1 - stage`` batches after a drain only fill the
pipeline. Each later batch ends with the gradients of the minibatch that many batches ago. Under
``pipedream_2bw`` only the first batch fills; later ones end with the previous batch's gradients.

Ranks that share a parameter each have a copy. :mod:`.pipeline.tied_gradients` keeps the copies
equal; the training loop must call it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dist.engine.pipeline.loss import AverageWeight, LossWeights
from lightning_dist.engine.pipeline.microbatch import Microbatch, batch_size_of, split
from lightning_dist.engine.pipeline.pending_update import PendingUpdate
from lightning_dist.engine.pipeline.runtime import Links, Runtime, Work, explain_with
from lightning_dist.engine.pipeline.stage import Step
from lightning_dist.engine.pipeline.stages import OwnStages, StageMaker, StageOptions
from lightning_dist.engine.profiling.meters.recorder import Recorder
from lightning_dist.engine.schedules.actions import ActionKind
from lightning_dist.engine.schedules.registry import PipelineShape
from lightning_dist.engine.schedules.rounds import Round, Rounds
from lightning_dist.engine.schedules.update_rule import UpdateRule
from lightning_dist.engine.splitting.cut import cut
from lightning_dist.engine.splitting.layers import Layers, layers_in
from lightning_dist.engine.tensors.rng import python_state_kept

OnComplete = Callable[[int, Mapping[str, Tensor]], None]
"""Takes an update, counted since the last drain, and its gradients by parameter name."""
_COMPLETES_GRADIENTS = (ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT)


def _ignore(*_: object) -> None: ...


def _same(weight: float | None) -> float | None:
    return weight


_OPTIONS = StageOptions()


class Pipeline:
    """Runs batches through one rank's stages of a pipeline.

    Args:
        sequence: The pipelined module, or its layers; other stages' layers are removed from it.
        shape: This rank's part of the pipeline.
        links: Channels to the neighbours.
        options: How the stages compute.
        rank: Name of this rank in the timeline.
        on_complete: Called when gradients are complete before their update is due, under
            ``"pipedream_2bw"``.
        average_weight: Averages the losses' weights over the data replicas, as ``on_complete`` and
            :meth:`install_gradients`'s ``reduce`` average gradients; called before these.
        shared: Names of the parameters that other ranks of the pipeline have too; their hooks run
            on the rank that sums their gradients.
    """

    def __init__(
        self,
        sequence: nn.Sequential | Layers,
        shape: PipelineShape,
        links: Links,
        options: StageOptions = _OPTIONS,
        *,
        rank: int | None = None,
        on_complete: OnComplete = _ignore,
        average_weight: AverageWeight = _same,
        shared: Collection[str] = (),
    ) -> None:
        cut(sequence, shape.layers_per_stage, shape.stages)
        self.links = links
        self.recorder = Recorder(shape.rank if rank is None else rank, options.device)
        self.stages = OwnStages(StageMaker(layers_in(sequence), options), shape)
        self._rounds = Rounds(shape)
        self._on_complete = on_complete
        loss_weights = LossWeights(average_weight)
        self._held = PendingUpdate(
            self.stages,
            self.recorder,
            loss_weights,
            completes_early=self.update_rule.completes_early,
            shared=shared,
        )
        self._runtime = Runtime(
            self.stages,
            links,
            self.recorder,
            loss_weights,
            microbatches_per_update=shape.num_microbatches if self.asynchronous else None,
            on_complete=self._complete_early,
            explain=explain_with(self._rounds.drawn()),
        )
        self._batches_since_drain = 0
        self._num_batches = 0
        self._num_evaluated = 0
        self._microbatch_sizes: tuple[int, ...] = ()

    @property
    def shape(self) -> PipelineShape:
        """This rank's part of the pipeline."""
        return self.stages.shape

    @property
    def asynchronous(self) -> bool:
        """Whether batches overlap, so that gradients come later than their batch."""
        return self._rounds.asynchronous

    @property
    def delay(self) -> int:
        """Batches between a batch and its gradients on this rank."""
        return self._rounds.delay

    @property
    def lag(self) -> int:
        """Number of batches by which the first rank may be ahead of the last rank's results."""
        return self._rounds.lag

    @property
    def update_rule(self) -> UpdateRule:
        """The meaning of the schedule's update."""
        return self._rounds.update_rule

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
        return self._held.is_due

    @property
    def due_update(self) -> int:
        """The update whose gradients are held, counted since the last drain."""
        return self._held.index

    @property
    def gradients_of_batch(self) -> int:
        """The batch (counted from the first ever) whose gradients are held."""
        index = self._held.index
        if not self.asynchronous:
            return self._num_batches - 1
        return self._num_batches - self._batches_since_drain + index

    def microbatch_sizes_of(self, batch: Any) -> tuple[int, ...]:
        """Counts the samples of each micro-batch of a training batch.

        Args:
            batch: A batch as for :meth:`train_batch`.
        """
        return tuple(microbatch.num_samples for microbatch in self._split(batch))

    def _split(self, batch: Any) -> list[Microbatch]:
        return split(batch, self._rounds.num_pieces(batch_size_of(batch) or 1))

    def train_batch(
        self,
        batch: Any,
        step: Step,
        *,
        gradient_scale: float = 1.0,
        loss_scale: float = 1.0,
        seed: int | None = None,
        on_results: Callable[[list[Any]], None] = _ignore,
    ) -> list[Any]:
        """Runs one batch's round of the schedule.

        Args:
            batch: Any tree of tensors with the samples in dim 0, the same on all stages.
            step: Called with each micro-batch; must call the pipelined module once and return the
                loss, a mean over the micro-batch's samples. It may return a dict instead, with the
                loss under ``"loss"``, and under ``"weight"`` how much of anything else it is a mean
                over.
            gradient_scale: Multiplies the gradients, unless the step returns its loss's weight.
            loss_scale: Multiplies the loss for the backward; installed gradients are divided by it.
                It must be the same on all stages.
            seed: Names the batch for the random numbers; None counts the batches.
            on_results: Called with the results, as soon as no other rank waits for this one.

        Returns:
            The step's result for each micro-batch on the last stage; empty on the others.

        Raises:
            ValueError: The batch cannot be cut.
        """
        microbatches = self._split(batch)
        self._microbatch_sizes = tuple(m.num_samples for m in microbatches)
        first = self._batches_since_drain * len(microbatches) if self.asynchronous else 0
        numbered = {first + microbatch.index: microbatch for microbatch in microbatches}
        name = (self._num_batches if seed is None else seed,)
        actions = self._rounds.training(self._batches_since_drain, len(microbatches))
        if not self.asynchronous:
            for stage in self.stages.values():
                stage.policy.restart()
        self._held.note_loss_scale(
            self._batches_since_drain if self.asynchronous else 0, loss_scale
        )
        with python_state_kept():
            work = Work(numbered, step, gradient_scale, name, loss_scale)
            results = self._run(actions, work, on_results)
        self._batches_since_drain += 1
        self._num_batches += 1
        self._num_evaluated = 0
        return results

    def drain(self) -> Iterator[None]:
        """Runs the backwards of the batches in flight.

        Yields:
            Nothing, once after each backward; install the gradients and step before going on.
        """
        self.recorder.interrupt()
        for actions in self._rounds.drain(self._batches_since_drain):
            self._run(actions, None)
            yield
        self.recorder.interrupt()
        self._batches_since_drain = 0
        for stage in self.stages.values():
            stage.policy.restart()

    def evaluate_batch(
        self, batch: Any, step: Step, num_microbatches: int, *, seed: int | None = None
    ) -> list[Any]:
        """Runs a batch forward only.

        Args:
            batch: Any tree of tensors with the samples in dim 0.
            step: Called with each micro-batch.
            num_microbatches: Largest number of micro-batches.
            seed: Names the previous training batch for the random numbers; None counts the batches.

        Returns:
            The step's result for each micro-batch on the last stage; empty on the others.
        """
        assert not torch.is_grad_enabled()
        self.recorder.interrupt()
        count = max(1, min(num_microbatches, batch_size_of(batch) or 1))
        microbatches = split(batch, count)
        self._microbatch_sizes = tuple(m.num_samples for m in microbatches)
        name = (self._num_batches if seed is None else seed, self._num_evaluated)
        work = Work({m.index: m for m in microbatches}, step, 1.0, name)
        self._num_evaluated += 1
        with python_state_kept():
            results = self._runtime.run(self._rounds.evaluation(count), work)
        return [results[index] for index in sorted(results)]

    def install_gradients(
        self, reduce: Callable[[], None] | None = None, *, is_complete: bool = True
    ) -> None:
        """Moves the held gradients to ``p.grad``, adding to what is there.

        Args:
            reduce: Averages ``p.grad`` over the data replicas.
            is_complete: Whether no other batch adds to the gradients before the update. Then
                ``p.grad`` is divided by the sum of the losses' weights, if steps return weights;
                see :mod:`.pipeline.loss`.
        """
        self._held.install(reduce, is_complete=is_complete)

    def begin_update(self) -> None:
        """Stashes the weights; the optimizer's writes must come next."""
        self._held.begin()

    def end_update(self) -> None:
        """Ends the update after the optimizer's writes."""
        self._held.end()

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
        self._held.clear()
        self._batches_since_drain = 0

    def close(self) -> None:
        """Restores the pipelined module's own forward and closes the channels."""
        self.detach()
        self.links.close()

    def detach(self) -> None:
        """Restores the pipelined module's own forward."""
        self.stages.detach()

    def detached(self) -> AbstractContextManager[None]:
        """Returns a context manager that detaches the stages from the pipelined module.

        Nothing may be in flight. See :meth:`OwnStages.detached`. The counts of batches and the
        recorded spans are kept.
        """
        assert self._batches_since_drain == 0 or not self.asynchronous
        return self.stages.detached()

    def _complete_early(self, update: int) -> None:
        self._on_complete(update, self._held.complete_early(update))

    def _run(
        self,
        actions: Round,
        work: Work | None,
        on_results: Callable[[list[Any]], None] = _ignore,
    ) -> list[Any]:
        parted = self._rounds.parted(actions)
        backwards = Counter(a.stage_index for a in actions if a.kind in _COMPLETES_GRADIENTS)
        for number, count in backwards.items():
            self.stages[number].begin_round(count)
        found = self._runtime.run(parted.until_last_send, work)
        results = [found[index] for index in sorted(found)]
        on_results(results)
        self._runtime.run(parted.local_tail, work)
        for number in backwards:
            self.stages[number].end_round()
        self._held.hold(parted.optimizer_actions[-1] if parted.optimizer_actions else None)
        return results
