"""What hosts have: the same software everywhere, a device for each rank, and enough cores."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeVar

import torch

from lightning_dist.doctor.check import Check, Run, worst_of
from lightning_dist.doctor.report import Result, fail, ok, warn
from lightning_dist.engine.common.environment import (
    Environment,
    compare_environments,
    read_environment,
)
from lightning_dist.engine.common.table import format_bytes

# With these different, ranks would compute something else, or not understand each other.
_VITAL = frozenset({"torch", "lightning", "lightning-dist", "CUDA", "NCCL", "code", "script"})
_TOOL_SECONDS = 5.0
_MISSING = "no such file"

K = TypeVar("K", bound=Hashable)


def probe_environment(run: Run) -> Environment:
    """Reads this process's environment, and looks at the code and the driver."""
    own = read_environment()
    values = {
        "script": _digest_script(run.script),
        "code": _digest(sorted(Path(__file__).parents[1].rglob("*.py"))),
        "git commit": output_of("git", "rev-parse", "HEAD") or "none",
    }
    if torch.cuda.is_available():
        query = ("--query-gpu=driver_version", "--format=csv,noheader", "--id=0")
        values["CUDA"] = str(torch.version.cuda)
        values["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
        values["driver"] = output_of("nvidia-smi", *query) or "unknown"
    return Environment(own.host, {**own.values, **values})


def judge_environments(run: Run, facts: Mapping[int, Environment]) -> Result:
    """Judges whether all ranks have the same environment."""
    table = compare_environments([facts[rank] for rank in sorted(facts)])
    names = [name for name, *_ in table.rows if name]
    absent = [rank for rank in sorted(facts) if facts[rank].values.get("script") == _MISSING]
    if absent:
        return fail(
            f"{run.places(absent)}: there is no script {run.script}",
            "Give --script a path that all hosts have, or copy the script there.",
            table if names else None,
        )
    if not names:
        values = facts[min(facts)].values
        shown = ", ".join(f"{name} {values[name]}" for name in ("Python", "torch", "lightning"))
        return ok(f"the same everywhere: {shown}")
    judge = fail if _VITAL.intersection(names) else warn
    return judge(
        f"hosts differ in {', '.join(names)}",
        "Install the same packages on all hosts, from one file of exact versions or one container"
        " image, copy the same code there, and let the launcher pass the variables on.",
        table,
    )


def _digest_script(path: Path | None) -> str:
    if path is None:
        return "none"
    return _digest([path]) if path.is_file() else _MISSING


def _digest(paths: list[Path]) -> str:
    digest = blake2b(digest_size=8)
    for path in paths:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def output_of(*command: str) -> str:
    """Returns what a command prints; empty if there is no such command."""
    if shutil.which(command[0]) is None:
        return ""
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=_TOOL_SECONDS, check=False
    )
    return done.stdout.strip()


@dataclass(frozen=True, slots=True)
class Device:
    """The device of a rank; without a GPU of its own all but the number is empty."""

    number: int = 0  # GPUs that the rank can see
    identity: str = ""  # identity of its own one
    name: str = ""  # name of that
    memory: int = 0  # bytes of its memory
    reaches_all: bool = True  # whether it can read the other ones directly (NVLink or PCIe)
    has_near_core: bool = True  # whether the process may use a core of its NUMA node


def device_of(run: Run) -> torch.device:
    """Returns the device of this rank."""
    has_gpu = torch.cuda.is_available()
    return torch.device("cuda", run.launch.local_rank) if has_gpu else torch.device("cpu")


def probe_device(run: Run) -> Device:
    """Looks at this rank's device."""
    number = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = run.launch.local_rank
    if index >= number:
        return Device(number)
    own = torch.cuda.get_device_properties(index)
    others = [other for other in range(number) if other != index]
    listed = output_of("nvidia-smi", "--query-gpu=uuid,pci.bus_id", "--format=csv,noheader")
    bus = dict(line.split(", ") for line in listed.splitlines()).get(f"GPU-{own.uuid}", "")
    # nvidia-smi writes 00000000:1B:00.0, the kernel 0000:1b:00.0.
    near = _read(Path(f"/sys/bus/pci/devices/{bus[4:].lower()}/local_cpulist"))
    return Device(
        number,
        str(own.uuid),
        own.name,
        own.total_memory,
        all(torch.cuda.can_device_access_peer(index, other) for other in others),
        not near or bool(cores_of(near) & os.sched_getaffinity(0)),
    )


