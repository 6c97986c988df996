"""One rank's pipeline: what a training loop calls, Lightning's or your own.

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
pipeline; later ones bring the gradients of the minibatch so many batches ago. Under
``pipedream_2bw`` the first one does, and later ones bring those of the batch before.

Ranks that share a parameter each have a copy; :mod:`.pipeline.tied_gradients` keeps these
equal, and is the loop's to call.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dist.engine.pipeline.gradients import Gradients, HeldGradients
from lightning_dist.engine.pipeline.loss import AverageWeight, LossWeights
from lightning_dist.engine.pipeline.microbatch import Microbatch, batch_size_of, split
from lightning_dist.engine.pipeline.pending_update import PendingUpdate
from lightning_dist.engine.pipeline.runtime import Links, Runtime, Work, explain_with
from lightning_dist.engine.pipeline.stage import Step
from lightning_dist.engine.pipeline.stages import OwnStages, StageMaker
from lightning_dist.engine.profiling.meters.recorder import Recorder
from lightning_dist.engine.schedules.actions import ActionKind
from lightning_dist.engine.schedules.registry import PipelineShape
from lightning_dist.engine.schedules.rounds import Round, Rounds
from lightning_dist.engine.schedules.schedule import UpdateRule
from lightning_dist.engine.splitting.cut import cut
from lightning_dist.engine.splitting.layers import Layers, layers_in
from lightning_dist.engine.stashing.half_versions import HalfWeights
from lightning_dist.engine.stashing.policy import Predict, WeightVersions
from lightning_dist.engine.tensors.rng import python_state_kept

OnComplete = Callable[[int, Mapping[str, Tensor]], None]
"""Takes an update, counted since the last drain, and its gradients by parameter name."""
_COMPLETES_GRADIENTS = (ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT)


def _ignore(*_: object) -> None:
    """Does nothing."""


def _same(weight: float | None) -> float | None:
    return weight


def _lent(_: int) -> Gradients:
    return HeldGradients()


class Pipeline:
    """Runs batches through one rank's stages of a pipeline.

    Args:
        sequence: The pipelined module, or its layers; those of other stages are taken out of it.
        shape: Which part of which pipeline this is.
        links: Channels to the neighbours.
        weight_versions: ``"stash"``, ``"vertical_sync"`` or ``"none"``; matters for asynchronous
            schedules only.
        seed: Base of the random numbers; the same on all ranks.
        device: Where the stage computes.
        rank: Name of this rank in the timeline.
        layers: Gives what runs a stage's layers, if something has been made of them that does; else
            they run one after the other.
        gradients: Makes what holds those of a stage until :meth:`install_gradients`; by default
            they are lent to each backward.
        on_complete: Called where gradients are complete before their update is due, under
            ``"pipedream_2bw"``.
        average_weight: Averages what losses weigh over the data replicas, as ``on_complete`` and
            :meth:`install_gradients`'s ``reduce`` average gradients; called before these.
        predict: Gives copies of parameters as they will be some updates later, for forwards to run
            on under ``"pipedream"``.
        measure_discrepancy: Whether :attr:`reports` say how far weights have moved from a batch's
            forward to its update.
        half: How layers compute in half precision; None leaves them the parameters' own.
        shared: Names of the parameters that other ranks of the pipeline have too; where the
            summands of their gradients are added up, their hooks are run.
    """

    def __init__(
        self,
        sequence: nn.Sequential | Layers,
        shape: PipelineShape,
        links: Links,
        *,
        weight_versions: WeightVersions = "stash",
        seed: int = 0,
        device: torch.device | None = None,
        rank: int | None = None,
        layers: Callable[[int], nn.Module] | None = None,
        gradients: Callable[[int], Gradients] = _lent,
        on_complete: OnComplete = _ignore,
        average_weight: AverageWeight = _same,
        predict: Predict | None = None,
        measure_discrepancy: bool = False,
        half: HalfWeights | None = None,
        shared: Collection[str] = (),
    ) -> None:
        cut(sequence, shape.layers_per_stage, shape.stages)
        device = device or torch.device("cpu")
        self.links = links
        self.recorder = Recorder(shape.rank if rank is None else rank, device)
        self.stages = OwnStages(
            StageMaker(
                layers_in(sequence),
                weight_versions,
                seed,
                device,
                layers,
                gradients,
                predict,
                measure_discrepancy,
                half,
            ),
            shape,
        )
        self._rounds = Rounds(shape)
        self._on_complete = on_complete
        loss_weights = LossWeights(average_weight)
        comes_late = self.update_rule is UpdateRule.LATE
        self._held = PendingUpdate(
            self.stages, self.recorder, loss_weights, comes_late=comes_late, shared=shared
        )
        self._runtime = Runtime(
            self.stages,
            links,
            self.recorder,
            loss_weights,
            shape.num_microbatches if self._rounds.asynchronous else None,
            self._complete_early,
            explain_with(self._rounds.drawn()),
        )
        self._batches_since_drain = 0
        self._num_batches = 0
        self._num_evaluated = 0
        self._microbatch_sizes: tuple[int, ...] = ()

    @property
    def shape(self) -> PipelineShape:
        """Which part of which pipeline this is."""
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
        """By how many batches the first rank may be ahead of what the last one knows."""
        return self._rounds.lag

    @property
    def update_rule(self) -> UpdateRule:
        """When gradients are applied."""
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
            batch: As for :meth:`train_batch`.
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
                loss, a mean over the micro-batch's samples; or a dict with it under ``"loss"``, and
                under ``"weight"`` how much of anything else it is a mean over.
            gradient_scale: Multiplies the gradients, unless the step says what its loss weighs.
            loss_scale: Multiplies the loss for the backward, and is taken out of the gradients when
                they are installed; the same on all stages.
            seed: Names the batch for the random numbers; None counts the batches.
            on_results: Called with what is returned, as soon as no other rank waits for this one.

        Returns:
            What the step returned for each micro-batch on the last stage; empty on the others.

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
            Once after each backward; install the gradients and step before going on.
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
            is_complete: Whether no other batch adds to them before the update. Then ``p.grad`` is
                divided by what the losses weigh, if steps say so; see
                :mod:`.pipeline.loss_weights`.
        """
        self._held.install(reduce, is_complete=is_complete)

    def begin_update(self) -> None:
        """Stashes the weights; the optimizer's writes must come next."""
        self._held.begin()

    def end_update(self) -> None:
        """Notes that the optimizer has written."""
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
        """Gives the pipelined module its forward back and ends the channels."""
        self.detach()
        self.links.close()

    def detach(self) -> None:
        """Gives the pipelined module its forward back."""
        self.stages.detach()

    def detached(self) -> AbstractContextManager[None]:
        """Leaves the pipelined module alone while entered; nothing may be in flight.

        See :meth:`OwnStages.detached`. The numbers of batches, and what was recorded, go on.
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
