"""A tree is killed and another takes its address: another peer, and the old one's rooms end."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from pdrt.engine.manager import KVManager
from pdrt.engine.room import KVRoom
from pdrt.protocol.states import KVPoll
from tests.faults.conftest import QUIET_S, start_net
from tests.faults.traffic import Phase, Route, finish, recover, run, succeed
from tests.waiting import wait_until

#: Only another instance at the address can end a room in time.
PATIENT = (
    "--bootstrap-timeout", "50", "--waiting-timeout", "50", "--transfer-stall-timeout", "50",
    "--peer-timeout", "40", "--quiet-timeout", "9", "--pool-tokens", "4096",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("transport", ["shm", "nixl"])
def test_a_tree_started_again_is_another_peer(tmp_path: Path, side: str, transport: str) -> None:
    with contextlib.ExitStack() as stack:
        net = start_net(stack, tmp_path, transport, PATIENT)
        recover(net.route, 30)
        old = net.route
        trips = [old.open(phase) for phase in Phase for _ in range(2) if phase < Phase.WHOLE]
        run([old], lambda: all(t.reached for t in trips), 10, "rooms to be in every phase")
        killed = net.prefill if side == "prefill" else net.decode
        survivor = net.decode if side == "prefill" else net.prefill
        killed.kill_and_restart()
        killed.wait_ready()
        fresh = stack.enter_context(
            contextlib.closing(KVManager.attach(str(killed.facts["attach"]), name="fresh"))
        )
        if side == "prefill":
            route = Route(fresh, old.decode, old.peer, targets=old.targets)
            left: list[KVRoom] = [trip.receiver for trip in trips]
        else:
            route = Route(old.prefill, fresh, old.peer, sources=old.sources)
            left = [trip.sender for trip in trips]
        first = route.open()

        def all_failed() -> bool:
            return first.over and all(room.poll() is KVPoll.Failed for room in left)

        run([route], all_failed, 8, "the rooms with the dead tree to fail")
        # PEER_LOST: a new prefill was asked for a room before it was recognised as new.
        reasons = {room.timeline().reason for room in left}
        assert "PEER_RESTARTED" in reasons
        assert reasons <= {"PEER_RESTARTED", "PEER_LOST"}
        run([route], lambda: all(room.quiet() for room in left), QUIET_S, "them to be quiet")
        recover(route, 10)
        succeed(route, 20)
        for room in left:
            room.clear()
        finish([route], 10, "the new rooms to be over")
        wait_until(lambda: not survivor.rooms(), 10, "the survivor's table to be empty")
        assert not survivor.unplanned_restarts()
