"""URLs of sources and sinks: their meaning, and the errors about wrong ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from onceward import Transaction
from onceward.connectors.base import ConnectorClosedError
from onceward.connectors.boundary.scheme import server_of
from onceward.connectors.jetstream import scheme as jetstream
from onceward.connectors.postgresql.address import connection_of, parts_of
from onceward.connectors.redis_streams.scheme import stream_of
from onceward.connectors.sqlite.scheme import file_of
from onceward.connectors.urls import Address
from onceward.errors import ConfigurationError
from onceward.transaction import Settlement, Verdict
from tests.support.world import World

SECRET = "hunter2"


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("sqlite:///orders.db", "orders.db"),
        ("sqlite:////var/lib/orders.db?lease=30", "/var/lib/orders.db"),
        ("sqlite:///with%20blank.db", "with blank.db"),
    ],
)
def test_a_queue_in_a_file(url: str, path: str) -> None:
    assert (Address(url).scheme, file_of(Address(url))) == ("sqlite", path)


@pytest.mark.parametrize(
    ("url", "server", "stream"),
    [
        ("redis://localhost:6379/orders", "redis://localhost:6379/0", "orders"),
        ("redis://localhost/2/orders?group=billing", "redis://localhost/2", "orders"),
        ("rediss://u:p@h:1/orders", "rediss://u:p@h:1/0", "orders"),
        ("redis://localhost/shop:orders", "redis://localhost/0", "shop:orders"),
    ],
)
def test_a_stream(url: str, server: str, stream: str) -> None:
    assert stream_of(Address(url)) == (server, stream)


def test_a_jetstream_stream() -> None:
    address = Address(f"tls://u:{SECRET}%40x@h:4222/ORDERS?consumer=billing")
    assert jetstream.server_of(address) == "tls://h:4222"
    assert jetstream.stream_of(address) == "ORDERS"
    assert address.queue == ("tls", address.place, "billing")
    options = jetstream.options_of(address)
    assert (options["user"], options["password"]) == ("u", f"{SECRET}@x")
    assert jetstream.options_of(Address(f"nats://{SECRET}%2F@h/ORDERS")) == {"token": f"{SECRET}/"}
    with pytest.raises(ConfigurationError, match=r"ca of the source .* is not a file: nowhere\.pem"):
        jetstream.options_of(Address("tls://h/ORDERS?ca=nowhere.pem"))


def test_a_boundary() -> None:
    assert server_of(Address("boundary+http://h:7700?consumer=c")) == "http://h:7700"
    assert server_of(Address("boundary+https://h/?consumer=c&ca=a&cert=b&key=c")) == "https://h"
    assert Address("boundary+http://h:7700?from_zone=a&to_zone=b", sink=True).settings == {
        "from_zone": "a",
        "to_zone": "b",
    }


@pytest.mark.req("PG-11")
@pytest.mark.req("UI-05")
@pytest.mark.parametrize(
    ("url", "destination"),
    [
        ("redis://localhost:6379/0/orders?group=billing", ("redis", "orders", "billing")),
        ("rediss://localhost:6379/orders", ("redis", "orders", "onceward")),
        ("nats://localhost:4222/ORDERS?consumer=billing", ("nats", "ORDERS", "billing")),
        ("boundary+http://localhost:7700?consumer=billing", ("onceward_boundary", "localhost", "billing")),
        ("sqlite:///shop.db?queue=orders", ("sqlite", "orders", None)),
    ],
)
def test_telemetry_shows_the_system_the_place_in_it_and_the_group(
    url: str, destination: tuple[str, str, str | None]
) -> None:
    assert Address(url).destination == destination


def test_a_sink_has_no_group() -> None:
    assert Address("redis://localhost:6379/orders?group=billing", sink=True).destination.group is None


def test_queues_of_one_file_are_not_each_other() -> None:
    whole, one, same, other = map(
        Address,
        (
            "sqlite:///o.db",
            "sqlite:///o.db?queue=a",
            "sqlite:///o.db?lease=5&queue=a",
            "sqlite:///o.db?queue=b",
        ),
    )
    assert one.queue == same.queue
    assert len({whole.queue, one.queue, other.queue}) == 3
    assert (whole.origin, one.origin) == ("sqlite:///o.db", "sqlite:///o.db?queue=a")


@pytest.mark.req("PG-01")
@pytest.mark.parametrize(
    "url",
    [
        "postgresql://h/shop/orders",
        "postgres://h:5432/shop/orders",
        f"postgresql://ann:{SECRET}@h/shop/orders?lease=5&sslmode=require",
        "postgresql://h/shop?queue=orders",
        "postgresql:///shop/orders?host=h",
    ],
)
def test_a_queue_in_a_database_is_one_however_it_is_spelled(url: str) -> None:
    address = Address(url)
    assert parts_of(address) == ("shop", "orders")
    assert (
        address.queue == Address("postgresql://h/shop/orders").queue != Address("postgresql://h/shop/x").queue
    )
    assert address.origin == "postgresql://h:5432/shop/orders"
    connection = connection_of(address)
    assert (connection.drivername, connection.database) == ("postgresql+psycopg", "shop")
    assert "queue" not in connection.query
    assert "lease" not in connection.query
    assert SECRET not in str(address)


def test_settings_are_numbers_where_the_connector_wants_numbers() -> None:
    settings = Address(
        "sqlite:///o.db?lease=30&max_deliveries=3&on_failure=redeliver&synchronous=normal"
    ).settings
    assert settings == {
        "lease": 30.0,
        "max_deliveries": 3,
        "on_failure": "redeliver",
        "synchronous": "NORMAL",
    }


WRONG = [
    ("orders.db", "start its URL with one of sqlite://, redis://"),
    ("", "start its URL with one of sqlite://"),
    (f"mysql://u:{SECRET}@h/x", "start its URL with one of sqlite://"),
    (f"postgresql://u:{SECRET}@h/shop", "names database 'shop' and no queue in it; write postgresql://"),
    (f"postgresql://u:{SECRET}@h", "names no database and no queue"),
    ("postgres://h/shop/orders/eu", "more than a database and a queue"),
    ("postgres://h/shop/orders%2Feu", "queue=orders, where the name may have a /"),
    ("postgresql://h/shop/orders?queue=orders", "names its queue twice"),
    ("postgresql://h/shop?queue=", "queue is empty"),
    ("postgresql://h/shop/or%0Aders", "printable characters"),
    ("postgresql://h/shop/orders?group=a", "has no setting 'group'; it has"),
    ("postgresql://h/shop/orders?lease=0", "lease must be a positive number"),
    ("sqlite://orders.db", "names no file"),
    ("sqlite:///", "names no file"),
    ("sqlite:///:memory:", "names no file"),
    ("sqlite:///o.db?queue=Orders%2C", "queue must be a name of up to 40 lower-case letters"),
    ("sqlite:///o.db?speed=9", "has no setting 'speed'; it has lease"),
    ("sqlite:///o.db?lease=soon", "lease must be a number of seconds, not 'soon'"),
    ("sqlite:///o.db?lease=0", "lease must be a positive number"),
    ("sqlite:///o.db?lease=nan", "lease must be a positive number"),
    ("sqlite:///o.db?lease=1&lease=2", "lease twice"),
    ("sqlite:///o.db?lease=", "lease must be a number"),
    ("sqlite:///o.db?max_deliveries=2.5", "max_deliveries must be a whole number"),
    ("sqlite:///o.db?on_failure=cry", "on_failure must be one of"),
    ("sqlite:///o.db?synchronous=maybe", "synchronous must be one of"),
    ("redis://localhost:6379", "names no stream"),
    ("redis://localhost:6379/0", "names no stream"),
    (f"redis://:{SECRET}@localhost/a/b", "names no stream"),
    ("redis://localhost/or%2Fders", "names no stream"),
    ("redis:///orders", "names no host"),
    (f"redis://:{SECRET}@localhost:port/orders", "not a valid URL"),
    (f"redis://:{SECRET}#x@localhost/orders", "%23"),
    (f"redis://:x/{SECRET}@localhost/orders", "not a valid URL"),
    (f"redis://u:?{SECRET}@localhost/orders", "a \\? in a password as %3F"),
    (f"redis://u:?{SECRET}&x@localhost/orders", "a \\? in a password as %3F"),
    (f"redis://u:?lease={SECRET}@localhost/orders", "lease must be a number of seconds"),
    (f"redis://localhost/orders?password={SECRET}", "no setting 'password'"),
    ("redis://localhost/orders?group=", "group is empty"),
    ("redis://localhost/orders?maxlen=0", "maxlen must be 1 or more"),
    ("nats://localhost:4222", "names no stream"),
    ("nats:///ORDERS", "names no host"),
    (f"nats://u:{SECRET}@localhost/ORDERS.new", "the stream must be a name without"),
    ("nats://localhost/a/b", "the stream must be a name without"),
    ("nats://localhost/ORDERS?consumer=a.b", "consumer must be a name without"),
    ("nats://localhost/ORDERS?subject=orders.*", "subject must be a subject to publish to"),
    ("nats://localhost/ORDERS?ca=ca.pem", "need TLS; write tls://"),
    ("tls://localhost/ORDERS?cert=c.pem", "both cert and key"),
    ("nats://localhost/ORDERS?monitoring=x", "monitoring must be a port number"),
    (f"nats://{SECRET}@h:port/ORDERS", "not a valid URL"),
    ("boundary+http://h:1", "add \\?consumer=NAME"),
    ("boundary+http://?consumer=c", "the host is missing"),
    ("boundary+http://h?consumer=c&ca=x&cert=y&key=z", "boundary\\+https"),
    ("boundary+https://h?consumer=c&ca=x", "all of ca, cert and key"),
    ("memory://", "it has no name"),
    ("memory://orders?group=x", "has no setting 'group'"),
]


@pytest.mark.parametrize(("url", "problem"), WRONG)
def test_a_url_that_names_no_source_is_refused_at_once_and_without_its_password(
    url: str, problem: str
) -> None:
    with pytest.raises(ConfigurationError, match=problem) as refused:
        Address(url)
    assert SECRET not in str(refused.value)


def test_a_sink_is_called_a_sink_and_a_boundary_needs_zones_there() -> None:
    with pytest.raises(ConfigurationError, match=r"sink 'boundary\+http://h'.*from_zone=HERE&to_zone=THERE"):
        Address("boundary+http://h", sink=True)


def test_the_origin_has_no_settings() -> None:
    assert Address(f"redis://u:{SECRET}@h/orders?group=g").origin == "redis://u:***@h/orders"


# ── opening ─────────────────────────────────────────────────────────────────────────────────────────────


def opened(world: World, url: str) -> Any:
    return Address(url).open(asynchronous=world.asynchronous)


def call(world: World, connector: Any, method: str, *arguments: Any) -> Any:
    return world.run(getattr(connector, f"{method}_async" if world.asynchronous else method), *arguments)


@pytest.mark.parametrize("kind", ["sqlite", "memory"])
def test_what_one_sends_another_of_the_same_url_fetches_after_the_first_is_closed(
    world: World, kind: str, tmp_path: Path
) -> None:
    url = f"sqlite:///{tmp_path}/orders.db" if kind == "sqlite" else f"memory://{tmp_path}"
    sink = opened(world, url)
    call(world, sink, "dispatch_transactions", [Transaction(payload=1), Transaction(payload=2)])
    call(world, sink, "close")
    with pytest.raises(ConnectorClosedError):
        call(world, sink, "fetch_transactions", 1)
    source = opened(world, f"{url}?lease=7")
    assert source.lease == 7
    taken = call(world, source, "fetch_transactions", 5)
    assert [each.payload for each in taken] == [1, 2]
    call(world, source, "settle_transactions", [Settlement(each, Verdict.DONE) for each in taken])
    call(world, source, "close")


def test_threads_and_asyncio_share_what_is_in_memory(tmp_path: Path) -> None:
    url = f"memory://{tmp_path}"
    with Address(url).open(asynchronous=False) as sink:
        sink.dispatch_transactions([Transaction(payload=1)])
    asyncio_world = World("asyncio")
    [taken] = call(asyncio_world, opened(asyncio_world, url), "fetch_transactions", 5)
    assert taken.payload == 1
