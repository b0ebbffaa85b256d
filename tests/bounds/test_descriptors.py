"""Trees of real processes that may open no further descriptor, one process at a time: what they
cannot do is refused, named or counted, and once the limit is lifted everything works again."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import httpx
import psutil
import pytest
import zmq

from pdrt import attach
from pdrt.attach import AttachRequest
from pdrt.child import ChildProcess
from pdrt.engine.manager import KVManager
from pdrt.errors import AttachFailed
from pdrt.protocol.codec import encode
from pdrt.protocol.messages import OLDEST, VERSION, Agent, Hello, Introduction
from pdrt.supervision import Pulse, Spent
from tests.faults.traffic import Phase, Route, all_over, finish, recover, run, succeed
from tests.faults.trees import SERIES, Tree, make_model
from tests.waiting import wait_until

QUICK = (
    "--bootstrap-timeout", "3", "--waiting-timeout", "3", "--transfer-stall-timeout", "3",
    "--peer-timeout", "1.5", "--quiet-timeout", "9", "--pool-tokens", "4096",
)  # fmt: skip
WAIT_S = 20.0
NOT_LAUNCHED = re.compile(r"listener is backoff: not launched.*open files")


@dataclass
class Net:
    prefill: Tree
    decode: Tree
    route: Route


def start(stack: contextlib.ExitStack, folder: Path, transport: str) -> Net:
    model = folder / "model"
    model.mkdir()
    flags = ["--model-path", str(make_model(model)), "--transport", transport, *QUICK]
    trees = [Tree(role, folder, flags) for role in ("prefill", "decode")]
    for tree in trees:
        stack.callback(tree.stop)
    managers = []
    for tree in trees:
        tree.wait_ready()
        manager = KVManager.attach(str(tree.facts["attach"]), name="test")
        managers.append(stack.enter_context(contextlib.closing(manager)))
    route = Route(managers[0], managers[1], trees[0].control)
    succeed(route, 1)
    return Net(trees[0], trees[1], route)


@pytest.fixture(scope="module", params=["shm", pytest.param("nixl", marks=pytest.mark.slow)])
def net(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Net]:
    with contextlib.ExitStack() as stack:
        yield start(stack, tmp_path_factory.mktemp("bounds"), request.param)


@contextlib.contextmanager
def starved(pid: int) -> Iterator[None]:
    """Not one descriptor more for that process, until the end of the block."""
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    used = {int(name) for name in os.listdir(f"/proc/{pid}/fd")}
    lowest_free = next(number for number in range(len(used) + 1) if number not in used)
    # The first ones are held for as long as it lives: what is closed meanwhile gives no place.
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (min(lowest_free, 8), before[1]))
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


class Watcher:
    """Looks at a supervisor over a connection that it accepted before it was starved."""

    def __init__(self, tree: Tree) -> None:
        self._client = httpx.Client(base_url=str(tree.facts["supervisor"]), timeout=10)
        self.ready()

    def ready(self) -> str:
        return self._client.get("/ready").text

    def total(self, name: str) -> float:
        lines = self._client.get("/metrics").text.splitlines()
        matches = (SERIES.match(line) for line in lines)
        return sum(float(m[3]) for m in matches if m is not None and m[1] == name)

    def pid(self, name: str) -> int:
        """0 while it has no process."""
        children = self._client.get("/health").json()["children"]
        return next(child["pid"] or 0 for child in children if child["name"] == name)

    def has_lost(self, name: str, pid: int) -> bool:
        return self.pid(name) != pid

    def close(self) -> None:
        self._client.close()


def test_a_supervisor_without_descriptors_says_so_keeps_its_rooms_and_recovers(net: Net) -> None:
    tree, supervisor = net.prefill, net.prefill.popen.pid
    before = tree.children()["listener"]["restarts"]
    refused_before = tree.total("pdrt_callback_errors")
    moving = net.route.open(Phase.MOVING)
    run([net.route], lambda: moving.reached, WAIT_S, "a room to move")
    with contextlib.closing(Watcher(tree)) as watcher:
        with starved(supervisor):
            ask = AttachRequest(kind="engine", name="late")
            with pytest.raises(AttachFailed):
                attach.request(str(tree.facts["attach"]), ask, timeout_s=0.5)
            wait_until(
                lambda: watcher.total("pdrt_callback_errors") > refused_before,
                WAIT_S,
                "the refusal to be counted",
            )
            # A standby may take over; then there is none, and none can be launched.
            kills = 0
            while pid := watcher.pid("listener"):
                psutil.Process(pid).kill()
                kills += 1
                wait_until(partial(watcher.has_lost, "listener", pid), WAIT_S, "its death")
                wait_until(
                    lambda: NOT_LAUNCHED.search(watcher.ready()) or watcher.pid("listener"),
                    WAIT_S,
                    "the reason to be named, or a successor",
                )
            assert NOT_LAUNCHED.search(watcher.ready())
            moving.want = Phase.WHOLE  # a room that moves needs no listener
            run([net.route], partial(all_over, [moving]), WAIT_S, "the room to be over")
        wait_until(lambda: '"ready"' in watcher.ready(), WAIT_S, "the tree to be ready again")
    assert moving.succeeded
    finish([net.route], WAIT_S, "it to be quiet")
    assert tree.children()["listener"]["restarts"] == before + kills  # not launched is not died
    with contextlib.closing(KVManager.attach(str(tree.facts["attach"]), name="late")):
        succeed(net.route, 2)


def test_a_child_that_cannot_be_looked_at_gets_one_excuse_and_later_no_double_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its supervisor may open nothing in /proc, and must not end of that.  The descriptor it has
    tells it what the child has waited."""

    def none_left(*_: object, **__: object) -> list[str]:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    command = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as popen:
        process = ChildProcess(popen)
        try:
            wait_until(lambda: process.spent().waited_ns, 10, "it to have waited for a CPU")
            wait_until(lambda: process.state() == "S", 10, "it to wait for its input")
            pulse, starved = Pulse(1, 0, process.spent()), Pulse(1, 0, Spent())
            with monkeypatch.context() as patch:
                patch.setattr(os, "listdir", none_left)
                patch.setattr("builtins.open", none_left)
                assert not pulse.is_hung(60, limit_ns=100, excuses=process)
                assert process.waits_ns() == {}
                assert process.state() == ""
                assert pulse.is_hung(101, limit_ns=100, excuses=process)
                assert not starved.is_hung(101, limit_ns=100, excuses=process)
            # What it waited before anybody could look is no excuse for now.
            assert pulse.is_hung(101, limit_ns=100, excuses=process)
        finally:
            process.kill()
            process.close()


