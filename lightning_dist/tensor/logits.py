"""Logits that each rank has a part of, under a step that does not know.

The head leaves its output apart, as a ``DTensor`` over the vocabulary. torch's ``loss_parallel``
makes ``F.cross_entropy`` compute the loss from the parts; the whole logits exist nowhere, forward
or backward. Whatever else the user's step does with them beside plain tensors, an accuracy say,
gets them joined.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.overrides import TorchFunctionMode

from lightning_dist.shards import is_spread, whole
from lightning_dist.tree import map_tensors


class LogitsApart(TorchFunctionMode):
    """What a step runs in; looks at each of torch's functions that the step calls."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Calls a function with the logits apart or joined.

        Args:
            func: Of torch.
            types: Of its arguments.
            args: Its arguments.
            kwargs: Its arguments by name.
        """
        named = kwargs or {}
        given = [tensor for value in (*args, *named.values()) for tensor in _tensors_in(value)]
        num_apart = sum(is_spread(tensor) for tensor in given)
        if num_apart and func is F.cross_entropy:
            with loss_parallel():
                return joined(func(*args, **named)).clone()  # FSDP2 wants no view of a step
        if 0 < num_apart < len(given):
            return func(*joined(args), **joined(named))
        return func(*args, **named)


def joined(tree: Any) -> Any:
    """Joins what is apart in a tree; all ranks must call it.

    Args:
        tree: Any.
    """
    return map_tensors(whole, tree)


def _tensors_in(value: Any) -> Sequence[Tensor]:
    # No deeper: this is asked for each operation of a step.
    if isinstance(value, Tensor):
        return (value,)
    return [v for v in value if isinstance(v, Tensor)] if isinstance(value, list | tuple) else ()
