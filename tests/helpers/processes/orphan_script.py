"""Starts a process that waits for the one that has launched it; run by the tests."""

from __future__ import annotations

import os
import sys
import time

from lightning_dist.engine.comms.failures.parent_watch import (
    ending_with_launcher,
    known_to_children,
)


def main() -> None:
    with known_to_children():
        if os.fork() == 0:
            if sys.argv[1] == "waits_in_another" and os.fork():
                os.wait()  # as a script that trains in a process of its own
            else:
                wait_for_launcher()
    time.sleep(60)


def wait_for_launcher() -> None:
    with ending_with_launcher():
        print(f"child {os.getpid()} waits", flush=True)
        if sys.argv[1] != "meets":
            time.sleep(60)
    print("and has met it", flush=True)
    time.sleep(60)


if __name__ == "__main__":
    main()
