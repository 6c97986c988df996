"""Spans that are packed for other ranks."""

from __future__ import annotations

import pickle

from hypothesis import given
from hypothesis import strategies as st

from lightning_dist.engine.schedules.actions import Action, ActionKind
from lightning_dist.engine.schedules.timeline import PackedSpans, Span, SpanKind

actions = st.builds(
    Action, st.integers(0, 2**20), st.sampled_from(ActionKind), st.integers(0, 2**40)
)
times = st.floats(0, 2e9)
spans = st.builds(Span, st.integers(0, 2**20), st.sampled_from(SpanKind), actions, times, times)


@given(st.lists(spans, max_size=5))
def test_packed_spans_are_the_spans(given_spans: list[Span]) -> None:
    packed = pickle.loads(pickle.dumps(PackedSpans(given_spans)))
    assert list(packed) == given_spans
    if given_spans:
        assert packed[-1] == given_spans[-1]
    assert [action.kind for action in (span.action for span in packed)] == [
        span.action.kind for span in given_spans
    ]


def test_a_packed_span_is_small_in_a_message() -> None:
    forward = Action(3, ActionKind.FORWARD, 5)
    many = [Span(7, SpanKind.COMPUTE, forward, 1.7e9 + i, 1.7e9 + i + 0.5) for i in range(1000)]
    assert len(pickle.dumps(PackedSpans(many))) < 40 * len(many)
