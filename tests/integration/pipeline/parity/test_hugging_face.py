"""Models of transformers, cut at their blocks, give what they give on a single device.

Transformers is no dependency of the package, only of its tests.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_dist import MeshStrategy, PipelineStrategy
from lightning_dist.engine.splitting.config import PipelineConfig
from lightning_dist.engine.tensors.dtensor import whole
from lightning_dist.strategies.base.saving.part_warning import without_warning
from tests.helpers.block_parity import largest_difference
from tests.helpers.networks.hugging_face import MODELS, build, build_untied
from tests.helpers.networks.models import make_optimizer, make_trainer, state_of
from tests.helpers.processes.workers import WorkerPool

PAGE = Path(__file__).parents[4] / "docs" / "hugging_face.md"
TOLERANCE = 1e-11
SHARES, T5_BLOCKS = "T5ForConditionalGeneration", "model.encoder.block"


class Samples(torch.utils.data.Dataset):
    """Tokens with padding, as a tokenizer would give them."""

    def __init__(self, count: int) -> None:
        self.tokens = torch.randint(1, 96, (count, 12), generator=torch.Generator().manual_seed(2))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        mask = torch.ones(12, dtype=torch.long)
        mask[12 - index % 3 :] = 0
        return {"input_ids": self.tokens[index], "attention_mask": mask}


def loader(count: int = 20) -> DataLoader:
    return DataLoader(Samples(count), batch_size=8)


class Causal(L.LightningModule):
    """What a user of transformers would write."""

    def __init__(self, name: str = "LlamaForCausalLM") -> None:
        super().__init__()
        self.model = build_untied(name, 4)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.model(**batch, labels=batch["input_ids"]).loss
        self.log("train_loss", loss, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        logits = self.model(**batch).logits
        wanted = batch["input_ids"][:, 1:]
        self.log("val_loss", F.cross_entropy(logits[:, :-1].flatten(0, 1), wanted.flatten()))

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.model(**batch)

    def configure_optimizers(self) -> Any:
        return make_optimizer("adamw", self.parameters())


@pytest.fixture(autouse=True)
def _in_double() -> Iterator[None]:
    with in_double():
        yield


def in_double() -> Any:
    # Some norms compute in float32, whatever the model's dtype.
    return patch.object(torch.Tensor, "float", torch.Tensor.double)


def fit(
    strategy: Any, devices: int, epochs: int, resume: str | None = None, save: str | None = None
) -> Any:
    """Trains, validates and predicts; gives all that can be compared."""
    with in_double():
        module = Causal()
        trainer = make_trainer(devices=devices, strategy=strategy, max_epochs=epochs)
        trainer.fit(module, loader(), loader(13), ckpt_path=resume, weights_only=True)
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        if save is not None:
            trainer.save_checkpoint(save)
        state = state_of(module)
        predictions = trainer.predict(module, loader(5))
        return state, metrics, [(type(p).__name__, p.logits) for p in predictions]


def fit_stages(options: dict[str, Any], *arguments: Any) -> Any:
    return fit(PipelineStrategy(**options), 2, *arguments)


def assert_equal(ranks: list[Any], expected: Any) -> None:
    states = {name: value for state, *_ in ranks for name, value in state.items()}
    torch.testing.assert_close(states, expected[0], rtol=0, atol=TOLERANCE)
    for _, metrics, predictions in ranks:
        assert metrics == pytest.approx(expected[1], abs=TOLERANCE)
        assert [kind for kind, _ in predictions] == ["CausalLMOutputWithPast"]
        torch.testing.assert_close(predictions[0][1], expected[2][0][1], rtol=0, atol=TOLERANCE)


def test_trains_validates_predicts_and_resumes_anywhere(
    workers: WorkerPool, tmp_path: Path
) -> None:
    once, twice = fit("auto", 1, 1), fit("auto", 1, 2)
    path = str(tmp_path / "v_placement.ckpt")
    v_placement = {"schedule": "zbv", "num_microbatches": 2, "save_full": True}
    assert_equal(workers.run(2, fit_stages, v_placement, 1, None, path), once)
    assert_equal([fit("auto", 1, 2, path)], twice)
    assert_equal(workers.run(2, fit_stages, {"partition": [1, 3]}, 2, path), twice)


def run_block(block: str) -> int:
    import transformers

    trainers = []

    def on_two(devices: int, strategy: PipelineStrategy) -> L.Trainer:
        trainers.append(make_trainer(devices=2, strategy=strategy))
        return trainers[0]

    names: dict[str, Any] = {
        "AutoModelForCausalLM": transformers.AutoModelForCausalLM,
        "L": SimpleNamespace(LightningModule=L.LightningModule, Trainer=on_two),
        "PipelineStrategy": PipelineStrategy,
        "config": build_untied("LlamaForCausalLM", 4).config,
        "datamodule": DataLoader([{**s, "labels": s["input_ids"]} for s in Samples(16)], 8),
        "torch": torch,
    }
    exec(block, names)
    return trainers[0].global_step


def test_the_first_block_of_the_page_trains(workers: WorkerPool) -> None:
    block = re.findall(r"```python\n(.+?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)[0]
    assert workers.run(2, run_block, block) == [2, 2]


class Sharing(L.LightningModule):
    """A model whose head is its embedding."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.model = build(name, **({"num_layers": 4} if name == SHARES else {}))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return loss_of(self.model, batch)

    def configure_optimizers(self) -> Any:
        return make_optimizer("sgd", self.parameters())


