"""One training step of a rank whose neighbours do not exist, by the classes that train.

The Trainer's work around a step is left out: no hooks, no logging, no update.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor

from lightning_dist.engine.common.mesh_shape import MeshShape
from lightning_dist.engine.parallelize.composition import Parallelism, ParallelModule
from lightning_dist.engine.pipeline.microbatch import Microbatch
from lightning_dist.engine.pipeline.pipeline import Pipeline
from lightning_dist.engine.pipeline.stages import StageOptions
from lightning_dist.engine.pipeline.tied_gradients import TiedSums, TieLinks
from lightning_dist.engine.planning.traffic import MessageKind, TrafficLedger
from lightning_dist.engine.tensors.dtensor import local_part
from lightning_dist.strategies.mesh_runtime.dry.channel import Sent, dry_links
from lightning_dist.strategies.mesh_runtime.sharded_module import ShardedModule, StepContext
from lightning_dist.strategies.mesh_runtime.staged_module import StagedModule


@dataclass(frozen=True)
class DryStep:
    """A step to run.

    Attributes:
        composed: The user's module, made parallel.
        asked: How the module was made parallel.
        mesh: The sizes of the mesh.
        rank: The rank that runs the step.
        context: Creates the context manager that the step runs in.
        ledger: Records the bytes that this rank sends to other stages.
    """

    composed: ParallelModule
    asked: Parallelism
    mesh: MeshShape
    rank: int
    context: StepContext
    ledger: TrafficLedger

    def run(self, batch: Any, known: Mapping[int, Sent]) -> Mapping[int, Sent]:
        """Runs forward and backward.

        Args:
            batch: A loader's batch.
            known: The messages that stages of other ranks send to the next stages, by stage.

        Returns:
            The messages that this rank's stages send to the next stages, by stage.
        """
        takes_index = is_param_in_hook_signature(self._training_step, "batch_idx", min_args=2)
        rest = (0,) if takes_index else ()
        try:
            if self.composed.split is None:
                self._run_whole(batch, rest)
                return {}
            return self._run_stages(batch, rest, known)
        except Exception as error:
            error.add_note("In a dry run a step has no Trainer, and its tensors have no values.")
            raise

    @property
    def _training_step(self) -> Any:
        return self.composed.module.training_step

    def _run_whole(self, batch: Any, rest: tuple[int, ...]) -> None:
        sharded = ShardedModule(self.composed, None)
        loss = _loss_of(sharded.train(self._training_step, self.context, batch, *rest))

        def differentiate() -> Tensor:
            loss.backward()
            return loss

        sharded.backward(loss, differentiate, accumulating=False)
        sharded.add_gradients()

    def _run_stages(
        self, batch: Any, rest: tuple[int, ...], known: Mapping[int, Sent]
    ) -> Mapping[int, Sent]:
        split = self.composed.split
        config = self.asked.pipeline
        assert split is not None
        assert config is not None
        staged = StagedModule(self.composed, None, config)
        note = partial(self.ledger.add, MessageKind.SEND, ("pp",))
        shape = config.shape(self.mesh, self.rank, split.layers_per_stage)
        links, sent = dry_links(split.rank_of_stage, shape.rank, known, note)
        pipeline = Pipeline(
            split.layers,
            shape,
            links,
            StageOptions(layers=staged.root, gradients=staged.gradients),
        )
        step = staged.wrap_step(self._training_step)

        def run(microbatch: Microbatch) -> Any:
            with self.context():
                return _loss_of(step(microbatch.content, *rest))

        pipeline.train_batch(batch, run)
        pipeline.install_gradients()
        staged.add_gradients()
        gradients = pipeline.stages.named_parameters()
        tied = TiedSums(split.ties, split.rank_of_stage, shape.rank, TieLinks())
        for names in tied.sent.values():
            copies = [gradients[name].grad for name in names]
            note(sum(local_part(copy).nbytes for copy in copies if copy is not None))
        return sent


def _loss_of(result: Any) -> Tensor:
    loss = result.get("loss") if isinstance(result, Mapping) else result
    if not isinstance(loss, Tensor):
        raise ValueError(
            f"`training_step` returned {type(loss).__name__} for the sample batch, and there is"
            " nothing to differentiate. Give a batch for which it returns a loss."
        )
    return loss
