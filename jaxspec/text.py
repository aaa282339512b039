"""Text in and out: prompts to ids, ids to text while it streams, up to a stop string."""

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
    # Not verbose: of what is too long this package speaks itself, in one line.
    ids = list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    if not ids:
        raise ValueError("the prompt is empty: expected at least one token")
    return ids


def decode(tokenizer: Any, token_ids: Sequence[int], eos_ids: Collection[int] = ()) -> str:
    """Return the text of `token_ids` without special tokens; a final EOS is left out."""
    ids = list(token_ids)
    if ids and ids[-1] in eos_ids:
        ids.pop()
    return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def check_stops(stops: object) -> None:
    """Raise a one-line ValueError unless `stops` is a sequence of strings that text can hold."""
    if isinstance(stops, str) or not isinstance(stops, Sequence):
        raise ValueError(f"stops={stops!r} is not a sequence of strings")
    for index, stop in enumerate(stops):
        if not isinstance(stop, str):
            raise ValueError(f"stop string {index} is {stop!r}, expected a string")
        if not stop:
            raise ValueError(f"stop string {index} is empty: expected at least one character")
        try:
            stop.encode("utf-8")
        except UnicodeEncodeError:
            raise ValueError(f"stop string {index}, {stop!r}, is not valid Unicode text") from None


def decode_until_stop(
    tokenizer: Any,
    token_ids: Sequence[int],
    stops: Sequence[str],
    *,
    eos_ids: Collection[int] = (),
    min_new_tokens: int = 0,
) -> tuple[str, int | None]:
    """Return the text of `token_ids` cut before its first stop string, and the tokens to keep.

    Arguments, errors and what counts as a stop are those of `StopSearch`.

    Returns:
      The text and the number of tokens up to and including the one that completed the stop string;
      `decode` of all ids and None where there was none.
    """
    search = StopSearch(tokenizer, stops, eos_ids=eos_ids, min_new_tokens=min_new_tokens)
    num_kept = search.push(token_ids) if stops else None
    text = decode(tokenizer, token_ids, eos_ids) if num_kept is None else search.text
    return text, num_kept


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


class StopFilter:
    """Cuts a text that arrives in pieces before the first stop string that it completes.

    Text that may yet turn out to belong to a stop string is held back: the longest end of the text
    so far with which some stop string begins. What `push` returned, joined, is the text before the
    stop string; without one, what `push` and `flush` returned is the whole text.

    Args:
      stops: the stop strings, possibly none.

    Raises:
      ValueError: see `check_stops`.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        check_stops(stops)
        self._stops = tuple(stops)
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""
        self._is_stopped = False

    @property
    def is_stopped(self) -> bool:
        """Return whether a stop string was completed; later text is dropped."""
        return self._is_stopped

    def push(self, piece: str, *, may_stop: bool = True) -> str:
        """Take more text and return the text that is now certain.

        Args:
          piece: what follows. If it completes several stop strings, the one that starts first cuts.
          may_stop: whether it can complete a stop string; one that ends in a piece that cannot is
            ordinary text.
        """
        if self._is_stopped:
            return ""
        text = self._held + piece
        if may_stop and (starts := self._completed(text)):
            self._is_stopped = True
            self._held = ""
            return text[: min(starts)]
        num_certain = self._num_certain(text)
        self._held = text[num_certain:]
        return text[:num_certain]

    def flush(self) -> str:
        """Return what was held back: nothing more follows that could complete it."""
        text, self._held = self._held, ""
        return text

    def _completed(self, text: str) -> list[int]:
        """Return the first start of each stop string that ends beyond what was held back."""
        beyond = len(self._held) + 1
        starts = [text.find(stop, max(0, beyond - len(stop))) for stop in self._stops]
        return [start for start in starts if start >= 0]

    def _num_certain(self, text: str) -> int:
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            end = text[start:]
            if any(stop.startswith(end) and stop != end for stop in self._stops):
                return start
        return len(text)


class StopSearch:
    """Looks for stop strings in one row while its ids arrive, and has its text up to the first.

    Each id makes some text certain, as `TextStream` has it: a character counts from the token on
    that made it whole, and EOS and special tokens have no text. The row ends with the first token
    whose text completes a stop string. How the ids are split over calls changes nothing.

    Args:
      tokenizer: a Hugging Face tokenizer with byte-level tokens.
      stops: the stop strings, possibly none.
      eos_ids: ids that end a text and are not shown.
      min_new_tokens: none of the first so many tokens ends the row. A stop string that one of them
        completed is ordinary text; one that only starts there counts.

    Raises:
      ValueError: see `check_stops`.
    """

    def __init__(
        self,
        tokenizer: Any,
        stops: Sequence[str],
        *,
        eos_ids: Collection[int] = (),
        min_new_tokens: int = 0,
    ) -> None:
        self._stream = TextStream(tokenizer, eos_ids)
        self._filter = StopFilter(stops)
        self._min_new_tokens = min_new_tokens
        self._num_tokens = 0
        self._parts: list[str] = []

    @property
    def text(self) -> str:
        """Return the text that is certain so far; after `flush`, or a stop string, all of it."""
        return "".join(self._parts)

    def push(self, token_ids: Sequence[int]) -> int | None:
        """Take more ids and return how many tokens of the row to keep.

        Returns:
          The number of tokens, from the row's first, up to and including the one that completed a
          stop string, also in every later call; None while there is none.
        """
        for token_id in token_ids:
            if self._filter.is_stopped:
                break
            self._num_tokens += 1
            self._parts.append(
                self._filter.push(
                    self._stream.push([token_id]),
                    may_stop=self._num_tokens > self._min_new_tokens,
                )
            )
        return self._num_tokens if self._filter.is_stopped else None

    def flush(self) -> str:
        """Return what was held back, at the end of the row; nothing after a stop string.

        A character that never became whole shows as U+FFFD; it completes no stop string.
        """
        text = self._filter.push(self._stream.flush(), may_stop=False) + self._filter.flush()
        self._parts.append(text)
        return text
