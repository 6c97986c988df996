"""Runs the user's steps through the pipeline, and sends their outcomes to all ranks.

Only the last stage has a step's result, its logged values and its request to stop. Lightning's
loops run on each rank and must see the same. Under an asynchronous schedule the first stage would
have to wait for them, so all ranks take an outcome some batches later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.data import extract_batch_size
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_dist.engine.comms.connect import Channels
from lightning_dist.engine.pipeline.loss_checks import warn_of_comparison
from lightning_dist.engine.pipeline.microbatch import Microbatch, merge, weight_of
from lightning_dist.engine.pipeline.pipeline import Pipeline
from lightning_dist.engine.pipeline.stage import NotCalledError
from lightning_dist.engine.pipeline.step_checks import CallNotes, check_calls
from lightning_dist.engine.tensors.tree import map_tensors, own_copy, tensors_in
from lightning_dist.strategies.base.lightning_internals import (
    as_of_training_step,
    forget_step_values,
    log_training_step,
    logged_step,
)
from lightning_dist.strategies.base.loaders.sample_lists import SampleLists
from lightning_dist.strategies.base.precision_plugin import HalfPrecisionPlugin
from lightning_dist.strategies.base.run_setup import ChangeStep, Step, StepContext
from lightning_dist.strategies.pipelining.results.outside_tensors import OutsideTensors
from lightning_dist.strategies.pipelining.results.rank_zero_calls import RankZeroCall, RankZeroCalls
from lightning_dist.strategies.pipelining.results.stage_metrics import StageMetrics
from lightning_dist.strategies.pipelining.results.step_log import BatchLog, StepLog
from lightning_dist.strategies.pipelining.results.step_rates import Changes, StepRates
from lightning_dist.strategies.pipelining.results.step_state import StepCounters, StepState

_EVALUATION_STEPS = {
    RunningStage.SANITY_CHECKING: "validation_step",
    RunningStage.VALIDATING: "validation_step",
    RunningStage.TESTING: "test_step",
    RunningStage.PREDICTING: "predict_step",
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a batch on the last stage.

    Attributes:
        result: The step's return value, merged over the micro-batches.
        should_stop: Whether the step asked to end the training.
        rank_zero_calls: What the step called that only rank 0 does.
        module_calls: With what the step called the pipelined module; None if not compared.
        rates: What the step set in the optimizer's parameter groups.
    """

    log: BatchLog
    result: Any
    should_stop: bool = False
    rank_zero_calls: Sequence[RankZeroCall] = ()
    module_calls: CallNotes | None = None
    rates: Sequence[Changes] = ()


class Outcomes:
    """Carries outcomes from the last stage to the others, which show them at the same batch.

    Under an asynchronous schedule the first stage gets a batch's gradients the longest after its
    forward. So each stage holds outcomes back until the first must have them too,
    ``num_stages - 1`` batches later. At the end of an epoch or a run they are exchanged at
    once.
    """

    def __init__(self, channels: Channels) -> None:
        self._channels = channels
        self._held: deque[Outcome] = deque()

    def publish(self, outcome: Outcome | None) -> None:
        """Ends a batch on this stage.

        Args:
            outcome: The outcome on the last stage; None on the others, which receive it.
        """
        if outcome is None:
            return
        self._held.append(outcome)
        for sender in self._channels.results_out:
            sender.send(outcome)

    def next(self) -> Outcome:
        """Returns the oldest outcome that this stage has not taken yet, and waits for it."""
        if self._channels.results_in is None:
            return self._held.popleft()
        received = self._channels.results_in.receive()
        assert isinstance(received, Outcome)
        return received


