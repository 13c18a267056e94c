"""A boundary with TLS and a configuration that tests may change, as a process."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import shutil
import ssl
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from onceward.boundary import AsyncBoundaryClient, BoundaryClient
from onceward.boundary.certs import HOSTS, Authority
from onceward.boundary.tls import Tls
from tests.support.driven import Driven
from tests.support.processes import LoggedProcess

CLIENTS = [BoundaryClient, AsyncBoundaryClient]
DEADLINE = 60.0
SERVICE = "onceward.boundary.v1.BoundaryService"
HQ = '[[peers]]\nidentity = "hq-bsfg"\nzone = "hq"\nto_zones = ["plant-a"]\nconsumers = ["hq-receiver"]\n'


def authority_in(directory: Path) -> Authority:
    directory.mkdir()
    return Authority(directory, days=365)


def plain_toml(tls: Tls, peers: str = HQ, zone: str = "plant-a", more: str = "") -> str:
    return f'zone = "{zone}"\n{more}\n[tls]\nca = "{tls.ca}"\ncert = "{tls.cert}"\nkey = "{tls.key}"\n{peers}'


class SecuredZone:
    """A CA, and certificates of a server and of the clients that a test names."""

    def __init__(self, directory: Path, zone: str = "plant-a", authority: Authority | None = None) -> None:
        self.directory = directory
        directory.mkdir(exist_ok=True)
        self.zone = zone
        self.authority = authority or authority_in(directory / "certs")
        self.server = self.authority.issue(f"{zone}-bsfg", f"{zone}-server", HOSTS)
        self.config = directory / "boundary.toml"
        self.url = ""
        self._forgotten = 0
        self.runtime = Path()
        """For the temporary files of its server. pytest's own paths are too long for a socket."""

    def issue(self, identity: str, hosts: tuple[str, ...] = HOSTS, days: float | None = None) -> Tls:
        return self.authority.issue(identity, identity, hosts, days=days)

    def write(self, peers: str = HQ, more: str = "", tls: Tls | None = None) -> None:
        self.config.write_text(plain_toml(tls or self.server, peers, self.zone, more))

    @property
    def command(self) -> list[str]:
        program = [sys.executable, "-m", "tests.support.boundary.secured_process"]
        return [*program, str(self.config), str(self.directory / "data")]

    @contextmanager
    def serving(self) -> Iterator[str]:
        """Yields its URL."""
        self.runtime = Path(tempfile.mkdtemp(prefix="s-"))
        self._server = LoggedProcess(
            self.command,
            self.directory / "server.log",
            stdout=subprocess.PIPE,
            env={**os.environ, "TMPDIR": str(self.runtime)},
        )
        try:
            assert self._server.process.stdout is not None
            self.url = self._server.process.stdout.readline().strip()
            assert self.url, self._server.log
            yield self.url
        finally:
            self._server.kill()
            shutil.rmtree(self.runtime)

    def stop(self) -> int:
        """Return its exit code."""
        self._server.process.terminate()
        return self._server.process.wait(DEADLINE)

    @property
    def lines(self) -> list[dict[str, Any]]:
        """The log of its server, since the last `forget`."""
        return self._server.lines[self._forgotten :]

    def forget(self) -> None:
        self._forgotten = len(self._server.lines)

    @property
    def messages(self) -> list[str]:
        return [each["message"] for each in self.lines]


def context_for(ca: Any, tls: Tls | None = None) -> ssl.SSLContext:
    """TLS settings of a client that may do what our client would not."""
    context = ssl.create_default_context(cafile=ca)
    if tls is not None:
        context.load_cert_chain(tls.cert, tls.key)
    return context


class Connection:
    """One connection with JSON over HTTP/1.1, as curl makes it."""

    def __init__(self, url: str, context: ssl.SSLContext) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None
        self._http = http.client.HTTPSConnection(parts.hostname, parts.port, context=context, timeout=30)

    def __enter__(self) -> Connection:
        self._http.connect()
        self._http.auto_open = 0  # another connection would be another handshake
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    @property
    def serial(self) -> str:
        """The certificate that the server presents."""
        shown = self._http.sock.getpeercert()
        assert shown is not None
        return str(shown["serialNumber"])

    def call(self, method: str, message: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        headers = {"content-type": "application/json"}
        self._http.request("POST", f"/{SERVICE}/{method}", json.dumps(message), headers)
        answer = self._http.getresponse()
        found: dict[str, Any] = json.loads(answer.read())
        return answer.status, found

    def get(self, path: str, headers: dict[str, str] | None = None) -> tuple[int, str]:
        self._http.request("GET", path, headers=headers or {})
        answer = self._http.getresponse()
        return answer.status, answer.read().decode()

    def metric(self, name: str) -> float:
        _, text = self.get("/metrics")
        return sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(name))


class EitherClient(Driven):
    """A client for threads or for asyncio."""

    def __init__(
        self, kind: type[BoundaryClient] | type[AsyncBoundaryClient], url: str, tls: Tls | None
    ) -> None:
        self._runner = asyncio.Runner()
        super().__init__(kind(url, tls=tls), self._runner.run)

    def __enter__(self) -> EitherClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        self._runner.close()


def append_message(id_: str = "m1", from_zone: str = "hq", to_zone: str = "plant-a") -> dict[str, Any]:
    return {
        "envelope": {"messageId": id_, "fromZone": from_zone, "toZone": to_zone, "producedAtUnixMs": "1"},
        "fact": {"subject": "batch:B1", "predicate": "done", "objectJson": "{}"},
    }
