"""Makes an attention see the width of its own heads.

Most attentions derive the size of a head from the width of their input (``B, T, C = x.size()``,
``C // self.n_head``, ``split(self.n_embd)``). On a rank with some of the heads this is right if the
width is that of the rank's own heads. So the forward is called with a stand-in of that width, and
the projections take the input behind it. A stand-in has no values, so other computations with it
give NaNs, never a wrong number. Without the verification (:mod:`.plan.verify`) no attention gets a
stand-in.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dist.engine.tensors.forward_ast import input_name, reads_width

_STANDS_FOR = "_lightning_dist_stands_for"


def show_own_width(attention: nn.Module, features: int, tp_size: int) -> None:
    """Makes an attention see inputs of width ``features`` as if they were its own heads'."""
    if not reads_width(attention):
        return
    compute, keyword = attention.forward, input_name(attention)

    @wraps(compute)
    def forward(*args: Any, **kwargs: Any) -> Any:
        x = args[0] if args else kwargs.get(keyword)
        if not isinstance(x, Tensor) or x.shape[-1] != features:
            return compute(*args, **kwargs)
        own = x.new_full((), torch.nan).expand(*x.shape[:-1], features // tp_size)
        setattr(own, _STANDS_FOR, x)
        # It can be query, key and value at once.
        others = {name: own if value is x else value for name, value in kwargs.items()}
        return compute(*(own if value is x else value for value in args), **others)

    attention.forward = forward


def stand_in_source(x: Tensor) -> Tensor:
    """Returns the tensor that a stand-in stands for, or else the argument itself."""
    whole: Tensor = getattr(x, _STANDS_FOR, x)
    return whole
