"""What goes into one forward, as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Feed:
    """Tokens of one request to run through the model in one forward.

    `pages` are the request's pages from its first token on; they must reach to
    start + len(tokens).  The KV of all tokens before `start` is in them already.
    """

    tokens: Sequence[int]
    start: int
    pages: NDArray[np.int32]
    wants_logits: bool = True
