"""The commands pdrt-prefill and pdrt-decode: flags and PDRT_* variables -> Settings -> Runtime."""

from __future__ import annotations

import itertools
import sys
from dataclasses import dataclass, field, fields
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Group, Parameter

from pdrt.errors import BadConfig, DeploymentError, PdrtError

if TYPE_CHECKING:
    from pdrt.config import Settings

SERVING = Group.create_ordered("Serving")
TRANSFER = Group.create_ordered("KV transfer")
LIMITS = Group.create_ordered("Limits")
TIMEOUTS = Group.create_ordered("Timeouts, in seconds")
OPERATION = Group.create_ordered("Operation")


def flag(group: Group, help: str, *names: str) -> Any:
    """A flag; without names it is called after its field."""
    if not names:
        return Parameter(group=group, help=help)
    return Parameter(name=names, group=group, help=help)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Flags:
    """Field names are those of Settings or Timeouts where they mean the same."""

    model_path: Annotated[
        str,
        flag(
            SERVING,
            "Folder of a Llama-style Hugging Face model. Default: SmolLM2-135M-Instruct, "
            "converted into the cache once.",
        ),
    ] = ""
    served_model_name: Annotated[
        str, flag(SERVING, "Name clients use. Default: the folder's name.")
    ] = ""
    host: Annotated[
        str, flag(SERVING, "Address every port of this role binds to. Not authenticated yet.")
    ] = "127.0.0.1"
    port: Annotated[
        int | None,
        flag(
            SERVING, "HTTP port of the engine; 0 picks one. [30000 for prefill, 30001 for decode]"
        ),
    ] = None
    engine: Annotated[
        str,
        flag(SERVING, '"reference", or "none": the runtime alone, engines attach from outside.'),
    ] = "reference"
    dtype: Annotated[str, flag(SERVING, "float32 or bfloat16; both roles must agree.")] = "float32"
    threads: Annotated[int, flag(SERVING, "Torch threads; 0 takes half of the cores.")] = 0
    chunked_prefill_size: Annotated[
        int, flag(SERVING, "Prompt tokens computed, and then sent, at a time.")
    ] = 512
    bootstrap_port: Annotated[
        int,
        flag(
            TRANSFER,
            "Prefill: its control port. Decode: the port assumed where a request names none.",
            "--bootstrap-port",
            "--disaggregation-bootstrap-port",
        ),
    ] = 8998
    control_port: Annotated[int, flag(TRANSFER, "Decode: its own control port; 0 picks one.")] = 0
    advertise_host: Annotated[str, flag(TRANSFER, "Address that peers dial. Default: --host.")] = ""
    transport: Annotated[
        str,
        flag(
            TRANSFER,
            '"nixl", or "shm" for two roles on one host without NIXL.',
            "--transport",
            "--disaggregation-transfer-backend",
        ),
    ] = "nixl"
    kv_checksum: Annotated[
        bool,
        flag(
            TRANSFER,
            "Prefill sends a digest of each room's KV; decode refuses KV that differs.",
            "--kv-checksum",
            "--disaggregation-enable-kv-checksum",
        ),
    ] = False
    on_transfer_failure: Annotated[
        str,
        flag(
            TRANSFER,
            'Decode, when a fault ends a room before its KV is here: "fail" the request with a '
            'typed error, or "recompute" its prompt here.',
        ),
    ] = "fail"
    ib_device: Annotated[
        str,
        flag(
            TRANSFER,
            "Network devices for UCX, as UCX_NET_DEVICES takes them.",
            "--ib-device",
            "--disaggregation-ib-device",
        ),
    ] = ""
    devices: Annotated[
        str, flag(TRANSFER, "One transfer worker each; the model's layers are split over them.")
    ] = "cpu:0"
    attach: Annotated[
        str, flag(TRANSFER, 'Unix socket for engines; "@..." is abstract. [@pdrt-<role>-<port>]')
    ] = ""
    page_size: Annotated[int, flag(LIMITS, "Tokens in a page; both roles must agree.")] = 16
    pool_tokens: Annotated[int, flag(LIMITS, "Tokens the KV pool holds.")] = 32768
    aux_rows: Annotated[int, flag(LIMITS, "Rooms that may hold an aux row at once.")] = 256
    rooms_max: Annotated[int, flag(LIMITS, "Slots in the status table.")] = 65536
    max_running_requests: Annotated[int, flag(LIMITS, "Requests computed at once.")] = 32
    queue_max: Annotated[int, flag(LIMITS, "Requests in the engine, waiting included.")] = 256
    bootstrap_timeout: Annotated[
        float | None, flag(TIMEOUTS, "The peer's half of a room must appear within this. [60]")
    ] = None
    waiting_timeout: Annotated[
        float | None, flag(TIMEOUTS, "With both halves known, bytes must move within this. [60]")
    ] = None
    transfer_stall_timeout: Annotated[
        float | None, flag(TIMEOUTS, "Moving bytes may pause this long. [30]")
    ] = None
    queue_timeout: Annotated[
        float | None, flag(TIMEOUTS, "A room may wait in queues this long before bytes move. [600]")
    ] = None
    quiet_timeout: Annotated[
        float | None, flag(TIMEOUTS, "A failed room's memory is fenced by force after this. [10]")
    ] = None
    drain_timeout: Annotated[
        float | None, flag(TIMEOUTS, "After SIGTERM what was started may go on this long. [30]")
    ] = None
    peer_timeout: Annotated[
        float | None, flag(TIMEOUTS, "Silence after which a peer counts as lost. [3]")
    ] = None
    supervisor_port: Annotated[
        int, flag(OPERATION, "Health, metrics and rooms over HTTP; 0 picks one.")
    ] = 0
    standby: Annotated[
        bool,
        flag(OPERATION, "Keep a warm spare listener and worker, which take over in milliseconds."),
    ] = True
    enable_metrics: Annotated[
        bool, flag(OPERATION, "Accepted for SGLang's sake; metrics are always on.")
    ] = True
    log_level: Annotated[str, flag(OPERATION, "debug, info, warning or error.")] = "info"
    config: Annotated[
        Path | None, flag(OPERATION, "TOML file with flags as keys; flags and variables win.")
    ] = field(default=None)


