import pytest
from torch import nn

from lightning_dist.engine.tensor_parallel.layers.styles import Style
from lightning_dist.engine.tensor_parallel.partial_gradients import (
    check_shared,
    find_partial_gradients,
)

SIZE = 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(SIZE)
        self.qkv = nn.Linear(SIZE, 3 * SIZE)
        self.out = nn.Linear(SIZE, SIZE)


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.LayerNorm(SIZE)
        self.gate = nn.Linear(SIZE, SIZE)


STYLES = {"blocks.0.qkv": Style.COLWISE, "blocks.0.out": Style.ROWWISE, "gate": Style.LOCAL}


def is_in_block(name: str) -> bool:
    return name.startswith("blocks.")


def test_without_a_cut_sequence_only_regions_have_summands() -> None:
    found = find_partial_gradients(Network(), STYLES, lambda _: False)
    assert found == ["blocks.0.qkv.bias", "gate.weight", "gate.bias"]


def test_with_it_all_of_the_blocks() -> None:
    network = Network()
    found = find_partial_gradients(network, STYLES, is_in_block)
    in_blocks = [name for name, _ in network.named_parameters() if is_in_block(name)]
    assert found == [*in_blocks, "gate.weight", "gate.bias"]


def test_a_norm_used_inside_and_outside_of_the_cut_is_refused() -> None:
    network = Network()
    network.norm = network.blocks[1].norm
    summands = find_partial_gradients(network, STYLES, is_in_block)
    with pytest.raises(ValueError, match=r"'blocks.1.norm.weight' and 'norm.weight' are one"):
        check_shared(network, summands, [])


def test_what_is_shared_on_one_side_is_not() -> None:
    network = Network()
    network.blocks[1].norm = network.blocks[0].norm
    check_shared(network, find_partial_gradients(network, STYLES, is_in_block), [])
    network.norm = network.blocks[0].norm
    check_shared(network, find_partial_gradients(network, STYLES, lambda _: False), [])


def test_what_is_cut_is_not() -> None:
    network = Network()
    network.gate.weight = network.blocks[0].out.weight
    summands = find_partial_gradients(network, {"blocks.0.out": Style.ROWWISE}, is_in_block)
    check_shared(network, summands, ["blocks.0.out.weight"])
