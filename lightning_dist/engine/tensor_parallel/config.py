"""The user's configuration of tensor parallelism."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from lightning_dist.engine.tensor_parallel.plan.plan import parse_style

_EXAMPLE = "plan={'*.q_proj': 'colwise', '*.o_proj': 'rowwise'}"


@dataclass(frozen=True)  # without slots, which the command line's parser does not take
class TensorConfig:
    """The arguments of :class:`~lightning_dist.TensorParallelStrategy` of the same names.

    Attributes:
        plan: Styles by pattern of module names, or ``"auto"``.
        sequence_parallel: Shard the sequence between the sharded layers.
        loss_parallel: Compute cross-entropy without gathering the logits.

    Raises:
        ValueError: The plan is of another kind, or a style in it is unknown.
    """

    plan: Literal["auto"] | Mapping[str, str] = "auto"
    sequence_parallel: bool = False
    loss_parallel: bool = False

    def __post_init__(self) -> None:
        """Checks the plan."""
        if self.plan == "auto":
            return
        is_plan = isinstance(self.plan, Mapping) and bool(self.plan)
        if not is_plan or not all(isinstance(pattern, str) for pattern in self.plan):
            raise ValueError(
                f"Pass plan='auto' or {_EXAMPLE}: plan={self.plan!r} must be 'auto' or a dictionary"
                " of patterns and styles."
            )
        for pattern, style in self.plan.items():
            parse_style(style, pattern)
