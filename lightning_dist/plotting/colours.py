"""Which colour stands for what, the same in all pictures."""

from __future__ import annotations

from types import MappingProxyType

from lightning_dist.engine.profiling.account import Use

SKY, BLUE, ORANGE, GREEN = "#56B4E9", "#0072B2", "#E69F00", "#009E73"
VERMILION, PURPLE, YELLOW, PALE, GREY = "#D55E00", "#CC79A7", "#F0E442", "#E8E8E8", "#999999"

OF_USES = MappingProxyType(
    {
        Use.FORWARD: SKY,
        Use.BACKWARD: BLUE,
        Use.UPDATE: ORANGE,
        Use.WAITING: PALE,
        Use.COMMUNICATION: VERMILION,
        Use.DATA_LOADING: YELLOW,
        Use.CHECKPOINT: PURPLE,
        Use.OTHER: GREY,
    }
)

OF_MEMORY = MappingProxyType(
    {
        "parameters": BLUE,
        "gradients": SKY,
        "optimizer_state": ORANGE,
        "activations": GREEN,
        "unsharded": YELLOW,
        "buffers": PURPLE,
        "stash": VERMILION,
    }
)
