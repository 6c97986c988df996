"""The user's LightningModule: ordinary steps around a model that a case names."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics.classification import MulticlassAccuracy

from tests.differential.case import ROUGH_PRECISIONS, Case
from tests.differential.dials.data import inputs_and_targets
from tests.differential.dials.layer_hooks import LAYER_HOOKS
from tests.differential.dials.models import (
    CLASSES,
    MODELS,
    OF_SHARED_PARAMETERS,
    OF_TOKENS,
    PARAMETER_HOOKS,
    TOKENS,
    logits_of,
)
from tests.differential.dials.optimizers import NOT_DECAYED, configure
from tests.differential.dials.strategies import STRATEGIES

OF_WHOLE_BATCHES = ("sum", "max", "min", "callable")
"""Logs of means over a batch that are reduced over batches by something other than a mean.

Over replicas, Lightning reduces by the same function, so only a run with one replica equals one
device.
"""
OF_OUTPUTS = ("epoch_end",)
"""Logs of what ``on_train_batch_end`` gets, which asynchronous stages know some batches later."""
OF_PIECES = ("size_one",)
"""Logs whose size is that of a sample: where each micro-batch has one, it may be their number."""
KEEPS = ("samples", "losses", "buffer", "teacher")
"""What steps and hooks keep in the module: numbers, tensors in a list, a buffer, other weights."""
OF_STAGES = ("norms", "by_parameter")
"""Logs of what each stage has a part of."""
OF_WHOLE_STEPS = ("gradients",)
"""Logs of what a hook computes of gradients that are those of all ranks."""
LOGS = (
    "loss",
    "step_only",
    "batch_size",
    "fixed_batch_size",
    "size_one",
    "metric",
    "before",
    "dict",
    "integer",
    "count",
    "batch_end",
    "epoch_end",
    "rate",
    *OF_WHOLE_BATCHES,
    *OF_STAGES,
    *OF_WHOLE_STEPS,
)


class Task(L.LightningModule):
    """Trains a model, and logs what the case names.

    Args:
        case: Names everything.
    """

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        self.loss_of = MODELS[case.model][1]
        self.model: Any = None
        if not case.built_late:
            self._build()
        self.strict_loading = not case.saves_part
        self.automatic_optimization = not case.is_manual
        self.lr: float | None = None
        num_classes = TOKENS if case.model in OF_TOKENS else CLASSES
        self.register_buffer("class_weights", torch.linspace(0.5, 2.0, num_classes), False)
        self.accuracy = MulticlassAccuracy(num_classes, average="micro")
        self.val_accuracy = MulticlassAccuracy(num_classes, average="macro")
        self.outputs: list[float] = []
        self.blocks: list[int] = []
        self.val_logits: list[Tensor] = []
        self.samples = 0
        self.losses: list[Tensor] = []
        self.register_buffer("total", torch.zeros((), dtype=torch.float64))
        self.num_replicas = STRATEGIES[case.strategy].replicas

    @property
    def has_replicas(self) -> bool:
        """Whether others train on other samples."""
        return self.num_replicas > 1

    def _build(self) -> None:
        self.model = MODELS[self.case.model][0]()
        for parameter in self.model.parameters():
            setattr(parameter, NOT_DECAYED, parameter.ndim <= 1)
        for name in self.case.parameter_hooks:
            PARAMETER_HOOKS[name](self.model)
        if "teacher" in self.case.keeps:
            self.teacher = copy.deepcopy(self.model).requires_grad_(False)
        for name in self.case.layer_hooks:
            LAYER_HOOKS[name](self.model)

    def configure_model(self) -> None:
        if self.model is None:
            entry = STRATEGIES[self.case.strategy]
            # Shards are filled with the CPU's numbers, where one device would draw its own.
            is_deferred = entry.is_sharded or entry.is_spread
            with torch.device("cpu") if is_deferred else nullcontext():
                self._build()
            if self.case.precision == "double":
                self.double()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.case.saves_part:
            for name in [n for n in checkpoint["state_dict"] if n.startswith("model.0.")]:
                del checkpoint["state_dict"][name]

    @property
    def backbone(self) -> nn.Module:
        """What is trained later, if a callback wants that."""
        part: nn.Module = self.model[:3]
        return part

    def _logs(self, name: str) -> bool:
        return name in self.case.logs

    def _log(self, name: str, value: Any, **options: Any) -> None:
        if isinstance(value, float):  # Lightning would round it to 32 bits
            value = torch.tensor(value, dtype=torch.float64)
        self.log(name, value, **{"sync_dist": True, **options})

    # --- steps -----------------------------------------------------------------------------------

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = inputs_and_targets(batch)
        if self._logs("before"):
            self._log("before", x.double().mean(), on_step=True, on_epoch=True)
        output = self.model(x)
        if self.case.returns == "weight":
            loss = F.cross_entropy(logits_of(output), y, self.class_weights)
            return {"loss": loss, "weight": self.class_weights[y].sum()}
        loss = self.loss_of(self.model, output, y) * self._factor(batch_idx)
        self._log_step(loss, logits_of(output), y)
        self._keep(loss.detach().double() * len(y), len(y))
        if self.case.is_manual:
            self._step_by_hand(loss, batch_idx)
        if self.case.returns == "dict":
            return {"loss": loss, "twice": 2 * loss.detach()}
        return loss

    def _factor(self, batch_idx: int) -> float:
        counts = {
            "global_step": self.global_step,
            "epoch": self.current_epoch,
            "batch_idx": batch_idx,
        }
        return 1.0 / (1.0 + counts.get(self.case.loss_depends_on or "", 0))

    def _step_by_hand(self, loss: Tensor, batch_idx: int) -> None:
        """Steps the first optimizer for each batch, and a second one for every two."""
        optimizers: Any = self.optimizers()
        self.manual_backward(loss)
        for optimizer in optimizers if self.case.stepping == "two_manual" else [optimizers]:
            if optimizer is optimizers or optimizer is optimizers[0] or batch_idx % 2 == 1:
                self.clip_gradients(optimizer, *self._clip_by_hand())
                optimizer.step()
                optimizer.zero_grad()

    def _clip_by_hand(self) -> tuple[float | None, str | None]:
        is_by_hand = self.case.clip is not None and self.case.clip[0] == "by_hand"
        return (self.case.clip[1], "value") if is_by_hand else (None, None)  # type: ignore[index]

    def _log_step(self, loss: Tensor, logits: Tensor, y: Tensor) -> None:
        mean = logits.detach().mean()
        per_epoch = {"on_step": False, "on_epoch": True}
        each = {"on_step": True, "on_epoch": True}
        if self._logs("loss") or self.case.scheduler == "plateau_step":
            self._log("train_loss", loss, prog_bar=True, **each)
        if self._logs("step_only"):
            self._log("step_only", mean, on_step=True, on_epoch=False)
        if self._logs("batch_size"):
            self._log("by_size", loss, batch_size=len(y), **per_epoch)
        if self._logs("fixed_batch_size"):
            self._log("by_batch", loss, batch_size=self.case.batch_size, **per_epoch)
        if self._logs("size_one"):
            self._log("by_one", loss, batch_size=1, **per_epoch)
        if self._logs("metric"):
            self.accuracy(logits.detach(), y)
            # A replica's metric shows its own samples before the epoch ends.
            self.log("train_accuracy", self.accuracy, on_step=not self.has_replicas, on_epoch=True)
        if self._logs("dict"):
            self.log_dict({"mean": mean, "double": 2 * mean}, sync_dist=True, **each)
        if self._logs("integer"):
            self._log("five", torch.tensor(5), **each)
        if self._logs("count"):
            self._log("correct", (logits.argmax(-1) == y).sum(), reduce_fx="sum", **each)
        for name in ("sum", "max", "min"):
            if self._logs(name):
                self._log(name, mean, reduce_fx=name, **each)
        if self._logs("callable"):
            self._log("highest", mean, reduce_fx=torch.max, **each)

    def _keep(self, loss: Tensor, num_samples: int) -> None:
        if "samples" in self.case.keeps:
            self.samples += num_samples
        if "losses" in self.case.keeps:
            self.losses.append(loss)
        if "buffer" in self.case.keeps:
            self.total += loss

    def _log_kept(self) -> None:
        kept: dict[str, Any] = {}
        if "samples" in self.case.keeps:
            kept["samples"] = float(self.samples)
        if "losses" in self.case.keeps and self.losses:
            kept["losses"] = torch.stack(self.losses).sum()
        if "buffer" in self.case.keeps:
            kept["total"] = self.total.clone()
        for name, value in kept.items():  # a mean over all ranks, also of stages, which have one
            self._log(f"kept/{name}", value * self._num_shares())
        self.losses.clear()

    def _num_shares(self) -> int:
        return self.num_replicas if self.trainer.world_size > 1 else 1

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        x, y = inputs_and_targets(batch)
        output = self.model(x)
        self._log("val_loss", self.loss_of(self.model, output, y))
        if "teacher" in self.case.keeps:
            self._log("teacher_loss", self.loss_of(self.teacher, self.teacher(x), y))
        if self.case.val_outputs:
            self.val_logits.append(logits_of(output))
        # A metric is that of one loader, and rounding decides what class a sample has.
        if dataloader_idx > 0 or self.case.precision in ROUGH_PRECISIONS:
            return
        self.val_accuracy(logits_of(output), y)
        self.log("val_accuracy", self.val_accuracy)

    def on_validation_epoch_end(self) -> None:
        if self.case.val_outputs:
            self._log("val_spread", torch.cat(self.val_logits).double().square().mean())
            self.val_logits.clear()

    def test_step(self, batch: Any, batch_idx: int) -> None:
        x, y = inputs_and_targets(batch)
        self._log("test_loss", self.loss_of(self.model, self.model(x), y), on_step=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return logits_of(self.model(inputs_and_targets(batch)[0]))

    # --- hooks -----------------------------------------------------------------------------------

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.outputs.append(float(outputs["loss"]))
        self.blocks.append(sys.getallocatedblocks())
        if self._logs("batch_end"):
            self._log("batch_end", float(batch_idx + 1), on_step=True, on_epoch=True)
        if self._logs("rate"):
            optimizer = self.optimizers()
            self._log("rate", optimizer.param_groups[0]["lr"], on_step=True)  # type: ignore[union-attr]

        if "teacher" in self.case.keeps:
            self._follow()

    @torch.no_grad()
    def _follow(self) -> None:
        followers = dict(self.teacher.named_parameters(remove_duplicate=False))
        for name, parameter in self.model.named_parameters():
            followers[name].data.lerp_(parameter.data, 0.25)

    def on_train_epoch_end(self) -> None:
        self._log_kept()
        if self._logs("epoch_end"):
            self._log("mean_output", sum(self.outputs) / len(self.outputs))

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        if self._logs("gradients"):
            for name, parameter in self.model.named_parameters():
                if parameter.grad is not None:
                    self._log(f"gradient/{name}", parameter.grad.norm())
        named = {n: p.grad for n, p in self.named_parameters() if p.grad is not None}
        squares = {name: float(gradient.square().sum()) for name, gradient in named.items()}
        if self.case.model in OF_SHARED_PARAMETERS:  # each stage that has one would count it
            return
        if self._logs("norms"):
            total = sum(squares.values())
            self._log("square", total, reduce_fx="sum", on_step=False, on_epoch=True)
        if self._logs("by_parameter"):
            for name, square in squares.items():
                self._log(f"square/{name}", square)

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        if self.case.clip is not None and self.case.clip[0] == "by_hand":
            gradient_clip_val, gradient_clip_algorithm = self._clip_by_hand()
        self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        if self.case.stepping == "own_step":
            optimizer: Any = self.optimizers()
            for group in optimizer.param_groups:
                group["lr"] = 0.01 * min(1.0, (self.trainer.global_step + 1) / 4)
        super().optimizer_step(*args, **kwargs)

    def configure_optimizers(self) -> Any:
        return configure(self.model, self.case, self.lr)


def make_task(case: Case, kind: Callable[[Case], Task] = Task, seed: int = 7) -> Task:
    """Builds the same module in each process."""
    torch.manual_seed(seed)
    task = kind(case)
    return task.double() if case.precision == "double" else task
