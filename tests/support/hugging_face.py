"""Data for small models of transformers, and a tokeniser."""

from pathlib import Path
from typing import Any

import numpy as np

from clients.models import tokenizer

VOCABULARY = 16
GPT2 = {
    "model_type": "gpt2",
    "vocab_size": VOCABULARY,
    "n_positions": 12,
    "n_embd": 8,
    "n_layer": 1,
    "n_head": 2,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
BERT = {
    "model_type": "bert",
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 12,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


def examples(n: int = 48, *, prompt: int = 3) -> tuple[dict[str, Any], dict[str, Any]]:
    """Tokens that count upwards; the first ones are a prompt without labels."""
    rng = np.random.default_rng(1)
    ids = (rng.integers(0, VOCABULARY, (n, 1)) + np.arange(10)) % VOCABULARY
    labels = ids.copy()
    labels[:, :prompt] = -100
    rows = {"input_ids": ids, "attention_mask": np.ones_like(ids), "labels": labels}
    cut = n * 2 // 3
    return (
        {name: part[:cut] for name, part in rows.items()},
        {name: part[cut:] for name, part in rows.items()},
    )


def sentences(folder: str, sha256: str | None = None) -> tuple[Any, Any]:
    """A source that tokenises texts."""
    found = tokenizer(folder, sha256)
    texts = ["the cat sat", "the dog ran", "a cat ran", "a dog sat"] * 4
    ids = found(texts, return_tensors="np")["input_ids"]
    return {"input_ids": ids, "labels": ids}, {"input_ids": ids, "labels": ids}


def save_tokenizer(folder: Path, words: tuple[str, ...]) -> None:
    """Write a tokeniser of whole words, whose numbers follow their order."""
    import tokenizers  # noqa: PLC0415 -- an extra
    import transformers  # noqa: PLC0415

    vocabulary = {word: number for number, word in enumerate(("[UNK]", *words))}
    model = tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]")  # noqa: S106
    fast = tokenizers.Tokenizer(model)
    fast.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=fast).save_pretrained(folder)


for _function in (examples, sentences):
    _function.preprocessing = "none"  # type: ignore[attr-defined]
