"""Replicas that step by themselves, and average their weights now and then.

Between two averages nothing is sent (Stich, ICLR 2019). With a warm-up on averaged gradients, the
method is post-local SGD (Lin et al., ICLR 2020). With an outer optimizer it is DiLoCo; with
fragments that take turns, and averages that travel while further steps are done, Streaming DiLoCo
(Douillard et al., arXiv 2501.18512, algorithm 2).

The optimizers' state stays each replica's own. Validation and checkpoints must see one set of
weights, so all rounds end there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from lightning_dist.engine.common.device_group import DeviceGroup
from lightning_dist.engine.common.names import check_count
from lightning_dist.engine.data_parallel.outer_optimizer import OuterSteps
from lightning_dist.engine.data_parallel.replicas import PendingAverage, average
from lightning_dist.engine.planning.partition import partition_layers

Wire = Literal["fp32", "bf16"]


@dataclass(frozen=True, slots=True)
class Rounds:
    """When replicas average their weights, and how.

    Attributes:
        sync_every: Optimizer steps from one average of a weight to the next; 1 without an outer
            optimizer averages the gradients of each step instead.
        warmup_steps: Steps with averaged gradients at the start.
        fragments: Parts of the model, of about as many elements each, whose rounds end in turns.
        delay: Local steps that are done while an average is under way.
        alpha: The part of a replica's own weights that stays when an average has come.
        wire: What is sent: weights as they are, or outer gradients in ``"bf16"``.

    Raises:
        ValueError: A value is out of range.
    """

    sync_every: int = 1
    warmup_steps: int = 0
    fragments: int = 1
    delay: int = 0
    alpha: float = 0.0
    wire: Wire = "fp32"

    def __post_init__(self) -> None:
        """Checks the values."""
        check_count("sync_every", self.sync_every)
        check_count("sync_warmup_steps", self.warmup_steps, at_least=0)
        check_count("fragments", self.fragments)
        check_count("delay", self.delay, at_least=0)
        if self.delay >= self.sync_every and self.delay > 0:
            raise ValueError(
                f"delay={self.delay} must be below sync_every={self.sync_every}: an average must"
                " have come before the next one of the same weights begins."
            )
        if self.fragments > self.sync_every:
            raise ValueError(
                f"fragments={self.fragments} must not be above sync_every={self.sync_every}: one"
                " fragment is sent in a step."
            )
        if not 0.0 <= self.alpha < 1.0:
            raise ValueError(f"alpha={self.alpha} must be from 0 to below 1.")
        if self.wire not in ("fp32", "bf16"):
            raise ValueError(f"wire={self.wire!r} is unknown; use 'fp32' or 'bf16'.")

    @property
    def streams(self) -> bool:
        """Whether anything differs from an average of all weights at once."""
        return (self.fragments, self.delay, self.alpha, self.wire) != (1, 0, 0.0, "fp32")


@dataclass(slots=True)
class _Fragment:
    """A part of the model.

    Attributes:
        parameters: Its parameters.
        first: The local step behind which its first average begins.
        stepped: The parameters that have had a local step since the last average began.
        sent: The parameters whose average is under way, that average, and when it is due.
    """

    parameters: list[nn.Parameter]
    first: int
    stepped: set[nn.Parameter] = field(default_factory=set)
    sent: tuple[list[nn.Parameter], PendingAverage, int] | None = None


class LocalSGD:
    """Counts a replica's local steps, and averages the weights when they are due.

    Args:
        module: This rank's replica.
        group: Group of the replicas.
        rounds: When and how.
        outer: Steps from the weights of one average to those of the next (DiLoCo). None takes the
            average itself.

    Raises:
        ValueError: The module has fewer parameters than fragments.
    """

    def __init__(
        self,
        module: nn.Module,
        group: DeviceGroup,
        rounds: Rounds,
        outer: OuterSteps | None = None,
    ) -> None:
        self._module = module
        self._group = group
        self._rounds = rounds
        self._outer = outer
        self._is_alone = group.size == 1 and outer is None
        self._num_local_steps = 0
        parameters = list(module.parameters())
        if rounds.fragments > len(parameters):
            raise ValueError(
                f"fragments={rounds.fragments} are more than the model's {len(parameters)}"
                " parameters."
            )
        self._fragments = []
        sizes = [max(parameter.numel(), 1) for parameter in parameters]
        counts = partition_layers(sizes, rounds.fragments)
        for index, count in enumerate(counts):
            own, parameters = parameters[:count], parameters[count:]
            first = index * rounds.sync_every // rounds.fragments or rounds.sync_every
            self._fragments.append(_Fragment(own, first))

    def is_local(self, step: int) -> bool:
        """Returns whether a step's gradients are not averaged; a single replica never averages."""
        keeps_weights = self._rounds.sync_every > 1 or self._outer is not None
        return self._is_alone or (keeps_weights and step >= self._rounds.warmup_steps)

    def begin_step(self) -> None:
        """Notes that a local step is about to begin."""
        if self._outer is not None:
            self._outer.begin(p for p in self._module.parameters() if p.requires_grad)

    def count_step(self) -> None:
        """Notes a local step; averages what is due."""
        if self._is_alone:
            return
        self._num_local_steps += 1
        step, every = self._num_local_steps, self._rounds.sync_every
        for fragment in self._fragments:
            # Now, for a parameter may be frozen between its last step and the average.
            fragment.stepped.update(p for p in fragment.parameters if p.requires_grad)
        if not self._rounds.streams:
            if step == every:
                self.average()
            return
        for fragment in self._fragments:
            if fragment.sent is not None and fragment.sent[2] == step:
                self._receive(fragment, self._rounds.alpha)
            if step >= fragment.first and (step - fragment.first) % every == 0:
                self._send(fragment)
                if self._rounds.delay == 0:
                    self._receive(fragment, self._rounds.alpha)

    def average(self) -> None:
        """Ends all rounds with equal weights, if a step has been local since the last time."""
        if self._num_local_steps == 0:
            return
        self._num_local_steps = 0
        for fragment in self._fragments:
            self._receive(fragment, self._rounds.alpha)
            self._send(fragment)
            self._receive(fragment, 0.0)
        average([b for b in self._module.buffers() if b.is_floating_point()], self._group)
        if self._outer is not None:
            self._outer.end()

    @torch.no_grad()
    def _send(self, fragment: _Fragment) -> None:
        """Begins the average of what has stepped."""
        stepped = [p for p in fragment.parameters if p in fragment.stepped]
        fragment.stepped.clear()
        sent: list[Tensor] = [p.detach() for p in stepped]
        wire = None
        if self._rounds.wire == "bf16":
            assert self._outer is not None
            sent = [self._outer.weights(p) - p for p in stepped]
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
        if self._outer is not None:
            if self._rounds.wire == "bf16":
                outer = self._outer
                values = [outer.weights(p) - v for p, v in zip(parameters, values, strict=True)]
            values = self._outer.step(parameters, values)
        for parameter, value in zip(parameters, values, strict=True):
            parameter.copy_(value if alpha == 0.0 else alpha * parameter + (1.0 - alpha) * value)
        if alpha > 0.0:
            fragment.stepped.update(parameters)  # the replicas' still differ
