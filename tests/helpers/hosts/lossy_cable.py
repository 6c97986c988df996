"""A cable on which packets are late or lost: a process between two TAP devices.

What ``netem`` does where a kernel has it; TAP devices are nearly everywhere. The process makes both
devices, and they vanish with it. One of them may be moved to another network namespace.

    python -m tests.helpers.hosts.lossy_cable NEAR FAR DELAY_SECONDS LOSS
"""

from __future__ import annotations

import fcntl
import os
import select
import struct
import sys
import time
from collections import deque
from contextlib import suppress
from random import Random

DEVICE = "/dev/net/tun"
_SET_DEVICE = 0x400454CA  # TUNSETIFF of linux/if_tun.h, and two of its flags
_TAP = 0x0002
_FRAMES_ALONE = 0x1000  # without a header of the driver's
_FRAME_BYTES = 65536
_NO_END = 3600.0


def open_device(name: str) -> int:
    """Makes a TAP device, as long as the returned file is open."""
    file = os.open(DEVICE, os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(file, _SET_DEVICE, struct.pack("16sH", name.encode(), _TAP | _FRAMES_ALONE))
    return file


def carry(near: int, far: int, delay_seconds: float, loss: float) -> None:
    """Carries frames both ways until a device is gone.

    Args:
        near: The file of a device.
        far: The other one's.
        delay_seconds: How long a frame is under way.
        loss: The probability that it does not arrive.
    """
    random = Random(0)
    under_way: deque[tuple[float, int, bytes]] = deque()  # in the order in which they are due
    while True:
        wait = under_way[0][0] - time.monotonic() if under_way else _NO_END
        readable, _, _ = select.select([near, far], [], [], max(wait, 0.0))
        now = time.monotonic()
        for file in readable:
            with suppress(BlockingIOError):
                frame = os.read(file, _FRAME_BYTES)
                if random.random() >= loss:
                    under_way.append((now + delay_seconds, far if file == near else near, frame))
        while under_way and under_way[0][0] <= now:
            _, to, frame = under_way.popleft()
            with suppress(OSError):  # a device that is down takes nothing
                os.write(to, frame)


def main() -> None:
    near, far, delay_seconds, loss = sys.argv[1:]
    files = open_device(near), open_device(far)
    print("ready", flush=True)
    with suppress(OSError):  # a host was killed, and its device with it
        carry(*files, float(delay_seconds), float(loss))


if __name__ == "__main__":
    main()
