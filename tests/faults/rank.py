"""The script that a launcher starts on each rank."""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path


def main() -> None:
    gc.disable()  # as in tests.helpers.processes.fit_script
    from tests.faults.training import train

    gc.freeze()
    gc.enable()
    path = Path(sys.argv[1])
    os.chdir(path.parent)  # by which the processes of a run are found
    train(json.loads(path.read_text()))


if __name__ == "__main__":
    main()