def fit_sharing(name: str, options: dict[str, Any] | None) -> dict[str, Tensor]:
    with in_double():
        module = Sharing(name)
        strategy = "auto" if options is None else PipelineStrategy(**options)
        trainer = make_trainer(devices=1 if options is None else 2, strategy=strategy)
        trainer.fit(module, loader())
        with without_warning(module):
            state = module.state_dict()
        return {name: value.detach().clone() for name, value in state.items()}


@pytest.mark.some("*-1f1b", "T5ForConditionalGeneration-model.encoder.block-zbv")
@pytest.mark.parametrize(
    ("name", "layers", "schedule"),
    [
        ("GemmaForCausalLM", "auto", "1f1b"),
        (SHARES, T5_BLOCKS, "1f1b"),
        (SHARES, T5_BLOCKS, "zb_h1"),
        (SHARES, T5_BLOCKS, "zbv"),
    ],
)
def test_an_embedding_on_two_stages_is_trained_as_one(
    workers: WorkerPool, name: str, layers: str, schedule: str
) -> None:
    options = {"schedule": schedule, "num_microbatches": 2, "layers": layers}
    expected = fit_sharing(name, None)
    states = workers.run(2, fit_sharing, name, options)
    assert states[0].keys() | states[1].keys() == expected.keys()
    for state in states:
        wanted = {name: expected[name] for name in state}
        torch.testing.assert_close(state, wanted, rtol=0, atol=TOLERANCE)


def fit_sharing_on_mesh(name: str, sizes: dict[str, Any], layers: str) -> dict[str, Tensor]:
    with in_double(), warnings.catch_warnings():
        # T5's blocks return views, which nobody writes to.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
        module = Sharing(name)
        pipeline = PipelineConfig(num_microbatches=2, layers=layers)
        strategy = MeshStrategy(pp=2, pipeline=pipeline, **sizes)
        make_trainer(devices=4, strategy=strategy).fit(module, loader())
        every = module.named_parameters(remove_duplicate=False)
        return {name: whole(p.detach()).clone() for name, p in every}


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "sizes", "layers"),
    [
        ("GemmaForCausalLM", {"dp_shard": 1, "tp": 2}, "auto"),
        (SHARES, {"dp_shard": 2}, T5_BLOCKS),
    ],
)
def test_an_embedding_on_two_stages_of_a_mesh_is_trained_as_one(
    workers: WorkerPool, name: str, sizes: dict[str, Any], layers: str
) -> None:
    expected = fit_sharing(name, None)
    states = workers.run(4, fit_sharing_on_mesh, name, sizes, layers)
    assert {name for state in states for name in state} == expected.keys()
    for state in states:
        wanted = {name: expected[name] for name in state}
        torch.testing.assert_close(state, wanted, rtol=0, atol=TOLERANCE)


