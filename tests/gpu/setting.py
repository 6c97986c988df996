"""Where the pieces run: on a GPU, or, with small sizes, on the CPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch

DEVICES = ("cuda", "cpu")


@dataclass(frozen=True)
class Setting:
    """A device, and how a pipeline's tensors travel.

    Attributes:
        device: ``"cuda"``, or ``"cpu"`` to try the pieces themselves on small sizes.
        transport: ``transport`` of the strategies with stages, on two ranks.
    """

    device: str
    transport: str = "auto"

    @property
    def is_gpu(self) -> bool:
        return self.device == "cuda"

    @property
    def accelerator(self) -> str:
        """Lightning's name of the device."""
        return "gpu" if self.is_gpu else "cpu"

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cuda", 0) if self.is_gpu else torch.device("cpu")

    @property
    def compiler(self) -> str:
        """The compiler's backend: on a CPU the graphs are captured and run as they are."""
        return "inductor" if self.is_gpu else "aot_eager"

    def synchronize(self) -> None:
        """Waits for the device."""
        if self.is_gpu:
            torch.cuda.synchronize(self.torch_device)


def missing_gpu() -> str | None:
    """Returns why no piece can run on a GPU here; None if one can."""
    if torch.cuda.is_available():
        return None
    built = "without CUDA" if torch.version.cuda is None else f"for CUDA {torch.version.cuda}"
    return f"torch.cuda.is_available() is False: torch {torch.__version__} is built {built}"
