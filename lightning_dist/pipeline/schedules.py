"""The schedules: who computes what when, as short functions that yield compute actions.

Four micro-batches on three stages, a column per unit of time (``F`` and ``B`` equally long here):

.. code-block:: text

    gpipe      F0 F1 F2 F3 .  .  .  .  B0 B1 B2 B3     all forwards, then all backwards
               .  F0 F1 F2 F3 .  .  B0 B1 B2 B3 .
               .  .  F0 F1 F2 F3 B0 B1 B2 B3 .  .

    1f1b       F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3     fewer in flight, the same bubble
               .  F0 F1 .  B0 F2 B1 F3 B2 .  B3 .
               .  .  F0 B0 F1 B1 F2 B2 F3 B3 .  .

    pipedream  the order of 1f1b, but each micro-batch is a minibatch with an update of its own,
               and the next ones follow without a flush: no bubble but at a drain

GPipe: Huang et al. 2019, section 2. 1F1B: Narayanan et al. 2021 (Megatron-LM), section 2.2.1, after
PipeDream: Narayanan et al. 2019, section 3.2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from lightning_dist.pipeline.actions import Action, ActionKind
from lightning_dist.pipeline.schedule import Schedule

F, B = ActionKind.FORWARD, ActionKind.BACKWARD

Generator = Callable[[int, int, int], Iterator[tuple[ActionKind, int]]]
"""Takes stage, stages and micro-batches; yields kinds and micro-batches in order."""


def _gpipe(stage: int, num_stages: int, count: int) -> Iterator[tuple[ActionKind, int]]:
    yield from ((F, index) for index in range(count))
    yield from ((B, index) for index in range(count))


def _one_forward_one_backward(
    stage: int, num_stages: int, count: int
) -> Iterator[tuple[ActionKind, int]]:
    # The stages behind this one are filled while it runs ahead by as many forwards.
    warmup = min(num_stages - 1 - stage, count)
    yield from ((F, index) for index in range(warmup))
    for index in range(warmup, count):
        yield F, index
        yield B, index - warmup
    yield from ((B, index) for index in range(count - warmup, count))


def _forward(stage: int, num_stages: int, count: int) -> Iterator[tuple[ActionKind, int]]:
    yield from ((F, index) for index in range(count))


@dataclass(frozen=True, slots=True)
class ScheduleFamily:
    """A kind of schedule, for any sizes.

    Attributes:
        name: Its name.
        generate: Makes the order of one stage.
        asynchronous: Whether each micro-batch ends with an update of its own.
        trains: Whether it has backwards.
    """

    name: str
    generate: Generator
    asynchronous: bool = False
    trains: bool = True


FAMILIES: Mapping[str, ScheduleFamily] = MappingProxyType(
    {
        family.name: family
        for family in (
            ScheduleFamily("gpipe", _gpipe),
            ScheduleFamily("1f1b", _one_forward_one_backward),
            ScheduleFamily("pipedream", _one_forward_one_backward, asynchronous=True),
            ScheduleFamily("forward", _forward, trains=False),
        )
    }
)

SCHEDULE_NAMES = tuple(family.name for family in FAMILIES.values() if family.trains)


def build_schedule(name: str, *, num_stages: int, num_microbatches: int) -> Schedule:
    """Builds a schedule of compute actions.

    Args:
        name: One of :data:`SCHEDULE_NAMES`, or ``"forward"`` for evaluation.
        num_stages: Stages of the pipeline, one per rank.
        num_microbatches: Micro-batches per batch; for ``"pipedream"`` the minibatches between two
            drains.

    Raises:
        ValueError: An unknown name, or a size below 1.
    """
    if name not in FAMILIES:
        raise ValueError(f"schedule={name!r} is unknown; use one of {list(FAMILIES)}.")
    if num_stages < 1 or num_microbatches < 1:
        raise ValueError(
            f"num_stages={num_stages} and num_microbatches={num_microbatches} must be at least 1."
        )
    family = FAMILIES[name]
    ranks = tuple(
        tuple(
            Action(stage, kind, index)
            for kind, index in family.generate(stage, num_stages, num_microbatches)
        )
        for stage in range(num_stages)
    )
    return Schedule(name, num_stages, num_microbatches, ranks, family.asynchronous)