def fit_mesh(sizes: dict[str, Any], devices: int, *arguments: Any) -> Any:
    return fit(MeshStrategy(pp=2, **sizes), devices, *arguments)


@pytest.mark.long
@pytest.mark.parametrize("sizes", [{"tp": 2}, {"dp_shard": 2}], ids=str)
def test_stages_of_a_mesh_do_the_same(workers: WorkerPool, sizes: dict[str, Any]) -> None:
    assert_equal(workers.run(4, fit_mesh, sizes, 4, 1), fit("auto", 1, 1))


@pytest.mark.long
def test_a_dry_run_has_stages_too() -> None:
    report = MeshStrategy(pp=2).dry_run(Causal(), world_size=2, sample_batch=next(iter(loader())))
    # Hidden states alone travel: of 8 samples, 12 tokens, 32 numbers of 8 bytes.
    (sent,) = report.kinds[0].traffic
    assert sent.num_bytes == 8 * 12 * 32 * 8


def train_stale(is_late: Callable[[str], bool]) -> dict[str, Tensor]:
    """Trains two epochs on weights of which some are a version older; validation catches up."""
    module = Causal()
    model = module.model
    optimizer = make_optimizer("adamw", module.parameters())
    for _ in range(2):
        before = now = state_of(model)
        for batch in loader():
            mixed = {n: (before if is_late(n) else now)[n].clone().requires_grad_() for n in now}
            inputs = {**batch, "labels": batch["input_ids"]}
            loss = torch.func.functional_call(model, mixed, (), inputs).loss
            gradients = torch.autograd.grad(loss, list(mixed.values()))
            for name, gradient in zip(mixed, gradients, strict=True):
                model.get_parameter(name).grad = gradient
            optimizer.step()
            before, now = now, state_of(model)
    return state_of(module)


def is_of_first_half(name: str) -> bool:
    return name.startswith(("model.embed_tokens", "model.layers.0", "model.layers.1"))


@pytest.mark.some("pipedream-*")
@pytest.mark.parametrize(
    ("schedule", "is_late"), [("pipedream", is_of_first_half), ("pipedream_2bw", lambda _: True)]
)
def test_stashes_the_weights_of_each_batch(
    workers: WorkerPool, schedule: str, is_late: Callable[[str], bool]
) -> None:
    ranks = workers.run(2, fit_stages, {"schedule": schedule, "partition": [2, 2]}, 2)
    actual = {name: value for state, *_ in ranks for name, value in state.items()}
    torch.testing.assert_close(actual, train_stale(is_late), rtol=0, atol=TOLERANCE)


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    if "Conditional" in type(model).__name__:
        return model(input_ids=batch["input_ids"], labels=batch["input_ids"]).loss
    return model(**batch, labels=batch["input_ids"]).loss


@pytest.mark.some("Falcon*", "GPT2*", "Gemma3*", "Llama*", "Roberta*")
@pytest.mark.parametrize("name", [name for name in MODELS if name != SHARES])
def test_four_stages_of_an_architecture_learn_what_it_learns_alone(name: str) -> None:
    config = PipelineConfig("zbv", 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers' own
        model = build_untied(name, 4)
        batches = list(DataLoader(Samples(8), batch_size=4))
        assert largest_difference(model, batches, loss_of, config) < TOLERANCE


def test_images_are_classified_as_alone() -> None:
    # On each stage this model asks its first layer's weights for their data type.
    import transformers

    sizes = {"hidden_size": 16, "intermediate_size": 24, "image_size": 8, "patch_size": 4}
    config = transformers.ViTConfig(num_hidden_layers=4, num_attention_heads=4, **sizes)
    torch.manual_seed(1)
    model = transformers.ViTForImageClassification(config).double()
    pixels = torch.randn(2, 4, 3, 8, 8, dtype=torch.float64)
    batches = [{"pixel_values": images, "labels": torch.tensor([0, 1, 1, 0])} for images in pixels]

    def step(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return model(**batch).loss

    assert largest_difference(model, batches, step, PipelineConfig("zbv", 2)) < TOLERANCE
