"""Tiny random models of the architectures that people train most."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_WIDE = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GROUPED = _WIDE | {"num_key_value_heads": 2}
_GEMMA = _GROUPED | {"head_dim": 16, "sliding_window": 8}
_BERT = _WIDE | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 96}
_DISTIL = {"dim": 32, "hidden_dim": 80, "n_layers": 2, "n_heads": 4, "vocab_size": 96}
_T5 = {"d_model": 32, "d_kv": 8, "d_ff": 80, "num_layers": 2, "num_heads": 4, "vocab_size": 96}
_PLAIN = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}

# Class of the model, and the options of its config.
MODELS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": _GROUPED,
    "Qwen2ForCausalLM": _GROUPED,
    "Qwen3ForCausalLM": _GROUPED | {"head_dim": 16},
    "MistralForCausalLM": _GROUPED,
    "GemmaForCausalLM": _GEMMA,
    "Gemma2ForCausalLM": _GEMMA,
    "Gemma3ForCausalLM": _GEMMA,
    "PhiForCausalLM": _WIDE | {"resid_pdrop": 0.0},
    "Phi3ForCausalLM": _GROUPED,
    "Olmo2ForCausalLM": _GROUPED,
    "Starcoder2ForCausalLM": _GROUPED | {"residual_dropout": 0.0, "embedding_dropout": 0.0},
    "GPTNeoXForCausalLM": _WIDE,
    "GPT2LMHeadModel": _PLAIN | _GPT2 | {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "OPTForCausalLM": _WIDE | {"ffn_dim": 80, "word_embed_proj_dim": 32, "dropout": 0.0},
    "BertForMaskedLM": _BERT,
    "RobertaForMaskedLM": _BERT,
    "DistilBertForMaskedLM": _PLAIN
    | _DISTIL
    | {"max_position_embeddings": 64, "dropout": 0.0, "attention_dropout": 0.0},
    "T5ForConditionalGeneration": _T5 | {"dropout_rate": 0.0, "decoder_start_token_id": 0},
    "FalconForCausalLM": _WIDE | {"multi_query": False, "ffn_hidden_size": 80},
    "GraniteForCausalLM": _GROUPED,
}


# What they call their number of blocks.
_BLOCKS = {
    "GPT2LMHeadModel": "n_layer",
    "DistilBertForMaskedLM": "n_layers",
    "T5ForConditionalGeneration": "num_layers",
}


def build_untied(name: str, num_blocks: int) -> nn.Module:
    """Builds a model whose head has weights of its own."""
    key = _BLOCKS.get(name, "num_hidden_layers")
    return build(name, **{key: num_blocks, "tie_word_embeddings": False})


def build(name: str, **options: Any) -> nn.Module:
    """Builds a model, the same one each time, in float64."""
    import transformers

    model_class = getattr(transformers, name)
    torch.manual_seed(1)
    model: nn.Module = model_class(model_class.config_class(**MODELS[name] | options))
    with torch.no_grad():  # larger than at the start of a training, so that all gradients count
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return model.double().train()


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Predicts each token from those that the model shows it."""
    more = {"decoder_input_ids": tokens} if "Conditional" in type(model).__name__ else {}
    logits = model(input_ids=tokens, **more).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