def judge_devices(run: Run, facts: Mapping[int, Device]) -> Result:
    """Judges the devices of all ranks."""
    if not any(own.number for own in facts.values()):
        return ok("no GPU: ranks compute on the CPU")
    without = [rank for rank, own in facts.items() if not own.identity]
    if without:
        return fail(
            f"no GPU is left for {run.places(without)}",
            "Start as many ranks on each host as it has GPUs; see CUDA_VISIBLE_DEVICES.",
        )
    owners = _by_value({rank: (run.hosts[rank], own.identity) for rank, own in facts.items()})
    shared = [ranks for ranks in owners.values() if len(ranks) > 1]
    if shared:
        return fail(
            f"one GPU for {run.places(shared[0])}: NCCL refuses that",
            "Give each rank its own: one CUDA_VISIBLE_DEVICES for all ranks of a host, or"
            " srun --gpus-per-task without it.",
        )
    kinds = _by_value({rank: (own.name, own.memory) for rank, own in facts.items()})
    if len(kinds) > 1:
        texts = (f"{name}: {run.places(ranks)}" for (name, _), ranks in kinds.items())
        return warn(f"GPUs differ: {'; '.join(texts)}", "The slowest sets the pace of all.")
    far = [rank for rank, own in facts.items() if not own.has_near_core]
    if far:
        return warn(
            f"bound to cores of another NUMA node than the GPU's: {run.places(far)}",
            "Bind each rank to its GPU's node (srun --gpu-bind=closest, numactl).",
        )
    [(name, memory)] = kinds
    apart = [rank for rank, own in facts.items() if not own.reaches_all]
    direct = f"no direct access among those of {run.places(apart)}" if apart else "direct access"
    return ok(f"{name}, {format_bytes(memory)}, one for each rank; {direct}")


def check_axes(run: Run) -> Result:
    """Checks whether ranks that talk in each layer are on one host."""
    crossing = []
    for name, mesh in run.meshes.items():
        groups = mesh.groups("tp") if mesh.tp > 1 else []
        hosts = [sorted({run.hosts[rank] for rank in ranks}) for ranks in groups]
        crossing += [f"{name}: {', '.join(own)}" for own in hosts if len(own) > 1][:1]
    if crossing:
        return warn(
            f"tensor-parallel ranks are on several hosts ({'; '.join(crossing)})",
            "They all-reduce in each layer. Make tp_size divide the ranks of a host, and use"
            " stages or replicas between hosts.",
        )
    return ok("no tensor-parallel group is on several hosts")


def check_cores(run: Run) -> Result:
    """Checks whether the ranks of this host compute with more threads than it has cores."""
    usable, cores = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    threads, ranks = (
        torch.get_num_threads(),
        [*run.hosts.values()].count(run.hosts[run.launch.rank]),
    )
    if threads > usable:
        return warn(
            f"{threads} threads compute in a process that is bound to {usable} cores",
            f"OMP_NUM_THREADS={usable}, or let the launcher bind less (mpirun --bind-to none).",
        )
    if threads * ranks > cores and threads > 1:
        return warn(
            f"{ranks} ranks of {threads} threads on {cores} cores",
            f"OMP_NUM_THREADS={max(1, cores // ranks)}.",
        )
    return ok(f"{threads} threads a rank, {cores} cores a host")


def _by_value(values: Mapping[int, K]) -> dict[K, list[int]]:
    ranks: dict[K, list[int]] = {}
    for rank, value in values.items():
        ranks.setdefault(value, []).append(rank)
    return ranks


def _read(path: Path) -> str:
    return path.read_text(encoding="ascii").strip() if path.exists() else ""


def cores_of(text: str) -> set[int]:
    """Returns the numbers of a list of the kernel's, such as ``0-3,8``."""
    ranges = [part.partition("-") for part in text.split(",") if part]
    return {n for first, _, last in ranges for n in range(int(first), int(last or first) + 1)}


HOSTS: tuple[Check[Any], ...] = (
    Check("cores", check_cores, worst_of, "Look at `nproc` and OMP_NUM_THREADS."),
    Check(
        "environment",
        probe_environment,
        judge_environments,
        "Look at the disk with the code.",
        30.0,
    ),
    Check("devices", probe_device, judge_devices, "Look at nvidia-smi.", 60.0),
    Check("axes", check_axes, worst_of, "Look at the sizes of the mesh."),
)
