"""Replicas that step by themselves, and average their weights now and then.

Between two averages nothing is sent (Stich, ICLR 2019). With a warm-up on averaged gradients, the
method is post-local SGD (Lin et al., ICLR 2020). With an outer optimizer it is DiLoCo; with
fragments that take turns, and averages that travel while further steps are done, Streaming DiLoCo
(Douillard et al., arXiv 2501.18512, algorithm 2).

The optimizers' state stays each replica's own. Validation and checkpoints must see one set of
weights, so all rounds end there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from lightning_dist.engine.common.device_group import DeviceGroup
from lightning_dist.engine.data_parallel.local_config import LocalConfig, OuterOptimizer
from lightning_dist.engine.data_parallel.replicas import PendingAverage, average, differing
from lightning_dist.engine.planning.partition import partition_layers
from lightning_dist.engine.tensors.dtensor import shard_like


class OuterSteps:
    """The state of DiLoCo's outer optimizer, which steps from one round of local steps to the next.

    Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models" (arXiv
    2311.08105), algorithm 1. A round begins with the outer weights on all replicas. Its outer
    gradient is these weights less the mean of the replicas' weights at its end.
    """

    def __init__(self, options: OuterOptimizer) -> None:
        self._options = options
        self._weights: dict[nn.Parameter, Tensor] = {}
        self._momentum: dict[nn.Parameter, Tensor] = {}

    @torch.no_grad()
    def begin(self, parameters: Iterable[nn.Parameter]) -> None:
        """Remembers the weights that parameters have before their first local step."""
        for parameter in parameters:
            if parameter not in self._weights:
                self._weights[parameter] = parameter.detach().clone()

    def weights(self, parameter: nn.Parameter) -> Tensor:
        """Returns the outer weights of a parameter that has begun a local step."""
        return self._weights[parameter]

    @torch.no_grad()
    def step(self, parameters: Sequence[nn.Parameter], means: Sequence[Tensor]) -> list[Tensor]:
        """Steps the outer weights, given the mean of the replicas' weights, and returns them."""
        options = self._options
        for parameter, mean in zip(parameters, means, strict=True):
            gradient = self._weights[parameter] - mean
            update = gradient
            if options.momentum:
                before = self._momentum.get(parameter)
                kept = gradient.clone() if before is None else before * options.momentum + gradient
                self._momentum[parameter] = kept
                update = gradient + options.momentum * kept if options.nesterov else kept
            # From the mean on, so that a rate of 1 without momentum leaves exactly the mean.
            self._weights[parameter] = mean + (gradient - options.lr * update)
        return [self._weights[parameter] for parameter in parameters]

    def end(self) -> None:
        """Forgets the outer weights, which all replicas have now."""
        self._weights.clear()

    def momentum_by_name(self, module: nn.Module) -> dict[str, Tensor]:
        """Returns the momentum of a module's parameters that have one."""
        named = module.named_parameters()
        return {name: self._momentum[p] for name, p in named if p in self._momentum}

    def load_momentum(self, module: nn.Module, momentum: Mapping[str, Tensor]) -> None:
        """Takes the momentum of a module's parameters from a checkpoint."""
        self._momentum = {
            parameter: shard_like(momentum[name].to(parameter.dtype), parameter).to(
                parameter.device, copy=True
            )
            for name, parameter in module.named_parameters()
            if name in momentum
        }


@dataclass(slots=True)
class _Fragment:
    """A part of the model."""

    parameters: list[nn.Parameter]
    first: int  # the local step behind which its first average begins
    # The parameters that have had a local step since the last average began.
    stepped: set[nn.Parameter] = field(default_factory=set)
    # The parameters whose average is under way, that average, and when it is due.
    sent: tuple[list[nn.Parameter], PendingAverage, int] | None = None


