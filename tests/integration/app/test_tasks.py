"""A complete app: its functions produce and consume, on every kind of source, with the same code."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

import msgspec
import pytest
from sqlalchemy import Engine, create_engine, text

from onceward import Onceward, Transaction
from onceward.app.build import open_task, open_task_async
from onceward.connectors.urls import Address
from onceward.inbox import AsyncInboxSession, Contract, InboxSession, UnprovenConsumerError
from onceward.task.report import Report
from tests.support.boundary.server import boundary_server
from tests.support.world import World

BOOK = "INSERT INTO bookings (subject, total) VALUES (:subject, :total)"


class Booking(msgspec.Struct):
    """In the form of a fact, which every source can carry."""

    subject: str
    predicate: str
    object: dict[str, int]


class Place(NamedTuple):
    source: str
    sink: str


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Engine]:
    engine = create_engine(f"sqlite:///{tmp_path}/shop.db")
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE bookings (subject TEXT, total INTEGER)"))
    yield engine
    engine.dispose()


@pytest.fixture(params=["sqlite", "memory", "redis", "boundary"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    name = uuid.uuid4().hex
    if request.param == "sqlite":
        yield Place(f"sqlite:///{tmp_path}/queue.db", f"sqlite:///{tmp_path}/queue.db")
    elif request.param == "memory":
        yield Place(f"memory://{name}", f"memory://{name}")
    elif request.param == "redis":
        server = request.getfixturevalue("redis_url")
        yield Place(f"{server}/{name}?group=billing", f"{server}/{name}")
    else:
        with boundary_server(tmp_path / "boundary") as url:
            yield Place(f"boundary+{url}?consumer=billing", f"boundary+{url}?from_zone=shop&to_zone=hq")


def contract(**changes: Any) -> Contract:
    return Contract(
        consumer_id="billing",
        event_types=["*"],
        owner_team="shop",
        idempotency_mechanism="booking and record in one transaction",
        **changes,
    )


def shop(place: Place, world: World, database: Engine, **settings: Any) -> Onceward:
    """The same code for every source."""
    app = Onceward("shop", database=str(database.url), **settings)
    if world.asynchronous:

        @app.consumer(place.source, contract=contract())
        async def book(booking: Booking, session: AsyncInboxSession) -> None:
            await session.execute(BOOK, {"subject": booking.subject, "total": booking.object["total"]})

        @app.producer(place.sink)
        async def order(*totals: Any) -> AsyncIterator[Any]:
            for total in totals:
                yield fact(total)

    else:

        @app.consumer(place.source, contract=contract())
        def book(booking: Booking, session: InboxSession) -> None:
            session.execute(BOOK, {"subject": booking.subject, "total": booking.object["total"]})

        @app.producer(place.sink)
        def order(*totals: Any) -> Iterator[Any]:
            yield from map(fact, totals)

    return app


def fact(total: Any) -> dict[str, Any]:
    return {"subject": f"order:{total}", "predicate": "placed", "object": {"total": total}}


def produce(app: Onceward, world: World, *totals: Any) -> Report:
    function = app.producers["order"].function
    if world.asynchronous:
        return asyncio.run(app.produce_async(function, *totals))
    return app.produce(function, *totals)


def consume(app: Onceward, world: World, name: str = "book") -> Report:
    consumer = app.consumers[name]

    async def consume_async() -> Report:
        async with open_task_async(app, consumer) as task:
            return await task.consume_transactions(consumer.policy)

    if world.asynchronous:
        return asyncio.run(consume_async())
    with open_task(app, consumer) as task:
        return task.consume_transactions(consumer.policy)


def booked(engine: Engine) -> list[int]:
    with engine.connect() as connection:
        return sorted(connection.execute(text("SELECT total FROM bookings")).scalars())


def test_the_same_app_runs_on_every_source_and_only_the_url_changes(
    place: Place, world: World, database: Engine
) -> None:
    app = shop(place, world, database)
    assert produce(app, world, 1, 2, 3).succeeded == 3
    report = consume(app, world)
    assert (report.succeeded, report.failed) == (3, 0)
    assert booked(database) == [1, 2, 3]
    assert consume(app, world).succeeded == 0, "everything is acknowledged"


def test_a_payload_that_does_not_fit_goes_to_the_dead_letters_of_the_database(
    place: Place, world: World, database: Engine
) -> None:
    app = shop(place, world, database)
    produce(app, world, 1, "hunter2", 3)
    report = consume(app, world)
    assert (report.succeeded, report.failed) == (2, 1)
    consume(app, world)
    assert booked(database) == [1, 3]
    with database.connect() as connection:
        [letter] = connection.execute(
            text("SELECT consumer, origin, category, error FROM onceward_dead_letters")
        )
    assert (letter.consumer, letter.category) == ("billing", "contract")
    assert letter.origin == place.source.partition("?")[0]
    assert "object" in letter.error
    assert "hunter2" not in letter.error


def attention(caplog: pytest.LogCaptureFixture) -> logging.LogRecord:
    """The one line that requests it."""
    [line] = [line for line in caplog.records if line.levelno >= logging.WARNING]
    assert vars(line)["task"] == "book"
    return line


def test_a_refused_payload_is_one_warning_and_the_rest_is_there_for_those_who_look(
    world: World, database: Engine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "onceward")
    url = f"sqlite:///{tmp_path}/queue.db"
    app = shop(Place(url, url), world, database)
    produce(app, world, "hunter2")
    consume(app, world)
    line = attention(caplog)
    assert (line.name, line.levelno) == ("onceward.engine", logging.WARNING)
    assert "does not fit Booking of consumer 'billing'" in line.getMessage()
    others = [line for line in caplog.records if line.levelno == logging.INFO]
    assert [line.name for line in others] == [
        "onceward.inbox",
        "onceward.connectors.leasing",
        "onceward.deadletters",
    ]


def test_a_handler_that_fails_is_one_error(
    world: World, database: Engine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url = f"sqlite:///{tmp_path}/queue.db"
    app = shop(Place(url, url), world, database)
    with database.begin() as connection:
        connection.execute(text("DROP TABLE bookings"))
    produce(app, world, 1)
    consume(app, world)
    line = attention(caplog)
    assert (line.name, line.levelno) == ("onceward.engine", logging.ERROR)
    assert line.exc_info is not None


def test_the_engine_of_an_app_goes_by_the_settings_of_the_app(
    world: World, database: Engine, tmp_path: Path
) -> None:
    url = f"sqlite:///{tmp_path}/queue.db"
    app = shop(Place(url, url), world, database, engine={"io_guard": "raise"})
    if world.asynchronous:

        @app.consumer(f"sqlite:///{tmp_path}/files.db")
        async def peek(file: str) -> bytes:
            return Path(file).read_bytes()

    else:

        @app.consumer(f"sqlite:///{tmp_path}/files.db")
        def peek(file: str) -> bytes:
            return Path(file).read_bytes()

    assert produce(app, world, 1).succeeded == 1
    assert consume(app, world).succeeded == 1, "the guard ignores queue and session"
    with app.consumers["peek"].source.open(asynchronous=False) as queue:
        queue.dispatch_transactions([Transaction(payload=f"{tmp_path}/queue.db")])
    assert consume(app, world, "peek").failed == 1


def test_a_message_that_comes_twice_has_its_effect_once(
    world: World, database: Engine, tmp_path: Path
) -> None:
    url = f"sqlite:///{tmp_path}/queue.db"
    app = shop(Place(url, url), world, database)
    twice = Transaction(payload=fact(5))
    with Address(url).open(asynchronous=False) as queue:
        queue.dispatch_transactions([twice, twice])
    report = consume(app, world)
    assert (report.succeeded, report.duplicates) == (2, 1)
    assert booked(database) == [5]


def test_in_production_an_unproven_consumer_does_not_start(
    world: World, database: Engine, tmp_path: Path
) -> None:
    url = f"sqlite:///{tmp_path}/queue.db"
    app = shop(Place(url, url), world, database, env="production")
    with pytest.raises(UnprovenConsumerError, match="onceward verify"):
        consume(app, world)


class Total(TypedDict):
    total: int


def test_without_a_contract_a_function_gets_payload_and_transaction(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url = f"sqlite:///{tmp_path}/queue.db?max_deliveries=1"
    app = Onceward("shop")
    seen: list[tuple[int, str]] = []
    if world.asynchronous:

        @app.consumer(url)
        async def book(order: Total, transaction: Transaction) -> None:
            seen.append((order["total"], transaction.id))

    else:

        @app.consumer(url)
        def book(order: Total, transaction: Transaction) -> None:
            seen.append((order["total"], transaction.id))

    with Address(url).open(asynchronous=False) as queue:
        queue.dispatch_transactions(
            [Transaction(id="a", payload={"total": 3}), Transaction(payload={"total": "x"})]
        )
        report = consume(app, world)
        assert (report.succeeded, report.failed) == (1, 1)
        assert seen == [(3, "a")]
        [letter] = queue.dead_letters()
    assert letter.error is not None
    assert "does not fit Total of book: $.total" in letter.error
    assert "does not fit Total of book: $.total" in attention(caplog).getMessage()
