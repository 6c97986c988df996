"""Names of the ways in which a sharded model can be trained."""

from __future__ import annotations

from typing import Literal

Offload = Literal["none", "cpu"]
ActivationCheckpointing = Literal["none", "full", "selective"]
ReduceDtype = Literal["float32", "bfloat16", "float16"]
