"""Text in and out: prompts to ids, ids to text while it streams."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any


def encode(tokenizer: Any, text: str) -> list[int]:
    """Return the ids of `text` as it stands, without special tokens added.

    Raises:
      ValueError: there is no tokenizer, or the text has no tokens or is no valid Unicode.
    """
    if tokenizer is None:
        raise ValueError("the model directory has no tokenizer: expected prompts as token ids")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError("the prompt is not valid UTF-8 text") from None
    ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    if not ids:
        raise ValueError("the prompt is empty: expected at least one token")
    return ids


def decode(tokenizer: Any, token_ids: Sequence[int], eos_ids: Collection[int] = ()) -> str:
    """Return the text of `token_ids` without special tokens; a final EOS is left out."""
    ids = list(token_ids)
    if ids and ids[-1] in eos_ids:
        ids.pop()
    return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


class TextStream:
    """Turns ids that arrive bit by bit into text, holding back a partial UTF-8 character.

    A byte-level token can end in the middle of a character; its decoding then ends with U+FFFD,
    and nothing is shown until the character is whole. What `push` and `flush` returned, joined,
    is `decode` of all ids.

    Source: the two-offset scheme that text servers share; only the last few tokens are decoded
    anew, so that the cost per token does not grow with the text.

    Args:
      tokenizer: a Hugging Face tokenizer with byte-level tokens.
      eos_ids: ids that end a text and are not shown.
    """

    def __init__(self, tokenizer: Any, eos_ids: Collection[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._eos_ids = frozenset(eos_ids)
        self._ids: list[int] = []
        self._window_start = 0
        self._shown_end = 0

    def push(self, token_ids: Sequence[int]) -> str:
        """Take more ids and return the text that is now certain."""
        return "".join(self._push_one(token_id) for token_id in token_ids)

    def flush(self) -> str:
        """Return what was held back; a character that never became whole shows as U+FFFD."""
        text = self._unseen()
        self._window_start = self._shown_end = len(self._ids)
        return text

    def _push_one(self, token_id: int) -> str:
        if token_id in self._eos_ids:
            return ""
        self._ids.append(token_id)
        text = self._unseen()
        if not text or text.endswith("\ufffd"):
            return ""
        self._window_start, self._shown_end = self._shown_end, len(self._ids)
        return text

    def _unseen(self) -> str:
        shown = decode(self._tokenizer, self._ids[self._window_start : self._shown_end])
        return decode(self._tokenizer, self._ids[self._window_start :])[len(shown) :]
