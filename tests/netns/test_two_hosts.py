"""Two hosts: the tests of `two_hosts.py`, run in network namespaces that need no privilege."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

UNSHARE = (
    "unshare", "--map-root-user", "--net", "--mount", "--pid", "--fork", "--kill-child",
    "--mount-proc",
)  # fmt: skip
PROBE = (
    "ip link add a0 type veth peer b0 && ip link set a0 up && tc qdisc add dev a0 clsact"
    " && tc filter add dev a0 egress bpf da bytecode '1,6 0 0 4294967295'"
    " && mount -t sysfs none /sys && unshare --net --mount true"
)
# Of this machine's shared memory nothing is seen, so that nothing of it is taken for ours.
INSIDE = ("sh", "-c", 'mount -t tmpfs none /dev/shm && exec "$@"', "sh")
TESTS = Path(__file__).with_name("two_hosts.py")


@pytest.fixture(scope="module", autouse=True)
def allowed() -> None:
    for tool in ("unshare", "nsenter", "ip", "tc"):
        if shutil.which(tool) is None:
            pytest.skip(f"two hosts need {tool} (packages util-linux and iproute2)")
    done = subprocess.run(
        [*UNSHARE, "sh", "-c", PROBE], capture_output=True, text=True, check=False, timeout=20
    )
    if done.returncode:
        pytest.skip(f"no network namespaces for us here: {done.stderr.strip()[-300:]}")


def run_inside(expression: str, timeout_s: float) -> None:
    pytest.importorskip("nixl_cu12")
    inner = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(TESTS)]
    done = subprocess.run(
        [*UNSHARE, *INSIDE, *inner, "-m", expression],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=timeout_s,
    )
    assert done.returncode == 0, done.stdout[-12_000:]


@pytest.mark.timeout(120)
def test_rooms_and_black_holes_between_two_hosts() -> None:
    run_inside("not slow", 100)


@pytest.mark.slow
@pytest.mark.timeout(420)
def test_bad_cables_between_two_hosts() -> None:
    run_inside("slow", 400)
