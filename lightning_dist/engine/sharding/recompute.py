"""Activation checkpointing: activations are freed in the forward and recomputed in the backward.

Memory for time (Chen et al., *Training Deep Nets with Sublinear Memory Cost*, 2016). The module's
own ``forward`` is replaced, so parameters keep their names and FSDP2's gather stays outside.

Inner units are gathered within the recomputed part, and some are whole already in the
recomputation. torch's selective checkpointing numbers all operations, and treats such a difference
as an error. Here it sees only the operations whose results it may keep; a gather has none of these.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts, noop_context_fn
from typing_extensions import override

from lightning_dist.engine.tensors.module_tree import is_composite, original_class, outermost

_MATRIX_PRODUCTS = [
    torch.ops.aten.mm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.convolution.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
]
"""Operations whose results are expensive to compute and small to keep."""


def choose_recomputed(root: nn.Module, names: Collection[str]) -> list[nn.Module]:
    """Chooses the modules to recompute as one, among nested modules.

    To recompute a whole model at the start of the backward saves nothing. So the outermost modules
    are chosen, but inside a module with several modules of one kind, those blocks are chosen. None
    is inside of another.
    """
    chosen: list[nn.Module] = []
    for name in outermost(names):
        inner = [other for other in names if other.startswith(f"{name}.")]
        parts = map(root.get_submodule, outermost(inner))
        kinds = Counter(original_class(part) for part in parts if is_composite(part))
        holds_blocks = max(kinds.values(), default=0) > 1
        chosen += choose_recomputed(root, inner) if holds_blocks else [root.get_submodule(name)]
    return chosen


def checkpoint_activations(modules: Iterable[nn.Module], *, keep_products: bool) -> None:
    """Makes modules recompute their activations in the backward.

    Args:
        modules: Modules to change in place, none inside of another.
        keep_products: Keep the results of matrix products, convolutions and attention, and
            recompute only the rest ("selective").
    """
    contexts = _selective_contexts if keep_products else noop_context_fn
    for module in modules:
        module.forward = _recomputed(module.forward, contexts)


def _recomputed(forward: Callable[..., Any], contexts: Callable[[], Any]) -> Callable[..., Any]:
    @wraps(forward)
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)

    return recomputed


class _ProductsOnly(TorchDispatchMode):
    """Passes only the operations of :data:`_MATRIX_PRODUCTS` to another mode."""

    def __init__(self, mode: TorchDispatchMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._mode = mode

    @override
    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Ignores compiled parts; else torch would run them uncompiled, now and later."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _MATRIX_PRODUCTS:
            return self._mode.__torch_dispatch__(func, types, args, kwargs)
        return func(*args, **kwargs)


def _selective_contexts() -> tuple[_ProductsOnly, _ProductsOnly]:
    keeping, giving_back = create_selective_checkpoint_contexts(_MATRIX_PRODUCTS)
    return _ProductsOnly(keeping), _ProductsOnly(giving_back)
