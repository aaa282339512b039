"""A small byte-level tokenizer, made on the spot."""

from __future__ import annotations

import functools

import tokenizers
import transformers


@functools.cache
def byte_tokenizer(vocab_size: int = 300) -> transformers.PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer whose last id is <|endoftext|>, as in Qwen3's files."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size - 1,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    text = ["def f(x):\n    return x\n", "for i in range(10):\n        print(i, 'é', '漢')\n"]
    tokenizer.train_from_iterator(text * 3, trainer)
    tokenizer.add_special_tokens(["<|endoftext|>"])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|endoftext|>"
    )
