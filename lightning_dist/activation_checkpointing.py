"""Forget activations in the forward and compute them again in the backward.

Memory for time (Chen et al., *Training Deep Nets with Sublinear Memory Cost*, 2016). The module's
own ``forward`` is replaced, not the module, so that no name of a parameter changes and what hooks
into its call (FSDP2's gathering) stays outside of what is computed twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial, wraps
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts, noop_context_fn

_MATRIX_PRODUCTS = [
    torch.ops.aten.mm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.convolution.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
]
"""What is dear to compute and small to keep."""


def checkpoint_activations(modules: Iterable[nn.Module], *, keep_products: bool) -> None:
    """Makes modules compute their activations again in the backward.

    Args:
        modules: Changed in place; none inside of another.
        keep_products: Keep the results of matrix products, convolutions and attention, and compute
            only the rest again ("selective").
    """
    contexts = (
        partial(create_selective_checkpoint_contexts, _MATRIX_PRODUCTS)
        if keep_products
        else noop_context_fn
    )
    for module in modules:
        module.forward = _recomputed(module.forward, contexts)


def _recomputed(forward: Callable[..., Any], contexts: Callable[[], Any]) -> Callable[..., Any]:
    @wraps(forward)
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)

    return recomputed
