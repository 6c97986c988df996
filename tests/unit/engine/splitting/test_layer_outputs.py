from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from lightning_dist.engine.splitting.blocks.blocks import keywords_of_a_stage


class Caching(nn.Module):
    def __init__(self, **config: Any) -> None:
        super().__init__()
        self.config = SimpleNamespace(use_cache=True, **config)

    def forward(self, tokens: Any, use_cache: bool | None = None, **options: Any) -> Any:
        return tokens


def test_a_cache_is_left_out_where_there_is_one() -> None:
    assert keywords_of_a_stage(Caching(), {"mask": 1}) == {"mask": 1, "use_cache": False}
    assert keywords_of_a_stage(Caching(), {"use_cache": None}) == {"use_cache": False}
    assert keywords_of_a_stage(nn.Linear(1, 1), {"mask": 1}) == {"mask": 1}


@pytest.mark.parametrize(
    ("config", "keywords", "message"),
    [
        ({}, {"use_cache": True}, r"use_cache=True asks Caching for something of all layers"),
        ({}, {"output_hidden_states": [3]}, r"output_hidden_states=\[3\]"),
        ({"output_attentions": True}, {}, r"output_attentions=True .* of the model's `config`"),
    ],
)
def test_what_would_be_half_of_the_answer_is_refused(
    config: dict[str, Any], keywords: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        keywords_of_a_stage(Caching(**config), keywords)


def test_a_call_may_do_without_what_the_config_asks_for() -> None:
    model = Caching(output_attentions=True)
    keywords_of_a_stage(model, {"output_attentions": False})
