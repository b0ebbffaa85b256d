"""What `import pdrt` offers, and what it costs."""

from __future__ import annotations

import subprocess
import sys

import pytest

import pdrt


@pytest.mark.parametrize("name", pdrt.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(pdrt, name).__name__ == name


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'KVNothing'"):
        _ = pdrt.KVNothing


def test_importing_the_package_imports_nothing_else() -> None:
    source = "import pdrt, sys; print(*[m for m in sys.modules if m in ('zmq', 'numpy', 'torch')])"
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True)
    assert done.stdout.strip() == ""
