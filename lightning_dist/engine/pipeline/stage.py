"""One stage: forward and backward of one micro-batch, under the user's unchanged step.

The user's step function runs on each stage. :class:`ForwardInterceptor` replaces the forward of the
pipelined module. The first stage runs its layers on the step's input. Each later stage runs its
layers on the previous stage's output instead. All but the last then leave the step by an exception;
on the last the module returns, and the user's code goes on to its loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dist.engine.pipeline.gradients import HeldGradients
from lightning_dist.engine.pipeline.microbatch import Microbatch
from lightning_dist.engine.pipeline.split_backward import SplitBackward
from lightning_dist.engine.pipeline.step_checks import (
    ModuleCalls,
    check_no_side_losses,
    refuse_input_gradients,
)
from lightning_dist.engine.splitting.layers import Layers, StepInterceptor
from lightning_dist.engine.stashing.staleness import StalenessMeter, UpdateReport
from lightning_dist.engine.stashing.versions import SwappedWeights, WeightPolicy, WeightVersion
from lightning_dist.engine.tensors.patch import replace_method
from lightning_dist.engine.tensors.rng import seed_all, seeded
from lightning_dist.engine.tensors.samples import warn_of_time_first
from lightning_dist.engine.tensors.tree import alias_of, map_tensors, tensors_in

Step = Callable[[Microbatch], Any]
"""The user's step on one micro-batch; returns the loss or the outputs on the last stage."""


@dataclass(eq=False, slots=True, weakref_slot=True)
class InFlight:
    """The state of a micro-batch from its forward until its backward."""

    inputs: list[Tensor]  # whose gradients go to the stage before
    outputs: list[Tensor]  # roots of the autograd graph: the layers' outputs, or the loss
    layer_input: Any
    weights: WeightVersion
    seed: tuple[int, ...]  # of the forward


class StopForward(BaseException):  # noqa: N818  (it is not an error)
    """Leaves the user's step behind the pipelined module, past an ``except Exception``."""


class NotCalledError(ValueError):
    """A step has ended without a call of the pipelined module."""


class ForwardInterceptor:
    """Replaces the forward of the pipelined module.

    Args:
        found: The layers of the pipelined module.
        outside: Called with the arguments of a call outside of a step; None runs the module, all of
            whose layers are on this rank.
    """

    def __init__(self, found: Layers, outside: Callable[..., Any] | None) -> None:
        module, self._compiler = found.module, found.compiler
        self.found = found
        self._outside = outside
        self._own_forward: Callable[..., Any] = module.forward
        self._layers: Callable[..., Any] | None = None
        self._outputs: list[Any] = []
        self._leaves = False
        self._undo = replace_method(module, "forward", self._compiler.pause(self._forward))

    def detach(self) -> None:
        """Restores the module's own forward."""
        self._undo()

    def run(self, step: Callable[[], Any], layers: Callable[..., Any], *, leaves: bool) -> Any:
        """Runs a step; returns the layers' output if it leaves the step there, else the result.

        ``layers`` replaces the forward of the module in the step's only call.

        Raises:
            NotCalledError: The step did not call the pipelined module.
            ValueError: The step called it more than once.
        """
        self._layers, self._leaves, self._outputs = layers, leaves, []
        result = None
        try:
            with self.found.in_step(is_last=not leaves):
                result = step()
        except StopForward:
            pass
        finally:
            outputs, self._outputs, self._layers = self._outputs, [], None
        if not outputs:
            returned = "" if result is not None else ", and returned None"
            raise NotCalledError(
                f"The step ended without a call of the pipelined module{returned}, so there is"
                " nothing to cut. Call it once in each step, or name another module with `layers=`."
                " No batch can be skipped, for each stage is sent what the one before computes:"
                " leave batches out where they are read, in the dataset or `collate_fn`, or return"
                " a loss of zero, like `output.sum() * 0.0`."
            )
        return outputs[0] if leaves else result  # a step may have caught the exception

    def _forward(self, *arguments: Any, **keywords: Any) -> Any:
        if self._layers is None:
            if self._outside is not None:
                return self._outside(*arguments, **keywords)
            return self._compiler.resume(self._own_forward, *arguments, **keywords)
        if self._outputs:
            raise ValueError(
                "The step called the pipelined module more than once. A pipeline runs each layer"
                " once per micro-batch: call the module once per step, as on all inputs joined by"
                " `torch.cat` (BatchNorm then sees them all), whose outputs `chunk` parts again, or"
                " use DDPStrategy."
            )
        with self.found.in_call((arguments, keywords)):
            self._outputs.append(self._layers(*arguments, **keywords))
        if self._leaves:
            raise StopForward
        return self._outputs[0]


@dataclass(frozen=True, slots=True)
class StagePlace:
    """A stage's place in the pipeline and among its data replicas."""

    index: int  # of the stage
    num_stages: int
    seed: tuple[int, int]  # of all random numbers, and index of the data replica
    device: torch.device
    shares_batch: bool  # with a later stage of the rank, which runs the step on it too


