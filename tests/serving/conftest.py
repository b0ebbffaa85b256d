"""Model folders, made once a session."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:  # importing torch takes seconds, which tests of HTTP need not wait for
    from tests.serving.engines import Pair, Single


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


@pytest.fixture
def pair_of(tiny_folder: Path) -> Iterator[Callable[..., Pair]]:
    """Makes pairs of engines for the tiny model, and closes them."""
    from tests.serving.engines import Pair

    with ExitStack() as stack:

        def make(**changes: Any) -> Pair:
            return stack.enter_context(Pair(tiny_folder, **changes))

        yield make


@pytest.fixture
def single_of(tiny_folder: Path) -> Iterator[Callable[..., Single]]:
    """Makes single engines for the tiny model, and closes them."""
    from tests.serving.engines import Single

    with ExitStack() as stack:

        def make(**changes: Any) -> Single:
            return stack.enter_context(Single(tiny_folder, **changes))

        yield make
