"""The disk of a run's checkpoints: shared by all hosts, atomic, and large enough."""

from __future__ import annotations

import os
import shutil
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lightning_dist.doctor.check import Check, Run, worst_of
from lightning_dist.doctor.report import Result, fail, ok, warn
from lightning_dist.engine.common.table import format_bytes

_SEEN_SECONDS = 5.0  # how long a network file system may take to show a new file elsewhere
_PROBE_BYTES = 1 << 20
_NUM_RENAMES = 20
_BYTES_PER_PARAMETER = 12  # fp32 weights, and Adam's two moments
_LEAST_BYTES = 1_000_000_000


@dataclass(frozen=True, slots=True)
class DiskFacts:
    """The directory of the run's files, as a rank sees it."""

    free: int = 0  # free bytes
    error: str = ""  # why this rank could not write there
    sees_first: bool = True  # whether the rank sees what rank 0 has written
    num_torn: int = 0  # how often a reader met a file that was not whole while it was replaced


def probe_disk(run: Run) -> DiskFacts:
    """Writes to the directory, and looks for rank 0's file there, which stays for others to see."""
    shared = run.root / run.token
    own = run.root / f"{run.token}.{run.launch.rank}.{socket.gethostname()}"
    try:
        run.root.mkdir(parents=True, exist_ok=True)
        if run.launch.rank == 0:
            shared.write_text(run.token, encoding="ascii")
        try:
            num_torn = _count_torn(own)
        finally:
            own.unlink(missing_ok=True)
    except OSError as error:
        return DiskFacts(error=error.strerror or str(error))
    deadline = time.monotonic() + _SEEN_SECONDS
    while not (sees := shared.exists()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return DiskFacts(shutil.disk_usage(run.root).free, "", sees, num_torn)


def _count_torn(path: Path) -> int:
    """Replaces a file many times while a thread reads it, as a resumed run may."""
    whole = [bytes([letter]) * _PROBE_BYTES for letter in b"ab"]
    path.write_bytes(whole[0])
    with path.open("rb+") as file:
        os.fsync(file.fileno())  # a full disk, or a quota, may say so only here
    torn, is_done = 0, threading.Event()

    def read() -> None:
        nonlocal torn
        while not is_done.is_set():
            torn += not path.exists() or path.read_bytes() not in whole

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    new = path.with_name(f"{path.name}.new")
    try:
        for index in range(_NUM_RENAMES):
            new.write_bytes(whole[index % 2])
            os.replace(new, path)
    finally:
        is_done.set()
        reader.join()
        new.unlink(missing_ok=True)
    return torn


def judge_disk(run: Run, facts: Mapping[int, DiskFacts]) -> Result:
    """Judges the directory of the run's files."""
    results = {
        rank: fail(
            f"{run.root} cannot be written to: {own.error}",
            "Name another directory (--root, default_root_dir), free space, or change its owner.",
        )
        for rank, own in facts.items()
        if own.error
    }
    if results:
        return worst_of(run, results)
    torn = [rank for rank, own in facts.items() if own.num_torn]
    if torn:
        return warn(
            f"a rename in {run.root} is not atomic for {run.places(torn)}",
            "A reader may meet half a checkpoint. Write to another disk and copy from there.",
        )
    blind = [rank for rank, own in facts.items() if not own.sees_first]
    if blind:
        sharded = [name for name, mesh in run.meshes.items() if mesh.world_size > mesh.dp_replicate]
        judge = fail if sharded or not run.meshes else warn
        return judge(
            f"{run.root} is not shared: {run.places(blind)} cannot see what rank 0 writes",
            "Name a directory that all hosts share (--root, default_root_dir), or give the strategy"
            " save_full=True: rank 0 then writes one file, and resuming needs a copy on each host.",
        )
    free = min(own.free for own in facts.values())
    needed = run.parameters * _BYTES_PER_PARAMETER
    if free < max(needed, _LEAST_BYTES):
        wanted = f"; a checkpoint needs {format_bytes(needed)}" if needed else ""
        judge = fail if free < needed else warn
        return judge(f"{run.root} has {format_bytes(free)} free{wanted}", "Free space there.")
    fitting = f"{free // needed} checkpoints" if needed else "see --parameters"
    return ok(f"{run.root}: all ranks see it, {format_bytes(free)} free ({fitting})")


DISK = Check(
    "disk",
    probe_disk,
    judge_disk,
    "Reading or writing hangs: is the network file system mounted and its server there?",
    60.0,
)
