"""Redis Streams under the connector suite."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

import pytest
import redis as redis_py

from onceward.connectors.base import AsyncConnector, Connector
from onceward.connectors.redis_streams import AsyncRedisStreamsConnector, RedisStreamsConnector
from onceward.testing import FakeClock
from onceward.testing.connectors import ConnectorConformance
from tests.support.every_redis import every_redis
from tests.support.pending_entries import age

pytestmark = every_redis


class OnRedis:
    """Redis does not accept a clock: time passes by making pending entries older."""

    releases = True

    @pytest.fixture(autouse=True)
    def on_a_stream_of_its_own(self, redis_url: str) -> None:
        self.url = redis_url
        self.stream = f"conformance:{uuid4().hex}"

    def advance(self, clock: FakeClock, seconds: float) -> None:
        clock.advance(seconds)
        with redis_py.Redis.from_url(self.url, protocol=2) as client:
            age(client, self.stream, seconds)

    def cut(self, connector: Any) -> None:
        with redis_py.Redis.from_url(self.url) as client:
            client.client_kill_filter(_type="normal", skipme=True)

    def put_raw(self, connector: Any, body: bytes) -> None:
        with redis_py.Redis.from_url(self.url) as client:
            client.xadd(self.stream, {"id": "raw", "body": body})


class TestRedisStreamsConnector(OnRedis, ConnectorConformance):
    def make(self, clock: Any, **settings: Any) -> Connector:
        return RedisStreamsConnector(self.url, self.stream, clock=clock, **settings)

    def make_waiting(self, **settings: Any) -> Connector:
        return RedisStreamsConnector(self.url, self.stream, **settings)

    def reopen(self, connector: Connector, clock: Any, **settings: Any) -> Connector:
        return self.make(clock, **settings)


class TestAsyncRedisStreamsConnector(OnRedis, ConnectorConformance):
    def make(self, clock: Any, **settings: Any) -> AsyncConnector:
        return AsyncRedisStreamsConnector(self.url, self.stream, clock=clock, **settings)

    def make_waiting(self, **settings: Any) -> AsyncConnector:
        return AsyncRedisStreamsConnector(self.url, self.stream, **settings)

    def reopen(self, connector: AsyncConnector, clock: Any, **settings: Any) -> AsyncConnector:
        return self.make(clock, **settings)
