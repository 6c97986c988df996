"""What contestants print, write and warn of would hide the table, and take time."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

QUIET_TRAINER: Mapping[str, Any] = MappingProxyType(
    {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "use_distributed_sampler": False,
    }
)
"""Arguments of a Trainer that does nothing but train, on the batches that it is given."""


def quieten() -> None:
    """Silences Lightning and all warnings in this process."""
    warnings.simplefilter("ignore")
    for name in ("pytorch", "fabric", "pytorch.utilities.rank_zero"):
        logging.getLogger(f"lightning.{name}").setLevel(logging.ERROR)
