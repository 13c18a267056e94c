"""The connection to Redis, in threads and asyncio: one send, replies in order, plain or over TLS."""

from __future__ import annotations

import asyncio
import socket
import ssl
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import pytest
import redis
import redis.asyncio

from onceward import Transaction
from onceward._process.stop import AsyncStop, BlockingStop
from onceward._redis.wire import BlockingRedisWire
from onceward._redis.wire_asyncio import AsyncRedisWire
from onceward._sync import run_blocking
from onceward.boundary.certs import Authority
from onceward.connectors.redis_streams import AsyncRedisStreamsConnector, RedisStreamsConnector
from onceward.testing.connectors.driver import ConnectorDriver
from tests.support.every_redis import every_redis
from tests.support.queue.proxy import proxy
from tests.support.wait import until

pytestmark = every_redis


class Wired:
    """A wire of either mode, its stop, and its connections as Redis sees them."""

    def __init__(self, mode: str, admin: redis.Redis, url: str, **settings: Any) -> None:
        self._admin = admin
        self._name = uuid4().hex
        self._loop = asyncio.new_event_loop() if mode == "asyncio" else None
        settings = {"client_name": self._name} | settings
        self.stop: Any
        self._wire: Any
        if self._loop is None:
            self.stop = BlockingStop()
            self._wire = BlockingRedisWire(redis.Redis.from_url(url, **settings), self.stop)
        else:
            self.stop = AsyncStop()
            self._wire = AsyncRedisWire(redis.asyncio.Redis.from_url(url, **settings), self.stop)

    def exchange(self, *commands: tuple[Any, ...], **more: Any) -> list[Any]:
        return self._run(self._wire.exchange(commands, **more))  # type: ignore[no-any-return]

    def close(self) -> None:
        self._run(self._wire.close())

    def pause(self) -> None:
        """Let an event loop notice what has happened to its connections."""
        if self._loop is not None:
            self._run(asyncio.sleep(0.05))

    def end(self) -> None:
        self.close()
        if self._loop is not None:
            self._loop.close()

    @property
    def connections(self) -> set[str]:
        return {each["id"] for each in self._admin.client_list() if each["name"] == self._name}

    def _run(self, coroutine: Any) -> Any:
        return run_blocking(coroutine) if self._loop is None else self._loop.run_until_complete(coroutine)


