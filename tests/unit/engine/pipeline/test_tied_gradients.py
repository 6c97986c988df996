"""Sums over copies, over channels in one thread: what would wait there would wait for ever."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_dist.engine.comms.channel import MemoryChannel
from lightning_dist.engine.comms.links import ChannelEnds
from lightning_dist.engine.pipeline.tied_gradients import TiedSums
from lightning_dist.engine.splitting.ties import Tie

PAIR = Tie({0: ("0.w",), 2: ("2.w",)})
THREE = Tie({0: ("0.v",), 1: ("1.v",), 2: ("2.v",)})
LATER = Tie({1: ("1.u",), 2: ("2.u",)})
PLAIN = (0, 1, 2)
LOOPED = (0, 1, 0, 1)


def ranks_of(
    ties: Sequence[Tie],
    rank_of_stage: Sequence[int] = PLAIN,
    num_ranks: int = 3,
    **options: Any,
) -> list[TiedSums]:
    channels = {(a, b): MemoryChannel() for a in range(num_ranks) for b in range(num_ranks)}
    return [
        TiedSums(
            ties,
            rank_of_stage,
            rank,
            ChannelEnds(
                {peer: channels[rank, peer] for peer in range(num_ranks)},
                {peer: channels[peer, rank] for peer in range(num_ranks)},
            ),
            **options,
        )
        for rank in range(num_ranks)
    ]


def parameters(*names: str) -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(torch.zeros(2, dtype=torch.float64)) for name in names}


def gradient(value: float) -> Tensor:
    return torch.full((2,), value, dtype=torch.float64)


def values(found: Mapping[str, nn.Parameter]) -> dict[str, float | None]:
    return {n: None if p.grad is None else float(p.grad[0]) for n, p in found.items()}


OWN = [
    {"0.w": gradient(1), "0.v": gradient(2), "0.x": gradient(3)},
    {"1.v": gradient(20), "1.u": gradient(30)},
    {"2.w": gradient(100), "2.v": gradient(200), "2.u": gradient(300)},
]


def test_copies_get_one_sum_and_only_who_adds_up_waits() -> None:
    sums = ranks_of([PAIR, THREE, LATER])
    # The order of `pipedream_2bw`: a later stage has a batch's gradients earlier.
    counted = [sums[rank].post(0, OWN[rank]) for rank in (2, 1, 0)]
    assert [set(gradients) for gradients in counted] == [set(), {"1.u"}, {"0.w", "0.v", "0.x"}]
    assert {n: float(g[0]) for g in counted for n, g in g.items()} == {
        "1.u": 330,
        "0.w": 101,
        "0.v": 222,
        "0.x": 3,
    }
    for rank, own in enumerate(OWN):
        held = parameters(*own)
        for name, parameter in held.items():
            parameter.grad = own[name]
        sums[rank].install(0, held)
        expected = {"w": 101, "v": 222, "u": 330, "x": 3}
        assert values(held) == {name: expected[name[-1]] for name in own}


def test_a_sum_is_changed_once_and_where_it_is_added_up() -> None:
    def change(name: str, gradient: Tensor) -> Tensor | None:
        changed.append(name)
        return None if name == "1.u" else gradient.clamp(max=50.0)

    changed: list[str] = []
    sums = ranks_of([PAIR, THREE, LATER], change=change)
    counted = [sums[rank].post(0, OWN[rank]) for rank in (2, 1, 0)]
    assert sorted(changed) == ["0.v", "0.w", "1.u"]
    assert [set(gradients) for gradients in counted] == [set(), set(), {"0.w", "0.v", "0.x"}]
    held = [parameters(*own) for own in OWN]
    for rank in range(3):
        sums[rank].install(0, held[rank])
    assert [values(one) for one in held] == [
        {"0.w": 50, "0.v": 50, "0.x": None},
        {"1.v": 50, "1.u": None},
        {"2.w": 50, "2.v": 50, "2.u": None},
    ]


def test_a_stage_may_be_an_update_ahead() -> None:
    sums = ranks_of([PAIR], num_ranks=3)
    for update in (0, 1):
        sums[2].post(update, {"2.w": gradient(10 * (update + 1))})
        sums[0].post(update, {"0.w": gradient(update + 1)})
    for update, total in ((0, 11), (1, 22)):
        for rank, name in ((0, "0.w"), (2, "2.w")):
            held = parameters(name)
            sums[rank].install(update, held)
            assert values(held) == {name: total}


def add(held: Mapping[str, nn.Parameter], value: float) -> None:
    """Adds to each gradient, as a batch does."""
    for parameter in held.values():
        before = parameter.grad
        parameter.grad = gradient(value) if before is None else before + value


def update(sums: Sequence[TiedSums], held: Sequence[dict[str, nn.Parameter]]) -> None:
    for rank in (2, 0):
        given = {n: p.grad for n, p in held[rank].items() if p.grad is not None}
        sums[rank].post(0, given)
    for rank in (0, 2):
        sums[rank].install(0, held[rank])


def test_what_an_earlier_update_has_left_counts_once() -> None:
    seen: list[float] = []

    def change(name: str, gradient: Tensor) -> Tensor:
        seen.append(float(gradient[0]))
        return gradient

    sums = ranks_of([PAIR], change=change)
    held = [parameters("0.w"), {}, parameters("2.w")]
    for total in (11, 22, 33):
        for rank, value in ((0, 1), (2, 10)):
            sums[rank].set_apart(held[rank])
            add(held[rank], value)
        update(sums, held)
        assert values(held[0]) == {"0.w": total}
        assert values(held[2]) == {"2.w": total}
    assert seen == [11, 11, 11], "hooks see what is new"


@pytest.mark.parametrize(("clears", "total"), [(False, 100 + 22), (True, 11)])
def test_gradients_of_an_update_s_other_batches_are_no_sums_yet(
    *, clears: bool, total: float
) -> None:
    sums, held = ranks_of([PAIR]), [parameters("0.w"), {}, parameters("2.w")]
    for rank in (0, 2):
        add(held[rank], 100)
    for batch in range(2):
        for rank, value in ((0, 1), (2, 10)):
            sums[rank].set_apart(held[rank])
            add(held[rank], value)
            if batch == 0:
                sums[rank].keep(held[rank])
                for parameter in held[rank].values() if clears else ():
                    parameter.grad = None
    update(sums, held)
    assert values(held[0]) == {"0.w": total}
    assert values(held[2]) == {"2.w": total}


def test_a_batch_without_gradients_takes_none_away() -> None:
    sums, held = ranks_of([PAIR]), [parameters("0.w"), {}, parameters("2.w")]
    for rank in (0, 2):
        add(held[rank], 100)
        sums[rank].set_apart(held[rank])
    add(held[0], 1)
    for rank in (0, 2):
        sums[rank].keep(held[rank])
    assert values(held[2]) == {"2.w": 100}
    for rank in (0, 2):
        sums[rank].set_apart(held[rank])
    update(sums, held)
    assert values(held[0]) == {"0.w": 101}
    assert values(held[2]) == {"2.w": 101}


def test_each_name_is_counted_once() -> None:
    ties = [PAIR, THREE, LATER]
    sums = ranks_of(ties)
    for tie in ties:
        assert [sums[s].counts(names[0]) for s, names in tie.names.items()].count(True) == 1
    assert [sorted(one.names) for one in sums] == [
        ["0.v", "0.w"],
        ["1.u", "1.v"],
        ["2.u", "2.v", "2.w"],
    ]


def test_gradients_that_some_do_not_have() -> None:
    sums = ranks_of([PAIR, THREE, LATER])
    sums[2].post(0, {"2.v": gradient(5)})
    sums[1].post(0, {})
    sums[0].post(0, {"0.w": gradient(7)})
    first, last = parameters("0.w", "0.v"), parameters("2.w", "2.v", "2.u")
    middle = parameters("1.v")  # the other one is frozen
    for rank, held in enumerate((first, middle, last)):
        sums[rank].install(0, held)
    assert values(first) == {"0.w": 7, "0.v": 5}
    assert values(middle) == {"1.v": 5}
    assert values(last) == {"2.w": 7, "2.v": 5, "2.u": None}


def test_copies_must_be_trained_or_frozen_alike() -> None:
    first, _, last = ranks_of([PAIR])
    last.post(0, {"2.w": gradient(100)}, {"2.w", "2.x"})
    first.post(0, {"0.w": gradient(1)}, {"0.w"})
    last.post(1, {"2.w": gradient(100)}, {"2.w"})
    with pytest.raises(ValueError, match=r"Stages share the parameters \['0.w'\], which are froz"):
        first.post(1, {}, {"0.x"})


def test_stages_of_one_rank_need_no_message() -> None:
    (alone,) = ranks_of([Tie({0: ("0.w",), 1: ("1.w",)})], (0, 0), 1)
    assert not alone.names
    assert alone.counts("0.w")
    sums = ranks_of([Tie({0: ("0.w",), 2: ("2.w",), 3: ("3.w",)})], LOOPED, 2)
    assert [sorted(one.names) for one in sums] == [["0.w"], ["3.w"]]
    assert sums[0].counts("2.w")


def test_ranks_that_add_up_for_each_other() -> None:
    sums = ranks_of([Tie({0: ("0.w",), 1: ("1.w",)}), Tie({1: ("1.v",), 2: ("2.v",)})], LOOPED, 2)
    # Each sends before it waits, or threads would deadlock here.
    import threading

    held = [parameters("0.w", "2.v"), parameters("1.w", "1.v")]
    own = [{"0.w": gradient(1), "2.v": gradient(2)}, {"1.w": gradient(10), "1.v": gradient(20)}]

    def run(rank: int) -> None:
        sums[rank].post(0, own[rank])
        sums[rank].install(0, held[rank])

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert values(held[0]) == {"0.w": 11, "2.v": 22}
    assert values(held[1]) == {"1.w": 11, "1.v": 22}


def test_clipping_what_is_installed_does_not_reach_the_other_copies() -> None:
    sums = ranks_of([PAIR])
    sums[2].post(0, {"2.w": gradient(1)})
    sums[0].post(0, {"0.w": gradient(2)})
    first, last = parameters("0.w"), parameters("2.w")
    sums[0].install(0, first)
    grad = first["0.w"].grad
    assert grad is not None
    grad.mul_(0)
    sums[2].install(0, last)
    assert values(last) == {"2.w": 3}


def test_copies_begin_equal() -> None:
    sums = ranks_of([PAIR, THREE])
    held = [parameters("0.w", "0.v"), parameters("1.v"), parameters("2.w", "2.v")]
    for rank, own in enumerate(held):
        for number, parameter in enumerate(own.values()):
            parameter.data.fill_(10 * (rank + 1) + number)
    for rank in range(3):
        sums[rank].share(held[rank])
    assert {n: float(p.detach()[0]) for own in held for n, p in own.items()} == {
        **{"0.w": 10, "0.v": 11},
        **{"1.v": 11},
        **{"2.w": 10, "2.v": 11},
    }


@pytest.mark.parametrize("rank", [0, 2])
def test_gradients_lie_in_memory_as_their_parameters_do(rank: int) -> None:
    sums = ranks_of([PAIR])
    ones = torch.ones(3, 2)
    sums[2].post(0, {"2.w": ones})
    sums[0].post(0, {"0.w": torch.arange(6.0).view(3, 2)})
    name = f"{rank}.w"
    held = {name: nn.Parameter(torch.ones(2, 3).t())}
    sums[rank].install(0, held)
    grad = held[name].grad
    assert grad is not None
    assert grad.stride() == held[name].stride()
    assert torch.equal(grad, 1 + torch.arange(6.0).view(3, 2))
