from __future__ import annotations

import pytest
from lightning.pytorch.plugins.io import AsyncCheckpointIO

from lightning_dist import DDPStrategy


def test_one_thread_writes() -> None:
    strategy = DDPStrategy(async_save=True, checkpoint_io=AsyncCheckpointIO())
    with pytest.raises(ValueError, match="two threads that write the same checkpoints"):
        strategy.setup_environment()
