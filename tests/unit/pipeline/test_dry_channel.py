from __future__ import annotations

import torch

from lightning_dist.pipeline.dry_channel import DryMessage, DrySender, dry_links


def test_what_is_sent_comes_out_as_shapes() -> None:
    sizes: list[int] = []
    sender = DrySender(sizes.append)
    wanted = torch.ones(2, 3, requires_grad=True)
    sender.send({"x": wanted, "mask": torch.ones(2, dtype=torch.bool), "name": "a"}, stamp=1)
    assert sizes == [2 * 3 * 4 + 2]
    made = sender.sent[0].make()
    assert made["name"] == "a"
    assert (made["x"].shape, made["x"].requires_grad) == ((2, 3), True)
    assert (made["mask"].dtype, made["mask"].requires_grad) == (torch.bool, False)


def test_a_gradient_comes_back_for_each_tensor_that_wants_one() -> None:
    sender = DrySender(lambda _: None)
    links = dry_links(0, None, sender, lambda _: None)
    assert not links.activations_in
    assert not links.gradients_out
    for size in (2, 3):
        sender.send([torch.ones(size, requires_grad=True), torch.ones(9)], port=size)
    for size in (3, 2):  # whatever the order of the backwards
        (gradient,) = links.gradients_in[0].receive(port=size).gradients
        assert gradient.shape == (size,)
        assert not gradient.requires_grad


def test_the_last_stage_receives_activations_and_sends_gradients() -> None:
    sizes: list[int] = []
    links = dry_links(1, {7: DryMessage.of(torch.ones(4))}, None, sizes.append)
    assert not links.activations_out
    assert not links.gradients_in
    assert links.activations_in[1].receive(port=7, stamp=5).shape == (4,)
    links.gradients_out[1].send([torch.ones(3)])
    assert sizes == [12]
