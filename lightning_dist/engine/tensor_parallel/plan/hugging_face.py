"""Translates the built-in tensor-parallel plan of a Hugging Face model.

The plan is written for inference, too. If a module needs all features of a projection, the plan
gathers them after it and shards them again before the next one. There is no such style here, nor
one for experts or latent attention. Layers that belong to one region are sharded together or not at
all. A model with such a plan is recognised by its attributes, without transformers.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from lightning_dist.engine.common.names import fits
from lightning_dist.engine.tensor_parallel.layers.projection import (
    input_size,
    is_projection,
    output_size,
)
from lightning_dist.engine.tensor_parallel.layers.styles import Style
from lightning_dist.engine.tensor_parallel.plan.attention import (
    flaw_of_heads,
    is_attention_projection,
)
from lightning_dist.engine.tensor_parallel.plan.mlp import find_mlp, is_featurewise

_STYLES = {
    "colwise": Style.COLWISE,
    "packed_colwise": Style.COLWISE,
    "rowwise": Style.ROWWISE,
    "replicated_with_grad_allreduce": Style.LOCAL,
}
_JOINED = ("colwise_gather_output", "colwise_rep", "rowwise_split_input", "rowwise_rep")


def built_in_plans(module: nn.Module) -> dict[str, dict[str, str]]:
    """Returns the built-in plans for the layers of models, none inside another, by model name."""
    found: dict[str, dict[str, str]] = {}
    for name, part in module.named_modules():
        is_inside = any(name.startswith(f"{outer}." if outer else "") for outer in found)
        plan = {} if is_inside else _plan_of(part)
        if any(style in (*_STYLES, *_JOINED) for style in plan.values()):
            found[name] = plan
    return found


def translate(model: nn.Module, plan: Mapping[str, str]) -> dict[str, Style]:
    """Returns the styles of a built-in plan, of all layers that can be sharded, by name."""
    found: dict[str, Style] = {}
    modules = dict(model.named_modules())
    for parent, members in _by_parent(model, plan).items():
        if any(style in _JOINED for style in members.values()):
            # A gate stacked on top of another matrix is no obstacle.
            found |= find_mlp(model, parent)[0]
        else:
            found |= _translate_group(modules, parent, members)
    return found


def _plan_of(part: nn.Module) -> dict[str, str]:
    config = getattr(part, "config", None)
    own = getattr(part, "_tp_plan", None)
    if config is None or not hasattr(part, "_tp_plan"):
        return {}
    plan = dict(own) if isinstance(own, dict) else {}
    base = getattr(config, "base_model_tp_plan", None)
    prefix = getattr(part, "base_model_prefix", "")
    if isinstance(base, dict):
        path = f"{prefix}." if isinstance(getattr(part, prefix, None), nn.Module) else ""
        plan = {path + pattern: style for pattern, style in base.items()} | plan
    return {pattern: style for pattern, style in plan.items() if isinstance(style, str)}


def _by_parent(model: nn.Module, plan: Mapping[str, str]) -> dict[str, dict[str, str]]:
    # Some patterns name bare parameters, those of experts for instance.
    names = [name for name, _ in model.named_modules() if name]
    names += [name for name, _ in model.named_parameters()]
    groups: dict[str, dict[str, str]] = {}
    for name in names:
        for pattern, style in plan.items():
            if fits(name, pattern):
                groups.setdefault(name.rpartition(".")[0], {})[name] = style
    return groups


def _translate_group(
    modules: Mapping[str, nn.Module], parent: str, members: Mapping[str, str]
) -> dict[str, Style]:
    styles = {n: _STYLES[s] for n, s in members.items() if s in _STYLES and n in modules}
    parts = {name: modules[name] for name in styles}
    downs = [name for name, style in styles.items() if style is Style.ROWWISE]
    ups = [name for name, style in styles.items() if style is Style.COLWISE]
    if len(styles) < len(members) or len(downs) != 1 or not ups:
        return {}
    if not all(is_projection(parts[name]) for name in ups + downs):
        return {}
    taken = input_size(parts[downs[0]])
    if not all(_is_cut_alike(name, members[name], output_size(parts[name]), taken) for name in ups):
        return {}
    if any(is_attention_projection(name.rpartition(".")[2]) for name in ups):
        is_clear = flaw_of_heads(modules[parent], taken, parts.values()) is None
    else:
        own_names = [name.rpartition(".")[2] for name in (*ups, *downs)]
        is_clear = is_featurewise(modules[parent], tuple(own_names[:-1]), own_names[-1])
    return styles if is_clear else {}


def _is_cut_alike(name: str, style: str, features: int, taken: int) -> bool:
    """Returns whether this package shards the layer as transformers does."""
    if style == "packed_colwise":
        return features == 2 * taken
    return features <= taken or name.endswith("query_key_value")
