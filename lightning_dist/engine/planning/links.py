"""A link between ranks in Hockney's model: a message of V bytes takes latency + V / bandwidth.

Hockney, "The communication challenge for MPP" (Parallel Computing 20, 1994). Papers write the
latency as alpha and the bandwidth, or its inverse, as beta.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lightning_dist.engine.planning.traffic import MessageKind


@dataclass(frozen=True, slots=True)
class Link:
    """What a message costs.

    Attributes:
        latency_seconds: Seconds of an empty message.
        bytes_per_second: Bandwidth in one direction, while the other is as busy.

    Raises:
        ValueError: The latency is below zero, or the bandwidth is not above it.
    """

    latency_seconds: float
    bytes_per_second: float

    def __post_init__(self) -> None:
        """Checks the numbers."""
        if not (self.latency_seconds >= 0 and self.bytes_per_second > 0):
            raise ValueError(f"{self}: a latency of 0 or more goes with a bandwidth above 0.")

    def seconds(self, num_bytes: float) -> float:
        """Returns the seconds of a message."""
        return self.latency_seconds + num_bytes / self.bytes_per_second

    def times(self, factor: float) -> Link:
        """Returns a link with so many times the bandwidth."""
        return Link(self.latency_seconds, self.bytes_per_second * factor)


@dataclass(frozen=True, slots=True)
class LinksByKind:
    """A link as each kind of message finds it.

    A backend's collective takes longer than messages between two ranks, by copies and by threads.

    Attributes:
        send: The link of a message from one rank to another.
        collectives: By kind, the link over which a ring takes the time of the backend's collective;
            kinds without one take ``send``.
    """

    send: Link
    collectives: Mapping[MessageKind, Link] = field(default_factory=dict)

    def of(self, kind: MessageKind) -> Link:
        """Returns the link of a kind of message."""
        return self.collectives.get(kind, self.send)

    def times(self, factor: float) -> LinksByKind:
        """Returns links with so many times the bandwidth."""
        collectives = {kind: link.times(factor) for kind, link in self.collectives.items()}
        return LinksByKind(self.send.times(factor), collectives)


@dataclass(frozen=True, slots=True)
class LinkFit:
    """A link fitted to measured messages.

    Attributes:
        link: The fitted link.
        sizes: Bytes of each message.
        seconds: Measured seconds of each message.
    """

    link: Link
    sizes: tuple[int, ...]
    seconds: tuple[float, ...]

    @property
    def residuals(self) -> tuple[float, ...]:
        """Measured seconds of each message over the predicted ones, less 1."""
        predicted = map(self.link.seconds, self.sizes)
        return tuple(s / p - 1.0 for s, p in zip(self.seconds, predicted, strict=True))


def fit_link(sizes: Sequence[int], seconds: Sequence[float]) -> LinkFit:
    """Fits a link by least squares of the relative errors, so that small messages count as much.

    Args:
        sizes: Bytes of each message; two different sizes or more.
        seconds: Seconds of each message, above 0.

    Returns:
        The fit. Its latency is not below 0. Its bandwidth is infinite if the seconds do not grow
        with the bytes.
    """
    assert len(set(sizes)) > 1
    assert min(seconds) > 0.0
    # Minimises the sum of ((latency + size * slope) / seconds - 1)^2: two normal equations.
    rows = [(1.0 / t, size / t) for size, t in zip(sizes, seconds, strict=True)]
    aa = sum(a * a for a, _ in rows)
    ab = sum(a * b for a, b in rows)
    bb = sum(b * b for _, b in rows)
    a, b = sum(a for a, _ in rows), sum(b for _, b in rows)
    determinant = aa * bb - ab * ab
    latency, slope = (a * bb - b * ab) / determinant, (aa * b - ab * a) / determinant
    if latency < 0.0:
        latency, slope = 0.0, b / bb
    if slope <= 0.0:
        latency, slope = a / aa, 0.0
    link = Link(latency, 1.0 / slope if slope > 0.0 else float("inf"))
    return LinkFit(link, tuple(sizes), tuple(seconds))
