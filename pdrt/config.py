"""Settings, limits and timeouts.  The only module that reads or sets the environment.

`Settings` is everything one `pdrt-prefill` or `pdrt-decode` was told; it is frozen and travels to
every child as it is.  The command line (`cli/launch.py`) fills it from flags and PDRT_* variables.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from pdrt.errors import BadConfig

DEFAULT_BOOTSTRAP_PORT = 8998
LOG_LEVELS = ("debug", "info", "warning", "error")
TRANSPORTS = ("nixl", "shm")
ON_TRANSFER_FAILURE = ("fail", "recompute")
TIMEOUT_MAX_S = 1_000_000
#: All rooms that wait at one peer are named in each of its heartbeats, a slot and a generation of
#: eight bytes each: in a larger table a heartbeat would be too big for a frame, and none renewed.
ROOMS_MAX = 250_000
HANG_PART = 2 / 3  # of the quiet bound
HANG_MIN_S = 0.2  # four pulses
QUIET_MIN_S = 0.3  # of which HANG_MIN_S is that part

#: SGLang's own variables, for the timeouts that mean the same here.  Flags and PDRT_* win.
SGLANG_BOOTSTRAP = "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT"
SGLANG_WAITING = "SGLANG_DISAGGREGATION_WAITING_TIMEOUT"
SGLANG_RELEASE = "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT"
SGLANG_BEAT = "SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL"
SGLANG_MISSES = "SGLANG_DISAGGREGATION_HEARTBEAT_MAX_FAILURE"
SGLANG_BEAT_S, SGLANG_BEAT_MIN_S, SGLANG_MISSES_DEFAULT = 5.0, 2.0, 2

#: What UCX needs for pdrt's promises, unless the operator says otherwise.  A black-holed TCP link
#: is noticed after USER_TIMEOUT instead of never.  Without CONN_NB UCX waits inside connect(2): a
#: host that does not answer would stop a worker, and with it every other peer (decision 0007).
UCX_DEFAULTS = {
    "UCX_TCP_USER_TIMEOUT": "3s",
    "UCX_TCP_CONN_NB": "y",
    "UCX_LOG_LEVEL": "error",
}


#: Field of `Timeouts` -> its flag, of those that have one.
TIMEOUT_FLAGS = {
    "bootstrap_s": "bootstrap_timeout",
    "waiting_s": "waiting_timeout",
    "stall_s": "transfer_stall_timeout",
    "queue_s": "queue_timeout",
    "quiet_s": "quiet_timeout",
    "drain_s": "drain_timeout",
    "peer_s": "peer_timeout",
}


class Timeouts(msgspec.Struct, frozen=True, kw_only=True):
    """All in seconds.  The first three are deadlines of room states; progress renews the third.

    An actor that stands still is to be seen as hung before the rooms that wait for it are fenced by
    force: that would restart a healthy worker for a frozen one's sake.  So `hang_s` is at most two
    thirds of `quiet_s`, and a shorter `quiet_s` takes it along (`Settings` sees to it); only one so
    short that a busy actor would look hung is refused."""

    bootstrap_s: float = 60.0  # the peer's half of the room never appeared
    waiting_s: float = 60.0  # both halves are known and nothing was posted
    stall_s: float = 30.0  # bytes stopped moving
    queue_s: float = 600.0  # a room may wait so long for its turn, however often it is renewed
    quiet_s: float = 10.0  # a Failed room is not quiet; then its worker is fenced by a restart
    beat_s: float = 0.5  # heartbeat to peers
    peer_s: float = 3.0  # silence after which a peer is lost
    resend_s: float = 0.2  # first repeat of an unacknowledged message
    ready_s: float = 60.0  # a child must announce itself
    engine_ready_s: float = 300.0
    drain_s: float = 30.0  # after SIGTERM an engine finishes what it has, within this
    shutdown_s: float = 5.0  # SIGTERM, then SIGKILL
    hang_s: float = 0.2  # an actor whose pulse stands still is killed; see above
    engine_hang_s: float = 60.0


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """One process tree.  See `--help` for the meaning of each flag."""

    role: str  # "prefill" or "decode"
    model_path: str = ""  # empty: the default model, converted into the cache
    served_model_name: str = ""
    host: str = "127.0.0.1"
    port: int = 30000
    bootstrap_port: int = DEFAULT_BOOTSTRAP_PORT  # prefill's control port; decode's default peer
    control_port: int = 0  # decode's own; 0 picks a free one
    advertise_host: str = ""  # what peers dial; default: host
    supervisor_port: int = 0
    attach: str = ""  # Unix socket for engines; "@..." is abstract; default: @pdrt-<role>-<port>
    devices: tuple[str, ...] = ("cpu:0",)
    transport: str = "nixl"
    engine: str = "reference"  # or "none": engines attach from outside
    page_size: int = 16
    pool_tokens: int = 32768
    aux_rows: int = 256
    rooms_max: int = 65536
    dtype: str = "float32"
    chunked_prefill_size: int = 512
    max_running_requests: int = 32
    queue_max: int = 256
    threads: int = 0  # torch threads; 0: half the cores, at least one
    standby: bool = True  # a warm spare listener and a warm spare worker
    intensity: int = 10  # restarts allowed within `period_s` before the tree gives up
    period_s: float = 60.0
    kv_checksum: bool = False  # prefill sends a digest of the KV, decode compares
    on_transfer_failure: str = "fail"  # decode: or "recompute" the prompt of a room that is lost
    log_level: str = "info"
    timeouts: Timeouts = Timeouts()

    def __post_init__(self) -> None:
        if self.role not in ("prefill", "decode"):
            raise BadConfig(f"role {self.role!r} is neither prefill nor decode")
        if self.transport not in TRANSPORTS:
            raise BadConfig(f"--transport {self.transport!r} is not one of {', '.join(TRANSPORTS)}")
        if self.engine not in ("reference", "none"):
            raise BadConfig(f"--engine {self.engine!r} is neither reference nor none")
        if self.on_transfer_failure not in ON_TRANSFER_FAILURE:
            given = f"--on-transfer-failure {self.on_transfer_failure!r}"
            raise BadConfig(f"{given} is not one of {', '.join(ON_TRANSFER_FAILURE)}")
        if self.on_transfer_failure != "fail" and self.role == "prefill":
            raise BadConfig("--on-transfer-failure is decode's choice; prefill has none")
        if self.log_level not in LOG_LEVELS:
            raise BadConfig(f"--log-level {self.log_level!r} is not one of {', '.join(LOG_LEVELS)}")
        if not self.devices or len(set(self.devices)) != len(self.devices):
            raise BadConfig(f"--devices {','.join(self.devices)!r}: give each device once")
        for device in self.devices:
            kind, _, index = device.partition(":")
            if kind != "cpu" or not index.isdecimal():
                raise BadConfig(f"device {device!r}: only cpu:N is supported so far")
        for name in ("page_size", "pool_tokens", "aux_rows", "rooms_max", "chunked_prefill_size"):
            if getattr(self, name) < 1:
                raise BadConfig(f"--{name.replace('_', '-')} must be at least 1")
        if self.rooms_max > ROOMS_MAX:
            raise BadConfig(f"--rooms-max {self.rooms_max}: at most {ROOMS_MAX}")
        for name in ("port", "bootstrap_port", "control_port", "supervisor_port"):
            if not 0 <= getattr(self, name) <= 65535:
                raise BadConfig(f"--{name.replace('_', '-')} {getattr(self, name)} is not a port")
        advertised = self.advertise_host or self.host
        if self.role == "decode" and is_unspecified(advertised):
            raise BadConfig(f"peers cannot dial {advertised}: give --advertise-host")
        for name in Timeouts.__struct_fields__:
            # Shorter than the table's millisecond would read as no deadline at all; neither is NaN.
            if not 0.001 <= getattr(self.timeouts, name) <= TIMEOUT_MAX_S:
                flag = TIMEOUT_FLAGS.get(name, name).replace("_", "-")
                raise BadConfig(f"--{flag} must be from 0.001 to {TIMEOUT_MAX_S} seconds")
        hang_s, quiet_s = self.timeouts.hang_s, self.timeouts.quiet_s
        if quiet_s < QUIET_MIN_S:
            given = f"--quiet-timeout {quiet_s:g}: at least {QUIET_MIN_S:g} seconds"
            raise BadConfig(f"{given}; a busy actor would look hung in less")
        if hang_s < HANG_MIN_S:  # no flag sets it
            raise BadConfig(f"hang_s {hang_s:g}: at least {HANG_MIN_S:g} seconds")
        hang_s = max(HANG_MIN_S, min(hang_s, quiet_s * HANG_PART))  # 0.3 * 2 / 3 is less than 0.2
        settled = msgspec.structs.replace(self.timeouts, hang_s=hang_s)
        msgspec.structs.force_setattr(self, "timeouts", settled)

    @property
    def pages_count(self) -> int:
        return -(-self.pool_tokens // self.page_size)

    @property
    def torch_threads(self) -> int:
        return self.threads or max(1, (os.cpu_count() or 2) // 2)


def authority(host: str, port: int) -> str:
    """host:port as URLs and ZMQ write it; IPv6 addresses stand in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Is it a name or address that only this machine reaches?"""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_unspecified(host: str) -> bool:
    """Does it mean every address of this machine?  One can listen there, and nobody can dial it."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return host in ("", "*")


