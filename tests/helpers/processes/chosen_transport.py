"""The transport of all pipelines of a run of the tests: ``pytest --transport p2p``.

Processes of the tests learn of it by a variable of their environment.
"""

from __future__ import annotations

import os
from dataclasses import replace
from functools import wraps

import torch

from lightning_dist.engine.splitting.config import PipelineConfig

VARIABLE = "TRANSPORT_OF_TESTS"


def use_chosen_transport() -> None:
    """Lets pipelines of this process that leave their transport open use the chosen one."""
    chosen = os.environ.get(VARIABLE)
    own = PipelineConfig.p2p_backend
    if not chosen or hasattr(own, "__wrapped__"):
        return

    @wraps(own)
    def p2p_backend(self: PipelineConfig, backend: str, device: torch.device) -> str | None:
        config = replace(self, transport=chosen) if self.transport == "auto" else self
        return own(config, backend, device)

    PipelineConfig.p2p_backend = p2p_backend  # type: ignore[method-assign]
