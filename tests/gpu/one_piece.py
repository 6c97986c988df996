"""Runs one piece in this process, and keeps its record.

python -m tests.gpu.one_piece PIECE DEVICE TRANSPORT FOLDER
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch

from tests.benchmarks.quiet import quieten
from tests.gpu.catalog import PIECES
from tests.gpu.records import End, Folder, Record, describe_machine
from tests.gpu.setting import Setting


def main() -> None:
    name, device, transport, path = sys.argv[1:]
    quieten()
    setting, folder = Setting(device, transport), Folder(Path(path))
    if not setting.is_gpu:
        torch.set_num_threads(1)
    record = Record(name, describe_machine(setting))
    folder.write(record)
    began = time.monotonic()
    for row in PIECES[name].run(setting):
        record.rows.append(row)
        record.seconds = time.monotonic() - began
        folder.write(record)
    record.end, record.seconds = End.DONE, time.monotonic() - began
    folder.write(record)


if __name__ == "__main__":
    main()
