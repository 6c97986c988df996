"""Large tensors that processes of one host share: written once, and mapped by all others.

A batch of images that goes from rank to rank by a socket is copied four times on its way to each,
and most stages never read it. Here a message names a file. If a rank does not touch a tensor's
elements, the tensor costs that rank a mapping. Mappings are private: no other rank sees writes.

A file has no name, so nothing is left behind when a process is killed. Another process opens it by
its number in the process that created it. On another host, in another container, as another user or
without Linux that fails, or a secret at the begin of the file shows that it is another one.
"""

from __future__ import annotations

import os
import pickle
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dist.engine.common.gather import gather_objects
from lightning_dist.engine.comms.packet import PacketLayout, TensorInfo

MOST_UNREAD_FILES = 64  # a process may have 1,024 open files by default
LARGE_BYTES = 1 << 20  # smaller tensors travel in their message: a file costs more
_NAME = "lightning_dist_batch"
_SECRET_BYTES = 16
# Offset after the secret, in the packet's header: whether all ranks have mapped the file.
_MAPPED_BY_ALL = _SECRET_BYTES
_HEADER_STEP_BYTES = 1024  # so that most headers are as long as the one before


@dataclass(frozen=True, slots=True)
class MappedFile:
    """The place where other processes of the host find tensors."""

    process: int  # ID of the process that has written the tensors
    descriptor: int  # number of the open file in that process
    secret: bytes  # first bytes of the file, for another host may have a process of that ID, too
    infos: tuple[TensorInfo, ...]

    def map(self, *, is_last: bool = False) -> list[Tensor]:
        """Maps the tensors, writable, into this process; `OSError` if it cannot open the file."""
        layout = PacketLayout(self.infos)
        path = f"/proc/{self.process}/fd/{self.descriptor}"
        # Checked first, since opening a file of another kind may wait for ever, or have effects.
        if os.readlink(path).split(" ")[0] != f"/memfd:{_NAME}":
            raise OSError(f"{path} is another file.")
        descriptor = os.open(path, os.O_RDWR)
        try:
            if os.pread(descriptor, _SECRET_BYTES, 0) != self.secret:
                raise OSError(f"File {self.descriptor} is of another process.")
            # Private, and by torch: Python's own mapping would keep a file open.
            pages = torch.from_file(path, size=layout.num_bytes, dtype=torch.uint8)
            if is_last:
                os.pwrite(descriptor, b"\1", _MAPPED_BY_ALL)
        finally:
            os.close(descriptor)
        return list(layout.tensors(pages.numpy()))


class TensorFiles:
    """The files that a process has written and that others have not mapped yet.

    Attributes:
        secret: First bytes of all the files.
    """

    def __init__(self) -> None:
        self.secret = secrets.token_bytes(_SECRET_BYTES)
        self._unread: list[int] = []

    def write(self, tensors: Sequence[Tensor]) -> MappedFile | None:
        """Copies CPU tensors into a file; None if the system has none, or no room for it."""
        self._unread = [descriptor for descriptor in self._unread if not _close_read(descriptor)]
        if not hasattr(os, "memfd_create") or len(self._unread) >= MOST_UNREAD_FILES:
            return None
        infos = tuple(TensorInfo.of(tensor) for tensor in tensors)
        try:
            descriptor = os.memfd_create(_NAME)
        except OSError:  # too many open files, say
            return None
        try:
            self._fill(descriptor, PacketLayout(infos), tensors)
        except OSError:
            os.close(descriptor)
            return None
        self._unread.append(descriptor)
        return MappedFile(os.getpid(), descriptor, secret=self.secret, infos=infos)

    def _fill(self, descriptor: int, layout: PacketLayout, tensors: Sequence[Tensor]) -> None:
        os.ftruncate(descriptor, layout.num_bytes)
        # Written, not copied into a mapping, which takes twice the time, since the system clears
        # each page first.
        with os.fdopen(descriptor, "wb", closefd=False) as file:
            file.write(self.secret)
            for tensor, begin in zip(tensors, layout.begins, strict=True):
                file.seek(begin)
                file.write(_bytes_of(tensor))

    def close(self) -> None:
        """Closes the files; a process that has mapped one keeps its tensors."""
        for descriptor in self._unread:
            os.close(descriptor)
        self._unread = []


class MessageFiles:
    """Turns lists of tensors into messages that leave the large ones in files, and back.

    Args:
        mappable: Secrets of the processes whose files the next rank of the chain can map.
        files: Files of this rank.
    """

    def __init__(self, mappable: frozenset[bytes], files: TensorFiles) -> None:
        self._mappable = mappable
        self._files = files

    def put(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Creates a message for the next rank."""
        places: list[int] = []
        if self._files.secret in self._mappable:
            places = [place for place, tensor in enumerate(tensors) if _is_large(tensor)]
        file = self._files.write([tensors[place] for place in places]) if places else None
        if file is None:
            places = []
        left = [tensor for place, tensor in enumerate(tensors) if place not in places]
        header = pickle.dumps(_Absent(file, tuple(places)))
        padded = bytearray(header + bytes(-len(header) % _HEADER_STEP_BYTES))
        return [torch.frombuffer(padded, dtype=torch.uint8), *left]

    def get(self, message: Sequence[Tensor]) -> tuple[list[Tensor], bool]:
        """Returns the tensors of a message, and whether the next rank can use it unchanged."""
        absent: _Absent = pickle.loads(message[0].numpy().tobytes())
        tensors = list(message[1:])
        if absent.file is None:
            return tensors, False
        passes_on = absent.file.secret in self._mappable
        mapped = absent.file.map(is_last=not passes_on)
        for place, tensor in zip(absent.places, mapped, strict=True):
            tensors.insert(place, tensor)
        return tensors, passes_on

    def close(self) -> None:
        """Closes the files."""
        self._files.close()


@dataclass(frozen=True, slots=True)
class _Absent:
    """The header of a message."""

    file: MappedFile | None  # the tensors that are not in the message
    places: tuple[int, ...]  # indices of those tensors among all


def _is_large(tensor: Tensor) -> bool:
    num_bytes = tensor.numel() * tensor.element_size()
    return num_bytes >= LARGE_BYTES and tensor.device.type == "cpu" and not tensor.requires_grad


def find_mappable(files: TensorFiles, group: dist.ProcessGroup) -> frozenset[bytes]:
    """Returns the secrets of the ranks whose files the next rank can map. Collective."""
    probe = files.write([])
    probes: list[MappedFile | None] = gather_objects(probe, group)
    own = torch.tensor([found is not None and _can_map(found) for found in probes])
    of_next = torch.zeros_like(own)
    place = dist.get_rank(group)
    # From rank to rank: gathered, the answers about all ranks would grow with their square.
    told = dist.isend(own, group=group, group_dst=place - 1) if place > 0 else None
    if place + 1 < len(probes):
        dist.recv(of_next, group=group, group_src=place + 1)
    if told is not None:
        told.wait()
    dist.barrier(group)  # all ranks have looked
    files.close()
    pairs = zip(probes, of_next.tolist(), strict=True)
    return frozenset(probe.secret for probe, can_map in pairs if can_map and probe is not None)


def _can_map(file: MappedFile) -> bool:
    try:
        file.map()
    except OSError:
        return False
    return True


def _bytes_of(tensor: Tensor) -> memoryview:
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return plain.view(-1).view(torch.uint8).numpy().data


def _close_read(descriptor: int) -> bool:
    """Closes a file if all ranks have mapped it, and returns whether they have."""
    if os.pread(descriptor, 1, _MAPPED_BY_ALL) != b"\1":
        return False
    os.close(descriptor)
    return True
