"""Real sinks that take nothing for a while, or not in this way: messages wait, uncounted, and arrive in order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import nats
import pytest
from nats.js.api import DiscardPolicy, StreamConfig
from redis import Redis
from sqlalchemy import create_engine, text

from onceward import Transaction
from onceward.connectors.jetstream import JetStreamConnector
from onceward.connectors.postgresql import PostgreSqlConnector
from onceward.connectors.redis_streams import RedisStreamsConnector
from onceward.outbox.relay import Relay
from onceward.testing.servers import nats_server
from tests.support.every_redis import every_redis
from tests.support.outbox import OutboxWorld, turn
from tests.support.schema import new_schema
from tests.support.wait import until


class Shop(OutboxWorld):
    """An outbox in a file, whose relay has the app's own sinks."""

    def __init__(self, folder: Path) -> None:
        super().__init__(f"sqlite:///{folder}/shop.db")
        self.own = Relay(self.engine, self.app.outbox.targets.address_of)
        self._relays.append(self.own)

    def sends_to(self, url: str) -> None:
        self.app.producer(url)(order)

    def order(self, *numbers: Any) -> None:
        self.send(*numbers, target=order, key="k")  # type: ignore[arg-type]

    def relays(self, *states: str) -> None:
        """Relay until the messages have these states."""
        until(lambda: (turn(self.own), self.rows() == [*states])[1])

    def waits(self, tries: int = 3) -> None:
        """Relay until the messages were tried as often; no failure counts."""
        until(lambda: (turn(self.own), self.own.away() and max(self.rows("attempts")) >= tries)[1])
        assert set(self.rows("failures")) == {0}


def order(number: int) -> int:
    return number


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Shop]:
    made = Shop(tmp_path)
    try:
        yield made
    finally:
        made.close()


def on_nats(url: str, work: Callable[[Any], Any]) -> Any:
    async def run() -> Any:
        client = await nats.connect(url)
        try:
            return await work(client.jetstream())
        finally:
            await client.close()

    return asyncio.run(run())


def arrived(source: Any) -> list[Any]:
    found: list[Transaction] = []
    with source:
        until(lambda: (found.extend(got := source.fetch_transactions(50)), not got)[1])
    return [each.payload for each in found]


@pytest.mark.req("OB-05")
def test_a_nats_that_is_down_costs_no_failure(shop: Shop) -> None:
    with nats_server(durable=True) as server:
        shop.sends_to(f"{server.url}/SHIP")
        shop.order(1)
        shop.relays("published")
        server.kill()
        shop.order(2, 3)
        shop.waits(tries=2)
        server.start()
        shop.relays(*["published"] * 3)
        assert arrived(JetStreamConnector(server.url, "SHIP")) == [1, 2, 3]


@pytest.mark.req("OB-05")
def test_a_stream_that_was_deleted_costs_no_failure_and_is_created_again(shop: Shop) -> None:
    with nats_server() as server:
        shop.sends_to(f"{server.url}/SHIP")
        shop.order(1)
        shop.relays("published")
        on_nats(server.url, lambda js: js.delete_stream("SHIP"))
        shop.order(2, 3)
        shop.waits(tries=1)
        shop.relays(*["published"] * 3)
        assert arrived(JetStreamConnector(server.url, "SHIP")) == [2, 3]


@pytest.mark.req("OB-05")
def test_a_stream_that_is_full_costs_no_failure(shop: Shop) -> None:
    with nats_server() as server:
        config = StreamConfig(name="SHIP", subjects=["SHIP"], max_msgs=1, discard=DiscardPolicy.NEW)
        on_nats(server.url, lambda js: js.add_stream(config))
        shop.sends_to(f"{server.url}/SHIP")
        shop.order(1, 2)
        shop.waits()
        assert shop.rows() == ["published", "ready"]
        on_nats(server.url, lambda js: js.purge_stream("SHIP"))
        shop.relays("published", "published")
        assert arrived(JetStreamConnector(server.url, "SHIP")) == [2]


