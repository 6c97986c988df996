"""The command ``doctor``: its arguments, and the order of the checks."""

from __future__ import annotations

import argparse
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from subprocess import TimeoutExpired
from types import MappingProxyType
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist
from lightning.pytorch.plugins.environments import ClusterEnvironment

from lightning_dist.doctor.before import BEFORE_MEETING
from lightning_dist.doctor.check import Check, Choice, NoFacts, Options, Run
from lightning_dist.doctor.clocks import CLOCKS
from lightning_dist.doctor.devices import DEVICES
from lightning_dist.doctor.disk import disk_check
from lightning_dist.doctor.launch import find_environment, read_launch
from lightning_dist.doctor.links import LINKS
from lightning_dist.doctor.meeting import Meeting, NotMetError, group_check
from lightning_dist.doctor.report import Report
from lightning_dist.doctor.result import Result, Status, fail
from lightning_dist.doctor.same import ENVIRONMENT
from lightning_dist.doctor.steps import step_check
from lightning_dist.engine.schedules.asynchronous import ASYNCHRONOUS
from lightning_dist.engine.schedules.registry import SCHEDULE_NAMES
from lightning_dist.strategies.base.launcher import ScriptLauncher
from lightning_dist.strategies.ddp import DDPStrategy
from lightning_dist.strategies.fsdp import FSDPStrategy
from lightning_dist.strategies.mesh import MeshStrategy
from lightning_dist.strategies.pipeline import PipelineStrategy
from lightning_dist.strategies.tensor_parallel import TensorParallelStrategy

_STRATEGIES: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "ddp": DDPStrategy,
        "fsdp": FSDPStrategy,
        "tensor_parallel": TensorParallelStrategy,
        "mesh": MeshStrategy,
        **{f"pipeline_{it}": partial(PipelineStrategy, schedule=it) for it in SCHEDULE_NAMES},
    }
)
_STALE = frozenset(f"pipeline_{family.name}" for family in ASYNCHRONOUS)
_ALONE = ("ddp",)
_TOGETHER = ("ddp", "fsdp", "tensor_parallel", "pipeline_1f1b", "pipeline_pipedream")
_FOUR = ("fsdp:shard_size=2", "mesh:pp=2,dp_shard=auto", "mesh:dp_shard=auto,tp=2")
_WAIT_SECONDS = 10.0


