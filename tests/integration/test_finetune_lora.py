"""Adapters in a frozen BERT: each strategy trains what one device does, and saves adapters only."""

from __future__ import annotations

import io
import warnings
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_dist import PipelineStrategy
from lightning_dist.engine.checkpoint.files import load_full
from lightning_dist.engine.tensor_parallel.config import resolve_plan
from lightning_dist.engine.tensor_parallel.plan.discovery import find_plan
from lightning_dist.engine.tensors.dtensor import is_dtensor
from recipes.docstring_data import DocstringDataModule
from recipes.docstrings import Docstring, load_docstrings
from tests.helpers.networks.models import make_trainer
from tests.helpers.networks.tiny_bert import save_tiny_bert
from tests.helpers.processes.workers import WorkerPool
from tests.integration.test_finetune_bert import STRATEGIES, Losses, given

peft = pytest.importorskip("peft", reason="peft, of the extra `lora`, is not installed")

FOUND = {**STRATEGIES, "stages": lambda: PipelineStrategy(num_microbatches=2)}
FIRST = "base_model.model.encoder.layer.0"
# Layers that are cut by output features (query, value, the MLP's first) and by input features.
TARGETS = ("query", "value", "dense")
ADAPTERS = 2 * 5 * 2  # in each of two layers two matrices for each of five projections
TRAINED = ADAPTERS + 2  # the classifier


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_bert(tmp_path_factory.mktemp("bert"))


@pytest.fixture(scope="module")
def docstrings() -> list[Docstring]:
    return load_docstrings()


def build(folder: str, **options: Any) -> Any:
    from recipes.finetune_lora import LoraClassifier

    torch.manual_seed(7)
    given: dict[str, Any] = {"targets": TARGETS, "dropout": 0.0, "learning_rate": 1e-2}
    return LoraClassifier(folder, warmup_steps=0, **given | options).double()


def finetune(
    docstrings: list[Docstring],
    folder: str,
    name: str,
    num_ranks: int,
    batch_size: int,
    steps: int,
    saved: str,
    loaded: str | None,
) -> tuple[list[float], int, int]:
    """Trains; gives the losses, the number of parameters in the optimizer, and of those cut."""
    losses = Losses()
    trainer = make_trainer(
        devices=num_ranks,
        strategy=FOUND[name](),
        max_steps=steps,
        callbacks=[losses],
        barebones=False,
        max_epochs=2,
    )
    with given(docstrings):
        data = DocstringDataModule(folder, batch_size=batch_size, sequence_length=16)
    with redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers' own
        trainer.fit(build(folder), data, ckpt_path=loaded)
        trainer.save_checkpoint(saved)
    (optimizer,) = trainer.optimizers
    trained = [p for group in optimizer.param_groups for p in group["params"]]
    return losses.values, len(trained), sum(map(is_dtensor, trained))


def twice(
    workers: WorkerPool,
    docstrings: list[Docstring],
    folder: str,
    name: str,
    num_ranks: int,
    num_replicas: int,
    directory: Path,
) -> tuple[list[float], Path]:
    """Trains two steps, and two more from their checkpoint; gives all losses, and the last file."""
    losses: list[float] = []
    share, before, saved = 16 // num_replicas, None, directory / "0.ckpt"
    for steps in (2, 4):
        saved = directory / f"{steps}.ckpt"
        arguments = docstrings, folder, name, num_ranks, share, steps, str(saved), before
        results = workers.run(num_ranks, finetune, *arguments)
        parts = torch.tensor([of for of, _, _ in results], dtype=torch.float64)
        losses += parts.mean(dim=0).tolist()
        held = [trained for _, trained, _ in results]
        assert sum(held) == TRAINED if name == "stages" else set(held) == {TRAINED}
        if name == "tp":  # of each adapter one matrix, beside the base's, which is cut as well
            assert {num_cut for _, _, num_cut in results} == {ADAPTERS // 2}
        before = str(saved)
    return losses, saved


@pytest.fixture(scope="module")
def alone(
    workers: WorkerPool,
    docstrings: list[Docstring],
    folder: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[list[float], Path]:
    losses, saved = twice(workers, docstrings, folder, "one", 1, 1, tmp_path_factory.mktemp("one"))
    assert len(set(losses)) == 4
    return losses, saved


@pytest.mark.some("tp-2-1")  # of stages: test_quantised_base.py
@pytest.mark.parametrize(
    ("name", "num_ranks", "num_replicas"),
    [("ddp", 2, 2), ("fsdp", 2, 2), ("tp", 2, 1), ("stages", 2, 1), ("mesh", 4, 2)],
)
def test_two_steps_and_two_resumed_ones_equal_those_of_one_device(
    workers: WorkerPool,
    docstrings: list[Docstring],
    folder: str,
    alone: tuple[list[float], Path],
    name: str,
    num_ranks: int,
    num_replicas: int,
    tmp_path: Path,
) -> None:
    losses, saved = twice(workers, docstrings, folder, name, num_ranks, num_replicas, tmp_path)
    assert losses == pytest.approx(alone[0], abs=1e-12)
    state, expected = load_full(str(saved))["state_dict"], load_full(str(alone[1]))["state_dict"]
    assert len(state) == TRAINED
    for key, value in expected.items():
        torch.testing.assert_close(state[key], value, rtol=0, atol=1e-12)


def test_peft_loads_the_adapters_without_this_package(
    alone: tuple[list[float], Path], folder: str, tmp_path: Path
) -> None:
    from recipes.minilm import load_encoder

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of peft and transformers
        module = build(folder)
        module.load_state_dict(load_full(str(alone[1]))["state_dict"], strict=False)
        module.model.encoder.save_pretrained(tmp_path)
        whole = peft.PeftModel.from_pretrained(load_encoder(folder, 0.0), tmp_path).double()
    tokens = torch.tensor([[2, 5, 6, 3]])
    ours, theirs = (m(input_ids=tokens).last_hidden_state for m in (module.model.encoder, whole))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)  # the file is float32's


def test_adapters_of_another_base_or_other_layers_are_refused(
    alone: tuple[list[float], Path], folder: str, tmp_path: Path
) -> None:
    checkpoint = load_full(str(alone[1]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of peft and transformers
        build(folder).on_load_checkpoint(checkpoint)
        with pytest.raises(ValueError, match="Pass the targets= that they were trained with"):
            build(folder, targets=["key"]).on_load_checkpoint(checkpoint)
        module = build(folder)
    other = {**checkpoint, "lora_base": "another"}
    with pytest.raises(ValueError, match="trained on another base"):
        module.on_load_checkpoint(other)


@pytest.mark.parametrize("options", [{"use_dora": True}, {"lora_bias": True}], ids=str)
def test_layers_with_other_adapters_stay_whole(folder: str, options: dict[str, bool]) -> None:
    plain, adapted = (find_plan(adapt(folder, **given), 2).styles for given in ({}, options))
    assert {name for name in plain if name not in adapted} == {
        name for name in plain if ".attention." in name
    }
    assert any(".attention." in name for name in plain)
    assert any(".intermediate." in name for name in adapted)


def test_a_head_with_adapters_is_not_gathered(folder: str) -> None:
    with pytest.raises(ValueError, match="nn.Linear without adapters"):
        resolve_plan(adapt(folder), {f"{FIRST}.attention.self.query": "colwise_gather"})


def adapt(folder: str, **options: Any) -> Any:
    from recipes.minilm import load_encoder

    config = peft.LoraConfig(r=2, target_modules=["query", "value"], **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of peft and transformers
        return peft.get_peft_model(load_encoder(folder, 0.0), config)
