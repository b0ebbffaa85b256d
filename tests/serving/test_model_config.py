from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pdrt.errors import BadModel
from pdrt.serving.model_config import read_model_config
from tests.serving.tiny_model import make_tiny_model


@pytest.fixture
def folder(tiny_folder: Path, tmp_path: Path) -> Path:
    """A copy that may be spoiled."""
    return Path(shutil.copytree(tiny_folder, tmp_path / "model"))


def change(folder: Path, **fields: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def test_the_layout_comes_from_the_config(tiny_folder: Path) -> None:
    config = read_model_config(tiny_folder)
    layout = config.layout(page_size=4, ranks=2)
    assert (layout.layers, layout.kv_heads, layout.head_dim, layout.dtype) == (3, 2, 16, "float32")
    assert (config.context_tokens, config.eos_token_ids, config.vocab_size) == (256, (2,), 512)


def test_no_torch_is_needed(tiny_folder: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from pdrt.serving.convert import model_folder;"
        "model_folder(Path(sys.argv[1]), cache=Path('/nonexistent'));"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(tiny_folder)], check=True, timeout=30)


def test_a_copy_has_the_same_fingerprint(tiny_folder: Path, folder: Path) -> None:
    assert read_model_config(folder).fingerprint == read_model_config(tiny_folder).fingerprint


def test_a_fine_tune_has_another_fingerprint(tiny_folder: Path, tmp_path: Path) -> None:
    other = make_tiny_model(tmp_path, seed=1)
    assert read_model_config(other).fingerprint != read_model_config(tiny_folder).fingerprint


@pytest.mark.parametrize("field", ["rope_theta", "vocab_size", "num_hidden_layers"])
def test_a_field_that_decides_the_kv_changes_the_fingerprint(
    tiny_folder: Path, folder: Path, field: str
) -> None:
    change(folder, **{field: 4})
    assert read_model_config(folder).fingerprint != read_model_config(tiny_folder).fingerprint


def test_several_eos_tokens_are_all_kept(folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 5]}))
    assert read_model_config(folder).eos_token_ids == (2, 5)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architectures": ["BertModel"]}, "causal"),
        ({"architectures": None}, "causal"),
        ({"model_type": "mamba"}, "not supported"),
        ({"sliding_window": 128}, "sliding-window"),
        ({"quantization_config": {"bits": 4}}, "quantized"),
        ({"num_attention_heads": "many"}, "wrong field"),
    ],
)
def test_models_that_cannot_be_served_are_named(
    folder: Path, fields: dict[str, object], message: str
) -> None:
    change(folder, **fields)
    with pytest.raises(BadModel, match=message):
        read_model_config(folder)


def test_a_window_that_is_switched_off_is_no_window(folder: Path) -> None:
    change(folder, sliding_window=128, use_sliding_window=False)
    read_model_config(folder)


def test_a_missing_folder_says_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(BadModel, match="--model-path"):
        read_model_config(tmp_path / "nothing")


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_missing_file_is_named(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(BadModel, match=name.removeprefix("model")):
        read_model_config(folder)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff"])
def test_a_config_that_is_no_object_is_a_bad_model(folder: Path, content: bytes) -> None:
    (folder / "config.json").write_bytes(content)
    with pytest.raises(BadModel, match=r"config\.json"):
        read_model_config(folder)


@pytest.mark.parametrize("kept_bytes", [0, 4, 100, 5000])
def test_cut_weights_are_noticed(folder: Path, kept_bytes: int) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:kept_bytes])
    with pytest.raises(BadModel, match="whole safetensors"):
        read_model_config(folder)
