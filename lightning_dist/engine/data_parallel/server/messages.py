"""What the user chooses of a parameter server, and the messages between workers and servers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from torch import Tensor

from lightning_dist.engine.common.names import check_choice, check_count, check_positive

ServerMode = Literal["sync", "async", "bounded"]
Compensation = Literal["none", "dc-asgd"]


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """How servers treat what is pushed.

    With the mode ``"sync"`` they step on the mean of all workers' gradients, with ``"async"`` on
    each gradient as it comes, and with ``"bounded"`` too, within ``max_staleness``.

    Raises:
        ValueError: A value is unknown or out of range, or does not go with the mode.
    """

    mode: ServerMode = "sync"
    max_staleness: int | None = None  # updates that a worker may be ahead of the slowest one
    num_servers: int = 1  # which the first ranks hold
    compensation: Compensation = "none"  # for the updates that a gradient does not know
    compensation_strength: float = 0.04  # the factor of the correction
    record_arrivals: bool = False  # whether servers note what came and was sent, in order

    def __post_init__(self) -> None:
        """Checks the values."""
        check_choice("mode", self.mode, get_args(ServerMode))
        check_choice("compensation", self.compensation, get_args(Compensation))
        check_count("num_servers", self.num_servers)
        if (self.mode == "bounded") != (self.max_staleness is not None):
            raise ValueError(
                f"mode={self.mode!r} with max_staleness={self.max_staleness}: the bound goes with"
                " mode='bounded', which needs one. Pass both, such as max_staleness=2, or neither."
            )
        if self.max_staleness is not None:
            check_count("max_staleness", self.max_staleness, at_least=0)
        check_positive("compensation_strength", self.compensation_strength)
        if self.mode == "sync" and self.compensation != "none":
            raise ValueError(
                f"compensation={self.compensation!r} has nothing to correct with mode='sync', whose"
                " gradients know all updates. Leave it out, or take mode='async' or 'bounded'."
            )


@dataclass(frozen=True, slots=True)
class Push:
    """A worker's gradients for one server."""

    gradients: list[Tensor | None]  # of the server's shard; None where a step left one out
    groups: list[dict[str, Any]]  # values of the worker's parameter groups, such as learning rates
    asked: tuple[int, ...]  # numbers of the decisions that this worker asks all workers for
    weights: Sequence[Tensor] = ()  # in step, of the server's own worker: hooks may have written


@dataclass(frozen=True, slots=True)
class Meet:
    """A worker waits for all workers."""

    drains: bool  # whether weights are sent, and pushes wait until the server opens again
    weights: Sequence[Tensor] = ()  # as above


@dataclass(frozen=True, slots=True)
class Reply:
    """A server's answer."""

    weights: list[Tensor]  # of the server's shard; none behind a plain meeting
    due: dict[int, int] = field(default_factory=dict)  # updates behind which a decision is obeyed
    living: tuple[int, ...] = ()  # the workers that are left, behind a plain meeting
    failure: str = ""  # why the server cannot go on


@dataclass(frozen=True, slots=True)
class Arrival:
    """A line in a server's record: a worker's gradients have come, or weights were sent to it."""

    kind: Literal["push", "pull"]
    worker: int  # its rank
