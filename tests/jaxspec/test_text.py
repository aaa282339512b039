"""Ids to text while it streams: nothing is lost, no half character is shown, stops cut."""

from __future__ import annotations

import functools
import logging

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoints import BUNDLED_MODEL
from checkpoints.tokenizer import load_tokenizer
from jaxspec.text import (
    StopFilter,
    StopSearch,
    TextStream,
    check_stops,
    decode,
    decode_until_stop,
    encode,
)
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


def test_a_text_beyond_the_tokenizers_length_is_encoded_without_a_word(monkeypatch):
    """What is too long for the model is said by its own line, which counts the new tokens too."""
    tokenizer = load_tokenizer(BUNDLED_MODEL)
    said = []
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", said.append)
    logger = logging.getLogger("transformers")
    logger.addHandler(handler)
    text = "x = 1\n" * tokenizer.model_max_length
    try:
        assert len(encode(tokenizer, text)) > tokenizer.model_max_length and not said
        # It does speak where it is not told not to.
        assert len(tokenizer(text)["input_ids"]) > tokenizer.model_max_length and len(said) == 1
    finally:
        logger.removeHandler(handler)


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


@functools.cache
def bundled_tokenizer():
    return load_tokenizer(BUNDLED_MODEL)


def certain_length(text, stops):
    """Return the characters before the longest end of `text` that begins some stop string."""
    prefixes = {stop[:length] for stop in stops for length in range(1, len(stop))}
    return min((i for i in range(len(text)) if text[i:] in prefixes), default=len(text))


def first_stop(pieces, stops, num_ignored=0):
    """Return (index of the piece, start) of the stop that counts, tried by brute force, or None."""
    text = "".join(pieces)
    end_before = 0
    for index, piece in enumerate(pieces):
        ends = range(end_before + 1, end_before + len(piece) + 1)
        end_before += len(piece)
        starts = [
            end - len(stop)
            for end in ends
            for stop in stops
            if end >= len(stop) and text[end - len(stop) : end] == stop
        ]
        if index >= num_ignored and starts:
            return index, min(starts)
    return None


def pieces_of(tokenizer, ids):
    """Return the text that each id made certain, from the decodings of whole prefixes."""
    pieces, certain = [], ""
    for end in range(1, len(ids) + 1):
        text = decode(tokenizer, ids[:end])
        if text.endswith("\ufffd"):
            text = certain
        pieces.append(text[len(certain) :])
        certain = text
    return pieces


def chunks(items, sizes):
    """Return `items` in chunks of these sizes, taken in turn."""
    parts, start, index = [], 0, 0
    while start < len(items):
        parts.append(items[start : start + sizes[index % len(sizes)]])
        start += sizes[index % len(sizes)]
        index += 1
    return parts


@given(
    st.lists(st.text("abx", max_size=5), max_size=12),
    st.lists(st.text("abx", min_size=1, max_size=5), max_size=4),
    st.integers(0, 5),
)
@settings(max_examples=600, deadline=None)
def test_the_filter_shows_all_that_is_certain_and_nothing_else(pieces, stops, num_ignored):
    stop_filter = StopFilter(stops)
    stopped = first_stop(pieces, stops, num_ignored)
    shown = arrived = ""
    for index, piece in enumerate(pieces):
        shown += stop_filter.push(piece, may_stop=index >= num_ignored)
        arrived += piece
        if stopped is not None and index >= stopped[0]:
            assert stop_filter.is_stopped
            assert shown == "".join(pieces)[: stopped[1]]
        else:
            assert not stop_filter.is_stopped
            assert shown == arrived[: certain_length(arrived, stops)]
    rest = stop_filter.flush()
    assert stop_filter.flush() == ""
    assert rest == "" if stopped is not None else shown + rest == arrived


@given(st.lists(st.booleans(), max_size=12), st.data())
@settings(max_examples=200, deadline=None)
def test_a_stop_counts_where_it_ends(flags, data):
    pieces = [data.draw(st.text("ab", max_size=3)) for _ in flags]
    stops = data.draw(st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3))
    stop_filter = StopFilter(stops)
    shown = "".join(
        stop_filter.push(piece, may_stop=flag) for piece, flag in zip(pieces, flags, strict=True)
    )
    expected = None
    for index, flag in enumerate(flags):
        found = first_stop(pieces[: index + 1], stops, index)
        if flag and found is not None:
            expected = found
            break
    text = "".join(pieces)
    assert stop_filter.is_stopped == (expected is not None)
    assert shown + stop_filter.flush() == (text if expected is None else text[: expected[1]])


