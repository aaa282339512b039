"""The demo model's tokenizer: byte-level BPE for Python, with Qwen3's special tokens and template.

`chat_template.jinja` and the special tokens are those of Qwen3 (Apache-2.0).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT = "<|endoftext|>"
END_OF_TURN = "<|im_end|>"
SPECIAL_TOKENS = (
    END_OF_TEXT,
    "<|im_start|>",
    END_OF_TURN,
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
ADDED_TOKENS = (
    "<tool_call>",
    "</tool_call>",
    "<|fim_prefix|>",
    "<|fim_middle|>",
    "<|fim_suffix|>",
    "<|fim_pad|>",
    "<|repo_name|>",
    "<|file_sep|>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)
_TEMPLATE_FILE = Path(__file__).with_name("chat_template.jinja")

# Qwen's pattern, but for the white space of code: a line's indentation is a token of its own, and
# so is its end, so that a prompt may stop at any of these borders and still look like training.
_PATTERN = (
    r"(?<=[\r\n])[ \t]+(?=[^\s])"
    r"|(?i:'s|'t|'re|'ve|'m|'ll|'d)(?!\p{L})"
    r"|[^\s\p{L}\p{N}]?\p{L}+| \p{L}+"
    r"|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+"
    r"|[ \t]*[\r\n]+(?:[ \t]*[\r\n]+)*"
    r"|\s+(?!\S)|\s+"
)


def train_tokenizer(texts: Iterable[str], *, vocab_size: int) -> Tokenizer:
    """Train byte-level BPE; the special ids are the last ones of `vocab_size`, as in Qwen3.

    There is no normalizer, so that decoding gives back every byte. Where the texts are too small
    for `vocab_size`, the tokenizer is smaller.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(SPECIAL_TOKENS) - len(ADDED_TOKENS),
        min_frequency=2,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(t, normalized=False) for t in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(t, normalized=False, special=False) for t in ADDED_TOKENS])
    return tokenizer


def encode(tokenizer: Tokenizer, texts: Sequence[str], *, chunk_size: int = 512) -> np.ndarray:
    """Return the texts' ids in one int32 array, `<|endoftext|>` after each text."""
    separator = np.asarray([tokenizer.token_to_id(END_OF_TEXT)], np.int32)
    parts: list[np.ndarray] = []
    for start in range(0, len(texts), chunk_size):
        chunk = list(texts[start : start + chunk_size])
        for encoding in tokenizer.encode_batch_fast(chunk, add_special_tokens=False):
            parts += [np.asarray(encoding.ids, np.int32), separator]
    return np.concatenate(parts) if parts else np.zeros(0, np.int32)


def token_bytes(tokenizer: Tokenizer) -> np.ndarray:
    """Return the number of text bytes of every id; special and added tokens count none."""
    # In byte-level BPE one character of a token stands for one byte.
    added = set(SPECIAL_TOKENS) | set(ADDED_TOKENS)
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    sizes = np.zeros(max(vocab.values()) + 1, np.int64)
    for token, token_id in vocab.items():
        sizes[token_id] = 0 if token in added else len(token)
    return sizes


def newline_ids(tokenizer: Tokenizer) -> np.ndarray:
    """Return the ids of tokens that end a line."""
    vocab = tokenizer.get_vocab(with_added_tokens=False)
    # U+010A is the byte-level spelling of the newline.
    return np.asarray([i for token, i in vocab.items() if token.endswith("\u010a")], np.int32)


def save_tokenizer(tokenizer: Tokenizer, directory: Path, *, max_length: int) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json`, which AutoTokenizer of v4 and v5 load."""
    tokenizer.save(str(directory / "tokenizer.json"))
    text = json.dumps(_tokenizer_config(tokenizer, max_length), indent=2, ensure_ascii=False)
    (directory / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")


def _tokenizer_config(tokenizer: Tokenizer, max_length: int) -> dict[str, Any]:
    added = {
        str(tokenizer.token_to_id(token)): {
            "content": token,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": token in SPECIAL_TOKENS,
        }
        for token in (*SPECIAL_TOKENS, *ADDED_TOKENS)
    }
    return {
        "add_prefix_space": False,
        "added_tokens_decoder": added,
        "additional_special_tokens": [t for t in SPECIAL_TOKENS if t != END_OF_TEXT],
        "bos_token": None,
        "chat_template": _TEMPLATE_FILE.read_text(encoding="utf-8"),
        "clean_up_tokenization_spaces": False,
        "eos_token": END_OF_TURN,
        "model_max_length": max_length,
        "pad_token": END_OF_TEXT,
        # Qwen2Tokenizer of transformers v5 would put Qwen's normalizer and pattern in the place
        # of those in tokenizer.json.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": None,
    }