def parse_choice(text: str) -> Choice:
    """Parses a strategy such as ``"ddp"`` or ``"mesh:pp=2,tp=2"``.

    Raises:
        ValueError: There is no such strategy, or it has no such argument.
    """
    name, _, sizes = text.partition(":")
    if name not in _STRATEGIES:
        raise ValueError(f"--strategy {text}: use one of {', '.join(_STRATEGIES)}")
    pairs = [pair.partition("=") for pair in sizes.split(",") if pair]
    arguments = {key: int(value) if value.isdigit() else value for key, _, value in pairs}
    build = partial(_STRATEGIES[name], **arguments)
    try:
        build()
    except (TypeError, ValueError) as error:
        raise ValueError(f"--strategy {text}: {error}") from error
    return Choice(text, build, is_exact=name not in _STALE)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command to a parser."""
    parser.add_argument(
        "--strategy",
        action="append",
        default=[],
        help="a strategy to check, such as ddp, pipeline_1f1b or mesh:pp=2,tp=2; may be repeated."
        " The default is all that the ranks suit",
    )
    add = parser.add_argument
    add("--root", type=Path, default=Path(), help="directory of the run's files")
    add("--parameters", type=float, default=0, help="parameters of the model, such as 7e9")
    add("--script", type=Path, help="the training script, to be the same everywhere")
    add("--seconds", type=float, default=30.0, help="how long ranks wait for each other")
    add("--devices", type=int, help="ranks of each host, if no launcher starts them")
    add("--nodes", type=int, default=1, help="number of hosts, if no launcher starts the ranks")
    add("--json", action="store_true", help="print JSON")


def run_doctor(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """Checks, and returns the exit code: 1 if a check fails, the same on all ranks."""
    try:
        choices = tuple(map(parse_choice, options.strategy))
    except ValueError as error:
        parser.error(str(error))
    wanted = Options(
        options.root.absolute(), choices, options.seconds, int(options.parameters), options.script
    )
    report = Report(options.json, is_shown=True)
    try:
        found = find_environment()
    except (RuntimeError, ValueError) as error:  # SLURM's variables do not go together
        return _refuse(report, error)
    begin = partial(_begin, found, wanted, report)
    if found[0].creates_processes_externally:
        return begin()
    devices = options.devices or torch.cuda.device_count() or 2
    os.environ["LOCAL_WORLD_SIZE"] = str(devices)  # as torchrun says it; others start no ranks
    starter = ScriptLauncher(found[0], devices, options.nodes)
    code: int = starter.launch(begin)
    for child in starter.procs:
        try:
            child.wait(_WAIT_SECONDS)
        except TimeoutExpired:
            child.kill()
    return code


def _refuse(report: Report, error: Exception) -> int:
    report.add("launcher", fail(str(error), "Start with one launcher, and no stale variables."))
    report.end({}, ["all else"])
    return 1


def _begin(found: tuple[ClusterEnvironment, str, str], options: Options, report: Report) -> int:
    try:
        launch = read_launch(*found)
    except ValueError as error:
        return _refuse(report, error)
    report.is_shown = launch.rank == 0
    run = Run(launch, options, {launch.rank: socket.gethostname()})
    choices = options.choices or suitable_choices(launch.world_size)
    try:
        meshes = {it.name: it.build().mesh_shape(launch.world_size) for it in choices}
    except ValueError as error:
        report.add("strategy", fail(str(error), "Start other numbers of ranks, or choose others."))
        report.end(run.hosts, ["all else"])
        return 1
    run = replace(run, options=replace(options, choices=choices), meshes=meshes)
    before = [check.attempt(run) for check in BEFORE_MEETING]
    try:
        meeting = Meeting(launch, options.seconds)
        hosts, met = meeting.meet()
        run = replace(run, hosts=hosts)
        return Examination(run, meeting, report).conduct(before, met)
    except NotMetError as error:
        report.is_shown = True
        if not report.results:
            for check, answer in zip(BEFORE_MEETING, before, strict=True):
                report.add(check.name, check.conclude(run, {launch.rank: answer}))
        report.add("meeting", error.result)
        report.end(run.hosts, ["all else"])
        return 1


class Examination:
    """The checks of ranks that have met. Rank 0 judges, prints, and decides what comes next.

    Args:
        run: What is known of the run.
        meeting: Where the ranks have met.
        report: The results.
    """

    def __init__(self, run: Run, meeting: Meeting, report: Report) -> None:
        self._run = run
        self._meeting = meeting
        self._report = report
        self._token = ""  # name of a file that rank 0 shows to the others

    def conduct(self, before: Sequence[object], met: Result) -> int:
        """Runs all checks; returns the exit code. Collective: every rank must call it.

        Args:
            before: This rank's answers to the checks before the meeting.
            met: The result of the meeting.

        Raises:
            NotMetError: Rank 0 has gone.
        """
        for check, answer in zip(BEFORE_MEETING, before, strict=True):
            self._conclude(check, answer)
        self._report.add("meeting", met)
        left = [] if met.status is Status.FAIL else self._checks()
        while left and self._conclude(left[0], left[0].attempt(self._run)):
            del left[0]
        if self._token and self._run.launch.rank == 0:
            (self._run.options.root / self._token).unlink(missing_ok=True)
        self._report.end(self._run.hosts, [check.name for check in left[1:]])
        code: int = self._meeting.tell(
            "code", int(self._report.worst is Status.FAIL), _WAIT_SECONDS
        )
        self._meeting.close(self._run.hosts)
        if dist.is_initialized():
            dist.destroy_process_group()
        return code

    def _checks(self) -> list[Check[Any]]:
        options = self._run.options
        self._token = self._meeting.tell("token", f".doctor-{uuid4().hex}", _WAIT_SECONDS)
        return [
            group_check(self._meeting, options.seconds),
            ENVIRONMENT,
            *DEVICES,
            *LINKS,
            disk_check(self._token),
            *CLOCKS,
            *(step_check(choice, options.seconds) for choice in options.choices),
        ]

    def _conclude(self, check: Check[Any], answer: object) -> bool:
        """Judges a check; returns whether all ranks have answered, the same on all ranks."""
        seconds = check.seconds + _WAIT_SECONDS
        ranks = self._run.hosts
        answers = self._meeting.gather(check.name, answer, seconds, ranks)
        if self._run.launch.rank == 0:
            silent = NoFacts(f"no answer within {seconds:g} s")
            answers |= dict.fromkeys(set(ranks) - set(answers), silent)
            self._report.add(check.name, check.conclude(self._run, answers))
        is_sound = not any(isinstance(it, NoFacts) for it in answers.values())
        sound: bool = self._meeting.tell(f"{check.name}/sound", is_sound, seconds)
        return sound


def suitable_choices(world_size: int) -> tuple[Choice, ...]:
    """Returns the strategies that suit a number of ranks."""
    names = _TOGETHER + _FOUR * (world_size % 4 == 0) if world_size > 1 else _ALONE
    return tuple(map(parse_choice, names))
