"""The other end of a puppet: reads what to do, does it, answers.  Imports nothing of ours."""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any

TURN_S = 0.005


def obey(make: Callable[[dict[str, Any]], Any]) -> None:
    """Make the puppet from what this process was told, then do as it is told: "open" is `do_open`.
    `turn` is called all the while, if it has one."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # ends with its parent, even while frozen
    # What the stack prints must not stand between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(**answer: Any) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    try:
        puppet = make(json.loads(sys.argv[1]))
    except BaseException as error:
        traceback.print_exc()
        say(error=repr(error))
        os._exit(1)
    turn = getattr(puppet, "turn", lambda: None)
    say(answer=None)
    rest = b""
    while True:
        turn()
        if not select.select([0], [], [], TURN_S)[0]:
            continue
        data = os.read(0, 1 << 20)
        if not data:
            os._exit(0)  # a stack's threads do not end
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            ask = json.loads(line)
            try:
                say(answer=getattr(puppet, f"do_{ask.pop('do')}")(**ask))
            except Exception as error:
                traceback.print_exc()
                say(error=repr(error))
