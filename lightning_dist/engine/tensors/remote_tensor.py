"""Placeholders for tensors of another rank: shape, dtype and device, without values.

A model's forward does not only compute with a layer's weights: each stage runs a line like
``x.to(self.embed.weight.dtype)``, with or without the embedding. Such a line gets the answer that
the rank with the tensor would give, and may freeze it. Each other operation needs the values and
raises `ValueError`. The exception are ``detach`` and ``data``, for code that only looks, such as a
logger that draws histograms of weights. They return NaNs for the unknown values, never a wrong
number. Writing such a NaN into a tensor, computing with it and other tensors, or a loss of it
raises `ValueError`: a teacher that follows its student by ``teacher.data.add_(student.data)`` would
be lost.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor
from typing_extensions import override

from lightning_dist.engine.tensors.tree import tensors_in


def _getters(*names: str) -> set[Any]:
    return {getattr(Tensor, name).__get__ for name in names}


_OF_THE_SIZES = {
    *(Tensor.__len__, Tensor.dim, Tensor.nelement, Tensor.numel, Tensor.size, Tensor.stride),
    *(torch.numel, *_getters("nbytes", "ndim", "shape")),
}
_OF_THE_KIND = {
    *(Tensor.element_size, Tensor.get_device, Tensor.is_complex, Tensor.is_floating_point),
    *(torch.get_device, torch.is_complex, torch.is_floating_point),
    *_getters("device", "dtype", "is_cpu", "is_cuda", "is_leaf", "is_meta", "itemsize", "layout"),
    *_getters("is_nested", "is_quantized", "is_sparse", "requires_grad"),
}
_MAKE_ONE_LIKE_IT = {
    *(Tensor.new_empty, Tensor.new_full, Tensor.new_ones, Tensor.new_tensor, Tensor.new_zeros),
}
_FREEZE = {Tensor.requires_grad_, Tensor.requires_grad.__set__}  # type: ignore[attr-defined]
_ONLY_LOOK = {Tensor.detach, *_getters("data")}
_READS = ("__index__", "__int__", "__invert__")
_MAKE_ANOTHER_LIKE_IT = {Tensor.to, Tensor.type_as}


class RemoteTensor(Tensor):
    """A tensor with a shape, a dtype and a device, and no values; or of which nothing is known."""

    _sample: Tensor | None  # of the dtype and on the device; None if nothing is known
    _reason: str

    @classmethod
    @override
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = (*args, *kwargs.values())
        if any(isinstance(a, RemoteTensor) and a._sample is None for a in given):
            raise _refusal(given)
        if func in _OF_THE_SIZES:
            return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        if func in _FREEZE:  # as the rank with the tensor does, by the same line
            func(*map(_sample_of, args), **kwargs)
            return args[0]
        asks = func in _OF_THE_KIND or func in _MAKE_ONE_LIKE_IT
        if asks or (func in _MAKE_ANOTHER_LIKE_IT and not isinstance(args[0], RemoteTensor)):
            return func(*map(_sample_of, args), **{n: _sample_of(a) for n, a in kwargs.items()})
        if func in _ONLY_LOOK and args[0].dtype.is_floating_point:
            (seen,) = args
            nans = torch.full(seen.shape, torch.nan, dtype=seen.dtype, device=seen.device)
            unknown = nans.as_subclass(UnknownValues)
            unknown._reason = seen._reason
            return unknown
        raise _refusal(given)

    @override
    def __iter__(self) -> NoReturn:
        raise _refusal(self)

    @override
    def __deepcopy__(self, memo: Any) -> RemoteTensor:
        return self

    @override
    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        if self._sample is None:
            return "RemoteTensor()"
        return f"RemoteTensor({tuple(self.shape)}, {self.dtype}, device={str(self.device)!r})"


def _sample_of(argument: Any) -> Any:
    return argument._sample if isinstance(argument, RemoteTensor) else argument


class UnknownValues(Tensor):
    """NaNs in place of a remote tensor's values, and what is computed of them."""

    _reason: str

    @classmethod
    @override
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = tensors_in((args, kwargs))
        unknown = next(tensor for tensor in given if isinstance(tensor, UnknownValues))
        known = [t for t in given if isinstance(t, Tensor) and not isinstance(t, UnknownValues)]
        is_written = any(not isinstance(t, UnknownValues) for t in _writes_into(func, args))
        if is_written or any(tensor.numel() > 1 for tensor in known):
            raise ValueError(unknown._reason)
        result = super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        for made in tensors_in(result):
            if isinstance(made, UnknownValues):
                made._reason = unknown._reason
        return result


def check_known(value: Tensor) -> None:
    """Checks that a loss was computed of known values.

    Raises:
        ValueError: It was computed of another rank's.
    """
    if isinstance(value, UnknownValues):
        raise ValueError(value._reason)


def _writes_into(func: Any, args: tuple[Any, ...]) -> list[Any]:
    """Returns the tensors that a method of tensors, or an operator, writes into."""
    name = getattr(func, "__name__", "")
    is_operator = name == "__setitem__" or (name.startswith("__i") and name not in _READS)
    in_place = name.endswith("_") and not name.endswith("__")
    return tensors_in(args[0]) if is_operator or in_place else []


def absent(like: Tensor, dtype: torch.dtype, device: torch.device, reason: str) -> Tensor:
    """Creates the placeholder for a tensor of another rank.

    Args:
        like: A tensor of the same shape.
        dtype: Dtype of the remote tensor.
        device: Device that the tensor would be on if this rank had it.
        reason: Error text for a read of the values: which tensor, on which rank, what to do.
    """
    sample = torch.empty(0, dtype=dtype, device=device, requires_grad=like.requires_grad)
    if _has_no_values(sample):
        return torch.empty(like.shape, dtype=dtype, device=device)
    made = torch.empty(like.shape, dtype=dtype, device="meta").as_subclass(RemoteTensor)
    made._sample, made._reason = sample, reason
    return made


def absent_value(reason: str) -> Tensor:
    """Creates the placeholder for a value of another rank; any use raises the reason."""
    empty = torch.empty((), device="meta")
    if _has_no_values(empty):
        return empty
    made = empty.as_subclass(RemoteTensor)
    made._sample, made._reason = None, reason
    return made


def _has_no_values(made: Tensor) -> bool:
    """Whether this is a dry run, whose tensors have a subclass of their own and no values."""
    return type(made) is not Tensor


def _refusal(given: Any) -> ValueError:
    absent_ones = (t for t in tensors_in(given) if isinstance(t, RemoteTensor))
    return ValueError(next(absent_ones)._reason)
