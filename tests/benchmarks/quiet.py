"""What contestants print and warn of would hide the table."""

from __future__ import annotations

import logging
import warnings


def quieten() -> None:
    """Silences Lightning and all warnings in this process."""
    warnings.simplefilter("ignore")
    for name in ("pytorch", "fabric", "pytorch.utilities.rank_zero"):
        logging.getLogger(f"lightning.{name}").setLevel(logging.ERROR)
