"""SGLang's native /generate and /abort_request: bodies, and answers in its shape.

As in SGLang, a streamed event repeats the text and ids so far, not only the new ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from pdrt.clock import SECOND_NS
from pdrt.serving.choices import Taken
from pdrt.serving.openai import NEUTRAL
from pdrt.serving.openai_replies import finite
from pdrt.serving.plan import (
    RID_CHARS_MAX,
    Ask,
    BadField,
    Context,
    Count,
    CountFromOne,
    Prompt,
    Routing,
    Seed,
    StopText,
    StopTexts,
    StopTokenIds,
    Temperature,
    TokenId,
    TopP,
    check_n,
    decode,
    plan,
    prompt_list,
    refuse_unsupported,
    spread,
)
from pdrt.serving.types import Delta, FinishReason, GenerationRequest, SamplingParams, TokenLogprob

MAX_NEW_TOKENS_DEFAULT = 128  # SGLang's

SAMPLING_NEUTRAL = {name: NEUTRAL[name] for name in NEUTRAL if name != "response_format"}


class GenerateSampling(msgspec.Struct, frozen=True, kw_only=True):
    """sampling_params."""

    max_new_tokens: CountFromOne | None = None
    min_new_tokens: Count | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    stop: StopText | StopTexts | None = None
    stop_token_ids: StopTokenIds | None = None
    ignore_eos: bool | None = None
    sampling_seed: Seed | None = None
    seed: Seed | None = None  # another name for sampling_seed
    n: CountFromOne | None = None
    # Refused unless neutral.
    top_k: Any = None
    min_p: Any = None
    presence_penalty: Any = None
    frequency_penalty: Any = None
    repetition_penalty: Any = None
    logit_bias: Any = None
    regex: Any = None
    ebnf: Any = None
    json_schema: Any = None


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    text: str | list[str] | None = None
    input_ids: list[TokenId | list[TokenId]] | None = None
    sampling_params: GenerateSampling | list[GenerateSampling] | None = None
    stream: bool | None = None
    return_logprob: bool | list[bool] | None = None
    top_logprobs_num: Count | list[Count] | None = None
    return_text_in_logprobs: bool | None = None


class AbortRequest(msgspec.Struct, frozen=True, kw_only=True):
    rid: str | None = None
    abort_all: bool | None = None


def parse_abort(body: bytes) -> str:
    """The rid prefix to abort; '' for every request.

    Without abort_all an empty rid is refused: as a prefix it would match everything.
    """
    request = decode(body, AbortRequest)
    if request.abort_all:
        return ""
    if not request.rid or len(request.rid) > RID_CHARS_MAX:
        raise BadField("rid", f"1 to {RID_CHARS_MAX} characters, or abort_all: true")
    return request.rid


def parse_generate(body: bytes, request_id: str, context: Context) -> GenerateReply:
    """Raises BadField, UnsupportedParameter or PromptTooLong."""
    started_ns = context.clock()
    request, routing = decode(body, GenerateRequest), decode(body, Routing)
    prompt, param = _prompt(request)
    first = request.sampling_params
    ns = {each.n or 1 for each in (first if isinstance(first, list) else [first]) if each}
    if len(ns) > 1:
        raise BadField("sampling_params", "n is the same for all prompts of a batch")
    n = ns.pop() if ns else 1
    prompts_max = check_n(n, context.info)
    prompts, batch = prompt_list(prompt, context.tokens, prompts_max=prompts_max, param=param)
    asks = _asks(request, len(prompts))
    requests = plan(prompts, asks, routing, n=n, request_id=request_id, info=context.info)
    return GenerateReply(
        context,
        requests,
        stream=bool(request.stream),
        listed=batch or n > 1,
        text_in_logprobs=bool(request.return_text_in_logprobs),
        started_ns=started_ns,
    )


def _prompt(request: GenerateRequest) -> tuple[Prompt, str]:
    """The prompt and the name of the field it came in."""
    if (request.text is None) == (request.input_ids is None):
        raise BadField(None, "one of text and input_ids is required, not both")
    if request.input_ids is not None:
        return list[str | int | list[int]](request.input_ids), "input_ids"
    assert request.text is not None
    text = request.text
    return text if isinstance(text, str) else list[str | int | list[int]](text), "text"


def _asks(request: GenerateRequest, prompts_count: int) -> list[Ask]:
    none = GenerateSampling()
    samplings = spread(request.sampling_params or none, prompts_count, "sampling_params")
    wanted = spread(request.return_logprob or False, prompts_count, "return_logprob")
    tops = spread(request.top_logprobs_num or 0, prompts_count, "top_logprobs_num")
    return [
        _ask(sampling, top if want else None)
        for sampling, want, top in zip(samplings, wanted, tops, strict=True)
    ]


def _ask(given: GenerateSampling, logprobs: int | None) -> Ask:
    refuse_unsupported(given, SAMPLING_NEUTRAL)
    stop = [given.stop] if isinstance(given.stop, str) else given.stop or []
    sampling = SamplingParams(
        min_tokens=given.min_new_tokens or 0,
        temperature=1.0 if given.temperature is None else given.temperature,
        top_p=1.0 if given.top_p is None else given.top_p,
        seed=given.seed if given.sampling_seed is None else given.sampling_seed,
        stop=tuple(stop),
        stop_token_ids=tuple(given.stop_token_ids or ()),
        ignore_eos=bool(given.ignore_eos),
        logprobs=logprobs,
    )
    return Ask(sampling=sampling, max_tokens=given.max_new_tokens, default=MAX_NEW_TOKENS_DEFAULT)


class GenerateReply:
    """`Reply` of /generate."""

    def __init__(
        self,
        context: Context,
        requests: Sequence[GenerationRequest],
        *,
        stream: bool,
        listed: bool,
        text_in_logprobs: bool,
        started_ns: int,
    ) -> None:
        self.requests = requests
        self.stream = stream
        self.taken = [Taken() for _ in requests]
        self._context = context
        self._listed = listed
        self._text_in_logprobs = text_in_logprobs
        self._started_ns = started_ns

    def chunk(self, index: int, delta: Delta) -> list[Any]:
        if not (delta.token_ids or delta.text or delta.finish_reason):
            return []
        payload = self._payload(index)
        return [payload | {"index": index}] if self._listed else [payload]

    def tail(self) -> list[Any]:
        return []

    def whole(self) -> Any:
        if not self._listed:
            return self._payload(0)
        return [self._payload(index) for index in range(len(self.taken))]

    def _payload(self, index: int) -> dict[str, Any]:
        taken = self.taken[index]
        request = self.requests[index]
        meta: dict[str, Any] = {
            "id": request.rid,
            "finish_reason": _finish(taken),
            "prompt_tokens": len(request.prompt_tokens),
            "completion_tokens": len(taken.token_ids),
            "cached_tokens": 0,
            "e2e_latency": (self._context.clock() - self._started_ns) / SECOND_NS,
        }
        if request.sampling.logprobs is not None:
            meta |= self._logprobs(taken.logprobs)
        if taken.meta:
            meta["room"] = taken.meta
        if taken.recomputed:
            meta["recomputed"] = True
        return {"text": taken.text, "output_ids": taken.token_ids, "meta_info": meta}

    def _logprobs(self, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        return {
            "output_token_logprobs": [
                self._entry(each.token_id, each.logprob) for each in logprobs
            ],
            "output_top_logprobs": [
                [self._entry(token_id, logprob) for token_id, logprob in each.top]
                for each in logprobs
            ],
        }

    def _entry(self, token_id: int, logprob: float) -> tuple[float, int, str | None]:
        text = self._context.tokens.token_text(token_id) if self._text_in_logprobs else None
        return finite(logprob), token_id, text


def _finish(taken: Taken) -> dict[str, Any] | None:
    match taken.finish_reason:
        case None:
            return None
        case FinishReason.LENGTH:
            return {"type": "length", "length": len(taken.token_ids)}
        case FinishReason.ABORT:
            return {"type": "abort", "message": "aborted"}
        case FinishReason.STOP:
            return {"type": "stop", "matched": taken.meta.get("matched")}
