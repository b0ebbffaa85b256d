"""Over shm, memory that a dead worker offered is let go of at once, whoever else is dead.

Found by the cascades: a decode lost its engine, its worker and its listener; the new listener had
no room, so it spoke to no prefill; prefill's worker kept the dead worker's region mapped until
prefill had missed that decode for long, and until then no engine of decode could start.
"""

from __future__ import annotations

import signal
import time
from pathlib import Path

from pdrt.config import Timeouts
from pdrt.engine.manager import KVManager
from stress.bench.trees import SMALL, pair
from stress.bench.trips import Phase, Route

QUIET_S = 2.0
#: Nobody is missed within this test, and nothing of it is over by its own deadline.
TIMEOUTS = Timeouts(bootstrap_s=60, waiting_s=60, stall_s=60, quiet_s=QUIET_S, peer_s=60)


def test_an_engine_starts_anew_though_no_listener_knows_who_maps_its_predecessors_pages(
    tmp_path: Path,
) -> None:
    with pair(tmp_path, SMALL, transport="shm", timeouts=TIMEOUTS) as (prefill, decode):
        route = Route(prefill, decode, SMALL)
        route.whole()
        route.to(Phase.MOVING)
        for child in ("worker0", "listener"):
            decode.kill(child, signal.SIGKILL)
        decode.manager.close()
        decode.manager = KVManager.attach(decode.attach, name="next")
        assert decode.manager.wait_quiet(5 * QUIET_S, pause=time.sleep)