@pytest.mark.req("OB-05")
def test_a_stream_without_atomic_batches_gets_one_message_after_the_other(shop: Shop) -> None:
    with nats_server() as server:
        on_nats(server.url, lambda js: js.add_stream(name="SHIP", subjects=["SHIP"]))
        shop.sends_to(f"{server.url}/SHIP")
        shop.order(*range(5))
        shop.relays(*["published"] * 5)
        assert arrived(JetStreamConnector(server.url, "SHIP")) == [*range(5)]
        assert shop.own.away() == {}


@pytest.mark.req("OB-05")
def test_a_message_that_a_stream_does_not_take_holds_up_no_other(shop: Shop) -> None:
    with nats_server() as server:
        config = StreamConfig(name="SHIP", subjects=["SHIP"], max_msg_size=1000)
        on_nats(server.url, lambda js: js.add_stream(config))
        shop.sends_to(f"{server.url}/SHIP")
        shop.order(1, "x" * 2000, 3)
        shop.relays("published", "dead", "published")
        assert arrived(JetStreamConnector(server.url, "SHIP")) == [1, 3]


@pytest.mark.req("OB-05")
@pytest.mark.parametrize("trouble", ["dropped", "read only"])
def test_a_database_that_takes_no_message_costs_no_failure(
    shop: Shop, postgres_url: str, trouble: str
) -> None:
    with new_schema(postgres_url) as schema:
        shop.sends_to(f"{schema.plain_url}&queue=ship")
        shop.order(1)
        shop.relays("published")
        engine = create_engine(schema.url)
        with engine.begin() as connection:
            user = connection.scalar(text("SELECT quote_ident(current_user)"))
            if trouble == "dropped":
                connection.execute(text(f"DROP SCHEMA {schema.name} CASCADE"))
            else:
                connection.execute(text(f"ALTER ROLE {user} SET default_transaction_read_only = on"))
                connection.execute(text(PARTED))
        try:
            shop.order(2, 3)
            shop.waits()
        finally:
            with engine.begin() as connection:
                connection.execute(text("SET TRANSACTION READ WRITE"))
                if trouble == "dropped":
                    connection.execute(text(f"CREATE SCHEMA {schema.name}"))
                else:
                    connection.execute(text(f"ALTER ROLE {user} RESET default_transaction_read_only"))
            engine.dispose()
        shop.relays(*["published"] * 3)
        expected = [2, 3] if trouble == "dropped" else [1, 2, 3]
        assert arrived(PostgreSqlConnector(schema.plain_url, "ship")) == expected


PARTED = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name LIKE 'onceward%'"
"""The setting applies to connections that begin afterwards."""


REFUSALS = {
    "permits nothing": ("ACL SETUSER shipper -@all", "ACL SETUSER shipper +@all"),
    "permits no write in a script": ("ACL SETUSER shipper -@write", "ACL SETUSER shipper +@all"),
    "has no replica": ("CONFIG SET min-replicas-to-write 1", "CONFIG SET min-replicas-to-write 0"),
    "is a replica": ("REPLICAOF 127.0.0.1 1", "REPLICAOF NO ONE"),
}


@pytest.mark.req("OB-05")
@every_redis
@pytest.mark.parametrize("trouble", REFUSALS)
def test_a_redis_that_takes_no_message_costs_no_failure(shop: Shop, redis_url: str, trouble: str) -> None:
    stream = f"ship-{uuid4()}"
    begin, end = REFUSALS[trouble]
    with Redis.from_url(redis_url) as redis:
        redis.execute_command("ACL SETUSER shipper on >secret12 ~* &* +@all")
        try:
            url = redis_url.replace("redis://", "redis://shipper:secret12@")
            shop.sends_to(f"{url}/{stream}?group=g")
            shop.order(1)
            shop.relays("published")
            redis.execute_command(begin)
            shop.order(2, 3)
            shop.waits()
            redis.execute_command(end)
            shop.relays(*["published"] * 3)
        finally:
            redis.execute_command(end)
            redis.execute_command("ACL DELUSER shipper")
    assert arrived(RedisStreamsConnector(redis_url, stream, "g")) == [1, 2, 3]
