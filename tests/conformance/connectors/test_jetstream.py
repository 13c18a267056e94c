"""NATS JetStream under the connector suite."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import nats
import pytest

from onceward._nats.wire import nats_loop
from onceward.connectors.base import AsyncConnector, Connector
from onceward.connectors.jetstream import AsyncJetStreamConnector, JetStreamConnector
from onceward.testing import FakeClock, servers
from onceward.testing.connectors import ConnectorConformance
from tests.support.jetstream_time import observed
from tests.support.proxy import proxy_to
from tests.support.wait import LIMIT

pytestmark = pytest.mark.req("NJ-01")


@pytest.fixture(scope="module")
def nats_url() -> Iterator[str]:
    with servers.nats_server() as server:
        yield server.url


class OnJetStream:
    """JetStream does not accept a clock: an observer ends what would be due."""

    releases = True

    @pytest.fixture(autouse=True)
    def on_a_stream_of_its_own(self, nats_url: str) -> Iterator[None]:
        server = urlsplit(nats_url)
        self.stream = f"conformance-{uuid4().hex}"
        with (
            observed(nats_url, self.stream) as self.time,
            proxy_to(str(server.hostname), server.port or 4222) as self.proxy,
        ):
            self.url = f"nats://127.0.0.1:{self.proxy.port}"
            yield

    def settings(self, connector: Any, lease: float) -> Any:
        self.time.lease = lease
        return connector

    def make_waiting(self, **settings: Any) -> Any:
        return self.make(time.monotonic, **settings)  # type: ignore[attr-defined]

    def advance(self, clock: FakeClock, seconds: float) -> None:
        clock.advance(seconds)
        self.time.advance(seconds)

    def cut(self, connector: Any) -> None:
        self.proxy.cut()

    def put_raw(self, connector: Any, body: bytes) -> None:
        async def put() -> None:
            client = await nats.connect(self.url, connect_timeout=int(LIMIT))
            js = client.jetstream()
            if self.stream not in [each.config.name for each in await js.streams_info()]:
                await js.add_stream(name=self.stream, subjects=[self.stream], allow_atomic=True)
            await js.publish(self.stream, body)
            await client.close()

        asyncio.run_coroutine_threadsafe(put(), nats_loop()).result(2 * LIMIT)


class TestJetStreamConnector(OnJetStream, ConnectorConformance):
    def make(self, clock: Any, **settings: Any) -> Connector:
        made = JetStreamConnector(self.url, self.stream, clock=clock, **settings)
        return self.settings(made, made.lease)  # type: ignore[no-any-return]

    def reopen(self, connector: Connector, clock: Any, **settings: Any) -> Connector:
        return self.make(clock, **settings)


class TestAsyncJetStreamConnector(OnJetStream, ConnectorConformance):
    def make(self, clock: Any, **settings: Any) -> AsyncConnector:
        made = AsyncJetStreamConnector(self.url, self.stream, clock=clock, **settings)
        return self.settings(made, made.lease)  # type: ignore[no-any-return]

    def reopen(self, connector: AsyncConnector, clock: Any, **settings: Any) -> AsyncConnector:
        return self.make(clock, **settings)
