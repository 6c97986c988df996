"""Memory of an export: ``python -m tests.benchmarks.exporting`` writes and exports 2 GB.

Each export is a process. Its *anonymous* memory is what the kernel cannot drop, read every 5 ms.
The rest of its resident memory is pages of files. A process that imports and does nothing else is
the first row.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from lightning_dist.engine.checkpoint.files import save_full, save_sharded

_LAYERS = 16


@dataclass(frozen=True)
class Cost:
    """What a process took: seconds, and most bytes of anonymous and of all resident memory."""

    seconds: float
    anonymous: int
    resident: int


def write(folder: Path, total_bytes: int) -> dict[str, Path]:
    """Writes a checkpoint in both layouts, with states of Adam: three times the model."""
    shape = (total_bytes // 4 // _LAYERS // 1024, 1024)
    state = {f"model.{i}.weight": torch.rand(shape) for i in range(_LAYERS)}
    moments = {name: {"exp_avg": t, "exp_avg_sq": t.clone()} for name, t in state.items()}
    paths = {"one file": folder / "one.ckpt", "shards": folder / "shards.ckpt"}
    optimizer = {"state": moments, "param_groups": [{"params": list(state)}]}
    save_sharded({"state_dict": state, "optimizer_states": [optimizer]}, paths["shards"], None)
    numbered = {**optimizer, "state": dict(enumerate(moments.values()))}
    save_full({"state_dict": state, "optimizer_states": [numbered]}, paths["one file"])
    return paths


def watch(*words: str) -> Cost:
    """Runs Python with words, and measures it.

    Raises:
        RuntimeError: It failed.
    """
    begin, anonymous, resident = time.perf_counter(), 0, 0
    process = subprocess.Popen([sys.executable, *words], stdout=subprocess.DEVNULL)
    status = Path(f"/proc/{process.pid}/status")
    while process.poll() is None:
        text = status.read_text()
        for name, size in re.findall(r"(RssAnon|VmHWM):\s+(\d+) kB", text):
            if name == "RssAnon":
                anonymous = max(anonymous, 1024 * int(size))
            else:
                resident = max(resident, 1024 * int(size))
        time.sleep(0.005)
    if process.returncode:
        raise RuntimeError(f"{words} ended with {process.returncode}.")
    return Cost(time.perf_counter() - begin, anonymous, resident)


def export_each(folder: Path, total_bytes: int) -> dict[str, Cost]:
    """Exports each layout in two formats; returns the costs by a row's name."""
    costs = {"imports alone": watch("-c", "import lightning_dist.__main__, safetensors.torch")}
    for layout, source in write(folder, total_bytes).items():
        for kind in ("safetensors", "torch"):
            target = folder / "exported"
            words = (str(source), str(target), "--format", kind)
            costs[f"{layout} to {kind}"] = watch("-m", "lightning_dist", "export", *words)
            target.unlink()
    return costs


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=2.0, help="of the weights, each 10^9")
    parser.add_argument("--folder", help="where to write seven times as much")
    options = parser.parse_args()
    total = int(options.gigabytes * 1e9)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        costs = export_each(Path(folder), total)
    print(
        f"{total / 1e6:,.0f} MB of weights in {_LAYERS} tensors of {total / _LAYERS / 1e6:,.0f} MB"
    )
    print(f"{'':24} {'seconds':>8} {'anonymous':>12} {'resident':>12}")
    for name, cost in costs.items():
        sizes = f"{cost.anonymous / 1e6:9,.0f} MB {cost.resident / 1e6:9,.0f} MB"
        print(f"{name:24} {cost.seconds:8.1f} {sizes}")


if __name__ == "__main__":
    main()
