"""Which modules are computed again, where some are inside of others."""

from __future__ import annotations

import pytest
from torch import nn

from lightning_dist.activation_checkpointing import choose_recomputed
from recipes.gpt import Block


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 8)
        self.blocks = nn.ModuleList(Block(8, 2, 0.0) for _ in range(2))
        self.head = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))


BLOCKS = ["net.blocks.0", "net.blocks.1"]
PARTS = [name for name, _ in Block(8, 2, 0.0).named_modules() if name]


@pytest.mark.parametrize(
    ("names", "chosen"),
    [
        ([], []),
        (["net"], ["net"]),
        (BLOCKS, BLOCKS),
        (["net", *BLOCKS], BLOCKS),
        (["net", "net.embed", *BLOCKS], ["net.embed", *BLOCKS]),
        (["net", BLOCKS[0]], ["net"]),
        (["net", "net.head", "net.head.0", "net.head.1"], ["net"]),
        ([*BLOCKS, *(f"{block}.{part}" for block in BLOCKS for part in PARTS)], BLOCKS),
        (["net.blocks.1", "net.blocks.10"], ["net.blocks.1", "net.blocks.10"]),
    ],
)
def test_the_outermost_ones_but_for_those_of_several_blocks(
    names: list[str], chosen: list[str]
) -> None:
    root = nn.ModuleDict({"net": Model()})
    root["net"].blocks.extend(Block(8, 2, 0.0) for _ in range(9))
    assert choose_recomputed(root, names) == [root.get_submodule(name) for name in chosen]
