"""A random BERT that is as small as can be, and its tokenizer, in a folder."""

from __future__ import annotations

import string
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import BertConfig, BertModel

_SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]


def save_tiny_bert(folder: Path) -> str:
    """Writes what ``save_pretrained`` of a model and its fast tokenizer would; gives the folder."""
    vocabulary = [*_SPECIAL, *string.ascii_lowercase, *(f"##{c}" for c in string.ascii_lowercase)]
    config = BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=32,
    )
    torch.manual_seed(3)
    model = BertModel(config)
    with torch.no_grad():  # larger than at the start of a training, so that all gradients count
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    model.save_pretrained(folder)
    ids = {token: i for i, token in enumerate(vocabulary)}
    tokenizer = Tokenizer(models.WordPiece(ids, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    begin, end = (("[CLS]", ids["[CLS]"]), ("[SEP]", ids["[SEP]"]))
    tokenizer.post_processor = processors.BertProcessing(end, begin)
    tokenizer.save(str(folder / "tokenizer.json"))
    return str(folder)
