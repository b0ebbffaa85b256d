"""A causal LM of a few thousand weights and its tokenizer, for tests that want a real one fast."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

VOCAB_SIZE = 512
EOS = 2
CORPUS = (
    "the quick brown fox jumps over the lazy dog and the river runs to the sea",
    "a page is a fixed run of tokens and a room is the id of one transfer",
    "naïve café, straße, 漢字 and 😀 are characters of several bytes",
    "prefill computes the prompt and decode goes on from there, token by token",
)
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tiny_model(
    folder: Path, *, model_type: str = "llama", seed: int = 0, **fields: Any
) -> Path:
    """Write a random model of three layers into `folder`."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(
        model_type,
        **{
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": 256,
            "initializer_range": 0.3,  # large, so that greedy output does not repeat one token
            "bos_token_id": 1,
            "eos_token_id": EOS,
            "pad_token_id": EOS,
            "tie_word_embeddings": False,
            "sliding_window": None,
            **fields,
        },
    )
    model: Any = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=_tokenizer(),
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        chat_template=TEMPLATE,
    )
    tokenizer.save_pretrained(folder)
    return folder


def _tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer
