"""From request bodies to `GenerationRequest`s: what /v1 and /generate share.  No HTTP here.

One body may hold several prompts and ask for n answers to each.  Choices are numbered as OpenAI
numbers them, prompt by prompt: choice = prompt_index * n + sample_index.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Protocol, TypeVar

import msgspec
from msgspec import Meta

from pdrt.clock import Clock
from pdrt.errors import BadRequest, PromptTooLong
from pdrt.serving.types import GenerationRequest, Rendezvous, SamplingParams

# SGLang's fake peer: a request that names it is a probe and never leaves this server.
FAKE_PEER_HOST = "2.2.2.2"
ROOMS_COUNT = 2**63
SEEDS_COUNT = 2**63
TOKEN_ID_MAX = 2**31 - 1
RID_CHARS_MAX = 256

Room = Annotated[int, Meta(ge=0, le=ROOMS_COUNT - 1)]
Port = Annotated[int, Meta(ge=0, le=65535)]
Rid = Annotated[str, Meta(min_length=1, max_length=RID_CHARS_MAX)]
TokenId = Annotated[int, Meta(ge=0, le=TOKEN_ID_MAX)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
StopText = Annotated[str, Meta(min_length=1)]
StopTexts = Annotated[list[StopText], Meta(max_length=16)]
StopTokenIds = Annotated[list[TokenId], Meta(max_length=64)]
Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]
CountFromOne = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Temperature = Annotated[float, Meta(ge=0)]
TopP = Annotated[float, Meta(gt=0, le=1)]
# One array type only: msgspec cannot tell list[str] from list[int] in a union.
Prompt = str | list[str | TokenId | list[TokenId]]

T = TypeVar("T")
Message = Mapping[str, str]


class TokensProtocol(Protocol):
    """The tokenizer as the HTTP side sees it.  `encode` may be called from another thread."""

    def encode(self, text: str, /) -> list[int]: ...

    def decode(self, ids: Sequence[int], /) -> str: ...

    def apply_chat(self, messages: Sequence[Message], /) -> list[int]:
        """Messages have `role` and `content`.  Raises BadRequest where the template refuses."""

    def token_text(self, token_id: int, /) -> str:
        """The text of one token, as logprobs show it."""


@dataclass(frozen=True, kw_only=True)
class ServerInfo:
    """What this server is, for the info endpoints, and the limits a request is held to."""

    served_model_name: str
    model_path: str
    role: str = "null"  # "prefill", "decode" or "null": SGLang's words for disaggregation_mode
    version: str = "0"
    max_model_len: int = 2048  # tokens, prompt and answer together
    vocab_size: int | None = None  # None: token ids of a prompt are not checked here
    bootstrap_port: int = 8998
    tokenizer_path: str | None = None  # None: model_path
    tp_size: int = 1
    dp_size: int = 1
    tokens_max: int | None = None  # tokens the KV pool holds; None: unknown
    running_max: int | None = None  # requests decoded at once; smg admits by it
    choices_max: int = 128  # prompts times n in one body
    logprobs_max: int = 20  # alternatives a token


@dataclass(frozen=True, kw_only=True)
class Ask:
    """What one prompt asks for; how much of it the context allows is settled with the prompt."""

    sampling: SamplingParams  # its max_tokens is not looked at
    max_tokens: int | None  # None: the default
    default: int | None  # None: whatever the context has left


@dataclass(frozen=True, kw_only=True)
class Context:
    """What turning a body into requests needs to know about this server."""

    tokens: TokensProtocol
    info: ServerInfo
    clock: Clock
    wall_s: Callable[[], float]  # seconds since 1970, for `created`


class BadField(BadRequest):
    """A field of the body is wrong.  `param` is its path, as OpenAI's clients expect it."""

    def __init__(self, param: str | None, detail: str) -> None:
        super().__init__(f"{param}: {detail}" if param else detail)
        self.param = param


class UnsupportedParameter(BadField):
    """The field is known and would change the answer, and this server does not implement it."""

    code = "unsupported_parameter"


class Routing(msgspec.Struct, frozen=True, kw_only=True):
    """What routers add to a body, whatever the endpoint.  Decoded beside the endpoint's struct.

    `n` and prompt lists in one body get lists, one entry a choice or one a prompt.
    """

    rid: Rid | list[Rid] | None = None
    bootstrap_room: Room | list[Room] | None = None
    bootstrap_host: str | list[str | None] | None = None
    bootstrap_port: Port | list[Port | None] | None = None


