"""The user's module cut into stages, each of which may be sharded over the other axes of the mesh.

Micro-batches are run by the same :class:`.Pipeline` that
:class:`~lightning_dist.PipelineStrategy` uses. Only the backward of shards differs: FSDP2 gets
gradients where autograd accumulates them, and reduces them in the last backward of a round; see
:mod:`.pipeline.fsdp_gradients`. Stages of whole layers hold their gradients as under that strategy,
and their replicas average them once for each update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_dist.engine.parallelize.composition import ParallelModule
from lightning_dist.engine.parallelize.mixed_tensors import explain_shard_errors
from lightning_dist.engine.pipeline.fsdp_gradients import ParamGradAccumulator
from lightning_dist.engine.pipeline.gradients import HeldGradients
from lightning_dist.engine.pipeline.microbatch import Microbatch
from lightning_dist.engine.sharding.unit_agreement import UnitAgreement
from lightning_dist.engine.sharding.unused_parameters import UnusedParameters
from lightning_dist.engine.splitting.config import PipelineConfig
from lightning_dist.engine.splitting.cut import put_placed
from lightning_dist.engine.splitting.ties import tie_again
from lightning_dist.engine.tensors.module_tree import dotted
from lightning_dist.strategies.base.distributed import DistributedStrategy
from lightning_dist.strategies.base.run_setup import Closure, Step, StepContext
from lightning_dist.strategies.mesh_runtime.first_call import step_arguments
from lightning_dist.strategies.mesh_runtime.sharded_module import ShardedModule
from lightning_dist.strategies.pipelining.checks import flatten_arguments
from lightning_dist.strategies.pipelining.session import Session, WrappedStages


class StagedModule(ShardedModule):
    """This rank's stages.

    Args:
        statistics: Modules that compute statistics of the batch.
    """

    def __init__(
        self,
        composed: ParallelModule,
        units: UnitAgreement | None,
        config: PipelineConfig,
        statistics: Sequence[str] = (),
        unused: UnusedParameters | None = None,
    ) -> None:
        super().__init__(composed, units, unused)
        assert composed.split is not None
        self._split = composed.split
        self._config = config
        self._statistics = statistics
        self._root_of = dict(zip(composed.split.stages, composed.roots, strict=True))
        self._sends = True
        self._unchecked = set(composed.split.stages)

    @property
    def _opened(self) -> Session:
        assert self.session is not None, "the pipeline exists from setup to teardown"
        return self.session

    @property
    @override
    def layers(self) -> str:
        own = [names for names in self._split.own_names if names]
        ranges = [n[0] if len(n) == 1 else f"{n[0]} to {n[-1]}" for n in own]
        return dotted(self._split.path, ", ".join(ranges))

    @property
    def is_whole(self) -> bool:
        """Whether the stages' layers are whole on this rank."""
        return not self._shards and self._tensor_parallel is None

    def take_replaced(self) -> None:
        """Takes new parameters of the module, which have replaced others, where it keeps them."""
        tie_again(self._split.layers, self._split.ties)
        self._split.layers.take_replaced()
        for stage, root in self._root_of.items():
            put_placed(self._split.layers, self._split.layers_per_stage, stage, root)

    @property
    def wrapped(self) -> WrappedStages:
        """How the stages run."""
        return WrappedStages(
            layers=self._root_of.__getitem__,
            gradients=None if self.is_whole else self._gradients,
            change_step=self.wrap_step,
            reshard=self.reshard,
            begin_sums=self.begin_sums,
        )

    def open(self, strategy: DistributedStrategy, complete_gradients: Callable[[], None]) -> None:
        """Begins a run. Collective."""
        self.session = Session(
            strategy,
            self._split,
            self._config,
            complete_gradients,
            wrapped=self.wrapped,
            statistics=self._statistics,
        )

    @override
    def close(self, *, failed: bool) -> None:
        super().close(failed=failed)
        session, self.session = self.session, None
        if session is not None:
            session.close(failed=failed)

    # --- steps -------------------------------------------------------------------------------

    def bare_step(self, context: StepContext) -> Callable[[Microbatch], Any]:
        """Returns the training step of a micro-batch, without what a run does around it."""
        own = self.module.training_step
        step = self.wrap_step(own)

        def train(microbatch: Microbatch) -> Any:
            with context():
                return step(*step_arguments(own, microbatch.content, 1))

        return train

    @override
    def train(self, step: Step, context: StepContext, *args: Any, **kwargs: Any) -> Any:
        if self._unused is not None:
            self._unused.begin_step()
        self.written.begin_round()
        self._opened.updates.begin_batch()
        with self.check_units(training=True), explain_shard_errors(has_units=self.is_sharded):
            return self._opened.runner.train(flatten_arguments(args, kwargs), context)

    @override
    def evaluate(self, step: Step, context: StepContext, *args: Any, **kwargs: Any) -> Any:
        with torch.inference_mode(False), torch.no_grad(), self.check_units(training=False):
            try:
                arguments = flatten_arguments(args, kwargs)
                return self._opened.runner.evaluate(step, arguments, context)
            finally:
                self.reshard()

    @override
    def reshard(self) -> None:
        self.written.keep_waiting()
        super().reshard()

    # --- gradients ---------------------------------------------------------------------------

    def _gradients(self, number: int) -> HeldGradients:
        """Creates the holder of the gradients of a sharded stage, which runs its backwards."""
        return ParamGradAccumulator(
            self._root_of[number],
            self.backward_context,
            lambda: self._sends,
            self.written.keep,
            partial(self._check_first, number),
        )

    def _check_first(self, number: int, outputs: Sequence[Tensor]) -> None:
        """Checks the first backward of each stage."""
        if number in self._unchecked:
            self.check_graph(outputs)
            self._unchecked.remove(number)
            if not self._unchecked:
                self.end_check()

    @override
    def backward(
        self, loss: Tensor, default: Callable[[], Tensor], *, accumulating: bool
    ) -> Tensor:
        if self._unused is not None:
            self._unused.keep_gradients()
        return self._opened.updates.backward(loss, accumulating=accumulating)

    @override
    def update(self, optimizer: Optimizer, closure: Closure, apply: Closure) -> Any:
        return self._opened.updates.step(optimizer, closure, apply)

    @override
    @contextmanager
    def no_sync(self) -> Iterator[None]:
        self._sends = False
        try:
            yield
        finally:
            self._sends = True
