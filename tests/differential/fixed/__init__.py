"""Cases that the test command runs: each dimension, and each kind of defect that there once was."""

from __future__ import annotations

from tests.differential.fixed.defects import DEFECTS
from tests.differential.fixed.dimensions import DIMENSIONS
from tests.differential.fixed.entry import Fixed

__all__ = ["FIXED", "NOT_YET", "Fixed"]

FIXED: dict[str, Fixed] = {**DEFECTS, **DIMENSIONS}

NOT_YET: dict[str, str] = {}
"""What is known to be not yet as on one device, by the name of its case, and why."""
