"""Find layers that take dim 0 for time, where batches are cut along it.

A batch is cut along dim 0, which must be that of the samples. torch's transformers and recurrent
layers take dim 0 for time, unless ``batch_first=True``. A batch that is laid out for them, [time,
batch, features], would be cut in time, and attention would see a part of each sequence.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn


@contextmanager
def warn_of_time_first(layers: nn.Module, num_samples: int) -> Iterator[None]:
    """Warns of a layer whose input has the samples of a micro-batch where it takes time.

    Args:
        layers: Layers of a stage, which run meanwhile.
        num_samples: Samples of the micro-batch, a piece of its batch.
    """
    has_warned = False

    def look(name: str, part: nn.Module, given: tuple[Any, ...]) -> None:
        nonlocal has_warned
        x = given[0] if given else None
        if has_warned or not isinstance(x, Tensor) or x.ndim != 3:
            return  # without a third dim it is one sequence, of any length
        if x.shape[0] != num_samples or x.shape[1] == num_samples:
            return  # its samples are in dim 1
        has_warned = True
        warnings.warn(
            f"{name!r} ({type(part).__name__} with batch_first=False) takes dim 0 of its input for"
            f" time, and got {tuple(x.shape)}, with the {num_samples} samples of a micro-batch"
            " there. A batch is cut along dim 0, so sequences may be cut in time. Lay batches out"
            " as [samples, time, ...] and pass batch_first=True, or transpose in front of the"
            " layer, or set num_microbatches=1.",
            stacklevel=2,
        )

    with ExitStack() as hooks:
        for name, part in layers.named_modules():
            # A hook would have a compiled layer compiled anew.
            if getattr(part, "batch_first", None) is False and part._compiled_call_impl is None:
                hooks.callback(part.register_forward_pre_hook(partial(look, name)).remove)
        yield