def ucx_environment(settings: Settings) -> dict[str, str]:
    """What UCX is told where the operator said nothing.  It binds by itself, and to every interface
    unless it is told better: a role that listens on loopback must not be reachable through UCX."""
    loopback = {"UCX_NET_DEVICES": "lo"} if is_loopback(settings.host) else {}
    return {**UCX_DEFAULTS, **loopback}


def sglang_timeouts() -> dict[str, float]:
    """Timeouts, by their names here, that SGLang's variables set.  Raises BadConfig.

    SGLang gives a peer up after so many missed beats; ours beat more often, for they renew
    deadlines too, so only the silence that it makes is taken over."""
    read = {name: _seconds(name) for name in (SGLANG_BOOTSTRAP, SGLANG_WAITING, SGLANG_RELEASE)}
    found = {
        "bootstrap_s": read[SGLANG_BOOTSTRAP],
        "waiting_s": read[SGLANG_WAITING],
        "quiet_s": read[SGLANG_RELEASE],
        "peer_s": None,
    }
    beat_s, misses = _seconds(SGLANG_BEAT), _seconds(SGLANG_MISSES)
    if misses is not None and misses != int(misses):
        raise BadConfig(f"{SGLANG_MISSES}={environment_value(SGLANG_MISSES)!r} is no whole number")
    if beat_s is not None or misses is not None:
        beat_s = max(SGLANG_BEAT_MIN_S, SGLANG_BEAT_S if beat_s is None else beat_s)
        found["peer_s"] = beat_s * max(1, SGLANG_MISSES_DEFAULT if misses is None else misses)
    return {name: value for name, value in found.items() if value is not None}


def _seconds(name: str) -> float | None:
    """A number of the environment, None if it is not set."""
    text = environment_value(name)
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        raise BadConfig(f"{name}={text!r} is not a number") from None
    if not 0.001 <= value <= TIMEOUT_MAX_S:
        raise BadConfig(f"{name}={text!r}: must be from 0.001 to {TIMEOUT_MAX_S}")
    return value


def environment_value(name: str) -> str:
    """A variable, "" if it is not set."""
    return os.environ.get(name, "")


def default_environment(values: Mapping[str, str]) -> None:
    """Set variables that the operator left unset, for libraries that read the environment only."""
    for name, value in values.items():
        os.environ.setdefault(name, value)


def environment_with(values: Mapping[str, str]) -> dict[str, str]:
    """Our environment for a child, with some variables set."""
    return {**os.environ, **values}


def cache_folder() -> Path:
    """Where converted models lie: $PDRT_CACHE, else $XDG_CACHE_HOME/pdrt, else ~/.cache/pdrt."""
    if chosen := os.environ.get("PDRT_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pdrt"
