"""Devices: each rank has one of its own, they are alike, and near to what they talk to most."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lightning_dist.doctor.check import Check, Run
from lightning_dist.doctor.result import Result, fail, ok, warn
from lightning_dist.doctor.same import output_of
from lightning_dist.engine.common.table import format_bytes


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """The device of a rank.

    Attributes:
        number: GPUs that the rank can see; without any, the rest is empty.
        identity: Identity of the rank's own GPU.
        name: Name of the GPU.
        memory: Bytes of the GPU's memory.
        unreachable: Visible GPUs that the rank's own cannot read directly (NVLink or PCIe).
        numa: The GPU's NUMA node; -1 if there is one only, or it is unknown.
        has_near_core: Whether the process may use a core of that node.
    """

    number: int = 0
    identity: str = ""
    name: str = ""
    memory: int = 0
    unreachable: tuple[int, ...] = ()
    numa: int = -1
    has_near_core: bool = True


def device_of(run: Run) -> torch.device:
    """Returns the device of this rank."""
    has_gpu = torch.cuda.is_available()
    return torch.device("cuda", run.launch.local_rank) if has_gpu else torch.device("cpu")


def probe_device(run: Run) -> DeviceFacts:
    """Looks at this rank's device."""
    number = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = run.launch.local_rank
    if index >= number:
        return DeviceFacts(number)
    device = torch.cuda.get_device_properties(index)
    others = [other for other in range(number) if other != index]
    listed = output_of("nvidia-smi", "--query-gpu=uuid,pci.bus_id", "--format=csv,noheader")
    bus = dict(line.split(", ") for line in listed.splitlines()).get(f"GPU-{device.uuid}", "")
    # nvidia-smi writes 00000000:1B:00.0, the kernel 0000:1b:00.0.
    node = int(_read(Path(f"/sys/bus/pci/devices/{bus[4:].lower()}/numa_node")) or -1)
    near = _cores_of(_read(Path(f"/sys/devices/system/node/node{node}/cpulist")))
    return DeviceFacts(
        number=number,
        identity=str(device.uuid),
        name=device.name,
        memory=device.total_memory,
        unreachable=tuple(
            other for other in others if not torch.cuda.can_device_access_peer(index, other)
        ),
        numa=node,
        has_near_core=not near or bool(near & os.sched_getaffinity(0)),
    )


def judge_devices(run: Run, facts: Mapping[int, DeviceFacts]) -> Result:
    """Judges the devices of all ranks."""
    if not any(own.number for own in facts.values()):
        return ok("no GPU: ranks compute on the CPU")
    without = [rank for rank, own in facts.items() if not own.identity]
    if without:
        return fail(
            f"no GPU is left for {run.places(without)}",
            "Start as many ranks on each host as it has GPUs; see CUDA_VISIBLE_DEVICES.",
        )
    by_identity: dict[tuple[str, str], list[int]] = {}
    for rank, own in facts.items():
        by_identity.setdefault((run.hosts[rank], own.identity), []).append(rank)
    shared = [ranks for ranks in by_identity.values() if len(ranks) > 1]
    if shared:
        return fail(
            f"one GPU for {run.places(shared[0])}: NCCL refuses that",
            "Give each rank its own: one CUDA_VISIBLE_DEVICES for all ranks of a host, or"
            " srun --gpus-per-task without it.",
        )
    kinds: dict[tuple[str, int], list[int]] = {}
    for rank, own in facts.items():
        kinds.setdefault((own.name, own.memory), []).append(rank)
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
    apart = [rank for rank, own in facts.items() if own.unreachable]
    direct = f"no direct access among those of {run.places(apart)}" if apart else "direct access"
    return ok(f"{name}, {format_bytes(memory)}, one for each rank; {direct}")


def _probe_nothing(run: Run) -> None:
    return None


def judge_axes(run: Run, facts: Mapping[int, None]) -> Result:
    """Judges whether ranks that talk in each layer are on one host."""
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


def _read(path: Path) -> str:
    return path.read_text(encoding="ascii").strip() if path.exists() else ""


def _cores_of(text: str) -> set[int]:
    """Returns the numbers of a list such as ``0-3,8``."""
    ranges = [part.partition("-") for part in text.split(",") if part]
    return {n for first, _, last in ranges for n in range(int(first), int(last or first) + 1)}


DEVICES: tuple[Check[Any], ...] = (
    Check("devices", probe_device, judge_devices, "Look at nvidia-smi.", 60.0),
    Check("axes", _probe_nothing, judge_axes, ""),
)
