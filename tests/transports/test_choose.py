"""One transport for two ends, and a sentence that says why."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrt.transports.base import TransportError
from pdrt.transports.choose import choose

names = st.lists(st.sampled_from(["nixl", "shm", "fake"]), unique=True)


@given(names, names, st.sampled_from(["auto", "nixl", "shm", "fake"]), st.booleans())
def test_a_choice_is_one_both_have_and_can_use(ours, theirs, preferred, same_host):
    usable = [n for n in ours if n in theirs and (same_host or n != "shm")]
    if not usable:
        with pytest.raises(TransportError):
            choose(ours, theirs, preferred=preferred, same_host=same_host)
        return
    choice = choose(ours, theirs, preferred=preferred, same_host=same_host)
    assert choice.name == (preferred if preferred in usable else usable[0])
    assert choice.why.startswith(f"{choice.name}: ")


@pytest.mark.parametrize(
    ("ours", "theirs", "preferred", "same_host", "why"),
    [
        (["nixl", "shm"], ["shm", "nixl"], "auto", True, "nixl: first of ours"),
        (["nixl", "shm"], ["shm"], "nixl", True, "shm: preferred nixl is missing on the peer"),
        (["shm"], ["shm", "nixl"], "nixl", True, "shm: preferred nixl is missing here"),
        (["nixl", "shm"], ["shm", "nixl"], "shm", False, "nixl: preferred shm needs both ends"),
    ],
)
def test_why_names_what_kept_the_wish_from_coming_true(ours, theirs, preferred, same_host, why):
    assert why in choose(ours, theirs, preferred=preferred, same_host=same_host).why


@pytest.mark.parametrize(
    ("ours", "theirs", "help_"),
    [
        (["shm"], ["shm"], "install nixl on both"),
        (["nixl"], ["shm"], "install nixl on the peer"),
        (["shm"], ["nixl"], "install nixl here"),
        ([], [], "install nixl on both ends"),
    ],
)
def test_without_a_choice_the_error_says_what_would_help(ours, theirs, help_):
    with pytest.raises(TransportError, match=help_):
        choose(ours, theirs, preferred="auto", same_host=False)
