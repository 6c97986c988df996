"""The command ``doctor``: its arguments, and the order of the checks."""

from __future__ import annotations

import argparse
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from subprocess import Popen, TimeoutExpired
from types import MappingProxyType
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist
from lightning.pytorch.plugins.environments import ClusterEnvironment

from lightning_dist.doctor.before import BEFORE_MEETING
from lightning_dist.doctor.check import Build, Check, NoFacts, Run
from lightning_dist.doctor.clocks import CLOCKS
from lightning_dist.doctor.disk import DISK, leaves_no_directory
from lightning_dist.doctor.hosts import HOSTS
from lightning_dist.doctor.launch import Launch, find_environment, read_launch
from lightning_dist.doctor.links import LINKS
from lightning_dist.doctor.meeting import GRACE_SECONDS, Meeting, group_check, judge_meeting
from lightning_dist.doctor.report import Report, Status, StoppedError, fail
from lightning_dist.doctor.steps import step_check
from lightning_dist.engine.common.names import check_count, check_positive
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
_ALONE = ("ddp",)
_TOGETHER = ("ddp", "fsdp", "tensor_parallel", "pipeline_1f1b", "pipeline_pipedream")
_FOUR = ("fsdp:shard_size=2", "mesh:pp=2,dp_shard=auto", "mesh:dp_shard=auto,tp=2")


def parse_choice(text: str) -> Build:
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
    return build


def suitable_choices(world_size: int) -> tuple[str, ...]:
    """Returns the names of the strategies that suit a number of ranks."""
    return _TOGETHER + _FOUR * (world_size % 4 == 0) if world_size > 1 else _ALONE


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command to a parser."""
    add = parser.add_argument
    add(
        "--strategy",
        action="append",
        default=[],
        help="a strategy to check, such as ddp, pipeline_1f1b or mesh:pp=2,tp=2; may be repeated."
        " The default is all that the ranks suit",
    )
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
        _check_numbers(options)
        choices = {text: parse_choice(text) for text in options.strategy}
    except ValueError as error:
        parser.error(str(error))
    report = Report(options.json)
    children: Sequence[Popen[bytes]] = ()
    try:
        environment, origin = find_environment()
        if not environment.creates_processes_externally:
            children = _start_ranks(environment, options)
        launch = read_launch(environment, origin)
        report.is_shown = launch.rank == 0
        code = _examine(launch, choices, options, report)
    except StoppedError as stopped:
        report.add(stopped.check, stopped.result)
        report.end({}, ["all else"])
        code = 1
    for child in children:
        try:
            child.wait(GRACE_SECONDS)
        except TimeoutExpired:
            child.kill()
    return code


def _check_numbers(options: argparse.Namespace) -> None:
    if options.devices is not None:
        check_count("--devices", options.devices)
    check_count("--nodes", options.nodes)
    check_positive("--seconds", options.seconds)
    if options.parameters != 0:
        check_positive("--parameters", options.parameters)


def _start_ranks(
    environment: ClusterEnvironment, options: argparse.Namespace
) -> Sequence[Popen[bytes]]:
    """Starts the other ranks of this host, as Lightning does; returns their processes.

    Raises:
        StoppedError: The variables do not suit such a start.
    """
    devices = options.devices or torch.cuda.device_count() or 2
    os.environ["LOCAL_WORLD_SIZE"] = str(devices)  # as torchrun says it; others start no ranks
    starter = ScriptLauncher(environment, devices, options.nodes)
    try:
        starter.launch(lambda: None)
    except ValueError as error:  # a Trainer would refuse it, too
        remedy = "Set these variables on each host, or start with a launcher."
        raise StoppedError("launcher", fail(str(error), remedy)) from error
    return starter.procs


def _examine(
    launch: Launch, choices: Mapping[str, Build], options: argparse.Namespace, report: Report
) -> int:
    """Runs all checks; returns the exit code. Rank 0 judges, prints, and decides what comes next.

    Raises:
        StoppedError: A strategy does not suit the ranks, or rank 0 cannot be reached any more.
    """
    choices = choices or {it: parse_choice(it) for it in suitable_choices(launch.world_size)}
    try:
        meshes = {name: build().mesh_shape(launch.world_size) for name, build in choices.items()}
    except ValueError as error:
        remedy = "Start other numbers of ranks, or choose others."
        raise StoppedError("strategy", fail(str(error), remedy)) from error
    run = Run(
        launch,
        options.root.absolute(),
        options.seconds,
        {launch.rank: socket.gethostname()},
        meshes,
        int(options.parameters),
        options.script,
    )
    answers = [check.attempt(run) for check in BEFORE_MEETING]
    try:
        with leaves_no_directory(run.root):
            return _meet(run, choices, answers, report)
    except StoppedError:
        report.is_shown = True  # rank 0 does not print what this rank has found
        if not report.results:
            for check, answer in zip(BEFORE_MEETING, answers, strict=True):
                report.add(check.name, check.conclude(run, {launch.rank: answer}))
        raise


def _meet(run: Run, choices: Mapping[str, Build], answers: Sequence[object], report: Report) -> int:
    """Meets the other ranks, and runs the checks of all together; returns the exit code.

    Raises:
        StoppedError: Rank 0 cannot be reached, or not any more.
    """
    meeting = Meeting(run.launch, run.seconds)
    came = meeting.meet()
    hosts = {rank: host for rank, (host, _) in came.items()}
    token = meeting.tell("token", f".doctor-{uuid4().hex}", GRACE_SECONDS)
    run = replace(run, hosts=hosts, token=token)
    for check, answer in zip(BEFORE_MEETING, answers, strict=True):
        _conclude(check, answer, run, meeting, report)
    met = judge_meeting(run.launch, came)
    report.add("meeting", met)
    checks: list[Check[Any]] = [group_check(meeting, run.seconds), *HOSTS, *LINKS, DISK, *CLOCKS]
    left = [*checks, *(step_check(*choice, run.seconds) for choice in choices.items())]
    while met.status is Status.OK and left:
        check = left.pop(0)
        if not _conclude(check, check.attempt(run), run, meeting, report):
            break
    if run.launch.rank == 0:
        with suppress(OSError):  # the check of the disk has said why it is not there
            (run.root / token).unlink()
    report.end(hosts, [check.name for check in left])
    code: int = meeting.tell("code", int(report.worst is Status.FAIL), GRACE_SECONDS)
    meeting.gather("closed", None, GRACE_SECONDS, hosts)  # the store ends with rank 0, the last
    if dist.is_initialized():
        dist.destroy_process_group()
    return code


def _conclude(
    check: Check[Any], answer: object, run: Run, meeting: Meeting, report: Report
) -> bool:
    """Judges a check; returns whether all ranks have answered, the same on all ranks."""
    seconds = check.seconds + GRACE_SECONDS
    answers = meeting.gather(check.name, answer, seconds, run.hosts)
    if run.launch.rank == 0:
        silent = NoFacts(f"no answer within {seconds:g} s")
        answers |= dict.fromkeys(set(run.hosts) - set(answers), silent)
        report.add(check.name, check.conclude(run, answers))
    is_sound = not any(isinstance(it, NoFacts) for it in answers.values())
    sound: bool = meeting.tell(f"{check.name}/sound", is_sound, seconds)
    return sound
