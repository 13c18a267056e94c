"""A boundary with TLS by a configuration that tests may change, in a thread with an event loop of its own."""

from __future__ import annotations

import asyncio
import http.client
import inspect
import json
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from onceward.boundary import AsyncBoundaryClient, BoundaryClient
from onceward.boundary.boundary import Boundary
from onceward.boundary.certs import HOSTS, Authority
from onceward.boundary.server.config import read_config
from onceward.boundary.server.process import running
from onceward.boundary.stores.sqlite import SqliteBoundaryStore
from onceward.boundary.tls import Tls

CLIENTS = [BoundaryClient, AsyncBoundaryClient]
DEADLINE = 60.0
CHECK_EVERY = 0.02
SERVICE = "onceward.boundary.v1.BoundaryService"
HQ = '[[peers]]\nidentity = "hq-bsfg"\nzone = "hq"\nto_zones = ["plant-a"]\nconsumers = ["hq-receiver"]\n'


def authority_in(directory: Path) -> Authority:
    directory.mkdir()
    return Authority(directory, days=365)


def plain_toml(tls: Tls, peers: str = HQ, zone: str = "plant-a", more: str = "") -> str:
    return f'zone = "{zone}"\n{more}\n[tls]\nca = "{tls.ca}"\ncert = "{tls.cert}"\nkey = "{tls.key}"\n{peers}'


class Site:
    """A CA, the certificate of a server, and those of whom tests want."""

    def __init__(self, directory: Path, zone: str = "plant-a", authority: Authority | None = None) -> None:
        self.directory = directory
        directory.mkdir(exist_ok=True)
        self.zone = zone
        self.authority = authority or authority_in(directory / "certs")
        self.server = self.authority.issue(f"{zone}-bsfg", f"{zone}-server", HOSTS)
        self.config = directory / "boundary.toml"
        self.url = ""

    def issue(self, identity: str, hosts: tuple[str, ...] = HOSTS, days: float | None = None) -> Tls:
        return self.authority.issue(identity, identity, hosts, days=days)

    def write(self, peers: str = HQ, more: str = "", tls: Tls | None = None) -> None:
        self.config.write_text(plain_toml(tls or self.server, peers, self.zone, more))

    @contextmanager
    def serving(self) -> Iterator[str]:
        """Yields its URL."""
        loop = asyncio.new_event_loop()
        ready: asyncio.Queue[str | BaseException] = asyncio.Queue()
        stop = asyncio.Event()

        async def serve() -> None:
            store = SqliteBoundaryStore(self.directory / "data")
            try:
                config = read_config(self.config)
                boundary = Boundary(store, config.settings())
                async with running(
                    boundary, config, "127.0.0.1", 0, path=self.config, check_every=CHECK_EVERY
                ) as url:
                    await ready.put(url)
                    await stop.wait()
            except BaseException as error:
                await ready.put(error)
            finally:
                await store.close()

        thread = threading.Thread(target=loop.run_until_complete, args=(serve(),), name="secured-boundary")
        thread.start()
        try:
            url = asyncio.run_coroutine_threadsafe(ready.get(), loop).result(DEADLINE)
            if isinstance(url, BaseException):
                raise url
            self.url = url
            yield url
        finally:
            loop.call_soon_threadsafe(stop.set)
            thread.join()
            loop.close()


def context_for(ca: Any, tls: Tls | None = None) -> ssl.SSLContext:
    """A client's, which may do what ours would not."""
    context = ssl.create_default_context(cafile=ca)
    if tls is not None:
        context.load_cert_chain(tls.cert, tls.key)
    return context


class Connection:
    """One connection, of JSON over HTTP/1.1, as curl makes it."""

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
        """Of the certificate that the server has shown."""
        shown = self._http.sock.getpeercert()
        assert shown is not None
        return str(shown["serialNumber"])

    def call(self, method: str, message: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        headers = {"content-type": "application/json"}
        self._http.request("POST", f"/{SERVICE}/{method}", json.dumps(message), headers)
        answer = self._http.getresponse()
        found: dict[str, Any] = json.loads(answer.read())
        return answer.status, found

    def get(self, path: str) -> tuple[int, str]:
        self._http.request("GET", path)
        answer = self._http.getresponse()
        return answer.status, answer.read().decode()

    def metric(self, name: str) -> float:
        _, text = self.get("/metrics")
        return sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(name))


class EitherClient:
    """A client for threads or for asyncio, called alike."""

    def __init__(
        self, kind: type[BoundaryClient] | type[AsyncBoundaryClient], url: str, tls: Tls | None
    ) -> None:
        self._runner = asyncio.Runner()
        self._client = kind(url, tls=tls)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            answer = getattr(self._client, name)(*args)
            return self._runner.run(answer) if inspect.iscoroutine(answer) else answer

        return call

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


def wait_until(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + DEADLINE
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.01)
