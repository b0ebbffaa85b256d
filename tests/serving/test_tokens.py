from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from pdrt.errors import BadModel, BadRequest
from pdrt.serving.tokens import Tokens

TALK = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "naïve 漢字 😀?"}]


def test_tokens_are_those_of_transformers(tiny_folder: Path) -> None:
    ours, theirs = Tokens(tiny_folder), AutoTokenizer.from_pretrained(tiny_folder)
    for text in ("", "the quick brown fox", "naïve café 漢字 😀", "a\n\n  b<|im_end|>c"):
        ids = ours.encode(text)
        assert ids == theirs(text)["input_ids"]
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


def test_chat_prompts_are_those_of_transformers(tiny_folder: Path) -> None:
    theirs = AutoTokenizer.from_pretrained(tiny_folder)
    wanted = theirs.apply_chat_template(TALK, add_generation_prompt=True, tokenize=False)
    ours = Tokens(tiny_folder)
    assert ours.chat_text(TALK) == wanted
    assert ours.apply_chat(TALK) == theirs(wanted, add_special_tokens=False)["input_ids"]


def test_content_parts_are_joined(tiny_folder: Path) -> None:
    tokens = Tokens(tiny_folder)
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    in_parts = tokens.apply_chat([{"role": "user", "content": parts}])
    assert in_parts == tokens.apply_chat([{"role": "user", "content": "one\ntwo"}])


@pytest.mark.parametrize(
    "content", [7, [{"type": "image_url", "image_url": {}}], ["text"], [{"type": "text"}]]
)
def test_content_that_is_no_text_is_refused(tiny_folder: Path, content: object) -> None:
    with pytest.raises(BadRequest, match="text"):
        Tokens(tiny_folder).apply_chat([{"role": "user", "content": content}])


def test_a_token_has_a_text_of_its_own(tiny_folder: Path) -> None:
    tokens = Tokens(tiny_folder)
    assert tokens.token_text(2) == "<|im_end|>"
    assert tokens.token_text(tokens.encode("x")[0]) == "x"


def test_without_a_template_chat_says_what_to_use(tiny_folder: Path, tmp_path: Path) -> None:
    shutil.copy(tiny_folder / "tokenizer.json", tmp_path)
    with pytest.raises(BadRequest, match="/v1/completions"):
        Tokens(tmp_path).apply_chat(TALK)


def test_what_the_template_refuses_is_the_callers_fault(tiny_folder: Path, tmp_path: Path) -> None:
    shutil.copy(tiny_folder / "tokenizer.json", tmp_path)
    template = "{{ raise_exception('roles must alternate') }}"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    with pytest.raises(BadRequest, match="roles must alternate"):
        Tokens(tmp_path).apply_chat(TALK)


def test_a_folder_without_tokenizer_is_a_bad_model(tmp_path: Path) -> None:
    with pytest.raises(BadModel, match=r"tokenizer\.json"):
        Tokens(tmp_path)
