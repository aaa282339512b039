"""Ids to text while it streams: nothing is lost, no half character is shown."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec.text import TextStream, decode, encode
from tests.tokenizers import byte_tokenizer

TEXTS = [
    "def f(x):\n    return x\n",
    "é漢🙂 naïve\t\tend",
    "  two  spaces  ",
    "\ufffd literal",
    "a",
]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("chunk", [1, 2, 5, 100])
def test_streamed_text_is_the_text(text, chunk):
    tokenizer = byte_tokenizer()
    ids = encode(tokenizer, text)
    stream = TextStream(tokenizer)
    parts = [stream.push(ids[i : i + chunk]) for i in range(0, len(ids), chunk)]
    assert "".join(parts) + stream.flush() == decode(tokenizer, ids) == text


@given(st.lists(st.integers(0, len(byte_tokenizer()) - 1), max_size=40), st.integers(1, 7))
@settings(max_examples=150, deadline=None)
def test_any_ids_stream_into_their_decoding(ids, chunk):
    tokenizer = byte_tokenizer()
    stream = TextStream(tokenizer)
    parts = [stream.push(ids[i : i + chunk]) for i in range(0, len(ids), chunk)]
    assert "".join(parts) + stream.flush() == decode(tokenizer, ids)


def test_a_partial_character_is_held_back():
    tokenizer = byte_tokenizer()
    ids = encode(tokenizer, "🙂!")
    stream = TextStream(tokenizer)
    assert [stream.push([token_id]) for token_id in ids] == ["", "", "", "🙂", "!"]


def test_a_character_that_never_ends_shows_at_the_end():
    tokenizer = byte_tokenizer()
    stream = TextStream(tokenizer)
    assert stream.push(encode(tokenizer, "🙂")[:2]) == ""
    assert stream.flush() == "\ufffd"
    assert stream.flush() == ""


def test_the_final_eos_is_not_text():
    tokenizer = byte_tokenizer()
    eos_id = tokenizer.eos_token_id
    ids = [*encode(tokenizer, "x"), eos_id]
    stream = TextStream(tokenizer, [eos_id])
    assert stream.push(ids) + stream.flush() == "x" == decode(tokenizer, ids, [eos_id])


def test_encode_errors():
    with pytest.raises(ValueError, match="the prompt is empty"):
        encode(byte_tokenizer(), "")
    with pytest.raises(ValueError, match="has no tokenizer"):
        encode(None, "x")
