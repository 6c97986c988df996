"""Finds the two layers that are as large as the vocabulary: token embedding and head.

They may share one weight, and one weight is sharded in one way. So the two are found together.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import cast

from torch import nn

from lightning_dist.engine.tensor_parallel.layers.projection import (
    has_own_forward,
    input_size,
    is_adapted,
    is_projection,
    is_token_table,
    output_size,
    projection_name,
)
from lightning_dist.engine.tensor_parallel.layers.styles import Style
from lightning_dist.engine.tensor_parallel.plan.regions import shared_path

_OTHER_TABLES = ("pos", "wpe", "type", "segment", "bias")


def find_vocabulary(module: nn.Module, taken: Collection[str], tp_size: int) -> dict[str, Style]:
    """Returns the styles with which token embedding and head can be sharded.

    The head is the last projection with an output for each row of the embedding. A model without a
    head may still compute logits, with the embedding's weight. Then no layer is sharded, unless the
    model is from Hugging Face, which would have a layer for that.
    """
    tables = _token_tables(module)
    heads = {name: _find_head(module, name, taken) for name in tables}
    would_have_head = any(hasattr(part, "get_output_embeddings") for part in module.modules())
    candidates = [name for name in tables if heads[name] or would_have_head]
    if not candidates:
        return {}
    best = max(candidates, key=lambda name: (heads[name] is not None, tables[name].num_embeddings))
    size = tables[best].weight.shape
    if size[0] % tp_size:
        return {}
    found: dict[str, Style] = {}
    for name in candidates:  # a copy of the model, a teacher say, is sharded as the model is
        if tables[name].weight.shape == size:
            found |= _table_and_head(module, tables, name, heads[name])
    return found


def _table_and_head(
    module: nn.Module, tables: Mapping[str, nn.Embedding], name: str, head: str | None
) -> dict[str, Style]:
    table = tables[name]
    found = {name: Style.VOCAB for name, part in tables.items() if part.weight is table.weight}
    if head is not None:
        found[head] = Style.COLWISE_GATHER
    # One weight is sharded in one way: for all layers that have it, or for none.
    users = {
        name
        for name, part in module.named_modules()
        if any(parameter is table.weight for parameter in part.parameters(recurse=False))
    }
    if users <= set(found):
        return found
    return {} if head is None or head in users else {head: Style.COLWISE_GATHER}


def refused_vocabulary(
    module: nn.Module, styles: Mapping[str, Style], tp_size: int
) -> dict[str, str]:
    """Returns the reasons why token embedding and head are replicated, by layer name."""
    found: dict[str, str] = {}
    for name, table in _token_tables(module).items():
        rows, head = table.num_embeddings, _find_head(module, name, styles)
        if rows % tp_size:
            more = -(-rows // tp_size) * tp_size
            reason = f"its {rows} rows do not divide by tp_size={tp_size}; pad them to {more}"
        elif head is None:
            reason = (
                f"no layer has an output for each of its {rows} rows; a head may use its weight"
            )
        else:
            reason = "its weight is another layer's too, or another table is the vocabulary's"
        found |= {n: reason for n in (name, head) if n is not None and n not in styles}
    return found


def check_head(module: nn.Module, styles: Mapping[str, Style], tp_size: int) -> None:
    """Checks that the plan shards a head, for sharded logits."""
    if Style.COLWISE_GATHER in styles.values():
        return
    sizes = {table.num_embeddings for table in _token_tables(module).values()}
    odd = sorted(size for size in sizes if size % tp_size)
    padded = [f"{size} to {-(-size // tp_size) * tp_size}" for size in odd]
    reason = (
        f" A vocabulary must be shared out over tp_size={tp_size} ranks: pad {', '.join(padded)}."
        if padded
        else " None was found that has an output for each row of a token embedding."
    )
    raise ValueError(
        "Leave loss_parallel out, or name the head 'colwise_gather' in plan={...}:"
        " loss_parallel=True leaves each rank its part of the logits, but no head is sharded as"
        f" 'colwise_gather'.{reason}"
    )


def _token_tables(module: nn.Module) -> dict[str, nn.Embedding]:
    return {
        name: part
        for name, part in module.named_modules()
        if is_token_table(part)
        and not has_own_forward(part)
        and not name.endswith("token_adapter.base_layer")  # peft computes with its weight
        and not any(word in name.lower().rpartition(".")[2] for word in _OTHER_TABLES)
    }


def _find_head(module: nn.Module, table_name: str, taken: Collection[str]) -> str | None:
    """Returns the last layer with an output for each row of a table, in the same model."""
    table = cast(nn.Embedding, module.get_submodule(table_name))
    heads = [
        name
        for name, part in module.named_modules()
        if is_projection(part)
        and not is_adapted(part)  # its base is found
        and not has_own_forward(part)
        and projection_name(name) not in taken
        and output_size(part) == table.num_embeddings
        and input_size(part) == table.embedding_dim
    ]

    def nearness(name: str) -> int:  # a copy of the model, a reference say, has a head, too
        return len(shared_path(name, table_name))

    return max(reversed(heads), key=nearness, default=None)
