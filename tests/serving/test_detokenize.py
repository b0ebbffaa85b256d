from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrt.serving.detokenize import WINDOW_TOKENS_MAX, Detokenizer, StopStrings


def decode_bytes(tokens: Sequence[int]) -> str:
    """One token a byte: the worst case for characters of several bytes."""
    return bytes(tokens).decode("utf-8", errors="replace")


@given(st.text(max_size=40), st.text(max_size=10))
def test_pieces_are_whole_characters_and_add_up(text: str, prompt: str) -> None:
    detokenizer = Detokenizer(decode_bytes, list(prompt.encode()))
    pieces = [detokenizer.push(token) for token in text.encode()]
    assert "".join(pieces) + detokenizer.flush() == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


def test_an_unfinished_character_comes_out_at_the_end() -> None:
    detokenizer = Detokenizer(decode_bytes, [])
    assert [detokenizer.push(token) for token in "é".encode()[:1]] == [""]
    assert detokenizer.flush() == "\ufffd"


def test_bytes_that_never_become_a_character_are_not_kept_for_ever() -> None:
    detokenizer = Detokenizer(decode_bytes, [])
    text = "".join(detokenizer.push(0xFF) for _ in range(3 * WINDOW_TOKENS_MAX))
    assert len(text) > WINDOW_TOKENS_MAX


def test_a_character_before_an_unfinished_one_does_not_wait() -> None:
    detokenizer = Detokenizer(decode_bytes, [])
    both = "漢字".encode()
    assert [detokenizer.push(token) for token in both[:4]] == ["", "", "漢", ""]


def test_the_first_token_keeps_its_space() -> None:
    """Decoders in the style of sentencepiece drop the space of whatever comes first."""
    words = ["", "▁the", "▁end"]

    def decode(tokens: Sequence[int]) -> str:
        return "".join(words[token] for token in tokens).replace("▁", " ").removeprefix(" ")

    assert Detokenizer(decode, [1]).push(2) == " end"


def reference(text: str, stops: Sequence[str]) -> str:
    found = [at for stop in stops if (at := text.find(stop)) >= 0]
    return text[: min(found)] if found else text


@given(
    st.text(alphabet="ab", max_size=30),
    st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=3),
    st.lists(st.integers(1, 4), min_size=1, max_size=30),
)
def test_text_ends_before_the_first_stop_that_is_complete(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    finder = StopStrings(stops)
    shown, at, seen = "", 0, ""
    for cut in cuts * len(text):
        if at >= len(text) or finder.matched is not None:
            break
        shown += finder.push(text[at : at + cut])
        at += cut
        seen = text[:at]
    if finder.matched is None:
        shown += finder.flush()
    assert shown == reference(seen, stops)
    assert (finder.matched is not None) == (reference(seen, stops) != seen)
    assert finder.matched is None or finder.matched in stops


def test_after_a_match_nothing_follows() -> None:
    finder = StopStrings(["\n"])
    assert finder.push("one\ntwo") == "one"
    assert finder.push("three") + finder.flush() == ""


def test_only_what_may_become_a_stop_is_held_back() -> None:
    finder = StopStrings(["STOP"])
    assert finder.push("go ST") == "go "
    assert finder.push("ART") == "START"


@pytest.mark.parametrize("stops", [[], ["END"]])
def test_skipped_text_is_not_searched(stops: list[str]) -> None:
    finder = StopStrings(stops)
    assert finder.skip("an END") == "an END"
    assert finder.matched is None
