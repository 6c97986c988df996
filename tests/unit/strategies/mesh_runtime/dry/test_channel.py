from __future__ import annotations

import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence

from lightning_dist.engine.comms.channel import MemoryChannel
from lightning_dist.strategies.mesh_runtime.dry.channel import DryMessage, DrySender, dry_links


def test_what_is_sent_comes_out_as_shapes() -> None:
    sizes: list[int] = []
    sender = DrySender(sizes.append)
    wanted = torch.ones(2, 3, requires_grad=True)
    sender.send({"x": wanted, "mask": torch.ones(2, dtype=torch.bool), "name": "a"})
    assert sizes == [2 * 3 * 4 + 2]
    made = sender.sent[0].make()
    assert made["name"] == "a"
    assert (made["x"].shape, made["x"].requires_grad) == ((2, 3), True)
    assert (made["mask"].dtype, made["mask"].requires_grad) == (torch.bool, False)


def test_integers_keep_their_values_which_may_be_sizes() -> None:
    packed = pack_sequence([torch.ones(3, 2), torch.zeros(1, 2)])
    out, _ = nn.GRU(2, 4)(DryMessage.of(packed).make())
    assert out.batch_sizes.tolist() == [2, 1, 1]
    assert out.data.shape == (4, 4)


def ignore(_: int) -> None: ...


def test_a_gradient_comes_back_for_each_tensor_that_wants_one() -> None:
    links, sent = dry_links((0, 1), 0, {}, ignore)
    assert {*links.outgoing} == {(0, 1)}
    assert {*links.incoming} == {(1, 0)}
    for size in (2, 3):
        activation = [torch.ones(size, requires_grad=True), torch.ones(9)]
        links.outgoing[0, 1].send(activation, tag=size)
    assert sent.keys() == {0}
    assert sent[0].keys() == {2, 3}
    for size in (3, 2):  # whatever the order of the backwards
        (gradient,) = links.incoming[1, 0].receive(tag=size).gradients
        assert gradient.shape == (size,)
        assert not gradient.requires_grad


def test_the_last_stage_receives_activations_and_sends_gradients() -> None:
    sizes: list[int] = []
    known = {0: {7: DryMessage.of(torch.ones(4))}}
    links, sent = dry_links((0, 1), 1, known, sizes.append)
    assert {*links.outgoing} == {(1, 0)}
    assert {*links.incoming} == {(0, 1)}
    assert links.incoming[0, 1].receive(tag=7).shape == (4,)
    links.outgoing[1, 0].send([torch.ones(3)])
    assert sizes == [12]
    assert not sent


def test_stages_of_one_rank_hand_over_and_send_nothing() -> None:
    sizes: list[int] = []
    known = {0: {0: DryMessage.of(torch.ones(4))}}
    links, sent = dry_links((0, 1, 1, 0), 1, known, sizes.append)
    assert sent.keys() == {2}  # what stage 1 gives stage 2 stays
    assert isinstance(links.outgoing[1, 2], MemoryChannel)
    assert links.incoming[1, 2] is links.outgoing[1, 2]
    assert links.incoming[2, 1] is links.outgoing[2, 1]
    links.outgoing[1, 2].send(torch.ones(5, requires_grad=True))
    assert links.incoming[1, 2].receive().requires_grad
    assert not sizes
    links.outgoing[2, 3].send(torch.ones(6))
    links.outgoing[1, 0].send([torch.ones(7)])
    assert sizes == [24, 28]