def test_a_listener_without_descriptors_serves_whom_it_knows_and_then_everybody(net: Net) -> None:
    listener = net.prefill.listener()
    with contextlib.ExitStack() as stack:
        with starved(listener.pid):
            newcomer = stack.enter_context(socket.create_connection(net.prefill.place))
            newcomer.setblocking(False)
            succeed(net.route, 2)
            assert not greeted(newcomer)
            wait_until(lambda: net.prefill.total("pdrt_descriptor_shortages"), WAIT_S, "it to tell")
        wait_until(lambda: greeted(newcomer), WAIT_S, "it to be let in")
    assert net.prefill.listener().pid == listener.pid


def greeted(client: socket.socket) -> bool:
    """A door of ours greets as soon as it has accepted."""
    try:
        return bool(client.recv(64))
    except BlockingIOError:
        return False


def replace_worker(tree: Tree) -> None:
    """Kill it, and wait for its successor."""
    old = tree.pids()["worker0"]
    psutil.Process(old).kill()

    def replaced() -> bool:
        child = tree.children()["worker0"]
        return bool(child["phase"] == "up" and child["pid"] != old)

    wait_until(replaced, WAIT_S, "its successor")


def test_a_worker_without_descriptors_refuses_new_paths_and_opens_them_later(net: Net) -> None:
    worker = net.prefill.pids()["worker0"]
    with starved(worker):
        succeed(net.route, 1)  # the path that it has
        replace_worker(net.decode)  # its successor is another agent
        trip = net.route.open()
        run([net.route], partial(all_over, [trip]), WAIT_S, "the room to be over")
        assert not trip.succeeded
        assert trip.receiver.failure() is not None
    recover(net.route, WAIT_S)
    succeed(net.route, 2)