def decode(body: bytes, kind: type[T]) -> T:
    """Decode JSON.  Raises BadField with the byte position, or with the path of the field."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise BadField(*_path_and_detail(str(error))) from error
    except msgspec.DecodeError as error:
        raise BadField(None, f"not valid JSON: {_with_position(body, str(error))}") from error
    except RecursionError as error:
        raise BadField(None, "not usable JSON: nested too deeply") from error


def _path_and_detail(text: str) -> tuple[str | None, str]:
    # The path is nowhere but in msgspec's text; without a match the text is still a good message.
    match = re.fullmatch(r"(.*) - at `\$\.?(.*)`", text, re.DOTALL)
    return (match[2] or None, match[1]) if match else (None, text)


def _with_position(body: bytes, text: str) -> str:
    """msgspec gives no position for a cut body or for bytes that are not UTF-8."""
    if "(byte " in text:
        return text
    try:
        body.decode()
    except UnicodeDecodeError as error:
        return f"{text} (byte {error.start})"
    return f"{text} (byte {len(body)})"


def rooms_named(body: bytes) -> list[Rendezvous]:
    """The rooms that a body names which was refused for what else it says; none if it cannot be
    told.  With one room for several choices only the first: its peer's body ends as a whole."""
    try:
        routing = decode(body, Routing)
        rooms = routing.bootstrap_room
        count = len(rooms) if isinstance(rooms, list) else 1
        meetings = _meetings(routing, count, 1)
    except BadRequest:
        return []
    return [meeting for meeting in meetings if meeting is not None]


def refuse_unsupported(request: msgspec.Struct, neutral: Mapping[str, tuple[object, ...]]) -> None:
    """Refuse known fields at values that would change the answer; routers inject the neutral ones.

    Ignoring them would return text the client did not ask for, with status 200.
    """
    fields = msgspec.structs.asdict(request)
    for name, accepted in neutral.items():
        if fields[name] is not None and fields[name] not in accepted:
            raise UnsupportedParameter(name, "this server does not implement it")


def prompt_list(
    prompt: Prompt, tokens: TokensProtocol, *, prompts_max: int, param: str = "prompt"
) -> tuple[list[tuple[int, ...]], bool]:
    """The prompts as token ids, and whether the body gave a list of prompts."""
    if isinstance(prompt, str):
        return [tuple(tokens.encode(prompt))], False
    if not prompt:
        raise BadField(param, "the list is empty")
    texts = [item for item in prompt if isinstance(item, str)]
    ids = [item for item in prompt if isinstance(item, int)]
    lists = [item for item in prompt if isinstance(item, list)]
    if len(prompt) == len(ids):
        return [tuple(ids)], False
    if len(prompt) > prompts_max:  # before tokenizing: one body must not ask for unbounded work
        raise BadField(param, f"{len(prompt)} prompts; at most {prompts_max} with this n")
    if len(prompt) == len(texts):
        return [tuple(tokens.encode(text)) for text in texts], True
    if len(prompt) == len(lists):
        return [tuple(item) for item in lists], True
    raise BadField(param, "a list holds strings, token ids, or lists of token ids, never a mix")


def check_prompt(prompt: tuple[int, ...], info: ServerInfo) -> None:
    """Raises BadField or PromptTooLong."""
    if not prompt:
        raise BadField("prompt", "the prompt has no tokens")
    if len(prompt) >= info.max_model_len:
        raise PromptTooLong(
            f"the prompt has {len(prompt)} tokens; the context holds {info.max_model_len}, "
            "and at least one is for the answer"
        )
    if info.vocab_size is not None and max(prompt) >= info.vocab_size:
        raise BadField(
            "prompt", f"token id {max(prompt)} is outside the vocabulary of {info.vocab_size}"
        )


def token_budget(
    prompt_count: int, asked: int | None, *, default: int | None, info: ServerInfo
) -> int:
    """How many tokens to generate.  `default` None: whatever the context has left.

    More than the context holds is refused, not clamped: a cut answer would look complete.
    """
    left = info.max_model_len - prompt_count
    if asked is None:
        return left if default is None else min(default, left)
    if asked > left:
        raise PromptTooLong(
            f"the prompt has {prompt_count} tokens and {asked} more are asked for; "
            f"the context holds {info.max_model_len}"
        )
    return asked


