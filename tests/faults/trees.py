"""Process trees without an engine, started one by one and joined by whatever the test likes."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil

from pdrt.cli.cluster import answers
from pdrt.config import environment_with
from tests.waiting import wait_until

LOOPBACK = {"UCX_NET_DEVICES": "lo"}
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
    "max_position_embeddings": 2048,
}
SERIES = re.compile(r"^(pdrt_\w+?)(?:_total)?(?:\{(.*)\})? (\S+)$")


def make_model(folder: Path) -> Path:
    """As much of a model as gives a KV layout."""
    header = json.dumps({"w": {"dtype": "U8", "shape": [8], "data_offsets": [0, 8]}}).encode()
    (folder / "config.json").write_text(json.dumps(MODEL))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    return folder


class Tree:
    """One pdrt-prefill or pdrt-decode with --engine none."""

    def __init__(
        self,
        role: str,
        folder: Path,
        flags: Sequence[str],
        *,
        name: str = "",
        prefix: Sequence[str] = (),
        environment: Mapping[str, str] = LOOPBACK,
    ) -> None:
        """`prefix` is a command that becomes the tree's, such as nsenter."""
        self._prefix, self._environment = prefix, environment
        self.role = role
        self._log = folder / f"{name or role}.log"
        self._flags = list(flags)
        self.facts: dict[str, Any] = {}
        self._launch()

    def _launch(self) -> None:
        ports = ["--port", "0"]
        for flag in ("--bootstrap-port", "--control-port"):
            if flag not in self._flags and flag.startswith("--b") == (self.role == "prefill"):
                ports += [flag, "0"]
        if "--standby" not in self._flags:  # rarely missed here, and their start costs a second
            ports.append("--no-standby")
        main = f"from pdrt.cli.launch import {self.role}; {self.role}()"
        with self._log.open("wb") as output:
            self.popen = subprocess.Popen(
                [
                    *self._prefix,
                    sys.executable,
                    "-c",
                    main,
                    "--engine",
                    "none",
                    *self._flags,
                    *ports,
                ],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment_with(self._environment),
                start_new_session=True,
            )

    def wait_ready(self) -> None:
        wait_until(self._announced, 30, f"{self._log.stem} to say where it is")
        wait_until(self._ready, 30, f"{self._log.stem} to be ready")

    def _ready(self) -> bool:
        return answers(f"{self.facts['supervisor']}/ready")

    def _announced(self) -> bool:
        assert self.popen.poll() is None, self._log.read_text()
        for line in self._log.read_text(errors="replace").splitlines():
            if line.startswith('{"pdrt"'):
                self.facts = json.loads(line)["pdrt"]
                return True
        return False

    @property
    def control(self) -> str:
        return str(self.facts["control"])

    @property
    def place(self) -> tuple[str, int]:
        """Where its control port listens, whatever it advertises."""
        return "127.0.0.1", int(self.control.rpartition(":")[2])

    def _get(self, path: str) -> httpx.Response:
        return httpx.get(f"{self.facts['supervisor']}/{path}", timeout=10)

    def rooms(self) -> list[dict[str, Any]]:
        return list(self._get("rooms").json())

    def is_empty(self) -> bool:
        return not self.rooms()

    def children(self) -> dict[str, dict[str, Any]]:
        return {child["name"]: child for child in self._get("health").json()["children"]}

    def metric(self, name: str) -> dict[str, float]:
        """A series by its labels."""
        found = {}
        for line in self._get("metrics").text.splitlines():
            match = SERIES.match(line)
            if match is not None and match[1] == name:
                found[match[2] or ""] = float(match[3])
        return found

    def total(self, name: str) -> float:
        return sum(self.metric(name).values())

    def pids(self) -> dict[str, int]:
        found = {name: child["pid"] for name, child in self.children().items()}
        return {name: int(pid) for name, pid in found.items() if pid}  # a standby may have none

    def listener(self) -> psutil.Process:
        return psutil.Process(self.pids()["listener"])

    def unplanned_restarts(self) -> dict[str, str]:
        """Children that died, other than the workers that the janitor restarted as a fence."""
        children = self.children()
        restarts = sum(child["restarts"] for child in children.values())
        if restarts == self.total("pdrt_quiet_forced") and not children["listener"]["restarts"]:
            return {}
        return {
            name: f"{child['restarts']} restarts, {child['last_death']}"
            for name, child in children.items()
            if child["restarts"]
        }

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def kill_and_restart(self) -> None:
        """SIGKILL the supervisor, wait until its children are gone, start another at the same
        control port."""
        family = [psutil.Process(pid) for pid in self.pids().values()]
        control_port = str(self.place[1])
        self.popen.kill()
        self.popen.wait(10)
        wait_until(lambda: not any(p.is_running() for p in family), 10, "the children to be gone")
        flag = "--bootstrap-port" if self.role == "prefill" else "--control-port"
        if flag not in self._flags:
            self._flags += [flag, control_port]
        self._launch()

    def stop(self) -> None:
        if self.popen.poll() is None:
            self.popen.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.popen.wait(20)
                return
            self.popen.kill()
        self.popen.wait(10)


def family(tree: Tree) -> list[psutil.Process]:
    """By the kernel's word: a frozen supervisor does not answer."""
    supervisor = psutil.Process(tree.popen.pid)
    return [supervisor, *supervisor.children(recursive=True)]


@contextlib.contextmanager
def stopped(tree: Tree) -> Iterator[None]:
    """Every process of it, at once, in the middle of whatever it does."""
    members = family(tree)
    try:
        for process in members:
            process.suspend()
        yield
    finally:
        for process in members:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()
