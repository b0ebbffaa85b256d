"""Two hosts: network namespaces of one user namespace, joined by a veth pair.

The process that uses this is root of its own user, network, mount and pid namespace already
(`test_two_hosts.py` sees to it), so nothing here touches the machine, and its death ends all of it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Self

import httpx

from pdrt.engine.manager import KVManager
from tests.faults.trees import Tree

CLONE_NEWNET = 0x40000000
LIBC = ctypes.CDLL(None, use_errno=True)
# /sys must show the namespace's own devices: UCX finds them there.
HOLD = "mount -t sysfs none /sys && ip link set lo up && echo ready && exec cat"
# What is done to every packet that leaves, as classic BPF; 2 is TC_ACT_SHOT, 4294967295 lets it go.
#: Dropped if a random word is below the threshold.
LOSE = "4,32 0 0 4294963256,53 1 0 {threshold},6 0 0 2,6 0 0 4294967295"
#: Dropped if it opens a TCP connection: of its flags, SYN is set and ACK is not.
NOTHING_NEW = "5,48 0 0 47,84 0 0 18,21 0 1 2,6 0 0 2,6 0 0 4294967295"
WORDS = 1 << 32
NOBODY = "02:00:00:00:00:99"  # a MAC address that no card has


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (command, done.stderr)


class Host:
    """One network namespace, with the end of a cable."""

    def __init__(self, name: str, address: str) -> None:
        self.name, self.address, self.card = name, address, f"{name}0"
        self._holder = subprocess.Popen(
            ["unshare", "--net", "--mount", "sh", "-c", HOLD],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._holder.stdout is not None
        assert self._holder.stdout.readline() == b"ready\n"
        self._net = os.open(f"/proc/{self._holder.pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)

    @property
    def pid(self) -> int:
        return self._holder.pid

    @property
    def prefix(self) -> list[str]:
        """Before a command that is to run here."""
        return ["nsenter", "--target", str(self.pid), "--net", "--mount"]

    def run(self, command: str) -> None:
        _run(*self.prefix, "sh", "-c", command)

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Sockets of this thread, and of threads that it starts, belong to this host."""
        home = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        try:
            _enter(self._net)
            yield
        finally:
            _enter(home)
            os.close(home)

    def lose(self, part: float) -> None:
        """This part of the packets that leave is lost; 1 is a black hole, 0 heals it."""
        self._filter(LOSE.format(threshold=min(WORDS - 1, int(part * WORDS))) if part else "")

    def open_nothing(self) -> None:
        """Connections that are there go on; new ones from here get no answer."""
        self._filter(NOTHING_NEW)

    def _filter(self, code: str) -> None:
        self.run(f"tc qdisc del dev {self.card} clsact 2> /dev/null || true")
        if code:
            self.run(f"tc qdisc add dev {self.card} clsact")
            self.run(f"tc filter add dev {self.card} egress bpf da bytecode '{code}'")

    def unplug(self) -> None:
        self.run(f"ip link set {self.card} down")

    def plug(self) -> None:
        self.run(f"ip link set {self.card} up")

    def close(self) -> None:
        self._holder.communicate()
        os.close(self._net)


def _enter(fd: int) -> None:
    if LIBC.setns(fd, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")


class Cable:
    """Two hosts and what joins them."""

    def __init__(self, *, mtu: int = 1500) -> None:
        self.a, self.b = Host("left", "10.77.0.1"), Host("right", "10.77.0.2")
        ends = self.a.card, self.b.card
        _run("ip", "link", "add", ends[0], "mtu", str(mtu), "type", "veth", "peer", ends[1])
        for host in (self.a, self.b):
            _run("ip", "link", "set", host.card, "netns", str(host.pid))
            host.run(f"ip link set {host.card} mtu {mtu}")
            host.run(f"ip addr add {host.address}/24 dev {host.card} && ip link set {host.card} up")

    @property
    def hosts(self) -> tuple[Host, Host]:
        return self.a, self.b

    def lose(self, part: float) -> None:
        for host in self.hosts:
            host.lose(part)

    def heal(self) -> None:
        self.lose(0)
        for host in self.hosts:
            host.plug()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for host in self.hosts:
            host.close()


class RemoteTree(Tree):
    """A tree on a host, which is asked there how it is."""

    def __init__(
        self,
        role: str,
        folder: Path,
        flags: Sequence[str],
        host: Host,
        environment: Mapping[str, str],
    ) -> None:
        self._host = host
        place = ["--host", host.address]
        super().__init__(
            role,
            folder,
            [*place, *flags],
            name=f"{role}-{host.name}",
            prefix=host.prefix,
            environment=environment,
        )

    def _ready(self) -> bool:
        with self._host.entered():
            return super()._ready()

    def _get(self, path: str) -> httpx.Response:
        with self._host.entered():
            return super()._get(path)

    def attach(self, name: str) -> KVManager:
        with self._host.entered():
            return KVManager.attach(str(self.facts["attach"]), name=name)
