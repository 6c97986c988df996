"""One rank's pipeline, to be called by a training loop, Lightning's or your own.

A loop calls :meth:`Pipeline.train_batch`, takes the update that is due, and drains at its end.

Under a synchronous schedule each batch ends with gradients, and :meth:`Pipeline.drain` has nothing
to do. Under ``pipedream`` the first ``num_stages - 1 - stage`` batches after a drain only fill the
pipeline. Each later batch ends with the gradients of the batch that many batches ago. Under
``pipedream_2bw`` only the first batch fills; later ones end with the previous batch's gradients.

Ranks that share a parameter each have a copy. :mod:`.pipeline.tied_gradients` keeps the copies
equal; the training loop must call it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dist.engine.comms.links import Links, check_links
from lightning_dist.engine.pipeline.gradients import EarlierGradients, install
from lightning_dist.engine.pipeline.loss_weights import AverageWeight, LossWeights
from lightning_dist.engine.pipeline.microbatch import Microbatch, split
from lightning_dist.engine.pipeline.runtime import Runtime, Work
from lightning_dist.engine.pipeline.stage import Step
from lightning_dist.engine.pipeline.stages import OwnStages, StageOptions
from lightning_dist.engine.profiling.meters.recorder import Recorder
from lightning_dist.engine.schedules.actions import Action, ActionKind
from lightning_dist.engine.schedules.registry import PipelineShape
from lightning_dist.engine.schedules.rounds import Round, Rounds
from lightning_dist.engine.schedules.timeline import SpanKind
from lightning_dist.engine.splitting.cut import cut
from lightning_dist.engine.splitting.layers import Layers, layers_in
from lightning_dist.engine.splitting.split import check_shape
from lightning_dist.engine.tensors.compiler import keep_saved_tensors
from lightning_dist.engine.tensors.patch import add_with_hooks
from lightning_dist.engine.tensors.rng import random_state_kept
from lightning_dist.engine.tensors.samples import batch_size_of

OnComplete = Callable[[int, dict[str, Tensor]], None]
"""Takes an update, counted since the last drain, and its gradients by parameter name."""
_COMPLETES_GRADIENTS = (ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT)
_OPTIONS = StageOptions()


class Pipeline:
    """Runs batches through one rank's stages of a pipeline.

    Args:
        sequence: A plain `nn.Sequential`, or the ``layers`` of :func:`.find_split`; other stages'
            layers are removed from it.
        shape: This rank's part of the pipeline.
        links: Channels to the neighbours.
        options: How the stages compute.
        rank: Name of this rank in the timeline.
        on_complete: Called when gradients are complete before their update is due, under
            ``"pipedream_2bw"``.
        average_weight: Averages the losses' weights over the data replicas, as ``on_complete`` and
            :meth:`install_gradients`'s ``reduce`` average gradients; called before these.
        shared: Names of the parameters that other ranks of the pipeline have too; their hooks run
            on the rank that sums their gradients, and :class:`.TiedSums` keeps the copies equal.

    Attributes:
        update_rule: The meaning of the schedule's update.
        asynchronous: Whether batches overlap, so that gradients come later than their batch.
        delay: Batches between a batch and its gradients on this rank.
        lag: Number of batches by which the first rank may be ahead of the last rank's results.
        batches_since_drain: Batches whose forward has run since the pipeline was last empty.
        num_batches: Training batches so far.
        microbatch_sizes: Samples of each micro-batch of the latest batch.

    Raises:
        ValueError: The module cannot be cut so, or the links are those of other stages.
    """

    def __init__(
        self,
        sequence: nn.Sequential | Layers,
        shape: PipelineShape,
        links: Links,
        options: StageOptions = _OPTIONS,
        *,
        rank: int | None = None,
        on_complete: OnComplete | None = None,
        average_weight: AverageWeight = lambda weight: weight,
        shared: Collection[str] = (),
    ) -> None:
        layers = layers_in(sequence)
        check_shape(layers, shape, shared)
        check_links(links, shape)
        cut(layers, shape.layers_per_stage, shape.stages)
        self.links = links
        self.recorder = Recorder(shape.rank if rank is None else rank, options.device)
        self.stages = OwnStages(layers, options, shape)
        self._rounds = Rounds(shape)
        self.update_rule = self._rounds.update_rule
        self.asynchronous = self._rounds.asynchronous
        self.delay, self.lag = self._rounds.delay, self._rounds.lag
        self._on_complete = on_complete
        self.shared = shared
        self._loss_weights = LossWeights(average_weight)
        self._earlier = EarlierGradients()
        self._loss_scales: dict[int, float] = {}
        self._due: Action | None = None  # the `STEP` of the update that is owed
        self._update_start: Any = None
        self._runtime = Runtime(
            self.stages,
            links,
            self.recorder,
            self._loss_weights,
            microbatches_per_update=shape.num_microbatches if self.asynchronous else None,
            on_complete=self._complete_early,
        )
        self.batches_since_drain = 0
        self.num_batches = 0
        self._num_evaluated = 0
        self.microbatch_sizes: tuple[int, ...] = ()

    @property
    def shape(self) -> PipelineShape:
        """This rank's part of the pipeline."""
        return self.stages.shape

    @property
    def has_gradients(self) -> bool:
        """Whether gradients are held that :meth:`install_gradients` has not installed."""
        return self._due is not None

    @property
    def compares_samples(self) -> bool:
        """Whether the loss is known to compare samples, on the rank of the last stage."""
        return any(stage.compares_samples for stage in self.stages.values())

    @property
    def due_update(self) -> int:
        """The update whose gradients are held, counted since the last drain."""
        assert self._due is not None, "no gradients are held"
        return self._due.microbatch_index

    @property
    def gradients_of_batch(self) -> int:
        """The batch (counted from the first ever) whose gradients are held."""
        if not self.asynchronous:
            return self.num_batches - 1
        return self.num_batches - self.batches_since_drain + self.due_update

    def microbatch_sizes_of(self, batch: Any) -> tuple[int, ...]:
        """Counts the samples of each micro-batch of a batch as for :meth:`train_batch`."""
        return tuple(microbatch.num_samples for microbatch in self._split(batch))

    def _split(self, batch: Any) -> list[Microbatch]:
        if self.shape.num_microbatches == 1:
            return split(batch, 1)
        return split(batch, self._rounds.num_pieces(batch_size_of(batch)))

    def train_batch(
        self,
        batch: Any,
        step: Step,
        *,
        gradient_scale: float = 1.0,
        loss_scale: float = 1.0,
        seed: int | None = None,
        on_results: Callable[[list[Any]], None] | None = None,
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
            ValueError: The batch cannot be cut, or an asynchronous schedule's update is left out.
        """
        self._check_taken()
        microbatches = self._split(batch)
        self.microbatch_sizes = tuple(m.num_samples for m in microbatches)
        first = self.batches_since_drain * len(microbatches) if self.asynchronous else 0
        numbered = {first + microbatch.index: microbatch for microbatch in microbatches}
        name = (self.num_batches if seed is None else seed,)
        actions = self._rounds.training(self.batches_since_drain, len(microbatches))
        for stage in self.stages.values():
            stage.begin_batch(overlaps=self.asynchronous)
        self._loss_scales[self.batches_since_drain if self.asynchronous else 0] = loss_scale
        with random_state_kept(self.stages.options.device):
            work = Work(numbered, step, gradient_scale, name, loss_scale)
            results = self._run(actions, work, on_results)
        for stage in () if self.has_gradients else self.stages.values():
            stage.policy.protect_versions()  # hooks come before the next update
        self.batches_since_drain += 1
        self.num_batches += 1
        self._num_evaluated = 0
        return results

    def drain(self) -> Iterator[None]:
        """Runs the backwards of the batches in flight.

        Yields:
            Nothing, after each backward; install the gradients and step before going on.

        Raises:
            ValueError: An update is left out.
        """
        self._check_taken()
        self.recorder.interrupt()
        for actions in self._rounds.drain(self.batches_since_drain):
            self._run(actions, None)
            yield
            self._check_taken()
        self.recorder.interrupt()
        self.batches_since_drain = 0
        for stage in self.stages.values():
            stage.restart()

    def evaluate_batch(
        self, batch: Any, step: Step, num_microbatches: int, *, seed: int | None = None
    ) -> list[Any]:
        """Runs a batch forward only, without gradients.

        Args:
            batch: Any tree of tensors with the samples in dim 0.
            step: Called with each micro-batch.
            num_microbatches: Largest number of micro-batches. Each has two samples at least.
            seed: Names the previous training batch for the random numbers; None counts the batches.

        Returns:
            The step's result for each micro-batch on the last stage; empty on the others.
        """
        self.recorder.interrupt()
        count = 1
        if num_microbatches > 1:
            count = max(1, min(num_microbatches, (batch_size_of(batch) or 1) // 2))
        microbatches = split(batch, count)
        self.microbatch_sizes = tuple(m.num_samples for m in microbatches)
        name = (self.num_batches if seed is None else seed, self._num_evaluated)
        numbered = {microbatch.index: microbatch for microbatch in microbatches}
        work = Work(numbered, step, 1.0, name)
        self._num_evaluated += 1
        with torch.no_grad(), random_state_kept(self.stages.options.device):
            return self._runtime.run(self._rounds.evaluation(count), work)

    def install_gradients(
        self, reduce: Callable[[], None] | None = None, *, is_complete: bool = True
    ) -> None:
        """Moves the held gradients to ``p.grad``, adding to what is there.

        Args:
            reduce: Averages ``p.grad`` over the data replicas.
            is_complete: Whether no other batch adds to the gradients before the update. Then
                ``p.grad`` is divided by the sum of the losses' weights, if steps return weights;
                see :class:`.Loss`.
        """
        update = 0 if self._due is None else self._due.microbatch_index
        completes_early = self.update_rule.completes_early
        divides = self._loss_weights.is_given and not completes_early
        own = self.stages.parameters() if divides else []
        self._earlier.set_apart(own)
        self._install_held(update)
        if not is_complete:
            self._earlier.keep(own)
        elif not completes_early:
            self._loss_weights.divide([p.grad for p in own if p.grad is not None])
            self._earlier.add()
        if reduce is not None and self._due is not None:
            action = replace(self._due, kind=ActionKind.REDUCE_GRAD)
            with self.recorder.span(SpanKind.COMMUNICATION, action):
                reduce()

    def _install_held(self, update: int) -> None:
        """Adds an update's held gradients to ``p.grad``, and runs the parameters' hooks on them."""
        # If so, :meth:`_complete_early` has unscaled them, and run the hooks.
        completes_early = self.update_rule.completes_early
        hooked: dict[nn.Parameter, Tensor] = {}
        named = self.stages.named_parameters() if self.shared else {}
        shared = {parameter for name, parameter in named.items() if name in self.shared}
        for stage in self.stages.values():
            taken = stage.gradients.take(update)
            if not completes_early:
                self._unscale(update, taken.values())
            runs_hooks = not (stage.gradients.runs_hooks or completes_early)
            install(taken, stage.updated_parameters(), hooked, shared if runs_hooks else None)
        self._loss_weights.collect(update)
        for parameter, gradient in hooked.items():
            with self._loss_weights.as_mean(parameter, gradient):
                add_with_hooks(parameter, gradient)

    def begin_update(self) -> None:
        """Stashes the weights; the optimizer's writes must come next."""
        self._update_start = self.recorder.mark()
        for stage in self.stages.values():
            stage.begin_update(self.due_update)

    def end_update(self) -> None:
        """Ends the update after the optimizer's writes."""
        assert self._due is not None
        self.recorder.record(SpanKind.UPDATE, self._due, self._update_start)
        self._loss_scales.pop(self.due_update, None)
        self._due = None

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Wraps the optimizer's writes in :meth:`begin_update` and :meth:`end_update`."""
        self.begin_update()
        yield
        self.end_update()

    def clear(self, *, failed: bool = True) -> None:
        """Forgets what is in flight or held; after a failed batch the pipeline can only be closed.

        Messages of that batch are in the channels, so to train on takes new ones.
        """
        self._runtime.clear(failed=failed)
        self._loss_weights.clear()
        self._loss_scales.clear()
        self._earlier = EarlierGradients()
        self._due = None
        self.batches_since_drain = 0

    def close(self) -> None:
        """Restores the pipelined module's own forward and closes the channels."""
        self.detach()
        self.links.close()

    def detach(self) -> None:
        """Restores the pipelined module's own forward."""
        self.stages.detach()

    def detached(self) -> AbstractContextManager[None]:
        """Returns :meth:`OwnStages.detached`; the counts of batches and the spans are kept."""
        assert self.batches_since_drain == 0 or not self.asynchronous
        return self.stages.detached()

    def _check_taken(self) -> None:
        """Checks that no asynchronous update is due, for the next one takes its place."""
        if self.asynchronous and self._due is not None:
            raise ValueError(
                "Whenever `has_gradients` is true, call `install_gradients()`, and"
                " `optimizer.step()` inside of `updating()`: the update of batch"
                f" {self.gradients_of_batch} was not taken, and would be lost."
            )

    def _complete_early(self, update: int) -> None:
        """Finishes gradients whose update is not due yet."""
        stages = self.stages.values()
        held = {n: g for stage in stages for n, g in stage.gradients.held(update).items()}
        self._unscale(update, held.values())
        self._loss_weights.collect(update)
        self._loss_weights.divide(held.values())
        for stage in stages:
            parameters = stage.named_parameters().items()
            own = {name: p for name, p in parameters if name not in self.shared}
            stage.gradients.run_hooks(update, own)
        if self._on_complete is not None:
            held = {n: g for stage in stages for n, g in stage.gradients.held(update).items()}
            self._on_complete(update, held)
            for stage in stages:  # other replicas may have used more parameters
                known = {n: held[n] for n in stage.updated_parameters() if n in held}
                stage.gradients.hold(update, known)

    def _unscale(self, update: int, gradients: Iterable[Tensor]) -> None:
        scale = self._loss_scales.get(update, 1.0)
        if scale != 1.0:
            for gradient in gradients:
                gradient.div_(scale)

    def _run(
        self,
        actions: Round,
        work: Work | None,
        on_results: Callable[[list[Any]], None] | None = None,
    ) -> list[Any]:
        until_last_send, local_tail, of_optimizer = self._rounds.split(actions)
        backwards = Counter(a.stage_index for a in actions if a.kind in _COMPLETES_GRADIENTS)
        for number, count in backwards.items():
            self.stages[number].begin_round(count)
        with keep_saved_tensors(any(a.kind is ActionKind.BACKWARD_WEIGHT for a in actions)):
            results = self._runtime.run(until_last_send, work)
            if on_results is not None:
                on_results(results)
            self._runtime.run(local_tail, work)
        for number in backwards:
            self.stages[number].gradients.end_round()
        self._due = of_optimizer[-1] if of_optimizer else None
        return results
