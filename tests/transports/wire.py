"""Two network namespaces joined by a cable that can be cut: a black hole that TCP does not notice.

Needs no privilege where users may make namespaces of their own.  The cable is a veth pair; cut,
each end sends its frames to an address that nobody has: they vanish, and nobody is told.  Each end
has a /sys of its own, for UCX looks there for devices.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests.waiting import wait_until

ENDS = ("a", "b")
ADDRESS = {"a": "10.77.0.1", "b": "10.77.0.2"}
OTHER = {"a": "b", "b": "a"}
MAC = {"a": "02:77:00:00:00:01", "b": "02:77:00:00:00:02"}
NOBODY = "02:77:00:00:00:99"
NEW = ("unshare", "-n", "-m", "-r")
OWN_SYS = "mount -t sysfs none /sys && exec"


def missing() -> str:
    """Why there can be no wire here; "" if there can."""
    for tool in ("unshare", "nsenter", "ip"):
        if shutil.which(tool) is None:
            return f"no {tool} on this machine"
    probe = f"ip link add p0 type veth && {OWN_SYS} true"
    done = subprocess.run([*NEW, "sh", "-c", probe], capture_output=True, text=True)
    return "" if done.returncode == 0 else f"no namespaces here: {done.stderr.strip()}"


class Wire:
    """Start a process at an end with `command(end) + [...]`; its device is `veth-<end>`."""

    def __init__(self) -> None:
        self._holders: dict[str, subprocess.Popen[bytes]] = {}
        try:
            self._holders["a"] = self._hold(NEW)
            joined = ["nsenter", "-t", str(self._pid("a")), "-U", "--preserve-credentials"]
            self._holders["b"] = self._hold([*joined, *NEW[:-1]])
            pair = f"link add veth-a address {MAC['a']} type veth peer name veth-b"
            self._ip("a", f"{pair} address {MAC['b']} netns {self._pid('b')}")
            for end in ENDS:
                self._ip(end, f"addr add {ADDRESS[end]}/30 dev veth-{end}")
                self._ip(end, f"link set veth-{end} up")
                self._ip(end, "link set lo up")
            wait_until(self._is_up, 5, "the cable to carry")
            self.mend()
        except BaseException:
            self.close()
            raise

    def _hold(self, how: Sequence[str]) -> subprocess.Popen[bytes]:
        """A process that keeps a namespace.  It ends when its input closes: it cannot be left."""
        command = [*how, "sh", "-c", f"{OWN_SYS} cat"]
        popen = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)

        def there() -> bool:
            assert popen.poll() is None, "no namespace"
            return Path(f"/proc/{popen.pid}/comm").read_text().strip() == "cat"

        wait_until(there, 5, "a namespace")
        return popen

    def _pid(self, end: str) -> int:
        return self._holders[end].pid

    def command(self, end: str) -> list[str]:
        """What to put before a command so that it runs at that end."""
        return ["nsenter", "-t", str(self._pid(end)), "-U", "-n", "-m", "--preserve-credentials"]

    def _is_up(self) -> bool:
        """The kernel looks at a new link a moment later; until then it has no route."""
        reads = [[*self.command(e), "cat", f"/sys/class/net/veth-{e}/operstate"] for e in ENDS]
        states = [subprocess.run(r, capture_output=True, text=True).stdout.strip() for r in reads]
        return states == ["up", "up"]

    def _ip(self, end: str, arguments: str) -> None:
        command = [*self.command(end), "ip", *arguments.split()]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, f"ip {arguments}: {done.stderr}"

    def _aim(self, macs: dict[str, str]) -> None:
        for end in ENDS:
            target = f"{ADDRESS[OTHER[end]]} lladdr {macs[end]}"
            self._ip(end, f"neigh replace {target} dev veth-{end} nud permanent")

    def cut(self) -> None:
        self._aim(dict.fromkeys(ENDS, NOBODY))

    def mend(self) -> None:
        self._aim({end: MAC[OTHER[end]] for end in ENDS})

    def close(self) -> None:
        for popen in reversed(self._holders.values()):
            assert popen.stdin is not None
            popen.stdin.close()
            popen.wait(10)
        self._holders.clear()
