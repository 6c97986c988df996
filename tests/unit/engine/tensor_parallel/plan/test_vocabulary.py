from __future__ import annotations

from torch import nn

from tests.unit.engine.tensor_parallel.plan.parts import (
    MLP,
    WIDTH,
    Adapted,
    holder,
    mlp,
    plan_of,
)


def language_model(rows: int = 30, **more: nn.Module) -> nn.Module:
    return holder(tokens=nn.Embedding(rows, WIDTH), positions=nn.Embedding(64, WIDTH), **more)


def test_embedding_and_head_are_the_two_of_one_size() -> None:
    tied = language_model(pooler=nn.Linear(WIDTH, WIDTH), head=nn.Linear(WIDTH, 30))
    assert plan_of(tied) == {"tokens": "vocab", "head": "colwise_gather"}
    tied.head.weight = tied.tokens.weight
    assert plan_of(tied, tp_size=2) == {"tokens": "vocab", "head": "colwise_gather"}


def test_a_weight_that_another_layer_uses_too_stays_whole() -> None:
    odd = language_model(mlp=mlp(), head=nn.Linear(WIDTH, 30), user=Adapted(WIDTH, 30))
    odd.user.weight = odd.tokens.weight
    assert plan_of(odd) == MLP | {"head": "colwise_gather"}


def test_an_embedding_with_trainable_tokens_of_peft_stays_whole() -> None:
    table = holder(token_adapter=holder(base_layer=nn.Embedding(30, WIDTH)))
    assert plan_of(holder(tokens=table, mlp=mlp(), head=nn.Linear(WIDTH, 30))) == MLP


def test_an_embedding_without_a_head_may_be_the_head_itself() -> None:
    assert plan_of(language_model(mlp=mlp())) == MLP


def test_a_vocabulary_that_cannot_be_shared_out_stays_whole() -> None:
    model = language_model(rows=31, mlp=mlp(), head=nn.Linear(WIDTH, 31))
    assert plan_of(model, tp_size=2) == MLP
    assert plan_of(model, tp_size=31).keys() == {*MLP, "tokens", "head"}


def test_a_copy_of_the_model_is_sharded_as_the_model_is() -> None:
    def tied() -> nn.Module:
        model = language_model(head=nn.Linear(WIDTH, 30, bias=False))
        model.head.weight = model.tokens.weight
        return model

    both = holder(policy=tied(), reference=tied().requires_grad_(False))
    assert plan_of(both) == {
        "policy.tokens": "vocab",
        "policy.head": "colwise_gather",
        "reference.tokens": "vocab",
        "reference.head": "colwise_gather",
    }
    both.user = Adapted(WIDTH, 30)
    both.user.weight = both.reference.tokens.weight
    assert plan_of(both) == {"policy.tokens": "vocab", "policy.head": "colwise_gather"}
