"""What ``self.log`` calls of a step's micro-batches become."""

from __future__ import annotations

from contextlib import suppress
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
from torchmetrics import MeanMetric, MeanSquaredError

from lightning_dist.strategies.pipelining.results.step_log import StepLog


class Logging(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric()


def test_logged_values_are_combined_over_microbatches() -> None:
    module = Logging()
    log = StepLog(module)
    for value, size in ((1.0, 3), (5.0, 1)):
        with log.recording(size):
            module.log("mean", torch.tensor(value), prog_bar=True)
            module.log("sum", value + 0.5, reduce_fx="sum")
            module.log("floating count", value, reduce_fx="sum")
            module.log("max", value, reduce_fx=torch.max)
            module.log("count", torch.tensor(int(value)), reduce_fx=sum)
            module.log("longest", int(value), reduce_fx="MAX")
            module.log("constant", value, batch_size=1)
            module.log("tokens", value, batch_size=torch.tensor(4 - size))
    taken = log.take(4)
    names = ["mean", "sum", "floating count", "max", "count", "longest", "constant", "tokens"]
    assert [call.name for call in taken.calls] == names
    assert taken.values.tolist() == [2.0, 2.5, 6.0, 2.0, 6.0, 5.0, 2.0, 4.0]
    assert [call.batch_size for call in taken.calls[-2:]] == [2, 4]
    assert [call.options["reduce_fx"] for call in taken.calls[2:6]] == ["sum", "max", "sum", "max"]
    assert "log" not in vars(module)
    assert log.take(4).calls == ()


def test_calls_of_one_name_in_a_step_stay_apart() -> None:
    module = Logging()
    log = StepLog(module)
    for value, size in ((1.0, 3), (5.0, 1)):
        with log.recording(size):
            for head in range(size, 0, -1):
                module.log("head", value * head)
    taken = log.take(4)
    assert [call.name for call in taken.calls] == ["head"] * 3
    assert taken.values.tolist() == [(3 * 3.0 + 5.0) / 4, 2.0, 1.0]


def test_the_value_of_a_metric_of_the_step_has_no_graph() -> None:
    module = Logging()
    module.error = MeanSquaredError()
    log = StepLog(module)
    with log.recording(2):
        module.error(torch.ones(2, requires_grad=True), torch.zeros(2))
        module.log("error", module.error)
    assert log.take(2).values.tolist() == [1.0]


def test_values_of_a_device_are_not_read() -> None:
    """Tensors on the meta device have no values: a read would raise."""
    module = Logging().to("meta")
    log = StepLog(module)
    for size in (3, 1):
        with log.recording(size):
            module.log("mean", torch.empty((), device="meta"))
            module.log("halves", torch.empty(1, dtype=torch.bfloat16, device="meta"))
            module.log("count", torch.empty((), dtype=torch.int64, device="meta"), reduce_fx="sum")
            module.log("number", float(size))
    taken = log.take(4)
    assert taken.values.shape == (4,)
    assert taken.values.device.type == "meta"
    logged: dict[str, Any] = {}
    with mock.patch.object(module, "log", lambda name, value, **_: logged.update({name: value})):
        log.replay(taken)
    assert [value.device.type for value in logged.values()] == ["meta"] * 4
    assert [value.dtype for value in logged.values()] == [
        *(torch.float32, torch.bfloat16, torch.float32, torch.float32)
    ]


def test_what_a_step_logs_before_it_is_left_is_dropped() -> None:
    module = Logging()
    log = StepLog(module)
    with suppress(InterruptedError), log.recording(2):
        module.log("before", 1.0)
        raise InterruptedError
    assert log.take(2).calls == ()
    with log.recording(2):
        module.log("whole", 1.0)
    assert [call.name for call in log.take(2).calls] == ["whole"]


@pytest.mark.parametrize("reduce_fx", ["median", torch.median, lambda values: values[0]])
def test_a_reduction_that_lightning_does_not_know_is_refused(reduce_fx: Any) -> None:
    module = Logging()
    with StepLog(module).recording(1), pytest.raises(ValueError, match="only 'mean', 'sum'"):
        module.log("x", 1.0, reduce_fx=reduce_fx)


def test_a_tensor_of_several_elements_is_refused() -> None:
    module = Logging()
    log = StepLog(module)
    with log.recording(1), pytest.raises(ValueError, match=r"shape \(2,\)"):
        module.log("x", torch.ones(2))
    with log.recording(1), pytest.raises(ValueError, match="not an attribute"):
        module.log("x", MeanMetric())
    with log.recording(1), pytest.raises(ValueError, match="sync_dist_group"):
        module.log("x", 1.0, sync_dist_group=object())


@pytest.mark.parametrize("value", [None, "loss", [1.0], {"a": {"b": 1.0}}])
def test_what_lightning_does_not_log_is_refused_in_its_words(value: Any) -> None:
    module = Logging()
    log = StepLog(module)
    with log.recording(1), pytest.raises(ValueError, match="cannot be logged|should be"):
        module.log("x", value)