def test_overlapping_stops():
    single = StopFilter(["ab", "xaby"])
    assert [single.push(piece) for piece in "zxaby"] == ["z", "", "", "x", ""]
    assert single.is_stopped
    whole = StopFilter(["ab", "xaby"])
    assert whole.push("zxaby!") == "z"
    assert whole.is_stopped


def test_an_ignored_stop_may_begin_another():
    stop_filter = StopFilter(["aa", "aab"])
    assert stop_filter.push("xaa", may_stop=False) == "x"
    assert stop_filter.push("b") == ""
    assert stop_filter.is_stopped


def test_a_stop_is_not_made_of_text_already_counted():
    stop_filter = StopFilter(["ab"])
    assert stop_filter.push("ab", may_stop=False) == "ab"
    assert stop_filter.push("") == ""
    assert stop_filter.push("c") == "c"
    assert not stop_filter.is_stopped


SNIPPETS = ["a", "b", "x", "y", "ab", "\n", "\n\n", "\n\n\n", "é", "漢", "🙂", "\ufffd", " a"]
STOPS = [
    "ab",
    "xaby",
    "b\n",
    "\n\n",
    "\n\n\n\n",
    "é",
    "a🙂",
    "🙂",
    "🙂🙂",
    "漢b",
    "\ufffd",
    "\ufffda",
]


@pytest.mark.parametrize("tokenizer_of", [byte_tokenizer, bundled_tokenizer])
@given(data=st.data())
@settings(max_examples=250, deadline=None)
def test_rows_end_where_brute_force_says(tokenizer_of, data):
    tokenizer = tokenizer_of()
    # Half of the rows are text, half are ids in any order, with characters that never end.
    pool = [encode(tokenizer, snippet) for snippet in SNIPPETS] + [[tokenizer.eos_token_id]]
    if data.draw(st.booleans()):
        pool = [[token_id] for ids in pool for token_id in ids]
    ids = sum(data.draw(st.lists(st.sampled_from(pool), max_size=20)), [])
    stops = data.draw(
        st.lists(st.sampled_from(STOPS) | st.text("abé\n", min_size=1, max_size=3), max_size=3)
    )
    min_new_tokens = data.draw(st.integers(0, 8))
    sizes = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))

    stopped = first_stop(pieces_of(tokenizer, ids), stops, min_new_tokens)
    text = decode(tokenizer, ids)
    num_kept = None
    if stopped is not None:
        num_kept = stopped[0] + 1
        text = "".join(pieces_of(tokenizer, ids))[: stopped[1]]
    options = {"eos_ids": [tokenizer.eos_token_id], "min_new_tokens": min_new_tokens}
    assert decode_until_stop(tokenizer, ids, stops, **options) == (text, num_kept)

    search = StopSearch(tokenizer, stops, **options)
    num_pushed = 0
    for chunk in chunks(ids, sizes):
        num_pushed += len(chunk)
        is_stopped = num_kept is not None and num_kept <= num_pushed
        assert search.push(chunk) == (num_kept if is_stopped else None)
        assert text.startswith(search.text)
        if is_stopped:
            assert search.text == text
    before = search.text
    assert before + search.flush() == search.text == text
    assert search.push([]) == num_kept


def test_a_stop_crosses_token_borders():
    tokenizer = bundled_tokenizer()
    ids = encode(tokenizer, "    pass\n\nclass A:\n")
    stop = "ss\n\ncl"
    tokens = [tokenizer.decode([token_id]) for token_id in ids]
    assert [i for i, token in enumerate(tokens) if stop.startswith(token)] == []
    completed_by = tokens.index("class")
    assert decode_until_stop(tokenizer, ids, [stop]) == ("    pa", completed_by + 1)


def test_min_new_tokens_counts_ends_not_starts():
    tokenizer = bundled_tokenizer()
    ids = [encode(tokenizer, character)[0] for character in "ababc"]
    cut = functools.partial(decode_until_stop, tokenizer, ids, ["ab"])
    assert cut(min_new_tokens=0) == cut(min_new_tokens=1) == ("", 2)
    assert cut(min_new_tokens=2) == cut(min_new_tokens=3) == ("ab", 4)
    assert cut(min_new_tokens=4) == cut(min_new_tokens=9) == ("ababc", None)


