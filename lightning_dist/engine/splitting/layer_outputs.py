"""What a model can be asked to return of all its layers, by the names of Hugging Face models.

A stage has the outputs of its own layers only. What would be half of the answer is refused, on all
stages alike; the cache of keys and values, which such models keep unless told not to, is left out:
a training or validation step makes it for nobody.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn

_OF_ALL_LAYERS = ("output_hidden_states", "output_attentions", "output_router_logits")


def keywords_of_a_stage(model: nn.Module, keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Gives the keywords that a model is called with on one stage.

    Args:
        model: Any.
        keywords: As the user's step gives them.

    Raises:
        ValueError: They, or the model's configuration, ask for something of all layers.
    """
    config = getattr(model, "config", None)
    asked = {name: keywords.get(name, getattr(config, name, None)) for name in _OF_ALL_LAYERS}
    asked["use_cache"] = keywords.get("use_cache")
    wanted = [f"{name}={value!r}" for name, value in asked.items() if value]
    if wanted:
        raise ValueError(
            f"{', '.join(wanted)} asks {type(model).__name__} for something of all layers, but each"
            " stage has only its own. Leave it out of the call, and of the model's `config`; for"
            " such outputs run the model on a single device."
        )
    return without_cache(model, keywords)


def without_cache(model: nn.Module, keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keywords of a call that keeps no keys and values, unless they ask for it.

    Args:
        model: Any.
        keywords: As the user's step gives them.
    """
    takes_cache = "use_cache" in inspect.signature(type(model).forward).parameters
    if takes_cache and keywords.get("use_cache") is None:  # else the model's `config` decides
        return {**keywords, "use_cache": False}
    return dict(keywords)
