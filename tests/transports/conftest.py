"""The suite lives in modules whose asserts pytest would not explain by itself."""

import pytest

pytest.register_assert_rewrite("tests.transports.conformance", "tests.transports.rigs")
