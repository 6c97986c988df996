from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import nn

from lightning_dist.strategies.mesh_runtime import replica_checks


def test_buffers_in_another_order_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_checks, "gather_objects", lambda own, _: [own, of_other(own)])

    def of_other(own: Any) -> Any:
        if isinstance(own, bytes):
            return b""
        parameter, *buffers = own.items()
        return dict([parameter, *reversed(buffers)])

    module, group = nn.Module(), cast(Any, None)
    module.weight = nn.Parameter(torch.zeros(1))
    for name in "ab":
        module.register_buffer(name, torch.zeros(1))
    message = "The buffer number 0 is 'a' on rank 0 and 'b' on rank 1."
    with pytest.raises(ValueError, match=message):
        replica_checks.check_module(module, group)