@pytest.fixture(params=["threads", "asyncio"])
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def admin(redis_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(redis_url) as client:
        yield client


@contextmanager
def wired(mode: str, admin: redis.Redis, url: str, **settings: Any) -> Iterator[Wired]:
    made = Wired(mode, admin, url, **settings)
    try:
        yield made
    finally:
        made.end()


def test_replies_come_in_order_with_errors_as_values_on_a_connection_that_is_kept(
    mode: str, admin: redis.Redis, redis_url: str
) -> None:
    with wired(mode, admin, redis_url) as wire:
        arrivals: list[float] = []
        first, refused, last = wire.exchange(("ECHO", 1), ("NOSUCH",), ("ECHO", b"2"), arrivals=arrivals)
        assert (first, last) == (b"1", b"2")
        assert isinstance(refused, redis.ResponseError)
        assert arrivals == sorted(arrivals)
        assert len(arrivals) == 3
        [kept] = wire.connections
        assert wire.exchange(("ECHO", "again")) == [b"again"]
        assert wire.connections == {kept}


def test_arrivals_say_which_command_failed(mode: str, admin: redis.Redis, redis_url: str) -> None:
    with wired(mode, admin, redis_url, socket_timeout=0.5) as wire:
        arrivals: list[float] = []
        with pytest.raises(redis.TimeoutError):
            wire.exchange(("ECHO", 1), ("BLPOP", f"none-{uuid4().hex}", 60), ("ECHO", 2), arrivals=arrivals)
        assert len(arrivals) == 1
        assert wire.exchange(("ECHO", 3)) == [b"3"], "the late reply stayed in the old connection"


def test_an_error_reply_is_not_held_back_by_a_command_that_blocks_after_it(
    mode: str, admin: redis.Redis, redis_url: str
) -> None:
    with wired(mode, admin, redis_url) as wire:
        began = time.monotonic()
        refused, nothing = wire.exchange(("NOSUCH",), ("BLPOP", f"none-{uuid4().hex}", 60), block_ms=60_000)
        assert isinstance(refused, redis.ResponseError)
        assert nothing is None
        assert time.monotonic() - began < 30


@contextmanager
def resetting() -> Iterator[str]:
    """A server that resets its connection once a command begins to arrive, as a killed one does. Yields its URL."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            accepted, _ = listening.accept()
            with accepted:
                accepted.recv(1)
                accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

        serving = threading.Thread(target=serve)
        serving.start()
        yield f"redis://127.0.0.1:{listening.getsockname()[1]}/0"
        serving.join()


@pytest.mark.parametrize("size", [1, 1 << 25], ids=["while receiving", "while sending"])
def test_a_connection_that_is_reset_is_lost_like_any_other(mode: str, admin: redis.Redis, size: int) -> None:
    silent = {"client_name": None, "driver_info": None}
    with resetting() as url, wired(mode, admin, url, **silent) as wire, pytest.raises(redis.ConnectionError):
        wire.exchange(("ECHO", b"x" * size))


def test_closing_closes_what_is_idle_and_the_next_exchange_opens_a_connection(
    mode: str, admin: redis.Redis, redis_url: str
) -> None:
    with wired(mode, admin, redis_url) as wire:
        wire.exchange(("PING",))
        [before] = wire.connections
        wire.close()
        wire.pause()
        assert wire.exchange(("PING",)) == [b"PONG"]
        assert before not in wire.connections


@contextmanager
def tls_before(url: str, directory: Path) -> Iterator[str]:
    """The URL of a TLS server that forwards everything to this Redis."""
    tls = Authority(directory, days=1).issue("redis", "redis", ["127.0.0.1"])
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(tls.cert, tls.key)
    target = urlsplit(url)
    loop = asyncio.new_event_loop()

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream_reader, upstream_writer = await asyncio.open_connection(target.hostname, target.port)
        await asyncio.gather(pump(reader, upstream_writer), pump(upstream_reader, writer))

    server = loop.run_until_complete(asyncio.start_server(serve, "127.0.0.1", 0, ssl=context))
    port = server.sockets[0].getsockname()[1]
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={directory / 'ca.pem'}"
    finally:
        loop.call_soon_threadsafe(server.close)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        for task in asyncio.all_tasks(loop):
            task.cancel()
            loop.run_until_complete(asyncio.wait([task]))
        loop.close()


def test_over_tls_connections_are_kept(mode: str, admin: redis.Redis, redis_url: str, tmp_path: Path) -> None:
    with tls_before(redis_url, tmp_path) as url, wired(mode, admin, url) as wire:
        wire.exchange(("PING",))
        [kept] = wire.connections
        wire.pause()
        pop = ("BLPOP", f"none-{uuid4().hex}", 0.05)
        assert wire.exchange(("ECHO", 1), pop, block_ms=50) == [b"1", None]
        assert wire.connections == {kept}


def test_over_tls_a_stop_ends_the_wait_of_a_connection_that_has_read_nothing_before(
    mode: str, admin: redis.Redis, redis_url: str, tmp_path: Path
) -> None:
    """TLS sends session tickets after its handshake: they are not the reply."""
    silent = {"client_name": None, "driver_info": None}
    with tls_before(redis_url, tmp_path) as url, wired(mode, admin, url, **silent) as wire:
        stopping = threading.Timer(0.5, wire.stop.request)
        stopping.start()
        began = time.monotonic()
        assert wire.exchange(("BLPOP", f"none-{uuid4().hex}", 60), block_ms=60_000) == [None]
        assert time.monotonic() - began < 30
        stopping.join()


def test_a_connector_that_is_closed_while_redis_is_silent_leaves_no_connection(
    mode: str, admin: redis.Redis, redis_url: str
) -> None:
    name = uuid4().hex
    driver: Any = redis.asyncio.Redis if mode == "asyncio" else redis.Redis
    kind: Any = AsyncRedisStreamsConnector if mode == "asyncio" else RedisStreamsConnector
    with proxy(redis_url) as link:
        client = driver.from_url(link.url, client_name=name, socket_timeout=60)
        with ConnectorDriver(kind(client, name)) as connector:
            connector.dispatch(Transaction(id="1", payload=1))
            admin.client_pause(1500)
            fetched: list[Any] = []
            fetching = threading.Thread(target=lambda: fetched.extend(connector.fetch()))
            sent = link.seen["EVALSHA"]
            fetching.start()
            until(lambda: link.seen["EVALSHA"] > sent)
            connector.close()
            fetching.join()
            assert [each.id for each in fetched] == ["1"], "it was fetched, and its caller has it"
            until(lambda: all(each["name"] != name for each in admin.client_list()))
