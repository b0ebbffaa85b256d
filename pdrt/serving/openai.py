"""Bodies of /v1/completions and /v1/chat/completions: what is read from them and what is refused.

Unknown fields are ignored and every field may be null: routers re-serialise bodies with all their
defaults.  Known fields this server does not implement are refused when they would change the text.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from pdrt.serving.openai_replies import ChatReply, CompletionReply, Head
from pdrt.serving.plan import (
    Ask,
    BadField,
    Context,
    Count,
    CountFromOne,
    Message,
    Prompt,
    Routing,
    Seed,
    StopText,
    StopTexts,
    StopTokenIds,
    Temperature,
    TopP,
    UnsupportedParameter,
    check_n,
    decode,
    plan,
    prompt_list,
    refuse_unsupported,
)
from pdrt.serving.types import GenerationRequest, SamplingParams

COMPLETION_TOKENS_DEFAULT = 16  # OpenAI's
# Pages for prompt and answer are reserved together; a chat that names no limit must not take the
# rest of the context from everybody else.
CHAT_TOKENS_DEFAULT = 1024

# Values at which a field changes nothing; null always is one.  1 << 30 is SGLang's "all".
NEUTRAL: dict[str, tuple[object, ...]] = {
    "top_k": (0, -1, 1 << 30),
    "min_p": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "regex": ("",),
    "ebnf": ("",),
    "json_schema": ("",),
}
COMPLETION_NEUTRAL = NEUTRAL | {"echo": (False,), "suffix": ("",)}
CHAT_NEUTRAL = NEUTRAL | {"tools": ([],), "functions": ([],), "continue_final_message": (False,)}


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    include_usage: bool | None = None


class OpenAIRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The fields both endpoints share."""

    model: str | None = None
    n: CountFromOne | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: CountFromOne | None = None
    min_tokens: Count | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    seed: Seed | None = None
    stop: StopText | StopTexts | None = None
    stop_token_ids: StopTokenIds | None = None
    ignore_eos: bool | None = None
    # Refused unless neutral, see NEUTRAL.
    top_k: Any = None
    min_p: Any = None
    presence_penalty: Any = None
    frequency_penalty: Any = None
    repetition_penalty: Any = None
    logit_bias: Any = None
    response_format: Any = None
    regex: Any = None
    ebnf: Any = None
    json_schema: Any = None


class CompletionRequest(OpenAIRequest, frozen=True, kw_only=True):
    prompt: Prompt | None = None
    logprobs: Count | None = None  # alternatives a token; 0: the chosen one only
    best_of: CountFromOne | None = None
    echo: Any = None
    suffix: Any = None


class ContentPart(msgspec.Struct, frozen=True, kw_only=True):
    type: str
    text: str | None = None


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    role: str
    content: str | list[ContentPart] | None = None


class ChatRequest(OpenAIRequest, frozen=True, kw_only=True):
    messages: Annotated[list[ChatMessage], Meta(min_length=1)] | None = None
    max_completion_tokens: CountFromOne | None = None  # wins over max_tokens, its older name
    logprobs: bool | None = None
    top_logprobs: Count | None = None
    tools: Any = None
    functions: Any = None
    continue_final_message: Any = None


def parse_completion(body: bytes, request_id: str, context: Context) -> CompletionReply:
    """Raises BadField, UnsupportedParameter or PromptTooLong."""
    request, routing = decode(body, CompletionRequest), decode(body, Routing)
    refuse_unsupported(request, COMPLETION_NEUTRAL)
    n = request.n or 1
    if request.best_of not in (None, n):
        raise UnsupportedParameter("best_of", "only best_of equal to n is implemented")
    if request.prompt is None:
        raise BadField("prompt", "is required")
    prompts_max = check_n(n, context.info)
    prompts, _ = prompt_list(request.prompt, context.tokens, prompts_max=prompts_max)
    ask = Ask(
        sampling=_sampling(request, logprobs=request.logprobs),
        max_tokens=request.max_tokens,
        default=COMPLETION_TOKENS_DEFAULT,
    )
    asks = [ask] * len(prompts)
    requests = plan(prompts, asks, routing, n=n, request_id=request_id, info=context.info)
    return CompletionReply(_head(request, requests, n, context), requests, context.tokens)


def parse_chat(body: bytes, request_id: str, context: Context) -> ChatReply:
    """Raises BadField, UnsupportedParameter or PromptTooLong; BadRequest from the chat template."""
    request, routing = decode(body, ChatRequest), decode(body, Routing)
    refuse_unsupported(request, CHAT_NEUTRAL)
    n = request.n or 1
    check_n(n, context.info)
    if request.messages is None:
        raise BadField("messages", "is required")
    if request.top_logprobs and not request.logprobs:
        raise BadField("top_logprobs", "needs logprobs: true")
    messages = [_message(message, i) for i, message in enumerate(request.messages)]
    prompt = tuple(context.tokens.apply_chat(messages))
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    ask = Ask(
        sampling=_sampling(request, logprobs=logprobs),
        max_tokens=request.max_completion_tokens or request.max_tokens,
        default=CHAT_TOKENS_DEFAULT,
    )
    requests = plan([prompt], [ask], routing, n=n, request_id=request_id, info=context.info)
    return ChatReply(_head(request, requests, n, context), requests, context.tokens)


def _sampling(request: OpenAIRequest, *, logprobs: int | None) -> SamplingParams:
    stop = [request.stop] if isinstance(request.stop, str) else request.stop or []
    return SamplingParams(
        min_tokens=request.min_tokens or 0,
        temperature=1.0 if request.temperature is None else request.temperature,
        top_p=1.0 if request.top_p is None else request.top_p,
        seed=request.seed,
        stop=tuple(stop),
        stop_token_ids=tuple(request.stop_token_ids or ()),
        ignore_eos=bool(request.ignore_eos),
        logprobs=logprobs,
    )


def _message(message: ChatMessage, index: int) -> Message:
    if not isinstance(message.content, list):
        return {"role": message.role, "content": message.content or ""}
    texts = []
    for part_index, part in enumerate(message.content):
        if part.type != "text":
            param = f"messages[{index}].content[{part_index}].type"
            raise UnsupportedParameter(param, "this server reads text parts only")
        texts.append(part.text or "")
    return {"role": message.role, "content": "\n".join(texts)}


def _head(
    request: OpenAIRequest, requests: tuple[GenerationRequest, ...], n: int, context: Context
) -> Head:
    options = request.stream_options
    return Head(
        rid=requests[0].rid,
        created=int(context.wall_s()),
        model=context.info.served_model_name,
        stream=bool(request.stream),
        include_usage=bool(options and options.include_usage),
        prompt_tokens=sum(len(each.prompt_tokens) for each in requests[::n]),
    )
