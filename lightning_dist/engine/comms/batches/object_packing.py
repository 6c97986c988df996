"""Objects as tensors: the plain tensors of an object, and one tensor with the pickled rest.

A batch is any object that the user's collate function returns. Pickle can rebuild each class, so no
class has to be known here. Only plain tensors are taken out, since their bytes need no pickling.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
from torch import Tensor

_STEP_BYTES = 1024  # so that most objects are as long as the one before, and share its description


def pack(value: Any) -> list[Tensor]:
    """Returns the pickled rest of an object as one tensor, and its plain tensors, not copied."""
    buffer = io.BytesIO()
    pickler = _Pickler(buffer)
    pickler.dump(value)
    buffer.write(bytes(-buffer.tell() % _STEP_BYTES))
    return [torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8), *pickler.tensors]


def unpack(packed: list[Tensor]) -> Any:
    """Turns tensors back into an object, which shares their memory; the inverse of :func:`pack`."""
    rest, *tensors = packed
    return _Unpickler(io.BytesIO(rest.numpy().tobytes()), tensors).load()


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._places: dict[int, int] = {}
        self.tensors: list[Tensor] = []

    def persistent_id(self, obj: Any) -> int | None:
        """Takes a plain tensor out, and returns its index; None for other objects."""
        if type(obj) is not Tensor or not _is_plain(obj):
            return None
        place = self._places.setdefault(id(obj), len(self.tensors))
        if place == len(self.tensors):
            self.tensors.append(obj)
        return place


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensors: list[Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors

    def persistent_load(self, pid: int) -> Tensor:
        """Returns the tensor of an index."""
        return self._tensors[pid]


def _is_plain(tensor: Tensor) -> bool:
    """Returns whether shape, dtype and elements describe a tensor fully."""
    odd = tensor.is_nested or tensor.is_quantized or tensor.is_meta
    return tensor.layout == torch.strided and not odd
