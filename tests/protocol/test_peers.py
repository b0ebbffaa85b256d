from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from pdrt.protocol.peers import TRANSPORT_CODES, instance_digest, transport_code


@settings(deadline=None)
@given(st.text(), st.text())
def test_instances_have_digests_of_their_own(one: str, other: str) -> None:
    assert (instance_digest(one) == instance_digest(other)) == (one == other)
    assert 0 < instance_digest(one) < 1 << 64  # 0 means no peer


def test_codes_of_transports_are_only_ever_appended() -> None:
    assert TRANSPORT_CODES[:4] == ("", "nixl", "shm", "fake")
    assert [transport_code(name) for name in TRANSPORT_CODES] == list(range(len(TRANSPORT_CODES)))
