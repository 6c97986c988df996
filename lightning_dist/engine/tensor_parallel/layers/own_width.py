"""Show an attention the width of its own heads.

``B, T, C = x.size()``, ``C // self.n_head``, ``split(self.n_embd)``, ``view(B, T, C)``: most
attentions know the size of a head by the width of their input. On a rank with some of the heads all
of it is right again if that width is the heads' own, and with it the attributes that say it. So the
forward is given a stand-in of that width, and the projections take what it stands for. A stand-in
has no values: whatever else is computed with it is no number, and never a wrong one.

Code that does something else with its input cannot go on with a stand-in, or returns something
else. That is seen before (:mod:`.plan.verify`); without that proof no attention is
shown one.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dist.engine.tensors.forward_ast import input_name, reads_width

_STANDS_FOR = "_lightning_dist_stands_for"


def show_own_width(attention: nn.Module, features: int, tp_size: int) -> None:
    """Makes an attention believe that its input is as wide as its own heads are.

    Args:
        attention: Changed, if its forward asks for the width.
        features: Of all heads together. An input of another width is left as it is.
        tp_size: Tensor-parallel ranks.
    """
    if not reads_width(attention):
        return
    compute, keyword = attention.forward, input_name(attention)

    @wraps(compute)
    def forward(*args: Any, **kwargs: Any) -> Any:
        x = args[0] if args else kwargs.get(keyword)
        if not isinstance(x, Tensor) or x.shape[-1] != features:
            return compute(*args, **kwargs)
        own = _stand_in(x, features // tp_size)
        # It can be query, key and value at once.
        others = {name: own if value is x else value for name, value in kwargs.items()}
        return compute(*(own if value is x else value for value in args), **others)

    attention.forward = forward


def behind(x: Tensor) -> Tensor:
    """Returns the tensor that a stand-in stands for, or else the argument itself.

    Args:
        x: Given to a projection.
    """
    whole: Tensor = getattr(x, _STANDS_FOR, x)
    return whole


def _stand_in(x: Tensor, width: int) -> Tensor:
    own = x.new_full((), torch.nan).expand(*x.shape[:-1], width)
    setattr(own, _STANDS_FOR, x)
    return own
