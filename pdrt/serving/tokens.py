"""Text to tokens and back, and chat messages to a prompt.

Uses `tokenizers` and `jinja2` directly: the same files and rules as transformers' tokenizer, in a
tenth of a second instead of several.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import Template, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from pdrt.errors import BadModel, BadRequest

SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")


class Tokens:
    """The tokenizer of a model folder.  Safe to use from several threads."""

    def __init__(self, folder: Path) -> None:
        """Raises BadModel if the folder has no usable tokenizer."""
        path = folder / "tokenizer.json"
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        # tokenizers raises bare Exceptions for whatever its Rust side reports.
        except Exception as error:
            raise BadModel(f"{path} cannot be read as a tokenizer: {error}") from error
        config = _read_config(folder)
        self._special = {name: _text_of(config.get(name)) for name in SPECIAL_NAMES}
        self._template = _chat_template(folder, config)

    @property
    def vocab_size(self) -> int:
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a prompt, with the special tokens the model's tokenizer adds by itself."""
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of tokens; unfinished characters show as U+FFFD."""
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens))

    def token_text(self, token_id: int) -> str:
        """One token as text, special tokens by name: what logprobs name tokens by."""
        return self.decode([token_id], skip_special_tokens=False)

    def chat_text(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """Render messages by the model's chat template.

        A message's content is a string or a list of {"type": "text", "text": ...}.  `variables`
        go to the template (tools, add_generation_prompt, ...).  Raises BadRequest.
        """
        if self._template is None:
            raise BadRequest("this model has no chat template; use /v1/completions")
        values = {"add_generation_prompt": True, "tools": None, **self._special, **variables}
        try:
            return self._template.render(
                messages=[_flat(message) for message in messages], **values
            )
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            raise BadRequest(f"the chat template refuses these messages: {error}") from error

    def apply_chat(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> list[int]:
        """Prompt tokens of a conversation.  The template writes special tokens itself."""
        return self.encode(self.chat_text(messages, **variables), add_special_tokens=False)


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / "tokenizer_config.json"
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_bytes())
    except ValueError as error:
        raise BadModel(f"{path} cannot be read: {error}") from error
    return config if isinstance(config, dict) else {}


def _text_of(token: Any) -> str:
    """A special token is written as a string, as an object with its content, or not at all."""
    if isinstance(token, Mapping):
        return str(token.get("content", ""))
    return "" if token is None else str(token)


def _chat_template(folder: Path, config: Mapping[str, Any]) -> Template | None:
    path = folder / "chat_template.jinja"
    source = path.read_text("utf-8") if path.is_file() else config.get("chat_template")
    if isinstance(source, list):  # several named templates
        source = next((each["template"] for each in source if each.get("name") == "default"), None)
    if source is None:
        return None
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.filters["tojson"] = _to_json
    try:
        return environment.from_string(source)
    except TemplateError as error:
        raise BadModel(f"{folder}: the chat template is broken: {error}") from error


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _flat(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message whose content is one string."""
    content = message.get("content")
    if content is None:
        content = ""
    if isinstance(content, list):
        content = "\n".join(_part_text(part) for part in content)
    if not isinstance(content, str):
        raise BadRequest("content must be a string or a list of text parts")
    return {**message, "content": content}


def _part_text(part: Any) -> str:
    if (
        isinstance(part, Mapping)
        and part.get("type") == "text"
        and isinstance(part.get("text"), str)
    ):
        return str(part["text"])
    raise BadRequest("only content parts of the form {'type': 'text', 'text': '...'} are supported")