class LocalSGD:
    """Counts the local steps of a replica, or a part, and averages weights when they are due."""

    def __init__(self, module: nn.Module, group: DeviceGroup, rounds: LocalConfig) -> None:
        self._module = module
        self._group = group
        self._rounds = rounds
        # Steps from one average's weights to those of the next (DiLoCo); None takes the average.
        self.outer = None if rounds.outer is None else OuterSteps(rounds.outer)
        self._is_alone = group.size == 1 and self.outer is None
        self._num_local_steps = 0
        self._has_stepped = False  # since `average` was called
        parameters = list(module.parameters())
        assert rounds.fragments <= len(parameters)
        self._fragments = []
        sizes = [max(parameter.numel(), 1) for parameter in parameters]
        counts = partition_layers(sizes, rounds.fragments)
        for index, count in enumerate(counts):
            own, parameters = parameters[:count], parameters[count:]
            first = index * rounds.sync_every // rounds.fragments or rounds.sync_every
            self._fragments.append(_Fragment(own, first))

    def is_local(self, step: int) -> bool:
        """Returns whether a step's gradients are not averaged; a single replica never averages."""
        rounds = self._rounds
        return self._is_alone or (rounds.averages_weights and step >= rounds.sync_warmup_steps)

    def begin_step(self) -> None:
        """Notes that a local step is about to begin."""
        if self.outer is not None:
            parameters = (p for fragment in self._fragments for p in fragment.parameters)
            self.outer.begin(p for p in parameters if p.requires_grad)

    def count_step(self) -> None:
        """Notes a local step; averages what is due."""
        if self._is_alone:
            return
        self._num_local_steps += 1
        self._has_stepped = True
        step, every = self._num_local_steps, self._rounds.sync_every
        for fragment in self._fragments:
            # Now, for a parameter may be frozen between its last step and the average.
            fragment.stepped.update(p for p in fragment.parameters if p.requires_grad)
        if not self._rounds.streams:
            if step == every:
                self._end_round()
            return
        for fragment in self._fragments:
            if fragment.sent is not None and fragment.sent[2] == step:
                self._receive(fragment, self._rounds.alpha)
            if step >= fragment.first and (step - fragment.first) % every == 0:
                self._send(fragment)
                if self._rounds.delay == 0:
                    self._receive(fragment, self._rounds.alpha)

    def average(self) -> None:
        """Ends all rounds with equal values, if a step has been local since the last time."""
        if not self._has_stepped:
            return
        self._has_stepped = False
        if self._num_local_steps > 0:
            self._end_round()
        else:
            self._average_others()

    def _end_round(self) -> None:
        self._num_local_steps = 0
        for fragment in self._fragments:
            self._receive(fragment, self._rounds.alpha)
            self._send(fragment)
            self._receive(fragment, 0.0)
        self._average_others()
        if self.outer is not None:
            self.outer.end()

    def _average_others(self) -> None:
        """Averages what no step has trained; hooks may have written it behind the last round."""
        buffers = [b for b in self._module.buffers() if b.is_floating_point()]
        # A hook may write into frozen parameters, as into a teacher's; most are the same for ever.
        frozen = [p for p in self._module.parameters() if not p.requires_grad]
        written = differing([p for p in frozen if p.is_floating_point()], self._group)
        average([*buffers, *written], self._group)

    @torch.no_grad()
    def _send(self, fragment: _Fragment) -> None:
        """Begins the average of what has stepped."""
        stepped = [p for p in fragment.parameters if p in fragment.stepped]
        fragment.stepped.clear()
        sent: list[Tensor] = [p.detach() for p in stepped]
        wire = None
        if self._rounds.wire == "bf16":
            assert self.outer is not None
            sent = [self.outer.weights(p) - p for p in stepped]
            wire = torch.bfloat16
        due = self._num_local_steps + self._rounds.delay
        fragment.sent = (stepped, PendingAverage(sent, self._group, wire), due)

    @torch.no_grad()
    def _receive(self, fragment: _Fragment, alpha: float) -> None:
        """Takes the weights of the average under way, if there is one."""
        if fragment.sent is None:
            return
        (parameters, pending, _), fragment.sent = fragment.sent, None
        values = pending.wait()
        if self.outer is not None:
            if self._rounds.wire == "bf16":
                outer = self.outer
                values = [outer.weights(p) - v for p, v in zip(parameters, values, strict=True)]
            values = self.outer.step(parameters, values)
        for parameter, value in zip(parameters, values, strict=True):
            parameter.copy_(value if alpha == 0.0 else alpha * parameter + (1.0 - alpha) * value)
        if alpha > 0.0:
            fragment.stepped.update(parameters)  # the replicas' still differ
