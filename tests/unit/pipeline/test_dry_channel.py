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
    links = dry_links(None, sender, lambda _: None)
    assert links.activations_in is links.gradients_out is None
    assert links.gradients_in is not None
    for size in (2, 3):  # an activation may be sent when others have come back
        sender.send([torch.ones(size, requires_grad=True), torch.ones(9)])
        (gradient,) = links.gradients_in.receive()
        assert gradient.shape == (size,)
        assert not gradient.requires_grad


def test_the_last_stage_receives_activations_and_sends_gradients() -> None:
    sizes: list[int] = []
    links = dry_links([DryMessage.of(torch.ones(4))], None, sizes.append)
    assert links.activations_out is links.gradients_in is None
    assert links.activations_in is not None
    assert links.activations_in.receive(stamp=5).shape == (4,)
    assert links.gradients_out is not None
    links.gradients_out.send([torch.ones(3)])
    assert sizes == [12]
