"""The function mode that makes deferred tensors look like CPU tensors.

The recorder sees operations, but ``nn.init.trunc_normal_`` and others do nothing on a tensor whose
device is meta, so ``device`` is the CPU. ``torch.tensor([1.0], device="meta")`` drops its data, so
tensors from data, and results of functions that are not among the factories here, are made at once.
``numpy``, ``tolist`` and printing read the bytes; they get the bytes of a copy.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from lightning_dist.engine.sharding.deferred_init.recorder import CPU, FIX, META, Recorder, on_meta
from lightning_dist.engine.tensors.tree import map_tensors

# Make tensors from sizes alone.
_FACTORIES = frozenset(
    {
        torch.arange,
        torch.empty,
        torch.empty_permuted,
        torch.empty_strided,
        torch.eye,
        torch.full,
        torch.linspace,
        torch.logspace,
        torch.ones,
        torch.rand,
        torch.randint,
        torch.randn,
        torch.randperm,
        torch.tril_indices,
        torch.triu_indices,
        torch.zeros,
    }
)
# Make tensors from data, in which there may be tensors.
_FROM_DATA = frozenset({torch.tensor, torch.as_tensor, torch.asarray})
# Show values without an operation.
_READERS = frozenset(
    {Tensor.numpy, Tensor.__array__, Tensor.tolist, Tensor.__format__, Tensor.__repr__}
)
# Hand out the memory itself.
_NEED_MEMORY = frozenset({Tensor.data_ptr, Tensor.share_memory_, Tensor.pin_memory})
_ANSWERS = {
    Tensor.device.__get__: CPU,
    Tensor.is_cpu.__get__: True,  # type: ignore[attr-defined]  # annotated as a bool
    Tensor.is_meta.__get__: False,  # type: ignore[attr-defined]
}


class FakeCPUMode(TorchFunctionMode):
    """Makes deferred tensors look like CPU tensors, while the recorder is active, too."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    @override
    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if self._recorder.aside:
            return func(*args, **kwargs)
        if args and isinstance(args[0], Tensor) and args[0].is_meta:
            if self._recorder.tape.knows(args[0]):
                return self._call_on_deferred(func, args, kwargs)
            return self._call_on_foreign(func, args, kwargs)
        if func in _FROM_DATA:
            with self._recorder.set_aside():
                args = tuple(map_tensors(self._recorder.value, args))
        # `torch.load` makes an empty tensor first, and then sets its real storage.
        is_bare = func is torch.empty and args == ((0,),)
        out = kwargs.get("out")
        if func in _FACTORIES and not is_bare and (out is None or out.is_meta):
            device = _device(kwargs.get("device")) or torch.get_default_device()
            if device == META:
                with self._recorder.set_aside():
                    return func(*args, **kwargs)
            if device.type == "cpu":
                kwargs["device"] = META
        return func(*args, **kwargs)

    def _call_on_deferred(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func in _ANSWERS:
            return _ANSWERS[func]
        if func in _NEED_MEMORY:
            raise ValueError(f"`Tensor.{func.__name__}` needs memory, which is deferred. {FIX}")
        if func in _READERS:
            return self._read(func, args, kwargs)
        if func is Tensor.cpu:
            return args[0]
        if func is Tensor.new_tensor:
            return func(torch.empty(0, dtype=args[0].dtype, device=CPU), *args[1:], **kwargs)
        if func is Tensor.to:  # where nothing changes, the result is the tensor itself
            args = (args[0], *(META if _device(arg) == CPU else arg for arg in on_meta(args[1:])))
        device = _device(kwargs.get("device"))
        if device == META:
            with self._recorder.set_aside():
                return func(*args, **kwargs)
        return func(*args, **({**kwargs, "device": META} if device == CPU else kwargs))

    def _call_on_foreign(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # The constructor itself made the tensor on the meta device.
        with self._recorder.set_aside():
            if func is not torch.empty_like or _device(kwargs.get("device")) != CPU:
                return func(*args, **kwargs)
            like = func(*args, **{**kwargs, "device": META})
        # `Module.to_empty` after `skip_init`
        return torch.empty_strided(like.size(), like.stride(), dtype=like.dtype, device=META)

    def _read(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self._recorder.set_aside():
            read = func(self._recorder.value(args[0]), *args[1:], **kwargs)
        if isinstance(read, np.ndarray):
            read.flags.writeable = False  # a write to the copy would be lost
        return read


def _device(value: Any) -> torch.device | None:
    if not isinstance(value, str | torch.device):
        return None
    device = torch.device(value)
    return CPU if device.type == "cpu" else device
