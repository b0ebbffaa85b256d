"""The model cache on a disk that is full: a typed error, nothing left behind, and a conversion that
succeeds once there is room."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pdrt.errors import BadModel
from pdrt.serving import convert

KIB = 1024
ROOM = 256 * KIB  # of the disk


def private_mounts() -> bool:
    """May we mount a disk of our own here?"""
    found = shutil.which("unshare")
    probe = [found or "", "-rm", "mount", "-t", "tmpfs", "none", "/tmp"]
    return found is not None and subprocess.run(probe, capture_output=True).returncode == 0


@pytest.mark.skipif(not private_mounts(), reason="no user and mount namespaces here (unshare -rm)")
def test_a_full_disk_is_named_leaves_nothing_and_is_no_longer_full_later(tmp_path: Path) -> None:
    code = (
        f"from tests.bounds.test_cache import on_a_small_disk; on_a_small_disk({str(tmp_path)!r})"
    )
    command = ["unshare", "-rm", sys.executable, "-c", code]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    # While converting; when only the manifest is left to write; with room for all.
    assert run.stdout.split() == ["refused", "refused", "made"]


def on_a_small_disk(folder: str) -> None:
    """Entered by the test above, in a mount namespace of its own."""
    cache, source = Path(folder, "cache"), Path(folder, "m.gguf")
    cache.mkdir()
    source.write_bytes(b"GGUF" * 100)

    def mount(*options: str) -> None:
        subprocess.run(["mount", "-t", "tmpfs", "-o", ",".join(options), "none", cache], check=True)

    def writer(length_bytes: int) -> object:
        def run(source: Path, made: Path, progress: object) -> None:
            made.mkdir()
            (made / "model.safetensors").write_bytes(bytes(length_bytes))

        return run

    def outcome() -> str:
        try:
            made = convert.default_model(cache, lambda *_: None, source)
        except BadModel as error:
            refusal = str(error)
        else:
            return "made" if convert.is_intact(made, source) else "broken"
        left = [path.name for path in cache.iterdir()]
        named = "PDRT_CACHE" in refusal and "No space left" in refusal
        clean = left == [f"{convert.DEFAULT_NAME}.lock"]
        return "refused" if named and clean else repr((refusal, left))

    mount(f"size={ROOM}")
    outcomes = []
    for length_bytes in (2 * ROOM, ROOM):
        convert._run_child = writer(length_bytes)  # type: ignore[assignment]
        outcomes.append(outcome())
    mount("remount", f"size={4 * ROOM}")
    outcomes.append(outcome())
    sys.stdout.write(" ".join(outcomes))
