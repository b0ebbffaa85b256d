"""Which transport two engines use, and why.  Pure: capabilities in, a choice out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdrt.transports.base import TransportError

if TYPE_CHECKING:
    from collections.abc import Sequence

ANY = "auto"  # as `preferred`: no wish, our order decides
SAME_HOST_ONLY = frozenset({"shm"})


@dataclass(frozen=True)
class Choice:
    """A transport's name and a sentence for the log that says why it was taken."""

    name: str
    why: str


def choose(
    ours: Sequence[str], theirs: Sequence[str], *, preferred: str, same_host: bool
) -> Choice:
    """Choose among what both ends have: the preferred one, else the first in our order.

    Raises TransportError, naming what would help, when nothing is left.
    """
    common = [name for name in ours if name in theirs]
    usable = [name for name in common if same_host or name not in SAME_HOST_ONLY]
    if not usable:
        raise TransportError(
            f"no transport in common: ours {list(ours)}, theirs {list(theirs)}; "
            + _help(ours, theirs, common)
        )
    if preferred in usable:
        return Choice(preferred, f"{preferred}: preferred, and both ends have it")
    name = usable[0]
    if preferred == ANY:
        return Choice(name, f"{name}: first of ours that both ends can use")
    return Choice(name, f"{name}: preferred {preferred} {_lack(preferred, ours, theirs)}")


def _lack(name: str, ours: Sequence[str], theirs: Sequence[str]) -> str:
    """Why a transport cannot be used."""
    if name not in ours:
        return "is missing here"
    if name not in theirs:
        return "is missing on the peer"
    return "needs both ends on one host"


def _help(ours: Sequence[str], theirs: Sequence[str], common: Sequence[str]) -> str:
    """What to change so that a transport is found."""
    if common:
        return f"{common[0]} needs both ends on one host; install nixl on both for two hosts"
    if "nixl" in ours:
        return "install nixl on the peer"
    if "nixl" in theirs:
        return "install nixl here"
    return "install nixl on both ends"
