"""A message between two ranks as one run of bytes."""

from __future__ import annotations

import numpy as np
import torch

from lightning_dist.engine.comms.channel import TensorInfo
from lightning_dist.engine.comms.gloo_channel import Memory, PacketLayout

SENT = [
    torch.arange(6, dtype=torch.float64).view(2, 3),
    torch.tensor(True),
    torch.empty(0, 3, dtype=torch.bfloat16),
    torch.arange(5, dtype=torch.int8),
    torch.tensor([1 + 2j, 3 - 4j]),
    torch.tensor([0.5, -2.0], dtype=torch.bfloat16),
]
LAYOUT = PacketLayout([TensorInfo.of(t) for t in SENT])


def packet() -> Memory:
    memory = np.zeros(LAYOUT.num_bytes, np.uint8)
    for place, tensor in zip(LAYOUT.tensors(memory), SENT, strict=True):
        place.copy_(tensor)
    return memory


def test_what_is_put_in_comes_out_of_a_copy() -> None:
    copy = packet().copy()
    for found, sent in zip(LAYOUT.tensors(copy), SENT, strict=True):
        assert found.dtype == sent.dtype
        assert torch.equal(found, sent)


def test_an_empty_packet_has_room_for_a_header() -> None:
    assert PacketLayout().num_bytes == 64


def test_a_write_into_one_tensor_of_a_packet_is_no_change_of_another() -> None:
    x, _, _, y, *_ = LAYOUT.tensors(packet())
    squares = x.requires_grad_().square().sum()
    y.add_(1)
    squares.backward()  # autograd has kept x, and would complain
    assert x.grad is not None
    assert torch.equal(x.grad, 2 * x)
    assert x.untyped_storage().data_ptr() != y.untyped_storage().data_ptr()
