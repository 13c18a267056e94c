"""Boundary stores on servers behind a wire that fails: what was acknowledged stays, and nothing is there twice."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import TypeVar
from urllib.parse import urlsplit
from uuid import uuid4

import pytest
from psycopg.conninfo import conninfo_to_dict

from onceward.boundary.errors import Unavailable
from onceward.boundary.store import BoundaryStore
from onceward.boundary.stores.jetstream.store import JetStreamBoundaryStore
from onceward.boundary.wire import stored
from onceward.testing import servers
from onceward.testing.boundary import fact
from tests.support.boundary.databases import StorePlace, place
from tests.support.proxy import TcpProxy, WireFault, proxy_to

__all__ = ["place"]

pytestmark = pytest.mark.timeout(120)

T = TypeVar("T")


@pytest.fixture(scope="module")
def nats() -> Iterator[servers.Server]:
    with servers.nats_server() as server:
        yield server


@asynccontextmanager
async def on_postgresql(place: StorePlace) -> AsyncIterator[tuple[TcpProxy, BoundaryStore]]:
    to = conninfo_to_dict(place.url)
    with proxy_to(str(to["host"]), int(to.get("port") or 5432)) as line:
        async with place.opened(**line.address) as store:
            yield line, store


@asynccontextmanager
async def on_nats(server: servers.Server) -> AsyncIterator[tuple[TcpProxy, BoundaryStore]]:
    to = urlsplit(server.url)
    with proxy_to(to.hostname or "127.0.0.1", to.port or 4222) as line:
        store = await JetStreamBoundaryStore.open(f"nats://127.0.0.1:{line.port}", name=f"t-{uuid4().hex}")
        try:
            yield line, store
        finally:
            await store.close()


async def until_acknowledged(call: Callable[[], Awaitable[T]]) -> T:
    for _ in range(200):
        try:
            return await call()
        except Unavailable:
            await asyncio.sleep(0.02)
    return await call()


async def drive(line: TcpProxy, store: BoundaryStore, fault: WireFault, positions: range) -> None:
    acknowledged: dict[str, int] = {}
    for at in positions:
        line.strike(fault, at)
        ids = [f"{at}-{number}" for number in range(3)]
        appended = [await until_acknowledged(lambda id_=id_: store.append(fact(id_))) for id_ in ids]  # type: ignore[misc]
        acknowledged |= dict(zip(ids, (each.offset for each in appended), strict=True))
        last = appended[-1].offset
        assert await until_acknowledged(lambda last=last: store.advance("reader", last)) == last  # type: ignore[misc]
    assert line.struck == len(positions)

    records = await until_acknowledged(lambda: store.read(0, 1000))
    found = {stored(each).message_id: each[0] for each in records}
    assert found == acknowledged
    assert [each[0] for each in records] == list(range(1, len(acknowledged) + 1))
    position = await until_acknowledged(lambda: store.position("reader", create=False))
    assert position == len(acknowledged)


@pytest.mark.req("ST-13")
@pytest.mark.parametrize("fault", list(WireFault))
def test_postgresql_keeps_what_it_acknowledged_wherever_a_connection_fails(
    place: StorePlace, fault: WireFault
) -> None:
    async def main() -> None:
        async with on_postgresql(place) as (line, store):
            await drive(line, store, fault, range(4))

    asyncio.run(main())


@pytest.mark.req("ST-13")
@pytest.mark.parametrize("fault", list(WireFault))
def test_nats_keeps_what_it_acknowledged_wherever_a_connection_fails(
    nats: servers.Server, fault: WireFault
) -> None:
    async def main() -> None:
        async with on_nats(nats) as (line, store):
            await drive(line, store, fault, range(3))

    asyncio.run(main())


@pytest.mark.req("ST-13")
def test_the_proxy_does_what_its_faults_are_called() -> None:
    """Otherwise the tests above prove nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server, proxy_to(*server.getsockname()) as line:

        def request(fault: WireFault) -> tuple[socket.socket, socket.socket]:
            client = socket.create_connection(("127.0.0.1", line.port), timeout=30)
            there, _ = server.accept()
            there.settimeout(30)
            client.sendall(b"one")
            assert there.recv(9) == b"one"
            there.sendall(b"first")
            assert client.recv(9) == b"first"
            line.strike(fault, on=b"two")
            client.sendall(b"two")
            return client, there

        for fault in (WireFault.CUT, WireFault.BLACK_HOLE):
            client, there = request(fault)
            with client, there:
                assert (client.recv(9), there.recv(9)) == (b"", b"")
        client, there = request(WireFault.LOST_REPLY)
        with client, there:
            assert there.recv(9) == b"two"
            there.sendall(b"second")
            assert client.recv(9) == b""
        client, there = request(WireFault.HALF_CLOSE)
        with client, there:
            assert (there.recv(9), client.recv(9)) == (b"two", b"")
            client.sendall(b"three")
            assert there.recv(9) == b"three"
        client, there = request(WireFault.DELAY)
        with client, there:
            assert there.recv(9) == b"two"
            there.sendall(b"second")
            assert client.recv(9) == b"second"