PORTS = {"prefill": 30000, "decode": 30001}
DESCRIPTORS_OWN = 64  # of the process that has the most, without a peer
PEERS_FEW = 64
NOT_SETTINGS = {"ib_device", "enable_metrics", "config"}


def settings_from(role: str, flags: Flags) -> Settings:
    """Raises BadConfig."""
    from pdrt.config import TIMEOUT_FLAGS, Settings, Timeouts, sglang_timeouts

    if flags.ib_device and flags.transport != "nixl":
        raise BadConfig(f"--ib-device {flags.ib_device}: --transport {flags.transport} has none")
    others = NOT_SETTINGS | set(TIMEOUT_FLAGS.values())
    values = {f.name: getattr(flags, f.name) for f in fields(flags) if f.name not in others}
    values["port"] = PORTS[role] if flags.port is None else flags.port
    values["devices"] = tuple(part for part in flags.devices.split(",") if part)
    given = {name: getattr(flags, flag) for name, flag in TIMEOUT_FLAGS.items()}
    told = {name: seconds for name, seconds in given.items() if seconds is not None}
    return Settings(role=role, timeouts=Timeouts(**{**sglang_timeouts(), **told}), **values)


def serve(role: str, flags: Flags) -> int:
    """Run one role until it is stopped; returns the exit code."""
    from pdrt.child import Descriptor
    from pdrt.config import authority, cache_folder, default_environment
    from pdrt.logs import start_logging
    from pdrt.runtime import EngineChild, Runtime, listen
    from pdrt.serving.convert import model_folder
    from pdrt.serving.model_config import read_model_config

    settings = settings_from(role, flags)
    start_logging(settings)
    raise_descriptors(len(settings.devices))
    if flags.ib_device:
        default_environment({"UCX_NET_DEVICES": flags.ib_device})
    path = Path(settings.model_path) if settings.model_path else None
    folder = model_folder(path, cache=cache_folder())
    layout = read_model_config(folder).layout(
        page_size=settings.page_size, dtype=settings.dtype, ranks=len(settings.devices)
    )
    if settings.engine == "none":
        with Runtime(settings, layout, None) as runtime:
            _announce(runtime.facts())
            runtime.run()
        return 0
    from pdrt.serving.process import EngineFacts, run_engine

    with listen(settings.host, settings.port, "--port") as http:
        name = settings.served_model_name or folder.name
        facts = EngineFacts(settings, folder, name, Descriptor(http.fileno()), version("pdrt"))
        with Runtime(settings, layout, EngineChild(run_engine, (facts,))) as runtime:
            _announce(
                {
                    **runtime.facts(),
                    "http": f"http://{authority(settings.host, http.getsockname()[1])}",
                }
            )
            runtime.run()
    return 0


def raise_descriptors(ranks: int) -> None:
    """Take as many descriptors as we are allowed, for this process and all that it starts, and say
    for how many peers they are enough.  Too few to start at all is the runtime's BadConfig."""
    import logging
    import resource

    log = logging.getLogger("pdrt.launch")
    before, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError) as error:  # a hard limit beyond the kernel's own, for one
        log.warning("cannot raise the limit of descriptors from %d to %d: %s", before, hard, error)
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return
    # Peers cost a worker a link and a path, and decode's listener a link and a caller a rank.
    peers = max(0, soft - DESCRIPTORS_OWN) // max(4, 2 + ranks)
    said = f"{soft} descriptors a process, {before} before, are enough for about {peers} peers"
    if peers < PEERS_FEW:
        log.warning("%s (ranks: %d); raise the hard limit of ulimit -n", said, ranks)
    else:
        log.info("%s", said)


def _announce(facts: dict[str, Any]) -> None:
    """One JSON line on stdout, so that a script that asked for port 0 can find everything."""
    import json

    sys.stdout.write(json.dumps({"pdrt": facts}) + "\n")
    sys.stdout.flush()


def make_app(name: str, summary: str) -> App:
    """A command of ours, still without anything to do."""
    return App(name=name, help=summary, version=version("pdrt"), help_format="plaintext")


def run_app(app: App) -> None:
    """Run a command with flags, variables and the file that `--config` names; ends the process."""
    from cyclopts.config import Env, Toml

    from pdrt.config import environment_value

    path = _config_path(sys.argv[1:]) or environment_value("PDRT_CONFIG")
    app.config = [Env("PDRT_", command=False)]
    try:
        if path:
            if not Path(path).is_file():
                raise BadConfig(f"--config {path}: no such file")
            app.config = [*app.config, Toml(path, use_commands_as_keys=False)]
        code = app()
    except PdrtError as error:
        action = "" if isinstance(error, DeploymentError) else " (see the log above)"
        sys.stderr.write(f"{app.name[0]}: {error.code}: {error}{action}\n")
        code = error.exit_code
    sys.exit(code)


def _main(role: str, summary: str) -> None:
    app = make_app(f"pdrt-{role}", summary)

    @app.default
    def run(flags: Flags = Flags()) -> int:
        return serve(role, flags)

    run_app(app)


def _config_path(arguments: list[str]) -> str:
    """The file named by --config, which has to be read before flags are."""
    for argument, following in itertools.zip_longest(arguments, arguments[1:], fillvalue=""):
        if argument == "--config":
            return following
        if argument.startswith("--config="):
            return argument.removeprefix("--config=")
    return ""


def prefill() -> None:
    """Entry point of pdrt-prefill."""
    _main("prefill", "Serve prompts: compute their KV cache and send it to decodes.")


def decode() -> None:
    """Entry point of pdrt-decode."""
    _main("decode", "Serve tokens: receive KV caches from prefills and generate.")
