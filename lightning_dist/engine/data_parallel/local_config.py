"""The user's configuration of replicas that step by themselves, and its checks.

It says when the replicas average their weights, and how the mean becomes their next weights.
:mod:`.data_parallel.local_sgd` does so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lightning_dist.engine.common.names import check_choice, check_count

Wire = Literal["fp32", "bf16"]


@dataclass(frozen=True)  # without slots, which the command line's parser does not take
class OuterOptimizer:
    """SGD on the outer gradients, as ``torch.optim.SGD`` does it.

    A rate of 1 without momentum takes the mean of the replicas' weights, as local SGD does.

    Attributes:
        lr: Outer learning rate.
        momentum: Outer momentum.
        nesterov: Whether the momentum is Nesterov's.

    Raises:
        ValueError: A value is out of range, or Nesterov's momentum is 0.
    """

    lr: float = 0.7
    momentum: float = 0.9
    nesterov: bool = True

    def __post_init__(self) -> None:
        """Checks the values."""
        if not self.lr > 0.0:
            raise ValueError(f"OuterOptimizer(lr={self.lr}): use a rate above 0, such as 0.7.")
        if not 0.0 <= self.momentum < 1.0:
            raise ValueError(
                f"OuterOptimizer(momentum={self.momentum}): use a momentum from 0 to below 1."
            )
        if self.nesterov and self.momentum == 0.0:
            raise ValueError(
                "OuterOptimizer(nesterov=True, momentum=0.0): Nesterov's step needs a momentum."
                " Give one, such as 0.9, or nesterov=False."
            )


@dataclass(frozen=True)  # without slots, which the command line's parser does not take
class LocalConfig:
    """Local SGD, DiLoCo and Streaming DiLoCo, as arguments.

    Attributes:
        sync_every: Optimizer steps from one average of a weight to the next. 1 without an outer
            optimizer averages the gradients of each step instead.
        sync_warmup_steps: Optimizer steps with averaged gradients at the start.
        outer: Steps from the weights of one average to those of the next, as DiLoCo does. None
            takes the average itself.
        fragments: Parts of the model, of about as many elements each, whose rounds end in turns;
            with ``outer``, as the next three.
        delay: Local steps that are done while an average is under way.
        alpha: The part of a replica's own weights that stays when an average has come.
        wire: What is sent: weights as they are, or outer gradients in ``"bf16"``.

    Raises:
        ValueError: A value is out of range, or needs an outer optimizer.
    """

    sync_every: int = 1
    sync_warmup_steps: int = 0
    outer: OuterOptimizer | None = None
    fragments: int = 1
    delay: int = 0
    alpha: float = 0.0
    wire: Wire = "fp32"

    def __post_init__(self) -> None:
        """Checks the values."""
        check_count("sync_every", self.sync_every)
        check_count("sync_warmup_steps", self.sync_warmup_steps, at_least=0)
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
        check_choice("wire", self.wire, ("fp32", "bf16"))
        if self.streams and self.outer is None:
            raise ValueError(
                f"fragments={self.fragments}, delay={self.delay}, alpha={self.alpha} and"
                f" wire={self.wire!r} go with outer=OuterOptimizer(). For the mean of the weights,"
                " that is OuterOptimizer(lr=1.0, momentum=0.0, nesterov=False)."
            )

    @property
    def averages_weights(self) -> bool:
        """Whether replicas step by themselves, behind the warm-up."""
        return self.sync_every > 1 or self.outer is not None

    @property
    def averages_gradients(self) -> bool:
        """Whether replicas average the gradients of some steps."""
        return self.sync_warmup_steps > 0 or not self.averages_weights

    @property
    def streams(self) -> bool:
        """Whether anything differs from an average of all weights at once."""
        return (self.fragments, self.delay, self.alpha, self.wire) != (1, 0, 0.0, "fp32")
