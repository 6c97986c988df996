"""Draws schedules that are valid by construction, in any order, as a file may have them."""

from __future__ import annotations

from hypothesis import strategies as st

from lightning_dist.engine.schedules.actions import Action, ActionKind
from lightning_dist.engine.schedules.schedule import Schedule


@st.composite
def random_schedules(draw: st.DrawFn) -> Schedule:
    """Mixes the micro-batches' own orders at random, on stages that lie anywhere."""
    num_ranks, per_rank = draw(st.integers(2, 4)), draw(st.integers(1, 2))
    count = draw(st.integers(1, 5))
    homes = draw(st.permutations([*range(num_ranks)] * per_rank))
    num_stages = len(homes)
    parted = draw(st.lists(st.booleans(), min_size=num_stages, max_size=num_stages))
    random = draw(st.randoms(use_true_random=False))

    def of_microbatch(index: int) -> list[Action]:
        found = [Action(stage, ActionKind.FORWARD, index) for stage in range(num_stages)]
        for stage in reversed(range(num_stages)):
            kind = ActionKind.BACKWARD_INPUT if parted[stage] else ActionKind.BACKWARD
            found.append(Action(stage, kind, index))
        for stage in range(num_stages):
            if parted[stage]:
                inputs = found.index(Action(stage, ActionKind.BACKWARD_INPUT, index))
                place = random.randint(inputs + 1, len(found))
                found.insert(place, Action(stage, ActionKind.BACKWARD_WEIGHT, index))
        return found

    left = [of_microbatch(index) for index in range(count)]
    ranks: list[list[Action]] = [[] for _ in range(num_ranks)]
    while any(left):
        action = random.choice([actions for actions in left if actions]).pop(0)
        ranks[homes[action.stage_index]].append(action)
    return Schedule("random", num_stages, count, tuple(map(tuple, ranks)))
