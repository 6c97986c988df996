"""A run with faults, as data: which strategy trains, and what goes wrong, where and when.

A case is drawn from a seed and a number, so that it can be repeated. What a fault meets is up to
the machine: it comes some milliseconds after a phase has begun.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Literal, get_args

from tests.faults.training import NUM_RANKS

Kind = Literal[
    "SIGKILL",
    "SIGTERM",
    "SIGUSR1",
    "SIGSTOP",
    "stopped for good",
    "raise",
    "disk full",
    "link cut",
    "link cut for good",
    "host killed",
    "host lost",
]
Phase = Literal["start", "step", "validation", "save", "drain", "teardown"]
Launcher = Literal["torchrun", "script", "two hosts"]
PHASES: tuple[Phase, ...] = get_args(Phase)

# Only a time-out tells of these: no connection is closed.
SILENT: tuple[Kind, ...] = ("stopped for good", "link cut for good", "host lost")
# Two hosts do not meet again.
PARTING: tuple[Kind, ...] = ("link cut for good", "host killed", "host lost")
ALL = -1
LAUNCHER = -2

# By how many seconds a fault may miss the begin of a phase: about as long as the phase takes.
SPREAD_SECONDS: dict[Phase, float] = {
    "start": 1.0,
    "step": 0.01,
    "validation": 0.02,
    "save": 0.03,
    "drain": 0.01,
    "teardown": 0.1,
}
# How often a phase begins in an uninterrupted run.
_TIMES: dict[Phase, int] = {
    "start": 1,
    "step": 18,
    "validation": 3,
    "save": 6,
    "drain": 6,
    "teardown": 2,
}


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong.

    Attributes:
        kind: What. A host that is killed closes its connections, one that is lost does not.
        phase: The phase of the run in which it comes.
        time: The how manieth such phase of the process, from 1.
        after_seconds: How long after the phase's begin.
        target: The rank, ``ALL`` of them, or the ``LAUNCHER``.
        lasts_seconds: How long a process stays stopped.
    """

    kind: Kind
    phase: Phase
    time: int = 1
    after_seconds: float = 0.0
    target: int = 1
    lasts_seconds: float = 0.0

    def __str__(self) -> str:
        target = {ALL: "all ranks", LAUNCHER: "the launcher"}.get(
            self.target, f"rank {self.target}"
        )
        passes = self.kind in ("SIGSTOP", "link cut")
        lasts = f" for {self.lasts_seconds:.1f} s" if passes else ""
        where = "the disk" if self.kind == "disk full" else target
        return f"{self.kind}{lasts} of {where} in {self.phase} {self.time}"


@dataclass(frozen=True)
class Case:
    """A run with faults.

    Attributes:
        strategy: The name of a strategy of :mod:`.training`.
        launcher: What starts the ranks: torchrun, on one host or on two hosts with a rank each, or
            the first rank as under Lightning alone.
        timeout_seconds: The strategy's ``timeout_s``.
        saves: ``save_top_k`` of the checkpoints beside the last one.
        async_save: The strategy's; then the last checkpoint is a link.
        keeps_port: Whether a launcher listens where the one before did.
        faults: What goes wrong.
    """

    strategy: str
    launcher: Launcher = "torchrun"
    timeout_seconds: float = 180.0
    saves: int = 0
    async_save: bool = False
    keeps_port: bool = True
    faults: tuple[Fault, ...] = ()

    @property
    def num_ranks(self) -> int:
        return NUM_RANKS[self.strategy]

    @property
    def fills_disk(self) -> bool:
        return any(fault.kind == "disk full" for fault in self.faults)

    def __str__(self) -> str:
        saving = ", async_save" * self.async_save
        faults = " and ".join(map(str, self.faults))
        return f"{self.strategy}, {self.launcher}{saving}: {faults}"


_KINDS: dict[Kind, int] = {
    "SIGKILL": 6,
    "SIGTERM": 6,
    "SIGUSR1": 2,
    "SIGSTOP": 5,
    "stopped for good": 1,
    "raise": 5,
    "disk full": 2,
}
_ASYNC_SAVES = 0.3  # of the cases


def draw(seed: int, number: int) -> Case:
    """Draws the case of a number; the same one for the same seed."""
    random = Random(f"{seed}/{number}")
    strategy = random.choice([n for n, ranks in NUM_RANKS.items() for _ in range(4 // ranks)])
    launcher: Launcher = "script" if random.random() < 0.15 else "torchrun"
    faults = [_draw_fault(random, NUM_RANKS[strategy])]
    if random.random() < 0.2:
        faults.append(_draw_fault(random, NUM_RANKS[strategy]))
    stays = [fault.target for fault in faults if fault.kind == "stopped for good"]
    return Case(
        strategy,
        "torchrun" if 0 in stays else launcher,  # nothing ends a stopped process but its parent
        timeout_seconds=6.0 if stays else 180.0,
        saves=random.choice((0, 1, -1)),
        keeps_port=random.random() < 0.5,
        async_save=random.random() < _ASYNC_SAVES,
        faults=tuple(faults),
    )


def draw_on_hosts(seed: int, number: int) -> Case:
    """Draws the case of a number on two hosts; the same one for the same seed."""
    random = Random(f"hosts {seed}/{number}")
    kinds: list[Kind] = ["link cut", "link cut", "link cut for good", "host killed", "host lost"]
    kind = random.choice(kinds)
    phase = random.choice(PHASES)
    fault = Fault(
        kind,
        phase,
        time=random.randint(1, _TIMES[phase]),
        after_seconds=random.uniform(0.0, SPREAD_SECONDS[phase]),
        target=random.randrange(2),
        lasts_seconds=5.0 if kind == "link cut" else 0.0,
    )
    return Case(
        random.choice([name for name, ranks in NUM_RANKS.items() if ranks == 2]),
        "two hosts",
        timeout_seconds=8.0 if kind in SILENT else 180.0,
        saves=random.choice((0, 1, -1)),
        async_save=random.random() < _ASYNC_SAVES,
        faults=(fault,),
    )


def _draw_fault(random: Random, num_ranks: int) -> Fault:
    kind = random.choices([*_KINDS], [*_KINDS.values()])[0]
    phase = random.choice(PHASES)
    if kind == "disk full":
        phase = random.choice(("step", "save"))
    if kind == "stopped for good":  # before the ranks have met, and later, no rank knows of it
        phase = random.choice(PHASES[1:-1])
    is_mistake = kind == "raise" and phase == "drain"  # of a hook behind the drain
    target = random.randrange(num_ranks)
    if kind not in ("raise", "disk full", "stopped for good"):
        target = random.choice((target, target, target, ALL, ALL))
    if kind in ("SIGKILL", "SIGTERM") and random.random() < 0.2:
        target = LAUNCHER
    return Fault(
        kind,
        phase,
        time=random.randint(1, _TIMES["validation" if is_mistake else phase]),
        after_seconds=random.uniform(0.0, SPREAD_SECONDS[phase]),
        target=target,
        lasts_seconds=random.uniform(0.2, 2.0),
    )
