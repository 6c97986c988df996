"""The most operations per second that a device can do, by its name.

Dense matrix products, from NVIDIA's data sheets. MFU (Chowdhery et al., 2022, appendix B) is what a
run does of that. A device that is not here has no MFU, and a CPU never has.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class PeakFlops:
    """Of one device, in FLOPs per second.

    Attributes:
        float32: In fp32.
        half: In bf16 or fp16 on tensor cores.
    """

    float32: float
    half: float


_TERA = 1e12
_PEAKS = MappingProxyType(
    {
        # A name that holds another one must come first.
        "H200": PeakFlops(66.9 * _TERA, 989.4 * _TERA),
        "H100 PCIe": PeakFlops(51.2 * _TERA, 756.0 * _TERA),
        "H100": PeakFlops(66.9 * _TERA, 989.4 * _TERA),
        "A100": PeakFlops(19.5 * _TERA, 312.0 * _TERA),
        "A30": PeakFlops(10.3 * _TERA, 165.0 * _TERA),
        "V100": PeakFlops(15.7 * _TERA, 125.0 * _TERA),
        "L40S": PeakFlops(91.6 * _TERA, 362.0 * _TERA),
        "L4": PeakFlops(30.3 * _TERA, 121.0 * _TERA),
        "T4": PeakFlops(8.1 * _TERA, 65.0 * _TERA),
    }
)


def find_peak_flops(device_name: str, precision: str) -> float | None:
    """Looks a device up.

    Args:
        device_name: As ``torch.cuda.get_device_name`` gives it; ``"cpu"`` has no peak.
        precision: As the Trainer's, such as ``"bf16-mixed"`` or ``"32-true"``.

    Returns:
        FLOPs per second; None where nobody has looked them up.
    """
    words = device_name.replace("-", " ").split()
    for name, peak in _PEAKS.items():
        if all(word in words for word in name.split()):
            return peak.half if "16" in precision else None if "64" in precision else peak.float32
    return None
