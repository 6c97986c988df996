"""A rank's stages, from when they replace the pipelined module's forward until they restore it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from lightning_dist.engine.pipeline.gradients import HeldGradients
from lightning_dist.engine.pipeline.layer_profiler import LayerProfiler
from lightning_dist.engine.pipeline.stage import ForwardInterceptor, Stage, StagePlace
from lightning_dist.engine.pipeline.step_checks import ModuleCalls
from lightning_dist.engine.planning.partition import stage_of_layers
from lightning_dist.engine.profiling.meters.recorder import Recorder
from lightning_dist.engine.schedules.registry import PipelineShape
from lightning_dist.engine.schedules.stash_depth import num_copies
from lightning_dist.engine.schedules.update_rule import WeightVersions
from lightning_dist.engine.splitting.cut import layers_of
from lightning_dist.engine.splitting.layers import Layers, StepInterceptor, WholeStep
from lightning_dist.engine.stashing.half_versions import HalfWeights
from lightning_dist.engine.stashing.policy import Predict, choose_policy
from lightning_dist.engine.stashing.staleness import StalenessMeter, UpdateReport

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class StageOptions:
    """How a rank's stages compute.

    Attributes:
        weight_versions: ``"stash"``, ``"vertical_sync"`` or ``"none"``; matters for asynchronous
            schedules only.
        seed: Base of the random numbers that steps draw, which ``torch.manual_seed`` does not
            change; the same on all ranks.
        device: Device on which the stages compute.
        layers: Returns the module that runs a stage's layers, for example a sharded one, in which
            parameters have the names that they have in the pipelined module; None runs the layers
            in order.
        gradients: Creates the holder of a stage's gradients until
            :meth:`.Pipeline.install_gradients`; by default :class:`.HeldGradients`.
        predict: Returns copies of parameters as they will be some updates later, for forwards to
            run on under an asynchronous schedule.
        measure_discrepancy: Whether :attr:`OwnStages.reports` say how far weights have moved from a
            batch's forward to its update.
        half: How layers compute in half precision; None keeps the parameters' dtype.
    """

    weight_versions: WeightVersions = "stash"
    seed: int = 0
    device: torch.device = _CPU
    layers: Callable[[int], nn.Module] | None = None
    gradients: Callable[[int], HeldGradients] = lambda _: HeldGradients()
    predict: Predict | None = None
    measure_discrepancy: bool = False
    half: HalfWeights | None = None


class OwnStages(Mapping[int, Stage]):
    """The stages by their number.

    When layers move, the stages are created anew, and the history of the earlier ones is kept.
    Other code holds the mapping, never its values.

    Args:
        found: The layers of the pipelined module.
        options: How the stages compute.
        shape: This rank's part of the pipeline; the module has been cut accordingly.

    Attributes:
        on_call: Answers calls of the pipelined module outside of steps; None refuses them.
        calls: Notes with what steps call the pipelined module, where that is compared.
    """

    def __init__(self, found: Layers, options: StageOptions, shape: PipelineShape) -> None:
        self.found = found
        self.options = options
        self.shape = shape
        _start_autograd(options.device)
        self._stages: dict[int, Stage] = {}
        self._earlier_peaks: dict[int, int] = {}
        self._interceptor: ForwardInterceptor | StepInterceptor | None = None
        self.on_call: Callable[..., Any] | None = None
        self.calls = ModuleCalls()
        self._attach()

    @override
    def __getitem__(self, number: int) -> Stage:
        return self._stages[number]

    @override
    def __iter__(self) -> Iterator[int]:
        return iter(self._stages)

    @override
    def __len__(self) -> int:
        return len(self._stages)

    @property
    def has_last(self) -> bool:
        """Whether this rank has the last stage, on which whole steps run."""
        return any(stage.is_last for stage in self.values())

    @property
    def peak_stash_bytes(self) -> dict[int, int]:
        """The most bytes of stashed weights, by stage."""
        return {
            number: max(stage.policy.peak_stash_bytes, self._earlier_peaks.get(number, 0))
            for number, stage in self.items()
        }

    @property
    def num_copies(self) -> tuple[int, ...]:
        """The most copies of its weights that each stage of the pipeline holds at a time."""
        predicts = self.options.predict is not None
        return num_copies(self.shape, self.options.weight_versions, predicts=predicts)

    @property
    def version_bytes(self) -> int:
        """The bytes of one more version of the weights of all stages."""
        return sum(stage.policy.version_bytes for stage in self.values())

    @property
    def reports(self) -> dict[int, UpdateReport]:
        """The report of the latest update, by stage; empty before the first update."""
        return {n: stage.report for n, stage in self.items() if stage.report is not None}

    @property
    def staleness(self) -> dict[int, tuple[int, ...]]:
        """Updates between the weights of a batch and its update, for each update, by stage."""
        return {number: stage.meter.history for number, stage in self.items()}

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Returns the trainable parameters by their names in the pipelined module."""
        return {n: p for stage in self.values() for n, p in stage.named_parameters().items()}

    def updated_parameters(self) -> dict[str, nn.Parameter]:
        """Returns the parameters that an update may change, as :meth:`Stage.updated_parameters`."""
        return {n: p for stage in self.values() for n, p in stage.updated_parameters().items()}

    def parameters(self) -> list[nn.Parameter]:
        """Returns all parameters, trainable or not, each once; stages may share one."""
        return list({id(p): p for s in self.values() for p in s.layers.parameters()}.values())

    def layer_profiler(self, recorder: Recorder) -> LayerProfiler:
        """Creates the profiler that times the layers while they train, by the rank's recorder."""
        stages = stage_of_layers(self.shape.layers_per_stage)
        parts = self.found.parts()
        own = [part for part in parts if stages[part.layer_index] in self]
        return LayerProfiler(own, recorder, self.options.half, self.found.compiler)

    @contextmanager
    def detached(self) -> Iterator[None]:
        """Detaches the stages from the pipelined module for a while; nothing may be in flight.

        Yields:
            Nothing. Meanwhile layers may move, if :meth:`repartition` follows, or another pipeline
            may run this rank's layers. The history of the weights goes on afterwards.
        """
        self.detach()
        yield
        self._attach()

    def repartition(self, layers_per_stage: tuple[int, ...]) -> None:
        """Sets the partition by which the module is cut now, while the stages are detached."""
        assert self._interceptor is None
        self.shape = replace(self.shape, layers_per_stage=layers_per_stage)

    def detach(self) -> None:
        """Restores the pipelined module's own forward."""
        interceptor, self._interceptor = self._interceptor, None
        if interceptor is not None:
            interceptor.detach()
            self.found.detach()
        for stage in self.values():
            stage.clear()

    def _attach(self) -> None:
        self._earlier_peaks = self.peak_stash_bytes
        known = self.staleness
        self.found.attach(self.options.device)
        interceptor = self._interceptor = self._make_interceptor()
        self._stages = {
            number: self._make_stage(number, interceptor, known.get(number, ()))
            for number in self.shape.stages
        }

    def _make_interceptor(self) -> ForwardInterceptor | StepInterceptor:
        if isinstance(self.found, WholeStep):
            return StepInterceptor(self.found)
        outside = None if self.shape.num_stages == 1 else self._run_outside
        return ForwardInterceptor(self.found, outside)

    def _run_outside(self, *arguments: Any, **keywords: Any) -> Any:
        if self.on_call is None:
            raise ValueError(
                "The pipelined module was called outside of a step. Its layers are on several"
                " ranks: call it inside training_step, validation_step, test_step or"
                " predict_step."
            )
        return self.on_call(*arguments, **keywords)

    def _make_stage(
        self,
        number: int,
        interceptor: ForwardInterceptor | StepInterceptor,
        history: Sequence[int],
    ) -> Stage:
        shape, options = self.shape, self.options
        own = layers_of(self.found, shape.layers_per_stage, number)
        layers = own if options.layers is None else options.layers(number)
        _check_names(number, own, layers)
        gradients = options.gradients(number)
        measures = options.measure_discrepancy
        weights = shape.family.update_rule.weights(
            options.weight_versions, shape.rank, shape.num_ranks, shape.num_microbatches
        )
        policy = choose_policy(
            own,
            weights,
            options.predict,
            options.half,
            remembers=measures,
            microbatches_per_update=shape.num_microbatches,
            hides_hooks=not gradients.runs_hooks,
        )
        place = StagePlace(
            index=number,
            num_stages=shape.num_stages,
            seed=(options.seed, shape.replica_index),
            device=options.device,
            shares_batch=number < max(shape.stages),
        )
        return Stage(
            place,
            layers,
            interceptor,
            self.calls,
            policy=policy,
            gradients=gradients,
            meter=StalenessMeter(policy.release, history, measures_discrepancy=measures),
        )


def _check_names(number: int, own: nn.Module, layers: nn.Module) -> None:
    """Checks the names by which weights and gradients are found in what runs a stage's layers."""
    names = {name for name, _ in own.named_parameters()}
    others = {name for name, _ in layers.named_parameters()} - names
    if others:
        raise ValueError(
            f"`layers` returned for stage {number} a module with a parameter {min(others)!r},"
            " which the stage does not have. Compile it with `module.compile()`, which keeps"
            " names, or give parameters those of the pipelined module."
        )


def _start_autograd(device: torch.device) -> None:
    """Creates the CUDA context of autograd's thread, by a first kernel.

    In a stage without a loss the first kernel may be a product, and cuBLAS warns without a context.
    """
    if device.type == "cuda":
        with torch.enable_grad():
            torch.zeros((), device=device, requires_grad=True).exp().backward()