def test_an_emoji_stops_with_its_last_byte():
    tokenizer = bundled_tokenizer()
    ids = encode(tokenizer, "x🙂🙂")
    assert len(ids) == 9
    search = StopSearch(tokenizer, ["🙂"])
    assert [search.push([token_id]) for token_id in ids[:5]] == [None, None, None, None, 5]
    assert search.text == "x"
    assert search.push(ids[5:]) == 5
    assert (search.flush(), search.text) == ("", "x")
    # The token that makes the emoji whole is the fifth, though its first bytes came before.
    assert decode_until_stop(tokenizer, ids, ["🙂"], min_new_tokens=4) == ("x", 5)
    assert decode_until_stop(tokenizer, ids, ["🙂"], min_new_tokens=5) == ("x🙂", 9)


def test_half_a_character_completes_nothing():
    tokenizer = bundled_tokenizer()
    ids = encode(tokenizer, "x🙂")[:-1]
    search = StopSearch(tokenizer, ["x🙂", "\ufffd"])
    assert search.push(ids) is None
    assert search.text == ""
    assert (search.flush(), search.text) == ("x\ufffd", "x\ufffd")
    assert decode_until_stop(tokenizer, ids, ["x🙂", "\ufffd"]) == ("x\ufffd", None)


def test_two_newlines_stop_in_one_token_and_in_two():
    tokenizer = bundled_tokenizer()
    newline, two, three = (encode(tokenizer, "\n" * count) for count in (1, 2, 3))
    assert len(newline) == len(two) == len(three) == 1
    start = encode(tokenizer, "x")
    cut = functools.partial(decode_until_stop, tokenizer, stops=["\n\n"])
    assert cut(start + two + start) == ("x", 2)
    assert cut(start + newline + newline + start) == ("x", 3)
    assert cut(start + newline + two) == ("x", 3)
    assert cut(start + three + start) == ("x", 2)
    assert cut(start + newline + start) == ("x\nx", None)


@pytest.mark.parametrize("tokenizer_of", [byte_tokenizer, bundled_tokenizer])
def test_eos_is_a_token_but_not_text(tokenizer_of):
    tokenizer = tokenizer_of()
    [a], [b] = encode(tokenizer, "a"), encode(tokenizer, "b")
    for stops, text in ((["ab"], "a"), ([tokenizer.eos_token], "a"), ([], "a")):
        for eos_id in (tokenizer.eos_token_id, b):
            search = StopSearch(tokenizer, stops, eos_ids=[eos_id])
            assert search.push([a, eos_id]) is None
            assert search.text + search.flush() == text
            assert decode_until_stop(tokenizer, [a, eos_id], stops, eos_ids=[eos_id]) == (
                text,
                None,
            )


def test_special_tokens_are_skipped_but_counted():
    tokenizer = bundled_tokenizer()
    [a], [b] = encode(tokenizer, "a"), encode(tokenizer, "b")
    special = tokenizer.convert_tokens_to_ids("<|im_start|>")
    ids = [special, a, special, b, special]
    assert decode_until_stop(tokenizer, ids, ["ab"]) == ("", 4)
    assert decode_until_stop(tokenizer, ids, ["<|im_start|>"]) == ("ab", None)
    assert decode_until_stop(tokenizer, ids, ["ab"], min_new_tokens=4) == ("ab", None)


def test_without_stops_it_is_decode():
    tokenizer = bundled_tokenizer()
    eos_id, special = tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|im_start|>")
    for text in TEXTS:
        for ids in (encode(tokenizer, text), [special, *encode(tokenizer, text), eos_id]):
            for end in range(len(ids) + 1):
                expected = decode(tokenizer, ids[:end], [eos_id]), None
                assert decode_until_stop(tokenizer, ids[:end], [], eos_ids=[eos_id]) == expected


@pytest.mark.parametrize(
    ("stops", "message"),
    [
        (["a", ""], "stop string 1 is empty: expected at least one character"),
        ([3], "stop string 0 is 3, expected a string"),
        (["a", None], "stop string 1 is None, expected a string"),
        ([b"a"], "stop string 0 is b'a', expected a string"),
        (["a\ud800\n"], r"stop string 0, 'a\ud800\n', is not valid Unicode text"),
        ("ab", "stops='ab' is not a sequence of strings"),
        (None, "stops=None is not a sequence of strings"),
    ],
)
def test_stops_are_checked(stops, message):
    with pytest.raises(ValueError) as error:
        check_stops(stops)
    assert str(error.value) == message


def test_good_stops_pass_and_bad_ones_go_nowhere():
    check_stops([])
    check_stops(("\n\n", "🙂", "\0", "\ufffd"))
    for build in (StopFilter, functools.partial(StopSearch, byte_tokenizer())):
        with pytest.raises(ValueError, match="stop string 0 is empty"):
            build([""])
    with pytest.raises(ValueError, match="stop string 0 is empty"):
        decode_until_stop(byte_tokenizer(), [1], [""])
