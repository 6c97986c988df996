"""A check: each rank gathers facts, and rank 0 judges the facts of all ranks.

Where a rank can judge its own facts, these are a result, and the worst result counts.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

from lightning_dist.doctor.launch import Launch
from lightning_dist.doctor.report import Result, Status, fail
from lightning_dist.engine.common.environment import name_places
from lightning_dist.engine.common.mesh_shape import MeshShape
from lightning_dist.strategies.base.distributed import DistributedStrategy

F = TypeVar("F")


Build = Callable[..., DistributedStrategy]
"""Creates a strategy; takes ``timeout_s``, ``save_full`` and ``check_environment``."""


@dataclass(frozen=True)
class Run:
    """What a check can know before it looks.

    Attributes:
        launch: How this process was launched.
        root: Directory of the run's files, as ``default_root_dir`` of a Trainer.
        seconds: How long ranks wait for each other.
        hosts: The host of each rank that is known.
        meshes: The mesh of each strategy, by its name.
        parameters: Parameters of the model to be trained, if given.
        script: The script to be run, if given.
        token: Name of a file that rank 0 shows to the others.
    """

    launch: Launch
    root: Path
    seconds: float
    hosts: Mapping[int, str]
    meshes: Mapping[str, MeshShape] = field(default_factory=dict)
    parameters: int = 0
    script: Path | None = None
    token: str = ""

    def places(self, ranks: Sequence[int]) -> str:
        """Names ranks with their hosts."""
        return name_places(ranks, [self.hosts.get(rank, "?") for rank in range(max(ranks) + 1)])

    def ranks_beside(self, rank: int) -> list[int]:
        """Lists the ranks on a rank's host, itself among them."""
        return [other for other, host in self.hosts.items() if host == self.hosts[rank]]

    @property
    def has_several_hosts(self) -> bool:
        """Whether the ranks are on several hosts, as far as is known."""
        return (
            len(set(self.hosts.values())) > 1
            or 0 < self.launch.ranks_per_host < self.launch.world_size
        )


@dataclass(frozen=True, slots=True)
class NoFacts:
    """The answer of a rank whose probe has brought no facts."""

    reason: str


@dataclass(frozen=True, slots=True)
class Check(Generic[F]):
    """A check.

    Attributes:
        name: Name of the check.
        probe: Gathers this rank's facts. The probes of all ranks run at the same time.
        judge: Judges the facts of all ranks that are known.
        remedy: What to change if a probe does not end, or raises.
        seconds: How long a probe may take.
    """

    name: str
    probe: Callable[[Run], F]
    judge: Callable[[Run, Mapping[int, F]], Result]
    remedy: str
    seconds: float = 10.0

    def attempt(self, run: Run) -> F | NoFacts:
        """Returns this rank's facts, or what became of the probe."""
        answers: list[F | NoFacts] = []

        def work() -> None:
            try:
                answers.append(self.probe(run))
            except Exception as error:  # a doctor must not die of what it looks for
                text = str(error).strip() or "without a text"
                answers.append(NoFacts(f"{type(error).__name__}: {text}"))

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        thread.join(self.seconds)
        return answers[0] if answers else NoFacts(f"not done within {self.seconds:g} s")

    def conclude(self, run: Run, answers: Mapping[int, F | NoFacts]) -> Result:
        """Judges the answers of ranks; a rank without facts is a failure."""
        silent = {
            rank: fail(answer.reason, self.remedy)
            for rank, answer in answers.items()
            if isinstance(answer, NoFacts)
        }
        facts = {rank: own for rank, own in answers.items() if not isinstance(own, NoFacts)}
        return worst_of(run, silent) if silent else self.judge(run, facts)


def worst_of(run: Run, results: Mapping[int, Result]) -> Result:
    """Returns the worst result, with the ranks that have it unless all of them do."""
    worst = max(result.status for result in results.values())
    ranks: dict[Result, list[int]] = {}
    for rank, result in results.items():
        if result.status is worst:
            ranks.setdefault(result, []).append(rank)
    first, own = next(iter(ranks.items()))
    if worst is Status.OK or len(own) == len(run.hosts):
        return first
    texts = [f"{run.places(own)}: {result.found}" for result, own in ranks.items()]
    return Result(worst, "; ".join(texts), first.remedy, first.table)
