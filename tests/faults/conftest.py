"""Four trees and two proxies:

    decode ──► bootstrap proxy ──► prefill        what decode says to prefill
    decode ◄── control proxy ◄──── prefill        Landed, from prefill's workers
    decode ───────────────────────► prefill2      healthy
    decode2 ──────────────────────► prefill       healthy

`--advertise-host` names a host and never a port, so the control proxy listens on the port of
decode's own control door, at another loopback address.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from pdrt.engine.manager import KVManager
from tests.faults.proxy import Action, Forward, Proxy
from tests.faults.traffic import Route, finish, recover
from tests.faults.trees import Tree, make_model

ADVERTISED = "127.0.0.2"
#: Short, so that a room's deadline takes seconds.
QUICK = (
    "--bootstrap-timeout", "3", "--waiting-timeout", "3", "--transfer-stall-timeout", "3",
    "--peer-timeout", "1.5", "--quiet-timeout", "9", "--pool-tokens", "4096",
)  # fmt: skip
#: No room ends later than this on a broken path: its longest deadline, the peer's silence, slack
#: for two busy cores.
OVER_S = 3 + 1.5 + 8
QUIET_S = 9 + 20  # a forced fence and the worker's new start


@dataclass
class Net:
    prefill: Tree
    prefill2: Tree
    decode: Tree
    decode2: Tree
    bootstrap: Proxy
    control: Proxy
    route: Route  # behind both proxies
    to_other: Route  # decode -> prefill2
    from_other: Route  # decode2 -> prefill

    @property
    def trees(self) -> list[Tree]:
        return [self.prefill, self.prefill2, self.decode, self.decode2]

    @property
    def healthy(self) -> list[Route]:
        return [self.to_other, self.from_other]

    def do(self, where: str, action: Action) -> None:
        if where in ("bootstrap", "both"):
            self.bootstrap.do(action)
        if where in ("control", "both"):
            self.control.do(action)

    def heal(self) -> None:
        self.do("both", Forward())


def control_proxy() -> Proxy:
    """At an address whose port is free on 127.0.0.1, too, for decode's own door."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    return Proxy(("127.0.0.1", port), host=ADVERTISED, port=port, seed=2)


def start_net(
    stack: contextlib.ExitStack, folder: Path, transport: str, flags: tuple[str, ...] = QUICK
) -> Net:
    model = folder / "model"
    model.mkdir()
    both = ["--model-path", str(make_model(model)), "--transport", transport, *flags]
    control = stack.enter_context(control_proxy())
    behind = ["--advertise-host", ADVERTISED, "--control-port", str(control.port)]

    def tree(role: str, name: str, *more: str) -> Tree:
        started = Tree(role, folder, [*both, *more], name=name)
        stack.callback(started.stop)
        return started

    prefill, prefill2 = tree("prefill", "prefill"), tree("prefill", "prefill2")
    decode, decode2 = tree("decode", "decode", *behind), tree("decode", "decode2")
    for started in (prefill, prefill2, decode, decode2):
        started.wait_ready()
    bootstrap = stack.enter_context(Proxy(prefill.place, seed=1))

    def attach(to: Tree, name: str) -> KVManager:
        return stack.enter_context(
            contextlib.closing(KVManager.attach(str(to.facts["attach"]), name=name))
        )

    p, d = attach(prefill, "p"), attach(decode, "d")
    p2, d2 = attach(prefill2, "p2"), attach(decode2, "d2")
    route = Route(p, d, bootstrap.address)
    to_other = Route(p2, d, prefill2.control, targets=route.targets)
    from_other = Route(p, d2, prefill.control, sources=route.sources)
    return Net(prefill, prefill2, decode, decode2, bootstrap, control, route, to_other, from_other)


@pytest.fixture(scope="package", params=["shm", pytest.param("nixl", marks=pytest.mark.slow)])
def net(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Net]:
    with contextlib.ExitStack() as stack:
        yield start_net(stack, tmp_path_factory.mktemp("net"), request.param)


@pytest.fixture
def healed(net: Net) -> Iterator[None]:
    """The test begins and ends with a whole path."""
    net.heal()
    recover(net.route, 30)
    yield
    net.heal()


@pytest.fixture
def emptied(net: Net, healed: None) -> Iterator[None]:
    """Neither does it leave a room behind, though it failed."""
    yield
    net.heal()
    routes = [net.route, *net.healthy]
    for route in routes:
        for trip in route.trips:
            trip.sender.abort()
            trip.receiver.abort()
    finish(routes, OVER_S + QUIET_S, "what a failed test left to be over")
