"""Answers of /v1/completions and /v1/chat/completions, whole and in chunks, in OpenAI's shapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pdrt.serving.choices import Taken
from pdrt.serving.plan import TokensProtocol
from pdrt.serving.types import Delta, FinishReason, GenerationRequest, TokenLogprob

# JSON has no -inf; OpenAI's own servers write this for a token that cannot be.
LOGPROB_MIN = -9999.0

Payload = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Head:
    """What every chunk of one answer repeats."""

    rid: str
    created: int  # seconds since 1970
    model: str
    stream: bool
    include_usage: bool
    prompt_tokens: int  # over all prompts, each counted once


def finite(logprob: float) -> float:
    return max(LOGPROB_MIN, logprob)


def usage(head: Head, taken: Sequence[Taken]) -> Payload:
    completion_tokens = sum(len(each.token_ids) for each in taken)
    return {
        "prompt_tokens": head.prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": head.prompt_tokens + completion_tokens,
    }


def recomputed(taken: Taken) -> Payload:
    """What a choice says of itself if its prompt was computed on decode; the others say nothing."""
    return {"recomputed": True} if taken.recomputed else {}


def reason(finish_reason: FinishReason | None) -> str | None:
    return finish_reason.value if finish_reason else None


def _has_news(delta: Delta) -> bool:
    # Tokens without text (half a character, a held stop string) say nothing a client can show.
    return bool(delta.text or delta.logprobs or delta.finish_reason)


class CompletionReply:
    """`Reply` of /v1/completions."""

    def __init__(
        self, head: Head, requests: Sequence[GenerationRequest], tokens: TokensProtocol
    ) -> None:
        self.requests = requests
        self.stream = head.stream
        self.taken = [Taken() for _ in requests]
        self._head = head
        self._tokens = tokens
        self._text_offsets = [0] * len(requests)  # characters of the choice already told, a chunk

    def chunk(self, index: int, delta: Delta) -> list[Any]:
        if not _has_news(delta):
            return []
        logprobs = self._logprobs(delta.logprobs, self._text_offsets[index])
        if logprobs is not None:
            self._text_offsets[index] += sum(map(len, logprobs["tokens"]))
        payload = self._payload([self._choice(index, delta.text, logprobs, delta.finish_reason)])
        if self._head.include_usage:
            payload["usage"] = None
        return [payload]

    def tail(self) -> list[Any]:
        if not self._head.include_usage:
            return []
        return [self._payload([]) | {"usage": usage(self._head, self.taken)}]

    def whole(self) -> Payload:
        choices = [
            self._choice(i, each.text, self._logprobs(each.logprobs, 0), each.finish_reason)
            for i, each in enumerate(self.taken)
        ]
        return self._payload(choices) | {"usage": usage(self._head, self.taken)}

    def _payload(self, choices: list[Payload]) -> Payload:
        return {
            "id": f"cmpl-{self._head.rid}",
            "object": "text_completion",
            "created": self._head.created,
            "model": self._head.model,
            "choices": choices,
        }

    def _choice(
        self, index: int, text: str, logprobs: Payload | None, finish: FinishReason | None
    ) -> Payload:
        return {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": reason(finish),
            **recomputed(self.taken[index]),
        }

    def _logprobs(self, logprobs: Sequence[TokenLogprob], text_offset: int) -> Payload | None:
        if not logprobs:
            return None
        texts = [self._tokens.token_text(each.token_id) for each in logprobs]
        offsets = []
        for text in texts:
            offsets.append(text_offset)
            text_offset += len(text)
        top: list[dict[str, float]] = []
        for each in logprobs:
            best: dict[str, float] = {}
            for token_id, logprob in each.top:
                # Two tokens may have the same text; the first is the likelier.
                best.setdefault(self._tokens.token_text(token_id), finite(logprob))
            top.append(best)
        return {
            "tokens": texts,
            "token_logprobs": [finite(each.logprob) for each in logprobs],
            "top_logprobs": top if any(top) else None,
            "text_offset": offsets,
        }


class ChatReply:
    """`Reply` of /v1/chat/completions."""

    def __init__(
        self, head: Head, requests: Sequence[GenerationRequest], tokens: TokensProtocol
    ) -> None:
        self.requests = requests
        self.stream = head.stream
        self.taken = [Taken() for _ in requests]
        self._head = head
        self._tokens = tokens
        self._greeted = [False] * len(requests)

    def chunk(self, index: int, delta: Delta) -> list[Any]:
        chunks = []
        if not self._greeted[index]:
            self._greeted[index] = True
            chunks.append(self._chunk(index, {"role": "assistant", "content": ""}))
        if _has_news(delta):
            content = {"content": delta.text} if delta.text else {}
            chunks.append(self._chunk(index, content, delta.logprobs, delta.finish_reason))
        return chunks

    def tail(self) -> list[Any]:
        if not self._head.include_usage:
            return []
        return [self._chunk_payload([]) | {"usage": usage(self._head, self.taken)}]

    def whole(self) -> Payload:
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": each.text, "refusal": None},
                "logprobs": self._logprobs(each.logprobs),
                "finish_reason": reason(each.finish_reason),
                **recomputed(each),
            }
            for index, each in enumerate(self.taken)
        ]
        payload = self._payload("chat.completion", choices)
        return payload | {"usage": usage(self._head, self.taken)}

    def _chunk(
        self,
        index: int,
        content: Payload,
        logprobs: Sequence[TokenLogprob] = (),
        finish: FinishReason | None = None,
    ) -> Payload:
        choice = {
            "index": index,
            "delta": content,
            "logprobs": self._logprobs(logprobs),
            "finish_reason": reason(finish),
            **recomputed(self.taken[index]),
        }
        payload = self._chunk_payload([choice])
        if self._head.include_usage:
            payload["usage"] = None
        return payload

    def _chunk_payload(self, choices: list[Payload]) -> Payload:
        return self._payload("chat.completion.chunk", choices)

    def _payload(self, kind: str, choices: list[Payload]) -> Payload:
        return {
            "id": f"chatcmpl-{self._head.rid}",
            "object": kind,
            "created": self._head.created,
            "model": self._head.model,
            "choices": choices,
        }

    def _logprobs(self, logprobs: Sequence[TokenLogprob]) -> Payload | None:
        if not logprobs:
            return None
        content = [
            self._token(each.token_id, each.logprob)
            | {"top_logprobs": [self._token(token_id, logprob) for token_id, logprob in each.top]}
            for each in logprobs
        ]
        return {"content": content, "refusal": None}

    def _token(self, token_id: int, logprob: float) -> Payload:
        text = self._tokens.token_text(token_id)
        return {"token": text, "logprob": finite(logprob), "bytes": list(text.encode())}