class Stage:
    """The layers of one stage, and the micro-batches in flight on it.

    ``layers`` runs the stage's layers, and ``interceptor`` lets it do so in the user's step.

    Attributes:
        in_flight: The micro-batches with their forward done and their backward not, by index.
        compares_samples: What :func:`.compares_samples` has found; None on all but the last stage.
    """

    def __init__(
        self,
        place: StagePlace,
        layers: nn.Module,
        interceptor: ForwardInterceptor | StepInterceptor,
        calls: ModuleCalls,
        *,
        policy: WeightPolicy,
        gradients: HeldGradients,
        meter: StalenessMeter,
    ) -> None:
        self.layers = layers
        self._place = place
        self.is_first, self.is_last = place.index == 0, place.index == place.num_stages - 1
        self._interceptor = interceptor
        self._found = interceptor.found
        self._calls = calls
        self._swapped = SwappedWeights(layers, self._found.loss_parameters.module)
        self.policy = policy
        self.gradients = gradients
        self.meter = meter
        self.report: UpdateReport | None = None
        self.in_flight: dict[int, InFlight] = {}
        self._split_backwards: dict[int, SplitBackward] = {}
        self.compares_samples: bool | None = None
        self._has_looked = False
        self._trained: dict[str, nn.Parameter] | None = None
        self._trained_in_flight: set[str] = set()

    def begin_batch(self, *, overlaps: bool) -> None:
        """Prepares for a training batch, which may overlap earlier ones."""
        if overlaps:
            self._trained_in_flight |= self.named_parameters().keys()
        else:
            self.restart()

    def restart(self) -> None:
        """Restarts with no micro-batch in flight."""
        self.policy.restart()
        self._trained_in_flight.clear()

    def begin_round(self, num_backwards: int) -> None:
        """Prepares for a number of backwards, or weights' parts, until gradients are wanted."""
        self._trained = None
        self.gradients.begin_round(num_backwards)

    def forward(
        self, index: int, microbatch: Microbatch, received: Any, step: Step, seed: tuple[int, ...]
    ) -> Any:
        """Runs the user's step on one micro-batch, as far as this stage goes.

        Args:
            index: Names the micro-batch until its backward.
            microbatch: The piece of the batch.
            received: The previous stage's output; ignored on the first stage.
            step: The user's step.
            seed: Names the random numbers. The caller must save the generators' states.

        Returns:
            The layers' output to send on, or the user's step's result on the last stage.

        Raises:
            ValueError: The step did not call the pipelined module exactly once.
        """
        # Asked here: the user's step may switch gradients off or on around the pipelined module.
        has_backward = torch.is_grad_enabled()
        weights = self.policy.acquire() if has_backward else self.policy.look()
        name = (*self._place.seed, *seed)
        layer_input = output = None

        def layers(*arguments: Any, **keywords: Any) -> Any:
            nonlocal layer_input, output
            self._calls.note(index, (arguments, keywords))
            if has_backward and self.is_last and not self.is_first:
                in_step_only.callback(refuse_input_gradients((arguments, keywords)))
            layer_input = self._found.layer_input(self.is_first, received, arguments, keywords)
            # A copy for another run, since the layers may write into their input.
            given = map_tensors(_copy_of, layer_input) if self._recomputes else layer_input
            looks = has_backward and not self._has_looked
            is_cut, size = microbatch.weight < 1.0, microbatch.num_samples
            with warn_of_time_first(self.layers, size) if looks and is_cut else nullcontext():
                output = self._run_layers(given, name)
            if looks and not self.is_last:
                check_no_side_losses(self.layers, self._place.index, output)
            self._has_looked |= has_backward
            output = map_tensors(_detached, output) if self._recomputes else output
            return output

        def in_step() -> Any:
            # The step may take something out of the batch, or write into its tensors.
            own = microbatch.copied() if self._place.shares_batch else microbatch
            own_step = partial(step, own)
            with self._found.copied_buffers() if self._place.shares_batch else nullcontext():
                return self._interceptor.run(own_step, layers, leaves=not self.is_last)

        seed_all(*name, device=self._place.device)
        with ExitStack() as in_step_only:
            result = self._swapped.run(weights, in_step)
        if has_backward:
            if self._recomputes:  # the backward uses other weights, so these need not stay
                weights = WeightVersion(weights.index, copies=weights.copies)
            inputs = [] if self.is_first else _differentiable(received)
            outputs = _differentiable(output)
            self.in_flight[index] = InFlight(inputs, outputs, layer_input, weights, name)
        return result

    def set_loss(self, index: int, loss: Tensor, scale: float) -> list[Tensor | None]:
        """Sets the root of the last stage's graph for a micro-batch; returns its gradients."""
        flight = self.in_flight[index]
        # A loss of weight zero may be nan (a mean over no tokens). The backward begins with zeros
        # at the layers' outputs then.
        if scale != 0.0:
            flight.outputs = [loss] if loss.requires_grad else []
        return [torch.full_like(output, scale) for output in flight.outputs]

    def backward(
        self, index: int, gradients: Sequence[Tensor | None], update: int = 0
    ) -> list[Tensor | None]:
        """Runs the backward of one micro-batch, and holds the parameters' gradients for an update.

        Takes one gradient, or None, for each output that requires grad. Returns one for each
        received tensor that requires grad.
        """
        flight = self.in_flight.pop(index)
        weights = self.policy.acquire() if self._recomputes else flight.weights
        outputs, gradients = self._roots(flight, weights, gradients)
        trainable = self._trainable(weights)
        backward = partial(self._swapped.backward, weights)
        results = self.gradients.run(outputs, gradients, flight.inputs, trainable, update, backward)
        self.meter.end_backward(flight.weights, update)
        return results

    def backward_input(self, index: int, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Runs the part of a :meth:`backward` that the stage before waits for."""
        flight = self.in_flight[index]
        assert flight.weights.index == self.policy.num_steps, "only synchronous schedules do that"
        outputs, gradients = self._roots(flight, flight.weights, gradients)
        with self.gradients.input_backward(self._trainable(flight.weights)) as trainable:
            split = SplitBackward(outputs, gradients, flight.inputs, trainable)
            self._split_backwards[index] = split
            return self._swapped.run(flight.weights, split.run_inputs)

    def backward_weight(self, index: int, update: int = 0) -> None:
        """Runs the rest of a backward after :meth:`backward_input`, and holds the gradients."""
        flight = self.in_flight.pop(index)
        split = self._split_backwards.pop(index)
        with self.gradients.adding(self._trainable(flight.weights), split.given, update):
            self._swapped.run(flight.weights, split.run_weights)
        self.meter.end_backward(flight.weights, update)

    def begin_update(self, update: int) -> None:
        """Stashes the weights, and reports an update's staleness; the optimizer must write next."""
        staleness, discrepancy = self.meter.measure(
            update, self.policy.num_steps, self.named_parameters
        )
        self.policy.before_step()
        self.report = UpdateReport(staleness, self.policy.stash_bytes, discrepancy)

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Returns the stage's trainable parameters by their names in the stage."""
        return {name: p for name, p in self.layers.named_parameters() if p.requires_grad}

    def updated_parameters(self) -> dict[str, nn.Parameter]:
        """Returns the trainable parameters, and those frozen since a batch in flight ran."""
        late, named = self._trained_in_flight, self.layers.named_parameters()
        return {name: p for name, p in named if p.requires_grad or name in late}

    def clear(self) -> None:
        """Drops the micro-batches in flight and the held gradients, after a failure."""
        self.in_flight.clear()
        self._split_backwards.clear()
        self.gradients.clear()
        self.meter.clear()

    @property
    def _recomputes(self) -> bool:
        # The last stage's backward follows its forward at once, with no step between them.
        return self.policy.recomputes and not self.is_last

    def _run_layers(self, value: Any, seed: tuple[int, ...]) -> Any:
        with seeded(*seed, self._place.index, device=self._place.device):
            return self._found.run(self.layers, map_tensors(_behind_leaf, value))

    def _roots(
        self, flight: InFlight, weights: WeightVersion, gradients: Sequence[Tensor | None]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Returns the outputs with which a backward begins, and a gradient for each."""
        outputs = self._recompute(flight, weights) if self._recomputes else flight.outputs
        pairs = [(o, g) for o, g in zip(outputs, gradients, strict=True) if g is not None]
        return [o for o, _ in pairs], [g for _, g in pairs]

    def _recompute(self, flight: InFlight, weights: WeightVersion) -> list[Tensor]:
        # On copies of the buffers, so that running statistics count each micro-batch once.
        buffers = {name: b.detach().clone() for name, b in self.layers.named_buffers()}
        with torch.enable_grad():
            swapped = WeightVersion(weights.index, {**weights.aliases, **buffers})
            output = self._swapped.run(
                swapped, lambda: self._run_layers(flight.layer_input, flight.seed)
            )
            return _differentiable(output)

    def _trainable(self, weights: WeightVersion) -> Mapping[str, Tensor]:
        # Once per round: a round may have many backwards, and the module tree may be large.
        self._trained = self.named_parameters() if self._trained is None else self._trained
        aliases = {name: alias for name, alias in weights.aliases.items() if alias.requires_grad}
        return {**self._trained, **aliases}


def _differentiable(tree: Any) -> list[Tensor]:
    return [t for t in tensors_in(tree) if t.requires_grad]


def _detached(tensor: Tensor) -> Tensor:
    """Returns a leaf with the same memory."""
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _copy_of(tensor: Tensor) -> Tensor:
    """Returns a leaf with memory of its own."""
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _behind_leaf(tensor: Tensor) -> Tensor:
    """Returns an alias of a leaf, with the same memory, that layers may write into."""
    # Autograd refuses to write in place into a leaf, and received tensors are leaves. On one device
    # `nn.ReLU(inplace=True)`, say, gets the previous layer's output, which is no leaf.
    if not tensor.requires_grad or not tensor.is_leaf:
        return tensor
    return alias_of(tensor)