class StepRunner:
    """Runs ``training_step`` and its like, per micro-batch, on this rank's stages.

    Args:
        evaluation_microbatches: Most micro-batches of a batch that runs forward only.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        pipeline: Pipeline,
        channels: Channels,
        metrics: StageMetrics,
        step_state: StepState,
        outside: OutsideTensors,
        rank_zero_calls: RankZeroCalls,
        *,
        evaluation_microbatches: int,
        change_step: ChangeStep,
        half: HalfPrecisionPlugin | None,
    ) -> None:
        self._module = module
        self._pipeline = pipeline
        self._metrics = metrics
        self._step_state = step_state
        self._outside = outside
        self._counters = StepCounters(module)
        self._rates = StepRates(module.trainer, is_late=pipeline.lag > 0)
        self._rank_zero_calls = rank_zero_calls
        self._evaluation_microbatches = evaluation_microbatches
        self._change_step = change_step
        self._half = half
        self._log = StepLog(module)
        self._sample_lists = SampleLists(module.trainer)
        self._outcomes = Outcomes(channels)
        self._last_result: Any = None
        # Of the batches whose outcomes have not been delivered, the step and the module's calls.
        self._undelivered: deque[tuple[int, CallNotes | None]] = deque()

    def train(self, arguments: Sequence[Any], context: StepContext) -> Any:
        """Runs a training batch.

        Returns:
            The loss (or the dict with it) of the newest batch that all ranks know of.

        Raises:
            ValueError: A parameter that belongs to no stage is trained by now.
        """
        is_empty = not self._pipeline.asynchronous or self._pipeline.batches_since_drain == 0
        self._outside.begin_batch(is_empty=is_empty)
        self._metrics.share_new()
        batch, *rest = arguments
        batch = self._sample_lists.mark(batch, "training_step")
        trainer = self._module.trainer
        if self._pipeline.asynchronous:  # no value may be known in this batch
            forget_step_values(trainer)
        step = self._step(self._module.training_step, context, rest)
        scale = 1.0 / trainer.accumulate_grad_batches
        # Only the last stage runs the whole step; its request to stop reaches all at one batch. A
        # request of another stage is that rank's own, like one of a callback.
        stopped_before, trainer.should_stop = trainer.should_stop, False

        def publish(results: list[Any]) -> None:
            # A loss of shape (1,) is averaged too, and not concatenated.
            scalars = [map_tensors(lambda t: t.reshape(()), r) for r in _scalars_of(results)]
            calls = self._pipeline.stages.calls.take()
            self._undelivered.append((logged_step(trainer), calls))
            rates, should_stop = self._rates.take(), trainer.should_stop
            self._publish(scalars, batch, ("training_step",), should_stop, calls, rates)

        self._pipeline.stages.calls.begin_batch()
        self._rates.begin_batch()

        # Published before the last backwards' weight halves, or other ranks would wait for them.
        place = f"batch {trainer.fit_loop.batch_idx} of epoch {trainer.current_epoch}"
        with _naming(f"`training_step`, {place}"):
            self._pipeline.train_batch(
                batch,
                step,
                gradient_scale=scale,
                loss_scale=1.0 if self._half is None else self._half.scale_of_next_batch(),
                seed=self._seed(),
                on_results=publish,
            )
        asked_alone = trainer.should_stop and not self._pipeline.stages.has_last
        trainer.should_stop = stopped_before or asked_alone
        self._deliver(self._num_held_back(), in_batch=True)
        return self._last_result

    def rehearse(self, pipeline: Pipeline, arguments: Sequence[Any], context: StepContext) -> None:
        """Runs a training batch through another pipeline, and drops its ``self.log`` calls."""
        batch, *rest = arguments
        batch = own_copy(batch)  # the step may write into it, and runs again
        batch = self._sample_lists.mark(batch, "training_step")
        step = self._step(self._module.training_step, context, rest)
        pipeline.train_batch(batch, step, seed=self._seed())
        self._log.forget()
        self._rank_zero_calls.take()

    def catch_up(self) -> None:
        """Delivers the outcomes of the newest training batches, which :meth:`train` has held back.

        There are such batches before a validation within an epoch, and at the end of an epoch that
        was stopped early. The last batch of a whole epoch holds nothing back.
        """
        if not self._undelivered:  # or a validation's values would be replaced by training's
            return
        with as_of_training_step(self._module):
            self._deliver(num_held_back=0)

    def forget(self) -> None:
        """Forgets the training batches that :meth:`train` has held back."""
        while self._undelivered:
            self._undelivered.popleft()
            self._outcomes.next()

    def evaluate(self, method: Step, arguments: Sequence[Any], context: StepContext) -> Any:
        """Runs a validation, test or prediction batch.

        Returns:
            The step's return value for the undivided batch, on each rank.
        """
        self._metrics.share_new()
        batch, *rest = arguments
        # A user may have replaced the method by any callable.
        stage = self._module.trainer.state.stage
        assert stage is not None
        name = _EVALUATION_STEPS[stage]
        batch = self._sample_lists.mark(batch, name, *rest[1:])
        step = self._step(method, context, rest)
        with _naming(f"`{name}`"):
            results = self._pipeline.evaluate_batch(
                batch, step, self._evaluation_microbatches, seed=self._seed()
            )
        self._check_comparison(name)
        self._publish(results, batch, (name, *rest[1:]))
        outcome = self._outcomes.next()
        self._log.replay(outcome.log)
        self._rank_zero_calls.make(outcome.rank_zero_calls)
        return outcome.result

    def _seed(self) -> int:
        # Counted over epochs and resumed runs alike, so a resumed run draws the same numbers.
        return self._module.trainer.fit_loop.epoch_loop.total_batch_idx

    def _step(
        self, method: Step, context: StepContext, rest: Sequence[Any]
    ) -> Callable[[Microbatch], Any]:
        method = self._change_step(method)

        def step(microbatch: Microbatch) -> Any:
            recording = self._log.recording(microbatch.num_samples)
            counting = self._counters.in_step(microbatch.weight)
            measuring = self._metrics.in_step(microbatch.weight)
            with ExitStack() as around:
                watching, noting = self._step_state.in_step(), self._rank_zero_calls.in_step()
                for each in (context(), recording, counting, measuring, watching, noting):
                    around.enter_context(each)
                result = method(microbatch.content, *rest)
            weight = weight_of(result)
            if weight is not None:
                self._log.weigh(weight)
            return result

        return step

    def _check_comparison(self, step: str) -> None:
        sizes = self._pipeline.microbatch_sizes
        if self._pipeline.compares_samples and len(sizes) > 1 and step != "predict_step":
            warn_of_comparison(f"`{step}`", max(sizes))

    def _publish(
        self,
        results: list[Any],
        batch: Any,
        step: Hashable,
        should_stop: bool = False,
        module_calls: CallNotes | None = None,
        rates: Sequence[Changes] = (),
    ) -> None:
        if not self._pipeline.stages.has_last:
            self._outcomes.publish(None)
            return
        log = self._log.take(_size_of(batch), step)
        result = _merged(
            [map_tensors(torch.detach, r) for r in results], self._pipeline.microbatch_sizes
        )
        calls = self._rank_zero_calls.take()
        self._outcomes.publish(Outcome(log, result, should_stop, calls, module_calls, rates))

    def _deliver(self, num_held_back: int, *, in_batch: bool = False) -> None:
        trainer = self._module.trainer
        while len(self._undelivered) > num_held_back:
            outcome = self._outcomes.next()
            step, own_calls = self._undelivered.popleft()
            if own_calls is not None and outcome.module_calls is not None:
                check_calls(own_calls, outcome.module_calls, [*self._pipeline.stages])
            self._log.replay(outcome.log)
            self._rank_zero_calls.make(outcome.rank_zero_calls)
            self._rates.install(outcome.rates)
            self._last_result = outcome.result
            trainer.should_stop = trainer.should_stop or outcome.should_stop
            is_newest = len(self._undelivered) == num_held_back
            # If an outcome is known in its own batch, Lightning logs it at the end of the batch.
            # By then it is also known whether a callback stops there.
            is_at_hand = in_batch and is_newest and num_held_back == 0
            if self._pipeline.asynchronous and not is_at_hand:
                log_training_step(trainer, step, stops=is_newest and trainer.should_stop)

    def _num_held_back(self) -> int:
        """Returns the number of batches whose outcome the first stage need not wait for."""
        trainer = self._module.trainer
        is_last_step = trainer.global_step + 1 == trainer.max_steps
        if self._last_result is None:
            return 0  # loops and callbacks want a loss from the first batch on
        if not self._pipeline.asynchronous or trainer.is_last_batch or is_last_step:
            return 0
        return min(self._pipeline.lag, self._pipeline.batches_since_drain)


@contextmanager
def _naming(place: str) -> Iterator[None]:
    """Puts the place of a step that does not call the model ahead of the error's words."""
    try:
        yield
    except NotCalledError as error:
        mistake = ValueError(f"{place}: {error}")
        for note in getattr(error, "__notes__", []):
            mistake.add_note(note)
        raise mistake from None  # it says all; with a cause it would not be shown briefly


def _size_of(batch: Any) -> int:
    """Returns the weight of a batch in the means of an epoch, as Lightning finds it."""
    try:
        return extract_batch_size(batch)
    except MisconfigurationException:  # Lightning asks only where a mean over the epoch is logged
        return 1


def _merged(results: list[Any], sizes: Sequence[int]) -> Any:
    weights = [weight for result in results if (weight := weight_of(result)) is not None]
    if len(weights) < len(results):
        return merge(results, sizes)
    total = sum(result["weight"] for result in results)
    return {**merge(results, sizes, weights), "weight": total}


def _scalars_of(results: list[Any]) -> list[Any]:
    """Keeps the loss, and of dicts the values that are single numbers in all micro-batches."""
    # With one sample in a micro-batch any value may look like a number.
    if not all(isinstance(result, Mapping) for result in results):
        return results
    kept = [{key for key, value in r.items() if _is_scalar(value)} for r in results]
    return [
        {key: value for key, value in result.items() if all(key in keys for keys in kept)}
        for result in results
    ]


def _is_scalar(value: Any) -> bool:
    return (isinstance(value, Tensor) and value.numel() == 1) or not tensors_in(value)
