"""Model folders, made once a session."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of three layers."""
    from tests.serving.tiny_model import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def smol_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real default model, converted once; into the user's cache, as the servers do."""
    from pdrt.config import cache_folder
    from pdrt.serving.convert import model_folder

    return model_folder(None, cache=cache_folder())
