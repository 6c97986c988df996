"""The disk of a run's checkpoints: shared by all hosts, atomic, and large enough."""

from __future__ import annotations

import os
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lightning_dist.doctor.check import Check, Run, worst_of
from lightning_dist.doctor.report import Result, fail, ok, warn
from lightning_dist.engine.common.table import format_bytes

_SEEN_SECONDS = 5.0  # how long a network file system may take to show a new file elsewhere
_PROBE_BYTES = 1 << 20
_NUM_RENAMES = 20
_BYTES_PER_PARAMETER = 12  # fp32 weights, and Adam's two moments
_LEAST_BYTES = 1_000_000_000


@contextmanager
def leaves_no_directory(root: Path) -> Iterator[None]:
    """Removes a directory and its parents afterwards, of those that are missing before."""
    missing = [path for path in (root, *root.parents) if not os.path.exists(path)]
    try:
        yield
    finally:
        for path in missing:
            with suppress(OSError):  # a run's files are there, or another rank has removed it
                path.rmdir()


def check_disk(run: Run) -> Result:
    """Writes to the directory, and looks for rank 0's file there, which stays for others to see."""
    root, shared = run.root, run.root / run.token
    try:
        root.mkdir(parents=True, exist_ok=True)
        if run.launch.rank == 0:
            shared.write_text(run.token, encoding="ascii")
        num_torn = _count_torn(root / f"{run.token}.{run.launch.rank}.{socket.gethostname()}")
    except (FileExistsError, NotADirectoryError):
        return fail(
            f"{root} is no directory, but a file, or in one",
            "Name a directory (--root, default_root_dir).",
        )
    except OSError as error:
        return fail(
            f"{root} cannot be written to: {error.strerror or error}",
            "Name another directory (--root, default_root_dir), free space, or change its owner.",
        )
    if num_torn:
        return warn(
            f"a rename in {root} is not atomic",
            "A reader may meet half a checkpoint. Write to another disk and copy from there.",
        )
    deadline = time.monotonic() + _SEEN_SECONDS
    while not shared.exists():
        if time.monotonic() > deadline:
            return judge_blind(run)
        time.sleep(0.1)
    return judge_space(run, shutil.disk_usage(root).free)


def judge_blind(run: Run) -> Result:
    """Judges that this rank does not see what rank 0 writes."""
    sharded = [name for name, mesh in run.meshes.items() if mesh.world_size > mesh.dp_replicate]
    judge = fail if sharded or not run.meshes else warn
    return judge(
        f"{run.root} is not shared: rank 0's files cannot be seen",
        "Name a directory that all hosts share (--root, default_root_dir), or give the strategy"
        " save_full=True: rank 0 then writes one file, and resuming needs a copy on each host.",
    )


def judge_space(run: Run, free: int) -> Result:
    """Judges whether a checkpoint fits into the free bytes."""
    needed = run.parameters * _BYTES_PER_PARAMETER
    if free < max(needed, _LEAST_BYTES):
        wanted = f"; a checkpoint needs {format_bytes(needed)}" if needed else ""
        judge = fail if free < needed else warn
        return judge(f"{run.root} has {format_bytes(free)} free{wanted}", "Free space there.")
    fitting = f"{free // needed} checkpoints" if needed else "see --parameters"
    return ok(f"{run.root}: all ranks see it, {format_bytes(free)} free ({fitting})")


def _count_torn(path: Path) -> int:
    """Replaces a file many times while a thread reads it, as a resumed run may."""
    whole = [bytes([letter]) * _PROBE_BYTES for letter in b"ab"]
    new = path.with_name(f"{path.name}.new")
    torn, is_done = 0, threading.Event()

    def read() -> None:
        nonlocal torn
        while not is_done.is_set():
            torn += not path.exists() or path.read_bytes() not in whole

    reader = threading.Thread(target=read, daemon=True)
    try:
        path.write_bytes(whole[0])
        with path.open("rb+") as file:
            os.fsync(file.fileno())  # a full disk, or a quota, may say so only here
        reader.start()
        for index in range(_NUM_RENAMES):
            new.write_bytes(whole[index % 2])
            os.replace(new, path)
    finally:
        is_done.set()
        if reader.ident is not None:
            reader.join()
        for left in (path, new):
            left.unlink(missing_ok=True)
    return torn


DISK = Check(
    "disk",
    check_disk,
    worst_of,
    "Reading or writing hangs: is the network file system mounted and its server there?",
    60.0,
)
