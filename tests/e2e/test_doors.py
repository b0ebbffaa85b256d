"""Bad input at every door gives a clear typed error and changes nothing."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import psutil
import pytest
import zmq

from pdrt.cli.cluster import Cluster
from tests.e2e.conftest import LOOPBACK, QUICK, StartCluster
from tests.e2e.driver import Driver, rooms_of, series, wait_idle
from tests.waiting import wait_until

PROMPT = [5 + i % 400 for i in range(40)]


def launch(role: str, *flags: str, limit: str = "") -> subprocess.CompletedProcess[str]:
    """Run a role until it gives up by itself."""
    main = f"{limit}from pdrt.cli.launch import {role}; {role}()"
    command = [sys.executable, "-c", main, *flags]
    env = {**os.environ, **LOOPBACK}
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=env)


@pytest.fixture(scope="module")
def cluster(start_cluster: StartCluster) -> Cluster:
    return start_cluster("--transport", "shm", "--pool-tokens", "512", *QUICK)


@pytest.fixture(scope="module")
def driver(cluster: Cluster) -> Driver:
    return Driver(cluster)


def serves(cluster: Cluster, driver: Driver) -> bool:
    outcome = driver.ask(driver.body(PROMPT, max_new_tokens=4))[0]
    wait_idle(cluster, 5)
    return outcome.succeeded


def test_an_unknown_model_folder(tmp_path: Path) -> None:
    done = launch("prefill", "--model-path", str(tmp_path / "nowhere"), "--port", "0")
    assert done.returncode == 2
    assert "bad_model" in done.stderr
    assert "nowhere" in done.stderr


@pytest.mark.parametrize(
    ("role", "flag"),
    [
        ("prefill", "--port"),
        ("prefill", "--bootstrap-port"),
        ("decode", "--control-port"),
        ("decode", "--supervisor-port"),
    ],
)
def test_a_port_in_use(tiny_folder: Path, role: str, flag: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ports = {"--port": "0", "--bootstrap-port": "0", flag: str(taken.getsockname()[1])}
        flags = [part for item in ports.items() for part in item]
        done = launch(role, "--model-path", str(tiny_folder), *flags)
    assert done.returncode == 2
    assert "port_in_use" in done.stderr
    assert flag.removeprefix("--") in done.stderr


def test_no_room_for_shared_memory(tiny_folder: Path) -> None:
    """The same error whether the limit is a file size, a cgroup or the machine."""
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20)); "
    flags = ["--model-path", str(tiny_folder), "--port", "0", "--bootstrap-port", "0"]
    done = launch("prefill", *flags, limit=limit)
    assert done.returncode == 2
    assert "no_memory" in done.stderr
    assert "--pool-tokens" in done.stderr


@pytest.mark.parametrize(
    "flags",
    [
        ("--page-size", "0"),
        ("--transport", "pigeon"),
        ("--devices", "cuda:0"),
        ("--devices", "cpu:0,cpu:0"),
        ("--quiet-timeout", "-1"),
    ],
)
def test_a_bad_flag_names_itself(tiny_folder: Path, flags: tuple[str, str]) -> None:
    done = launch("decode", "--model-path", str(tiny_folder), *flags)
    assert done.returncode == 2
    assert "bad_config" in done.stderr


def test_a_prompt_longer_than_the_pool(cluster: Cluster, driver: Driver) -> None:
    outcome = driver.ask(driver.body([7] * 600, max_new_tokens=4))[0]
    assert (outcome.prefill_status, outcome.decode_status) == (400, 400)
    assert outcome.error_codes == {"prompt_too_long"}
    assert serves(cluster, driver)


def test_a_room_id_twice(cluster: Cluster, driver: Driver) -> None:
    """The second user of a live room is refused; the first is not disturbed."""
    bodies = [driver.body(PROMPT, room=77, max_new_tokens=200, ignore_eos=True) for _ in range(2)]
    outcomes = driver.ask(*bodies, concurrency=2)
    assert any(outcome.succeeded for outcome in outcomes) or any(
        "room_in_use" in outcome.error_codes for outcome in outcomes
    )
    assert {c for o in outcomes for c in o.error_codes} <= {"room_in_use", "aborted", "peer_lost"}
    assert serves(cluster, driver)


@pytest.mark.parametrize("room", [-1, 2**63, "x", 1.5])
def test_a_room_that_is_no_room(cluster: Cluster, driver: Driver, room: object) -> None:
    outcome = driver.ask(driver.body(PROMPT) | {"bootstrap_room": room})[0]
    assert (outcome.prefill_status, outcome.decode_status) == (400, 400)
    assert rooms_of(cluster.prefill) == rooms_of(cluster.decode) == []


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"text": 5}', b"\xff\xfe", b"null"])
def test_garbage_json(cluster: Cluster, body: bytes) -> None:
    for member in (cluster.prefill, cluster.decode):
        response = httpx.post(f"{member.url}/generate", content=body, timeout=10)
        assert response.status_code == 400
        assert response.json()["error"]["type"]


def test_garbage_on_the_control_port_is_counted_and_dropped(
    cluster: Cluster, driver: Driver
) -> None:
    def malformed() -> float:
        names = (cluster.prefill, cluster.decode)
        return sum(
            series(f"{m.supervisor_url}/metrics")["pdrt_malformed_frames_total"] for m in names
        )

    before = malformed()
    frames: list[list[bytes]] = [
        [b""],
        [b"GARBAGE"],
        [b"a", b"b"],
        [b""] * 9,
        [b"\xd7"],
        [b"\xd7\xc1"],
        [b"\xd7\x91\x91\x63"],
        [b"None", b"0.0.0.0"],
    ]
    context = zmq.Context()
    for member in (cluster.prefill, cluster.decode):
        socket_ = context.socket(zmq.DEALER)
        socket_.set(zmq.LINGER, 5000)
        socket_.connect(f"tcp://{member.facts['control']}")
        for frame in frames:
            socket_.send_multipart(frame)
        socket_.close()
        host, _, port = str(member.facts["control"]).rpartition(":")
        with socket.create_connection((host, int(port))) as raw:
            raw.sendall(b"GET / HTTP/1.1\r\n\r\n" + os.urandom(512))
    context.term()
    wait_until(lambda: malformed() - before >= 2 * len(frames), 10, "every frame to be counted")
    assert serves(cluster, driver)
    for member in (cluster.prefill, cluster.decode):
        report = httpx.get(f"{member.supervisor_url}/health", timeout=5).json()
        assert all(child["restarts"] == 0 for child in report["children"]), report


def test_all_that_listens_is_on_loopback(cluster: Cluster) -> None:
    """Unless it is told otherwise."""
    listening = []
    for member in (cluster.prefill, cluster.decode):
        tree = psutil.Process(member.popen.pid)
        for process in (tree, *tree.children(recursive=True)):
            found = process.net_connections("inet")
            listening += [c.laddr.ip for c in found if c.status == psutil.CONN_LISTEN]
    assert len(listening) >= 2 * 3  # requests, control, supervisor
    assert set(listening) == {"127.0.0.1"}


@pytest.mark.timeout(120)
def test_a_layout_mismatch_names_the_field(start_cluster: StartCluster) -> None:
    cluster = start_cluster("--transport", "shm", *QUICK, prefill=["--page-size", "32"])
    try:
        driver = Driver(cluster)
        outcome = driver.ask(driver.body(PROMPT, max_new_tokens=4))[0]
        wait_idle(cluster, 5)
    finally:
        cluster.stop()
    assert (outcome.prefill_status, outcome.decode_status) == (503, 503)
    error = outcome.decode["error"]
    assert error["code"] == "layout_mismatch"
    assert "page_size 16/32" in error["message"]
    assert outcome.prefill["error"]["code"] == "layout_mismatch", outcome
