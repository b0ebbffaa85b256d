"""What is in flight in both trees: by their tables, read by a stranger, and by what they say."""

from __future__ import annotations

import contextlib
import socket
from typing import Any

import httpx
import psutil

from pdrt.cli.cluster import Cluster, Member
from stress.cascades.trees import Held
from stress.cascades.watcher import view_of
from stress.cascades.words import View

#: Of an engine's /metrics: what must be nothing when nothing is in flight.
GAUGES = (
    *("running", "waiting", "rooms_open", "rooms_releasing"),
    *("pages_used", "pages_held", "aux_used"),
)
HTTP_S = 10.0


class Side:
    """One tree, seen from outside."""

    def __init__(self, index: int, member: Member) -> None:
        self.index, self.member, self.name = index, member, member.name
        self._http = httpx.Client(timeout=HTTP_S)
        self.view: View
        self._connection: socket.socket
        self.view, self._connection = view_of(str(member.facts["attach"]), "watcher")

    @property
    def port(self) -> int:
        """Of the engine's HTTP."""
        return int(self.member.url.rpartition(":")[2])

    def rooms(self) -> int:
        """Live slots."""
        return self.view.live_count()

    def gauges(self) -> dict[str, float]:
        """What the engine says it holds; only what is not nothing."""
        text = self._http.get(f"{self.member.url}/metrics").text
        held: dict[str, float] = {}
        names = {f"pdrt_engine_{name}": name for name in GAUGES}
        for line in text.splitlines():
            name = names.pop(line.partition("{")[0].partition(" ")[0], "")
            if name and (value := float(line.rpartition(" ")[2])):
                held[name] = value
        assert not names, f"{self.name} does not say {sorted(names)}"
        return held

    def in_flight(self) -> dict[str, float]:
        """Everything that is not nothing, by what it is."""
        found = self.gauges()
        if rooms := self.rooms():
            found["slots"] = rooms
        if listed := len(self._http.get(f"{self.member.supervisor_url}/rooms").json()):
            found["rooms listed"] = listed
        return found

    def report(self) -> dict[str, Any]:
        """The supervisor's, on its health."""
        answer: dict[str, Any] = self._http.get(f"{self.member.supervisor_url}/health").json()
        return answer

    def faults(self) -> list[str]:
        """Why it is not as well as it was; empty if it is."""
        report = self.report()
        return [*report["live"], *report["ready"], *report["degraded"]]

    def hold(self, row: int) -> Held | None:
        """The process in a row, if there is one."""
        pid = self.view.pid_of(row)
        with contextlib.suppress(ProcessLookupError):
            return Held(pid) if pid else None
        return None

    def pids(self) -> dict[str, int]:
        found = {"supervisor": self.member.popen.pid}
        for child in self.report()["children"]:
            if child["pid"]:
                found[child["name"]] = int(child["pid"])
        return found

    def connections(self) -> int:
        """Established ones at the engine's HTTP port."""
        engine = psutil.Process(self.pids()["engine"])
        return sum(
            c.status == psutil.CONN_ESTABLISHED and bool(c.laddr) and c.laddr.port == self.port
            for c in engine.net_connections("tcp")
        )

    def close(self) -> None:
        self._http.close()
        self._connection.close()
        self.view.close()


class Both:
    """Prefill and decode of a cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self.sides = [Side(0, cluster.prefill), Side(1, cluster.decode)]

    def in_flight(self) -> str:
        """ "" if nothing is."""
        found = {side.name: held for side in self.sides if (held := side.in_flight())}
        return str(found) if found else ""

    def faults(self) -> list[str]:
        return [f"{side.name}: {fault}" for side in self.sides for fault in side.faults()]

    def close(self) -> None:
        for side in self.sides:
            side.close()
