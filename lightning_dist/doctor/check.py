"""A check: each rank gathers facts, and rank 0 judges the facts of all ranks.

A judge is a function of facts alone, so it is tested without hosts.
"""

from __future__ import annotations

import faulthandler
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

from lightning_dist.doctor.launch import Launch
from lightning_dist.doctor.result import Result, Status, fail
from lightning_dist.engine.common.environment import name_places
from lightning_dist.engine.common.mesh_shape import MeshShape
from lightning_dist.strategies.base.distributed import DistributedStrategy

F = TypeVar("F")


@dataclass(frozen=True, slots=True)
class Choice:
    """A strategy to check.

    Attributes:
        name: Its name on the command line.
        build: Creates it; takes ``timeout_s``, ``save_full`` and ``check_environment``.
        is_exact: Whether it trains as one device does.
    """

    name: str
    build: Callable[..., DistributedStrategy]
    is_exact: bool = True


@dataclass(frozen=True, slots=True)
class Options:
    """What the user asks for.

    Attributes:
        root: Directory of the run's files, as ``default_root_dir`` of a Trainer.
        choices: The strategies.
        seconds: How long ranks wait for each other.
        parameters: Parameters of the model to be trained, if given.
        script: The script to be run, if given.
    """

    root: Path
    choices: tuple[Choice, ...]
    seconds: float = 30.0
    parameters: int = 0
    script: Path | None = None


@dataclass(frozen=True)
class Run:
    """What a check can know before it looks.

    Attributes:
        launch: How this process was launched.
        options: What the user asks for.
        hosts: The host of each rank that is known.
        meshes: The mesh of each strategy, by its name.
    """

    launch: Launch
    options: Options
    hosts: Mapping[int, str]
    meshes: Mapping[str, MeshShape] = field(default_factory=dict)

    def places(self, ranks: list[int]) -> str:
        """Names ranks with their hosts."""
        return name_places(ranks, [self.hosts.get(rank, "?") for rank in range(max(ranks) + 1)])

    @property
    def has_several_hosts(self) -> bool:
        """Whether the ranks are on several hosts, as far as is known."""
        return len(set(self.hosts.values())) > 1 or self.launch.num_hosts > 1


@dataclass(frozen=True, slots=True)
class Check(Generic[F]):
    """A check.

    Attributes:
        name: Name of the check.
        probe: Gathers this rank's facts. The probes of all ranks run at the same time.
        judge: Judges the facts of all ranks that are known.
        remedy: What to change if a probe does not end, or raises.
        seconds: How long a probe may take.
        in_main_thread: Whether the probe must run in the main thread. If it does not end then, the
            process does.
    """

    name: str
    probe: Callable[[Run], F]
    judge: Callable[[Run, Mapping[int, F]], Result]
    remedy: str
    seconds: float = 10.0
    in_main_thread: bool = False

    def attempt(self, run: Run) -> F | NoFacts:
        """Returns this rank's facts, or what became of the probe."""
        if self.in_main_thread:
            with _ending_after(self.seconds):
                return _caught(lambda: self.probe(run))
        answers: list[F | NoFacts] = []
        thread = threading.Thread(
            target=lambda: answers.append(_caught(lambda: self.probe(run))), daemon=True
        )
        thread.start()
        thread.join(self.seconds)
        return answers[0] if answers else NoFacts(f"not done within {self.seconds:g} s")

    def conclude(self, run: Run, answers: Mapping[int, F | NoFacts]) -> Result:
        """Judges the answers of ranks; a rank without facts is a failure."""
        silent: dict[str, list[int]] = {}
        facts: dict[int, F] = {}
        for rank, answer in answers.items():
            if isinstance(answer, NoFacts):
                silent.setdefault(answer.reason, []).append(rank)
            else:
                facts[rank] = answer
        if not silent:
            return self.judge(run, facts)
        texts = (f"{run.places(ranks)}: {reason}" for reason, ranks in silent.items())
        return fail("; ".join(texts), self.remedy)


@dataclass(frozen=True, slots=True)
class NoFacts:
    """What became of a probe that has brought no facts."""

    reason: str


def each(judge: Callable[[Run, F], Result]) -> Callable[[Run, Mapping[int, F]], Result]:
    """Returns a judge of all ranks by a judge of one: the worst result, and the ranks that have it.

    Args:
        judge: Judges the facts of one rank.
    """

    def judge_all(run: Run, facts: Mapping[int, F]) -> Result:
        results = {rank: judge(run, own) for rank, own in facts.items()}
        worst = max(result.status for result in results.values())
        if worst is Status.OK:
            return results[min(results)]
        ranks: dict[Result, list[int]] = {}
        for rank, result in results.items():
            if result.status is worst:
                ranks.setdefault(result, []).append(rank)
        texts = [f"{run.places(own)}: {result.found}" for result, own in ranks.items()]
        return Result(worst, "; ".join(texts), next(iter(ranks)).remedy)

    return judge_all


def _caught(probe: Callable[[], F]) -> F | NoFacts:
    try:
        return probe()
    except Exception as error:  # a doctor must not die of what it looks for
        return NoFacts(f"{type(error).__name__}: {str(error).strip() or 'without a text'}")


@contextmanager
def _ending_after(seconds: float) -> Iterator[None]:
    faulthandler.dump_traceback_later(seconds, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