def check_n(n: int, info: ServerInfo) -> int:
    """How many prompts a body may have beside this n.  Raises BadField."""
    if n > info.choices_max:
        raise BadField("n", f"at most {info.choices_max} choices a request")
    return info.choices_max // n


def settle(ask: Ask, prompt: tuple[int, ...], info: ServerInfo) -> SamplingParams:
    """The sampling of one prompt, checked.  Raises BadField or PromptTooLong."""
    check_prompt(prompt, info)
    budget = token_budget(len(prompt), ask.max_tokens, default=ask.default, info=info)
    sampling = replace(ask.sampling, max_tokens=budget)
    if sampling.min_tokens > budget:
        raise BadField(
            "min_tokens", f"{sampling.min_tokens} is more than the {budget} that may be generated"
        )
    if sampling.logprobs is not None and sampling.logprobs > info.logprobs_max:
        raise BadField("logprobs", f"at most {info.logprobs_max} alternatives a token")
    return sampling


def plan(
    prompts: Sequence[tuple[int, ...]],
    asks: Sequence[Ask],
    routing: Routing,
    *,
    n: int,
    request_id: str,
    info: ServerInfo,
) -> tuple[GenerationRequest, ...]:
    """One request a choice.  `asks` has one entry a prompt.

    Sample j of a prompt runs with seed + j, so that n > 1 gives different answers and each can be
    had again; a prompt in a batch gets what it would get alone.
    """
    rids = _rids(routing.rid, len(prompts), n, request_id)
    meetings = _meetings(routing, len(prompts), n)
    requests: list[GenerationRequest] = []
    for prompt, ask in zip(prompts, asks, strict=True):
        settled = settle(ask, prompt, info)
        for sample in range(n):
            seed = None if settled.seed is None else (settled.seed + sample) % SEEDS_COUNT
            requests.append(
                GenerationRequest(
                    rid=rids[len(requests)],
                    prompt_tokens=prompt,
                    sampling=replace(settled, seed=seed),
                    rendezvous=meetings[len(requests)],
                )
            )
    return tuple(requests)


def spread(value: T | list[T], count: int, param: str) -> list[T]:
    """One value for all, or a list with one for each."""
    if not isinstance(value, list):
        return [value] * count
    if len(value) != count:
        raise BadField(param, f"has {len(value)} entries where {count} are needed")
    return value


def _spread_over_choices(value: Any, prompts_count: int, n: int, param: str) -> list[Any]:
    if isinstance(value, list) and len(value) == prompts_count:
        return [item for item in value for _ in range(n)]
    return spread(value, prompts_count * n, param)


def _rids(rid: str | list[str] | None, prompts_count: int, n: int, request_id: str) -> list[str]:
    """A rid for each choice; it starts with the one the client knows, so abort by prefix works."""
    if prompts_count * n == 1 and not isinstance(rid, list):
        return [rid or request_id]
    if isinstance(rid, list) and (n == 1 or len(rid) != prompts_count):
        return spread(rid, prompts_count * n, "rid")
    bases = _spread_over_choices(rid or request_id, prompts_count, n, "rid")
    return [f"{base}-{choice}" for choice, base in enumerate(bases)]


def _meetings(routing: Routing, prompts_count: int, n: int) -> list[Rendezvous | None]:
    count = prompts_count * n
    if routing.bootstrap_room is None:
        return [None] * count
    rooms = _rooms(routing.bootstrap_room, prompts_count, n)
    if len(set(rooms)) != count:
        raise BadField("bootstrap_room", "two choices have the same room")
    hosts = _spread_over_choices(routing.bootstrap_host, prompts_count, n, "bootstrap_host")
    ports = _spread_over_choices(routing.bootstrap_port, prompts_count, n, "bootstrap_port")
    return [
        None if host == FAKE_PEER_HOST else Rendezvous(room=room, host=host, port=port)
        for room, host, port in zip(rooms, hosts, ports, strict=True)
    ]


def _rooms(room: int | list[int], prompts_count: int, n: int) -> list[int]:
    """A room for each choice.

    Routers count prompts or n, not always both, so a body may come with fewer rooms than choices.
    Both sides get the same body and derive the missing ones alike: room + i, as SGLang does.
    """
    count = prompts_count * n
    if not isinstance(room, list):
        return [(room + i) % ROOMS_COUNT for i in range(count)]
    if len(room) == prompts_count:
        return [(first + sample) % ROOMS_COUNT for first in room for sample in range(n)]
    return spread(room, count, "bootstrap_room")
