"""What a model folder says about itself, read without torch.

The supervisor needs the KV layout before any engine process exists, so this module reads
`config.json`, the tokenizer and the heads of the weight files, and nothing heavier.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdrt.errors import BadModel
from pdrt.protocol.layout import Layout

#: `model_type`s whose attention goes through transformers' AttentionInterface with full causal
#: attention in every layer and rotary positions: what serving/model.py can page.
SUPPORTED_TYPES = ("llama", "mistral", "qwen2", "qwen3")
KV_FIELDS = (
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "vocab_size",
)
SAMPLE_BYTES = 64
HEADER_BYTES_MAX = 100_000_000  # the limit of the safetensors format itself


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Facts about a causal language model.  Counts are per model, not per rank."""

    folder: Path
    model_type: str
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    context_tokens: int  # longest sequence the model was made for, prompt and output together
    eos_token_ids: tuple[int, ...]
    fingerprint: str  # equal for two folders whose KV can be exchanged

    def layout(self, *, page_size: int, dtype: str = "float32", ranks: int = 1) -> Layout:
        """The KV layout of engines that run this model.  Raises BadConfig on impossible values."""
        return Layout(
            model=self.fingerprint,
            layers=self.layers,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            dtype=dtype,
            page_size=page_size,
            ranks=ranks,
        )


def read_model_config(folder: Path) -> ModelConfig:
    """Read and judge a Hugging Face folder.  Raises BadModel, which says what to do."""
    config = _read_config(folder)
    _check_supported(folder, config)
    try:
        heads = int(config["num_attention_heads"])
        return ModelConfig(
            folder=folder,
            model_type=config["model_type"],
            layers=int(config["num_hidden_layers"]),
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or config["hidden_size"] // heads),
            vocab_size=int(config["vocab_size"]),
            context_tokens=int(config["max_position_embeddings"]),
            eos_token_ids=_eos_token_ids(folder, config),
            fingerprint=_fingerprint(folder, config),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise BadModel(f"{folder}/config.json: missing or wrong field: {error}") from error


def _read_config(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        raise BadModel(
            f"model folder {folder} does not exist; give --model-path a folder with config.json, "
            "tokenizer.json and *.safetensors, or leave it out for the default model"
        )
    path = folder / "config.json"
    if not path.is_file():
        raise BadModel(f"{folder} has no config.json; it is not a Hugging Face model folder")
    config = _read_json(path)
    if not isinstance(config, dict):
        raise BadModel(f"{path} holds no JSON object")
    return config


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (ValueError, OSError) as error:
        raise BadModel(f"{path} cannot be read: {error}") from error


def _check_supported(folder: Path, config: Mapping[str, Any]) -> None:
    architectures = config.get("architectures") or []
    if not any(str(name).endswith("ForCausalLM") for name in architectures):
        raise BadModel(
            f"{folder}: architectures {architectures} name no ...ForCausalLM; pdrt serves causal "
            "language models only"
        )
    model_type = config.get("model_type")
    if model_type not in SUPPORTED_TYPES:
        raise BadModel(
            f"{folder}: model type {model_type!r} is not supported; pdrt's engine runs "
            f"{', '.join(SUPPORTED_TYPES)}; attach an external engine for others"
        )
    # Qwen writes a window and switches it off beside it.
    if config.get("sliding_window") and config.get("use_sliding_window", True):
        raise BadModel(f"{folder}: sliding-window attention is not supported")
    if config.get("quantization_config"):
        raise BadModel(f"{folder}: quantized weights are not supported; convert them first")


def _eos_token_ids(folder: Path, config: Mapping[str, Any]) -> tuple[int, ...]:
    path = folder / "generation_config.json"
    generation = _read_json(path) if path.is_file() else {}
    eos = generation.get("eos_token_id", config.get("eos_token_id"))
    if eos is None:
        return ()
    return tuple(int(token) for token in eos) if isinstance(eos, list) else (int(eos),)


def _fingerprint(folder: Path, config: Mapping[str, Any]) -> str:
    """Digest of what decides the KV: shape and positions, vocabulary, and a sample of each weight.

    Two fine-tunes of one model agree in every field of their configuration, yet their KV must not
    be mixed; the first bytes of every weight tell them apart without reading all of them.
    """
    digest = hashlib.blake2b(digest_size=16)
    fields = {name: config.get(name) for name in KV_FIELDS}
    digest.update(json.dumps(fields, sort_keys=True).encode())
    tokenizer = folder / "tokenizer.json"
    if not tokenizer.is_file():
        raise BadModel(f"{folder} has no tokenizer.json; save the model with a fast tokenizer")
    digest.update(hashlib.blake2b(tokenizer.read_bytes(), digest_size=16).digest())
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        raise BadModel(f"{folder} has no *.safetensors weights; save it with save_pretrained")
    samples = sorted(sample for path in weights for sample in _weight_samples(path))
    for name, sample in samples:
        digest.update(name.encode() + b"\0" + sample)
    return f"{config['model_type']}-{digest.hexdigest()}"


def _weight_samples(path: Path) -> Iterator[tuple[str, bytes]]:
    """Name and first bytes of each tensor in a safetensors file.

    File: u64 header length, JSON header {name: {dtype, shape, data_offsets}}, tensor bytes.
    """
    try:
        with path.open("rb") as file:
            (header_bytes,) = struct.unpack("<Q", file.read(8))
            if header_bytes > HEADER_BYTES_MAX:
                raise ValueError(f"header of {header_bytes} bytes")
            header = json.loads(file.read(header_bytes))
            header.pop("__metadata__", None)
            first_byte = 8 + header_bytes
            file_bytes = file.seek(0, 2)
            for name, tensor in header.items():
                start, end = tensor["data_offsets"]
                if first_byte + end > file_bytes:
                    raise ValueError(f"{name} lies beyond the end of the file; is it complete?")
                file.seek(first_byte + start)
                yield name, file.read(min(SAMPLE_BYTES, end - start))
    except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
        raise BadModel(f"{path} is not a whole safetensors file: {error}") from error
