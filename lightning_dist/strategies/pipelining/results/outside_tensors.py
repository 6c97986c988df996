"""Tensors outside of the pipelined layers, which hooks write on each stage for itself.

A hook that keeps an average of weights, in buffers or frozen parameters, has the values of its own
stage's layers only. So a tensor that one stage alone has written to is that stage's. The next step
may use it, as that of a teacher. So all exchange them before each training batch, if the user has
hooks that may write. Under an asynchronous schedule stages do not meet there: what steps use may
not be written then, and the rest is exchanged when the pipeline is empty.

What several stages have written must be the same: a hook that pairs ``teacher.parameters()`` with
a stage's ``parameters()`` by their order finds another partner on each.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dist.engine.common.device_group import gather_objects
from lightning_dist.engine.common.names import shorten
from lightning_dist.engine.tensors.dtensor import is_dtensor
from lightning_dist.engine.tensors.fingerprints import fingerprint, projection
from lightning_dist.strategies.base.callback_order import is_overridden_by_user
from lightning_dist.strategies.pipelining.results.python_state import mark

_BETWEEN_BATCHES = (
    *("on_fit_start", "on_train_start", "on_train_epoch_start", "on_train_batch_start"),
    *("on_before_zero_grad", "on_before_backward", "on_after_backward", "on_train_batch_end"),
    *("on_before_optimizer_step", "optimizer_step", "optimizer_zero_grad", "lr_scheduler_step"),
    "configure_gradient_clipping",
)
_BETWEEN_EPOCHS = (
    *("on_train_epoch_end", "on_validation_start", "on_validation_epoch_start"),
    *("on_validation_batch_start", "on_validation_batch_end", "on_validation_epoch_end"),
    *("on_validation_end", "on_validation_model_train", "on_sanity_check_end"),
    *("on_save_checkpoint", "on_load_checkpoint"),
)
_NUM_SAMPLED = 1024  # elements of a tensor; an average of weights changes all
_ROUNDING = 1e-6  # of a norm
_BY_NAME = (
    "In a hook, `parameters()` of the model are those of this rank's layers. So do not pair them"
    " with another network's by their order, as `zip(teacher.parameters(), model.parameters())`"
    " does, but by name: `followers = dict(teacher.named_parameters(remove_duplicate=False))`, and"
    " `followers[name].lerp_(p, 0.01)` for `name, p in model.named_parameters()`."
)


class OutsideTensors:
    """The parameters and buffers of the module that no stage has for itself.

    Collective: all stages of a replica must create it.

    Args:
        tensors: The parameters and buffers.
        waits: Whether no batch is in flight between two training batches.

    Attributes:
        buffers: Names of the buffers.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        tensors: Iterable[Tensor],
        stages: dist.ProcessGroup,
        *,
        waits: bool,
    ) -> None:
        self._module = module
        self._stages = stages
        self._waits = waits
        ids = {id(tensor) for tensor in tensors}
        self.buffers = [name for name, buffer in module.named_buffers() if id(buffer) in ids]
        beside = [(name, p) for name, p in module.named_parameters() if id(p) in ids]
        self._beside = dict(beside)
        self._fixed = [n for n, p in beside if not (p.requires_grad or is_dtensor(p))]
        self._names = [*self.buffers, *self._fixed]
        self._seen = self._written(self._names)
        self._sampled = self._samples()
        self._used: set[str] = set()  # in training steps
        self._writes_between_batches = self._writes_between_epochs = False
        if self._names:  # as on all stages, which may have other callbacks
            kinds = (_BETWEEN_BATCHES, _BETWEEN_EPOCHS)
            own = [is_overridden_by_user(hooks, module) for hooks in kinds]
            batches, epochs = zip(*gather_objects(own, stages), strict=True)
            self._writes_between_batches, self._writes_between_epochs = any(batches), any(epochs)
        self._begins = True
        self._notes = [
            module.get_submodule(name.rpartition(".")[0]).register_forward_pre_hook(
                partial(self._note, name)
            )
            for name in (self._fixed if self._writes_between_batches and not waits else ())
        ]

    def close(self) -> None:
        """Removes the hooks."""
        while self._notes:
            self._notes.pop().remove()

    def _note(self, name: str, *_: object) -> None:
        if self._module.trainer.training:
            self._used.add(name)

    def _check_frozen(self) -> None:
        """Checks that no parameter outside of the layers is trained by now.

        Raises:
            ValueError: A hook has thawed one, which belongs to no stage.
        """
        thawed = [name for name, p in self._beside.items() if p.requires_grad]
        if thawed:
            raise ValueError(
                f"{thawed[0]!r} requires a gradient by now, but is outside of the pipelined module,"
                " so it belongs to no stage and would not be trained. Let it require one from the"
                " start of the run, or make it part of that module (`layers='trace:'` cuts the"
                " whole LightningModule), or leave it frozen."
            )

    def begin_batch(self, *, is_empty: bool) -> None:
        """Prepares for a training batch. Collective: all stages of a replica call it.

        Args:
            is_empty: Whether no batch is in flight.

        Raises:
            ValueError: A parameter that belongs to no stage is trained by now, or stages have
                written other values than each other.
        """
        self._check_frozen()
        begins = self._begins or self._module.trainer.fit_loop.batch_idx == 0
        self._begins = False
        writes = self._writes_between_batches or (begins and self._writes_between_epochs)
        if writes and is_empty:
            self._follow()

    @torch.no_grad()
    def merge(self) -> None:
        """Takes what one stage alone has written. Collective: all stages of a replica call it.

        Raises:
            ValueError: Stages have written other values into a frozen parameter than each other,
                or steps have used what other stages' hooks wrote with batches in flight.
        """
        self._begins = True  # after a validation, or an epoch
        if not self._names:
            return
        if self._writes_between_batches and not self._waits:
            self._check_used()
        now = self._written(self._names)
        self._exchange([name for name, mark in now.items() if mark != self._seen.get(name)])

    @torch.no_grad()
    def _follow(self) -> None:
        """Takes what hooks of other stages have written since the last batch.

        It looks at a sample of each tensor's elements; :meth:`merge` looks at all. Collective: all
        stages of a replica call it, with no batch in flight.
        """
        now = self._samples()
        self._exchange([name for name, mark in now.items() if mark != self._sampled.get(name)])

    def _check_used(self) -> None:
        """Checks that no training step has used what hooks of other stages have written meanwhile.

        Collective: all stages of a replica call it, before an exchange.
        """
        now = self._samples()
        own = {name for name, mark in now.items() if mark != self._sampled.get(name)}
        found = gather_objects((own, self._used), self._stages)
        stale = {
            name
            for stage, (_, used) in enumerate(found)
            for other, (written, _) in enumerate(found)
            if other != stage
            for name in used & written
        }
        if stale:
            raise ValueError(
                f"Training steps use {shorten(sorted(stale))}, which hooks of other stages write"
                " after each batch, as those of a teacher that follows. Under an asynchronous"
                " schedule a stage does not wait for them. Use a synchronous one like '1f1b'."
            )

    def _exchange(self, own: Sequence[str]) -> None:
        """Takes what one stage alone has written; each stage names what it has."""
        written = gather_objects(own, self._stages)
        writers = Counter(name for names in written for name in names)
        self._used.clear()
        if not writers:
            return
        self._compare(sorted(n for n in self._fixed if writers[n] > 1), written)
        for index, names in enumerate(written):  # in turns, for all together may be large
            alone = [name for name in names if writers[name] == 1]
            if alone:
                self._take(alone, dist.get_global_rank(self._stages, index))
        names = [name for name in self._names if name in writers]
        self._seen |= self._written(names)
        self._sampled = self._samples()

    def _compare(self, names: Sequence[str], written: Sequence[Sequence[str]]) -> None:
        """Raises `ValueError` where stages have written other values into a parameter."""
        if not names:
            return
        own = [projection(value) for value in self._values(names).values()]
        found = gather_objects(own, self._stages)
        for index, name in enumerate(names):
            writers = [stage for stage, own_names in enumerate(written) if name in own_names]
            products, norms = zip(*(found[stage][index] for stage in writers), strict=True)
            # Machines may round differently.
            if max(products) - min(products) > _ROUNDING * max(norms):
                raise ValueError(
                    f"Hooks have written other values into {name!r} on stages {writers}; their"
                    f" norms are {norms}. {_BY_NAME}"
                )

    def _take(self, names: Sequence[str], source: int) -> None:
        is_own = dist.get_rank() == source
        sent = [self._values(names) if is_own else None]
        dist.broadcast_object_list(sent, src=source, group=self._stages)
        assert sent[0] is not None
        for name, value in () if is_own else sent[0].items():
            tensor = self._tensor(name)
            if tensor is not None and tensor.shape == value.shape:
                tensor.copy_(value)

    def _values(self, names: Sequence[str]) -> dict[str, Tensor]:
        found = {name: self._tensor(name) for name in names}
        return {name: tensor.cpu() for name, tensor in found.items() if tensor is not None}

    def _samples(self) -> dict[str, Any]:
        return self._written(self._names, at_most=_NUM_SAMPLED)

    @torch.no_grad()
    def _written(self, names: Iterable[str], at_most: int | None = None) -> dict[str, Any]:
        """Returns marks of tensors outside of the layers, which change with each write.

        Fingerprints are in them, for torch does not count what is written into ``tensor.data``.
        """
        found = {name: self._tensor(name) for name in names}
        marks = {name: (id(tensor), mark(tensor)) for name, tensor in found.items()}
        dense = {n: t for n, t in found.items() if t is not None and t.layout == torch.strided}
        if at_most is not None:
            dense = {n: t.flatten()[:: -(-t.numel() // at_most) or 1] for n, t in dense.items()}
        prints = [fingerprint(tensor).cpu() for tensor in dense.values()]
        bits = torch.stack(prints).tolist() if prints else []
        return marks | {n: (*marks[n], own) for n, own in zip(dense, bits, strict=True)}

    def _tensor(self, name: str) -> Tensor | None:
        path, _, key = name.rpartition(".")
        tensor = getattr(self._module.get_submodule(path), key, None)
        return tensor if isinstance(tensor, Tensor) else None


def note_pairing(error: BaseException) -> None:
    """Adds advice to torch's error where a hook has paired tensors of other shapes."""
    frames = traceback.extract_tb(error.__traceback__)
    hooks = [f.name for f in frames if f.name.startswith("on_") and hasattr(pl.Callback, f.name)]
    if isinstance(error, RuntimeError) and "must match the size of tensor" in str(error) and hooks:
        error.add_note(f"This was in `{hooks[-1]}`. {_BY_NAME}")
