"""Tokens in, text out, one at a time: whole characters only, and no part of a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]

REPLACEMENT = "\ufffd"  # what a decoder shows for the bytes of an unfinished character
CONTEXT_TOKENS = 4  # decoders treat the first token of a text differently, so never start with it
WINDOW_TOKENS_MAX = 64  # tokens that never make a whole character are not text worth waiting for


class Detokenizer:
    """Text of a growing token list.  Looks at the last few tokens only, whatever the length."""

    def __init__(self, decode: Decode, prompt_tokens: Sequence[int]) -> None:
        self._decode = decode
        self._window = list(prompt_tokens[-CONTEXT_TOKENS:])
        self._context_tokens = len(self._window)  # leading tokens of the window already in text
        self._emitted = len(decode(self._window)) if self._window else 0  # characters of the window

    def push(self, token_id: int) -> str:
        """Add a token; return the characters that are now complete."""
        self._window.append(token_id)
        text = self._decode(self._window)
        whole = len(text.rstrip(REPLACEMENT))
        if whole < len(text) and len(self._window) <= WINDOW_TOKENS_MAX:
            fresh = text[self._emitted : whole]
            self._emitted = max(self._emitted, whole)
            return fresh
        fresh = text[self._emitted :]
        self._restart_window()
        return fresh

    def flush(self) -> str:
        """The rest, as the decoder shows it, when no more tokens will come."""
        fresh = self._decode(self._window)[self._emitted :]
        self._restart_window()
        return fresh

    def _restart_window(self) -> None:
        self._window = self._window[-CONTEXT_TOKENS:]
        self._emitted = len(self._decode(self._window))


class StopStrings:
    """Finds the first stop string in streamed text and holds back what may become one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Add text; return what is certain to lie before any stop.  After a match, nothing more."""
        if self.matched is not None:
            return ""
        if not self._stops:
            return text
        held = self._held + text
        found = [(start, stop) for stop in self._stops if (start := held.find(stop)) >= 0]
        if found:
            start, self.matched = min(found)
            self._held = ""
            return held[:start]
        keep = max(_overlap(held, stop) for stop in self._stops)
        certain = len(held) - keep
        self._held = held[certain:]
        return held[:certain]

    def skip(self, text: str) -> str:
        """Add text in which stop strings do not count; returns it after what was held."""
        released, self._held = self._held + text, ""
        return released

    def flush(self) -> str:
        """What was held back for a stop that never came."""
        return self.skip("")


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop` and is not all of it."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if stop.startswith(text[-n:])), 0)
