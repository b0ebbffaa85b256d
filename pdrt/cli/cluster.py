"""One prefill, one decode and an unmodified router as real processes on this host.

For the demo, the end-to-end tests and the cascades.  Every port is free on arrival, every process
is stopped by pid on the way out, and its output stays in a folder for whoever has to look.
"""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Self

import httpx

from pdrt.config import environment_with
from pdrt.errors import DeploymentError

ROUTERS = ("sglang-router", "smg")
STOP_S = 45.0  # longer than a role may take to drain and shut down


class ClusterFailed(DeploymentError):
    """A process of the cluster did not come up, or ended by itself."""

    code = "cluster_failed"


@dataclass
class Member:
    """One process.  `facts` is what pdrt announced on its first line; {} for a router."""

    name: str
    popen: subprocess.Popen[bytes]
    log: Path
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return str(self.facts["http"])

    @property
    def supervisor_url(self) -> str:
        return str(self.facts["supervisor"])

    @property
    def ready_url(self) -> str:
        return f"{self.supervisor_url}/ready"

    def tail(self, lines: int = 15) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def stop(self) -> int:
        """SIGTERM, wait, SIGKILL; returns the exit code."""
        if self.popen.poll() is None:
            self.popen.send_signal(signal.SIGTERM)
            try:
                return self.popen.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self.popen.kill()
        return self.popen.wait(STOP_S)


class Cluster:
    """`with Cluster(folder, ...) as cluster: cluster.start(...)`."""

    def __init__(
        self,
        folder: Path,
        *,
        both: Sequence[str] = (),
        prefill: Sequence[str] = (),
        decode: Sequence[str] = (),
        router: str | None = "sglang-router",
        router_flags: Sequence[str] = (),
        environment: dict[str, str] | None = None,
    ) -> None:
        """`both`, `prefill`, `decode`: flags of the two roles.  `router`: one of ROUTERS or None;
        `router_flags`: besides those it needs.  Output goes to `folder`."""
        self._folder = folder
        self._flags = {"prefill": [*both, *prefill], "decode": [*both, *decode]}
        self._router_name = router
        self._router_flags = router_flags
        self._environment = environment_with(environment or {})
        self.members: dict[str, Member] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def prefill(self) -> Member:
        return self.members["prefill"]

    @property
    def decode(self) -> Member:
        return self.members["decode"]

    @property
    def url(self) -> str:
        """Where clients send their requests."""
        return str(self.members["router"].facts["http"])

    @property
    def model(self) -> str:
        """Name of the served model; smg routes by it."""
        return str(httpx.get(f"{self.decode.url}/v1/models").json()["data"][0]["id"])

    @property
    def bootstrap_port(self) -> int:
        return int(str(self.prefill.facts["control"]).rpartition(":")[2])

    def start(self, *, ready_s: float = 180.0, say: Callable[[str], None] = lambda _: None) -> None:
        """Start everything and wait until it serves.  Raises ClusterFailed with the log's tail."""
        deadline = time.monotonic() + ready_s
        say("starting pdrt-prefill and pdrt-decode")
        for role in ("prefill", "decode"):
            self._launch(role)
        for role in ("prefill", "decode"):
            member = self.members[role]
            self._wait(member, deadline, partial(self._announced, member))
        say("loading the model in both")
        for role in ("prefill", "decode"):
            self._wait_serving(self.members[role], deadline)
        if self._router_name is not None:
            say(f"starting {self._router_name}")
            self._launch_router(deadline)

    def start_again(self, role: str, *, ready_s: float = 180.0) -> None:
        """A role that has ended, at the addresses that it had.  Raises ClusterFailed."""
        deadline = time.monotonic() + ready_s
        facts = self.members[role].facts
        http, control = (int(str(facts[k]).rpartition(":")[2]) for k in ("http", "control"))
        self._launch(role, http, control)
        self._wait(self.members[role], deadline, partial(self._announced, self.members[role]))
        self._wait_serving(self.members[role], deadline)

    def _wait_serving(self, member: Member, deadline: float) -> None:
        # Without an engine of our own there is no HTTP port but the supervisor's.
        probe = f"{member.url}/health" if "http" in member.facts else member.ready_url
        self._wait(member, deadline, partial(answers, probe))

    def _launch(self, role: str, port: int = 0, control_port: int = 0) -> None:
        control = "--bootstrap-port" if role == "prefill" else "--control-port"
        ports = ["--port", str(port), control, str(control_port)]
        main = f"from pdrt.cli.launch import {role}; {role}()"
        command = [sys.executable, "-c", main, *self._flags[role], *ports]
        self.members[role] = self._spawn(role, command)

    def _spawn(self, name: str, command: list[str]) -> Member:
        log = self._folder / f"{name}.log"
        with log.open("wb") as output:
            popen = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self._environment,
                start_new_session=True,
            )
        return Member(name, popen, log)

    def _announced(self, member: Member) -> bool:
        for line in member.log.read_text(errors="replace").splitlines():
            if line.startswith('{"pdrt"'):
                member.facts = json.loads(line)["pdrt"]
                return True
        return False

    def _launch_router(self, deadline: float) -> None:
        port, metrics_port = free_ports(2)
        module = {"sglang-router": "sglang_router.cli", "smg": "smg.cli"}[str(self._router_name)]
        command = [sys.executable, "-m", module, "launch", "--pd-disaggregation"]
        command += ["--prefill", self.prefill.url, str(self.bootstrap_port)]
        command += ["--decode", self.decode.url, "--policy", "round_robin"]
        command += ["--host", "127.0.0.1", "--port", str(port)]
        command += ["--worker-startup-check-interval", "1"]
        command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port)]
        command += self._router_flags
        router = self.members["router"] = self._spawn("router", command)
        router.facts = {"http": f"http://127.0.0.1:{port}"}
        # Its own health does not say that both workers are registered; an answer does.
        self._wait(router, deadline, lambda: completes(self.url, self.model))

    def _wait(self, member: Member, deadline: float, ready: Callable[[], bool]) -> None:
        while not ready():
            code = member.popen.poll()
            if code is not None:
                raise ClusterFailed(f"{member.name} ended with exit code {code}:\n{member.tail()}")
            if time.monotonic() > deadline:
                raise ClusterFailed(f"{member.name} is not ready in time:\n{member.tail()}")
            time.sleep(0.1)

    def stop(self) -> None:
        """Stop the router first, then decode, then prefill."""
        for member in reversed(self.members.values()):
            member.stop()


def answers(url: str) -> bool:
    """Does a GET of the URL answer 200?"""
    try:
        return httpx.get(url, timeout=2.0).status_code == 200
    except httpx.HTTPError:
        return False


def completes(url: str, model: str) -> bool:
    """Does a one-token completion go through?"""
    body = {"model": model, "prompt": "a", "max_tokens": 1, "temperature": 0}
    try:
        response = httpx.post(f"{url}/v1/completions", json=body, timeout=20.0)
        return response.status_code == 200
    except httpx.HTTPError:
        return False


def free_ports(count: int) -> list[int]:
    """Ports nobody listens on now.  For programs that cannot be given port 0."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports
