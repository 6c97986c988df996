"""The peak FLOPs, memory and links of devices, from their makers' data sheets.

Plans for a machine that is not at hand begin with these, and MFU is a share of the peak.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from lightning_dist.engine.planning.links import Link


@dataclass(frozen=True, slots=True)
class Device:
    """The data sheet of a device.

    Attributes:
        fp32_flops: FLOPs per second in fp32, at most.
        half_flops: FLOPs per second of dense matrix products in 16 bits, at most.
        memory_bytes: Bytes of memory.
        link: Link to the other devices of a host.
    """

    fp32_flops: float
    half_flops: float
    memory_bytes: float
    link: Link


PCIE, _LATENCY = Link(10e-6, 25e9), 10e-6
DEVICES: Mapping[str, Device] = MappingProxyType(
    {
        "v100": Device(15.7e12, 125e12, 32e9, Link(_LATENCY, 150e9)),
        "a30": Device(10.3e12, 165e12, 24e9, PCIE),
        "a100": Device(19.5e12, 312e12, 80e9, Link(_LATENCY, 300e9)),
        "h100": Device(66.9e12, 989.4e12, 80e9, Link(_LATENCY, 450e9)),
        "h100pcie": Device(51.2e12, 756e12, 80e9, PCIE),
        "h200": Device(66.9e12, 989.4e12, 141e9, Link(_LATENCY, 450e9)),
        "b200": Device(75e12, 2250e12, 180e9, Link(_LATENCY, 900e9)),
        "t4": Device(8.1e12, 65e12, 16e9, PCIE),
        "l4": Device(30.3e12, 121e12, 24e9, PCIE),
        "l40s": Device(91.6e12, 362e12, 48e9, PCIE),
        "rtx4090": Device(82.6e12, 165e12, 24e9, PCIE),
    }
)
"""Devices by name."""


def find_device(name: str) -> Device | None:
    """Returns the device that ``torch.cuda.get_device_name`` names; None if it is not listed."""
    words = name.lower().replace("-", " ").split()
    pairs = ["".join(pair) for pair in zip(words, words[1:], strict=False)]
    return next((DEVICES[word] for word in (*pairs, *words) if word in DEVICES), None)


def find_peak_flops(name: str, precision: str) -> float | None:
    """Returns the peak FLOPs per second of a device; None if it is not listed, and for 64 bits.

    Args:
        name: Name from ``torch.cuda.get_device_name``.
        precision: The Trainer's precision, such as ``"bf16-mixed"`` or ``"32-true"``.
    """
    device = find_device(name)
    if device is None or "64" in precision:
        return None
    return device.half_flops if "16" in precision else device.fp32_flops
