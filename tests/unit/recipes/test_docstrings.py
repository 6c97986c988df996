from __future__ import annotations

import sysconfig
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from recipes import docstring_data
from recipes.docstring_data import DocstringDataModule, collate
from recipes.docstrings import AREAS, Docstring, load_docstrings, split_docstrings
from tests.helpers.networks.tiny_bert import save_tiny_bert


@pytest.fixture(scope="module")
def docstrings() -> list[Docstring]:
    return load_docstrings()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_bert(tmp_path_factory.mktemp("bert"))


def test_the_docstrings(docstrings: list[Docstring]) -> None:
    assert 1200 < len(docstrings) < 3000
    assert len({docstring.text for docstring in docstrings}) == len(docstrings)
    shares = Counter(docstring.area for docstring in docstrings)
    assert set(shares) == set(range(len(AREAS)))
    assert min(shares.values()) > 0.1 * len(docstrings)
    text = "Create a queue object with a given maximum size."
    (found,) = (d for d in docstrings if d.text == text)
    assert (found.module, list(AREAS)[found.area]) == ("queue", "concurrency")
    assert "asyncio.locks" in {docstring.module for docstring in docstrings}


@pytest.mark.parametrize("seed", range(5))
def test_no_module_and_no_text_is_in_two_parts(docstrings: list[Docstring], seed: int) -> None:
    parts = split_docstrings(docstrings, seed)
    assert Counter(d for part in parts for d in part) == Counter(docstrings)
    modules = [{docstring.module for docstring in part} for part in parts]
    texts = [{docstring.text for docstring in part} for part in parts]
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert not modules[one] & modules[other]
        assert not texts[one] & texts[other]


@pytest.mark.parametrize("seed", range(5))
def test_the_parts_have_about_their_shares_of_each_area(
    docstrings: list[Docstring], seed: int
) -> None:
    whole = Counter(docstring.area for docstring in docstrings)
    _, val, test = (Counter(d.area for d in part) for part in split_docstrings(docstrings, seed))
    for area, size in whole.items():
        assert 0.1 * size < test[area] <= 0.25 * size
        assert 0 < val[area] <= 0.15 * size


def test_the_split_depends_on_its_seed_alone(docstrings: list[Docstring]) -> None:
    first = split_docstrings(docstrings, 0, multiple=8)
    assert split_docstrings(docstrings, 0, multiple=8) == first
    assert split_docstrings(docstrings, 1, multiple=8) != first
    assert [len(part) % 8 for part in first[1:]] == [0, 0]


def test_a_python_without_sources_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(ValueError, match="lacks the sources"):
        load_docstrings()


def test_a_batch_is_as_long_as_its_longest_text() -> None:
    samples = [
        (torch.tensor([2, 5, 3, 0, 0]), torch.tensor(1)),
        (torch.tensor([2, 5, 6, 3, 0]), torch.tensor(0)),
    ]
    tokens, labels = collate(samples)
    assert tokens.tolist() == [[2, 5, 3, 0], [2, 5, 6, 3]]
    assert labels.tolist() == [1, 0]


def test_replicas_evaluate_each_docstring_once_in_as_many_batches(
    folder: str, docstrings: list[Docstring], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(docstring_data, "load_docstrings", lambda: docstrings)

    def read(data: DocstringDataModule) -> list[Any]:
        return list(data.test_dataloader())

    everything = torch.cat([labels for _, labels in read(DocstringDataModule(folder))])
    shares = []
    for rank in range(2):
        data = DocstringDataModule(folder)
        kwargs = {"num_replicas": 2, "rank": rank}
        trainer: Any = SimpleNamespace(distributed_sampler_kwargs=kwargs)
        data.trainer = trainer
        shares.append(read(data))
    assert len(shares[0]) == len(shares[1])
    for rank, share in enumerate(shares):
        assert torch.equal(torch.cat([labels for _, labels in share]), everything[rank::2])


@pytest.mark.parametrize(("argument", "value"), [("batch_size", 0), ("sequence_length", 2)])
def test_bad_sizes_of_the_data(argument: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"{argument}={value}"):
        DocstringDataModule(**{argument: value})


def test_batches_of_like_length_have_little_padding(folder: str) -> None:
    def padding(loader: Any) -> float:
        batches = [tokens for tokens, _ in loader]
        return 1 - sum(int((t != 0).sum()) for t in batches) / sum(t.numel() for t in batches)

    sizes = {"sequence_length": 400, "batch_size": 16}
    data = DocstringDataModule(folder, tokens_per_batch=4096, **sizes)
    loader = data.train_dataloader()
    batches = list(loader)
    assert max(tokens.numel() for tokens, _ in batches) <= 4096
    assert sum(len(labels) for _, labels in batches) == len(data.train_docstrings)
    data._tokens_per_batch = None  # batches of any lengths
    assert padding(data.train_dataloader()) > 3 * padding(loader)
