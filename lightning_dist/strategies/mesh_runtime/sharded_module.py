"""The user's module as it was composed, with the operations that a strategy needs.

Here each rank runs whole steps; :class:`.StagedModule` is the same for a pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import loss_parallel
from torch.optim import Optimizer

from lightning_dist.engine.common.mesh_shape import MeshShape
from lightning_dist.engine.common.names import shorten
from lightning_dist.engine.data_parallel.missing_gradients import parameters_without_gradient
from lightning_dist.engine.parallelize.composition import ParallelModule
from lightning_dist.engine.parallelize.mixed_tensors import explain_shard_errors
from lightning_dist.engine.sharding.calls_beside_steps import CallsBesideSteps
from lightning_dist.engine.sharding.early_optimizers import EarlyParameters
from lightning_dist.engine.sharding.fully_shard import (
    forget_step,
    move_rest,
    note_unfrozen,
    reshard,
    skip_never_gathered,
)
from lightning_dist.engine.sharding.gathered import (
    gathered,
    param_groups,
    show_gathered,
    show_shards,
)
from lightning_dist.engine.sharding.kept_gradients import KeptGradients
from lightning_dist.engine.sharding.manual_steps import ManualSteps
from lightning_dist.engine.sharding.unit_agreement import UnitAgreement
from lightning_dist.engine.sharding.unused_parameters import UnusedParameters
from lightning_dist.engine.sharding.wrap_summary import WrapSummary
from lightning_dist.engine.sharding.written_weights import WrittenWeights
from lightning_dist.engine.tensor_parallel.layers.sharded_logits import joined
from lightning_dist.engine.tensor_parallel.summary import TensorSummary, summarise
from lightning_dist.engine.tensors.patch import user_state_kept
from lightning_dist.strategies.base.lightning_internals import set_device
from lightning_dist.strategies.base.run_setup import Closure, Step, StepContext
from lightning_dist.strategies.mesh_runtime.layout_line import (
    describe_layout,
    describe_shards,
    describe_tensor,
)
from lightning_dist.strategies.pipelining.session import Session


class ShardedModule:
    """A module whose parameters are sharded over a mesh.

    Args:
        composed: The user's module, made parallel.
        unused: Finds the parameters that no rank uses; None where all ranks use the same.

    Attributes:
        early: The module's parameters before sharding; None where no optimizer can have them.
        plan: The plan that was found: which layers are sharded, and why the others are not.
        session: The pipeline during a run; None without stages.
        split: This rank's stages of the model; None without stages.
        units: Compares which units the ranks run in a step; None where no other rank exists.
        written: Copies back what steps write into gathered weights.
    """

    early: EarlyParameters | None = None
    session: Session | None = None

    def __init__(
        self,
        composed: ParallelModule,
        units: UnitAgreement | None,
        unused: UnusedParameters | None = None,
    ) -> None:
        assert isinstance(composed.module, pl.LightningModule)
        self.module = composed.module
        self.summary: WrapSummary = composed.summary
        self._sharding = composed.sharding
        self.plan, self.split = composed.plan, composed.split
        self._roots = composed.roots
        self._tensor_parallel = composed.tensor_parallel
        self._shards = composed.shards
        self._logits = None if composed.tensor_parallel is None else composed.tensor_parallel.logits
        self._groups = param_groups(self._shards)
        self._kept_gradients = KeptGradients(self._shards)
        self._entered: set[nn.Module] = set()
        self._are_trained = b""  # a flag for each parameter
        for root in self._roots if self._shards else ():
            root.register_forward_pre_hook(self._note_entry)  # behind FSDP2's own
        self.written = WrittenWeights(self._shards, in_rounds=not composed.is_manual)
        self._beside: CallsBesideSteps | None = None
        if self._shards and composed.split is None:
            self._beside = CallsBesideSteps(self.module, self._roots[0])
        self.units = units
        self._unused = unused
        self._manual: ManualSteps | None = None
        if composed.is_manual:
            self._manual = ManualSteps(self._roots[0], self.written.keep)

    @property
    def is_manual(self) -> bool:
        """Whether steps may call backward and update by themselves."""
        return self._manual is not None

    @property
    def is_sharded(self) -> bool:
        """Whether parameters are gathered for a forward."""
        return bool(self._shards)

    def gathered(self) -> list[tuple[str, nn.Parameter]]:
        """Lists the copies that are gathered for a backward, with the names of the parameters."""
        copies: dict[int, nn.Parameter] = {}
        for p in gathered(self._groups):
            copy = p._unsharded_param
            copies |= {id(p.sharded_param): copy, id(copy): copy}  # either may be in its place
        return [(n, copies[id(p)]) for n, p in self.module.named_parameters() if id(p) in copies]

    @property
    def layers(self) -> str:
        """Which layers this rank has, in words."""
        return "all"

    @property
    def tensor_summary(self) -> TensorSummary | None:
        """This rank's shard of each layer; None without tensor parallelism."""
        if self._tensor_parallel is None:
            return None
        return summarise(self.module, self._tensor_parallel.styles, self.plan)

    def layout_line(self, mesh: MeshShape, *, is_manual: bool) -> str:
        """Describes in one line how the model is sharded."""
        parts = []
        if self._tensor_parallel is not None:
            sizes = {name: p.numel() for name, p in self.module.named_parameters()}
            cut = sum(size for name, size in sizes.items() if name in self._tensor_parallel.cuts)
            styles = self._tensor_parallel.styles
            parts.append(describe_tensor(len(styles), cut, sum(sizes.values())))
        if mesh.dp_shard > 1:
            parts.append(describe_shards(self.summary, self._sharding, is_manual=is_manual))
        return describe_layout(mesh, parts)

    def _note_entry(self, root: nn.Module, _: object) -> None:
        self._entered.add(root)

    # --- a run -------------------------------------------------------------------------------

    def close(self, *, failed: bool) -> None:
        """Ends a run; if it has failed, other ranks may be gone."""
        # Until a root was entered nothing is gathered, and FSDP2 not set up.
        for root in self._entered if failed else ():
            forget_step(root)
        if failed and self._tensor_parallel is not None:
            self._tensor_parallel.forget_step()
        self.end_check()

    # --- steps -------------------------------------------------------------------------------

    def begin_batch(self, *, begins_update: bool) -> None:
        """Prepares for a training batch, which may be the first that an update accumulates."""
        if not self._shards:
            return
        if begins_update:
            self._kept_gradients.drop()
            if self._unused is not None:
                self._unused.begin_update()
        are_trained = bytes(p.requires_grad for p in self.module.parameters())
        if are_trained != self._are_trained:
            self._are_trained = are_trained
            for root in self._roots:
                note_unfrozen(root)

    def train(self, step: Step, context: StepContext, *args: Any, **kwargs: Any) -> Any:
        """Runs a step, a method of the module, whose result will be differentiated."""
        self.written.begin_round()
        try:
            return self._run(step, context, args, kwargs, training=True)
        finally:
            show_shards(self._groups)

    def evaluate(self, step: Step, context: StepContext, *args: Any, **kwargs: Any) -> Any:
        """Runs a step without gradients."""
        # Gathered parameters made under `inference_mode` could not be trained with later.
        with torch.inference_mode(False), torch.no_grad():
            try:
                return self._run(step, context, args, kwargs, training=False)
            finally:
                self.reshard()

    def _run(self, step: Step, context: StepContext, args: Any, kwargs: Any, training: bool) -> Any:
        if self._unused is not None and training:
            self._unused.begin_step()

        def entered(*args: Any, **kwargs: Any) -> Any:
            in_step = nullcontext() if self._beside is None else self._beside.step()
            with in_step, self.check_units(training=training):
                return self.wrap_step(step)(*args, **kwargs)

        (root,) = self._roots
        with context(), explain_shard_errors(has_units=self.is_sharded):
            if training and self._manual is not None:
                with self._manual.step():
                    return entered(*args, **kwargs)
            result = root(entered, *args, **kwargs)
            if training:
                self.written.keep()
            return result

    def check_units(self, *, training: bool) -> AbstractContextManager[None]:
        """Returns the check that all ranks used the same FSDP units in this step."""
        return nullcontext() if self.units is None else self.units.step(training=training)

    def wrap_step(self, step: Step) -> Step:
        """Wraps a step so that it forgets earlier steps and gathers sharded logits by itself."""
        tensor_parallel = self._tensor_parallel
        if tensor_parallel is None:
            return step

        def run(*args: Any, **kwargs: Any) -> Any:
            tensor_parallel.forget_step()
            if self._logits is None:
                return step(*args, **kwargs)
            with self._logits:
                return joined(step(*args, **kwargs))

        return run

    # --- gradients ---------------------------------------------------------------------------

    @contextmanager
    def backward_context(self) -> Iterator[None]:
        """Returns the context manager that the backward of a step's loss runs in."""
        if self._tensor_parallel is not None:
            self._tensor_parallel.crossings.begin_backward()
        if self._unused is not None:
            self._unused.begin_backward()
        in_loss = nullcontext() if self._logits is None else loss_parallel()
        with in_loss, skip_never_gathered(self._roots if self._shards else ()):
            yield

    def backward(
        self, loss: Tensor, default: Callable[[], Tensor], *, accumulating: bool
    ) -> Tensor:
        """Stores the gradients of the newest step in the parameters."""
        self.check_graph([loss])
        self.end_check()
        if self._unused is not None:
            self._unused.keep_gradients()
        if loss.requires_grad:
            # Hooks ahead of a backward still see the shards, and gradients of the last update.
            loss.register_hook(lambda _: self._begin_backward())
        with self.backward_context(), explain_shard_errors(has_units=self.is_sharded):
            result = default()
        self._check_reduced()
        return result

    def _begin_backward(self) -> None:
        if self._manual is not None:
            self.written.keep()  # for the backward frees what the step and its hooks have written
        show_gathered(self._groups)
        self.begin_sums()

    def _check_reduced(self) -> None:
        lost = {id(parameter) for parameter in self._kept_gradients.not_reduced()}
        if lost:
            show_shards(self._groups)
            names = [name for name, p in self.module.named_parameters() if id(p) in lost]
            raise ValueError(
                f"Gradients of {shorten(names)} would be lost: the last backward of the update has"
                " not reduced them. Write `checkpoint(..., use_reentrant=False)` where a step uses"
                " a layer several times. If `backward` leaves out some batches, pass"
                " `sync_every_microstep=True`."
            )

    def check_graph(self, outputs: Iterable[Tensor]) -> None:
        """Raises ``ValueError`` if a layer was not used for the outputs as the plan says."""
        if self._tensor_parallel is not None:
            self._tensor_parallel.check_graph(outputs)

    def end_check(self) -> None:
        """Ends the record of activations that :meth:`check_graph` reads."""
        if self._tensor_parallel is not None:
            self._tensor_parallel.crossings.end()

    def update(self, optimizer: Optimizer, closure: Closure, apply: Closure) -> Any:
        """Runs a step and the update that it brings."""
        return apply() if self._manual is None else self._manual.run_update(apply)

    def begin_sums(self) -> None:
        """Prepares for gradients that :meth:`add_gradients` will sum with those that are kept."""
        if self._tensor_parallel is not None:
            self._tensor_parallel.begin_backward()

    def add_gradients(self) -> None:
        """All-reduces gradients that are partial on tensor-parallel ranks, once per update."""
        if self._tensor_parallel is not None:
            self._tensor_parallel.add_gradients()

    def without_gradient(self) -> list[str]:
        """Lists parameters without a gradient at an update. Collective."""
        if self._unused is not None:
            return self._unused.end_update()
        return [] if self.units is None else parameters_without_gradient(self.module)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keeps the gradients of all backwards inside on this rank, unsharded."""
        for shards in self._shards:
            shards.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            for shards in self._shards:
                shards.set_requires_gradient_sync(True)

    # --- parameters --------------------------------------------------------------------------

    def move(self, device: torch.device, *, offloaded: bool) -> None:
        """Moves the module to the device that computes; offloaded shards stay in host memory."""
        if offloaded and self._shards:
            with user_state_kept(self.module):
                move_rest(self.module, self._shards, device)
            set_device(self.module, device)
            return
        with user_state_kept(self.module):
            self.module.to(device)
            # FSDP2 notices a move by a method of the modules that it knows. A root is around the
            # user's module, or beside it.
            for root in self._roots:
                root.to(device)

    def reshard(self) -> None:
        """Reshards the module's parameters, whatever has run last."""
        for root in self._roots:
            reshard(root)