@pytest.mark.slow
def test_a_decode_worker_without_descriptors_is_reached_later(net: Net) -> None:
    """Over nixl it has to accept, and UCX closes its door for good when it cannot: the worker is
    replaced once there are descriptors.  Over shm its supervisor hands out the region."""
    with starved(net.decode.pids()["worker0"]):
        succeed(net.route, 1)
        replace_worker(net.prefill)
        trip = net.route.open()
        run([net.route], partial(all_over, [trip]), WAIT_S, "the room to be over, one way or other")
    recover(net.route, WAIT_S)
    succeed(net.route, 2)


def test_an_engine_without_descriptors_is_refused_leaves_none_and_attaches_later(net: Net) -> None:
    """In a process of its own, as an engine is; one descriptor more at a time."""
    code = "from tests.bounds.test_descriptors import attach_with_few; attach_with_few()"
    address = str(net.prefill.facts["attach"])
    command = [sys.executable, "-c", code, address]
    engine = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert engine.returncode == 0, engine.stderr
    outcomes = engine.stdout.split()
    refused = outcomes.index("attached")
    assert outcomes == ["refused"] * refused + ["attached"] * (len(outcomes) - refused)
    assert 8 < refused < 24


def attach_with_few() -> None:
    """Entered by the test above."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    KVManager.attach(sys.argv[1], name="whole").close()  # imports what is imported late
    free = os.dup(0)
    os.close(free)
    for count in range(28):
        resource.setrlimit(resource.RLIMIT_NOFILE, (free + count, hard))
        try:
            KVManager.attach(sys.argv[1], name="starved").close()
            outcome = "attached"
        except AttachFailed:
            outcome = "refused"
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        # ZMQ's threads give theirs back in their own time.
        wait_until(lambda: len(os.listdir("/proc/self/fd")) <= free + 1, WAIT_S, "no leak")
        sys.stdout.write(outcome + "\n")


# --- strangers and noise on a real control port --------------------------------------------------


def test_a_crowd_of_strangers_is_counted_and_leaves_no_descriptor(net: Net) -> None:
    listener = net.prefill.listener()
    before, counted = listener.num_fds(), net.prefill.total("pdrt_strangers")
    with contextlib.ExitStack() as stack:
        for number in range(100):
            client = stack.enter_context(socket.create_connection(net.prefill.place))
            with contextlib.suppress(OSError):
                client.sendall(b"" if number % 10 == 0 else b"GET / HTTP/1.1\r\n\r\n")
        succeed(net.route, 1)
        wait_until(
            lambda: listener.num_fds() <= before, WAIT_S, "them to be gone, though they stay"
        )
    wait_until(
        lambda: net.prefill.total("pdrt_strangers") >= counted + 100, WAIT_S, "them to be counted"
    )
    succeed(net.route, 1)


def test_noise_from_outside_writes_a_bounded_number_of_lines(net: Net) -> None:
    """Peers that are refused, replaced and malformed, as fast as one socket can say so."""
    lines = len(net.prefill.log().splitlines())
    listener = net.prefill.listener().pid
    lates = net.prefill.total("pdrt_peers_lost")
    begun_s = time.monotonic()
    context = zmq.Context()
    noisy = context.socket(zmq.DEALER)
    noisy.set(zmq.LINGER, 0)
    noisy.set(zmq.SNDTIMEO, 20_000)
    noisy.connect(f"tcp://{net.prefill.control}")
    agent = Agent(0, 1, 1, 1, {"shm": b"nonsense"})
    for number in range(2000):
        foreign = Hello(VERSION, OLDEST, f"x{number}", 1, b"another layout")
        moved = Introduction(f"y{number}", 1, "nowhere:1", "another host", [agent], number)
        noisy.send(encode([foreign, moved, foreign]))
        noisy.send(b"GET / HTTP/1.1\r\n\r\n")
    wait_until(
        lambda: net.prefill.total("pdrt_peers_lost") >= lates + 1999, 60, "all of it to be heard"
    )
    noisy.close()
    context.term()
    seconds = time.monotonic() - begun_s
    places = 8
    assert len(net.prefill.log().splitlines()) - lines <= places * 10 * (seconds + 2)
    assert net.prefill.listener().pid == listener
    assert net.prefill.total("pdrt_malformed_frames") >= 2000
    recover(net.route, WAIT_S)
