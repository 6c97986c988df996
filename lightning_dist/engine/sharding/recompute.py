"""Activation checkpointing: activations are freed in the forward and recomputed in the backward.

Memory for time (Chen et al., *Training Deep Nets with Sublinear Memory Cost*, 2016). The module's
own ``forward`` is replaced, so parameters keep their names and FSDP2's gather stays outside.

Inner units are gathered within the recomputed part, and some are whole already in the
recomputation. torch's selective checkpointing numbers all operations, and treats such a difference
as an error. Here it sees only the operations whose results it may keep; a gather has none of these.

torch's checkpoint runs a forward again with the buffers that it finds, and lets it write them a
second time: BatchNorm would count each batch twice. Here they are as in the first run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
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
        module.forward = _recomputed(module, contexts)


def _recomputed(module: nn.Module, contexts: Callable[[], Any]) -> Callable[..., Any]:
    forward = module.forward

    @wraps(forward)
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        # What is compiled as a whole writes its buffers once by itself.
        run = forward if torch.compiler.is_compiling() else _RepeatableForward(module, forward)
        return checkpoint(run, *args, use_reentrant=False, context_fn=contexts, **kwargs)

    return recomputed


class _RepeatableForward:
    """A forward that writes its module's buffers once, however often it runs.

    A forward may read and write running statistics, or the vectors of a spectral norm. When it runs
    again, it finds them as they were ahead of the first time, and leaves them as they are.

    Args:
        module: The module whose buffers, and those of its parts, are kept.
        forward: Its forward.
    """

    def __init__(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        self._module = module
        self._forward = forward
        self._written: _Buffers | None = None  # as they were, of the parts that have written some

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._written is not None:
            with _in_place_of_own(self._written):
                return self._forward(*args, **kwargs)
        noted = [(part, _noted(part)) for part in self._module.modules()]
        result = self._forward(*args, **kwargs)
        self._written = {
            part: {name: copy for name, (_, _, copy) in buffers.items()}
            for part, buffers in noted
            if not _are_as_noted(part, buffers)
        }
        return result


_Buffers = dict[nn.Module, dict[str, Tensor | None]]

_Noted = dict[str, tuple[Tensor | None, int, Tensor | None]]
"""By name, a buffer with its number of writes and a copy of it."""


def _noted(part: nn.Module) -> _Noted:
    return {
        name: (buffer, _count_writes(buffer), None if buffer is None else buffer.detach().clone())
        for name, buffer in part._buffers.items()
    }


def _are_as_noted(part: nn.Module, noted: _Noted) -> bool:
    return part._buffers.keys() == noted.keys() and all(
        part._buffers[name] is buffer and _count_writes(buffer) == count
        for name, (buffer, count, _) in noted.items()
    )


def _count_writes(buffer: Tensor | None) -> int:
    # An inference tensor counts none, and may be written in inference mode only.
    return 0 if buffer is None or buffer.is_inference() else buffer._version


@contextmanager
def _in_place_of_own(buffers: _Buffers) -> Iterator[None]:
    """Gives modules other buffers for a while: copies, which they may write into."""
    own = [(part, dict(part._buffers)) for part in buffers]
    try:
        for part, values in buffers.items():
            part._buffers.clear()
            part._buffers |= {n: None if v is None else v.clone() for n, v in values.items()}
        yield
    finally:
        for part, values in own:
            part._buffers.clear()
            part._buffers |= values


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
