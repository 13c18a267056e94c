"""Services that are made for each message, and lifespans."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from onceward import Onceward, Transaction, testing
from onceward.app.build import open_task
from onceward.app.lifespan import shared_services, shared_services_async
from onceward.errors import ConfigurationError
from onceward.inbox import InboxSession
from onceward.task.exceptions import TransactionException
from onceward.verify import verify_consumer
from tests.support.orm_shop import Base, Customer, contract

ONCE = {"steps": {"process": {"retry": {"max_attempts": 1}}}}


class Customers:
    """What a repository usually looks like."""

    def __init__(self, db: Session) -> None:
        self.db = db

    def add(self, name: str) -> None:
        self.db.add(Customer(name=name))


class Rates:
    pass


def an_app() -> Onceward:
    return Onceward("shop", database="sqlite:///shop.db")


def names(t: Any) -> list[str]:
    return [row["name"] for row in t.rows("SELECT name FROM customers ORDER BY name")]


@pytest.mark.req("IN-09")
def test_each_message_gets_its_own_object_on_its_own_session() -> None:
    app, made = an_app(), []

    @app.service
    def rates() -> Rates:
        return Rates()

    @app.service(per="message", outside=False)
    def customers(db: Session, rates: Rates, transaction: Transaction) -> Customers:
        made.append((transaction.payload["name"], id(rates)))
        return Customers(db)

    @app.consumer("memory://orders", contract=contract(), policy=ONCE)
    def take(order: dict[str, Any], customers: Customers, session: InboxSession) -> None:
        customers.add(order["name"])
        session.send("memory://elsewhere", order)

    @app.consumer("memory://more", contract=contract(consumer_id="more"), policy=ONCE)
    def more(order: dict[str, Any], customers: Customers, db: Session) -> None:
        assert customers.db is db

    with testing.app(app, setup=Base.metadata.create_all) as t:
        for name in ("ann", "bob"):
            t.send(take, {"name": name})
        t.send(more, {"name": "eve"})
        assert t.drain().succeeded == 3
        assert names(t) == ["ann", "bob"]
    assert sorted(name for name, _ in made) == ["ann", "bob", "eve"]
    assert len({rates for _, rates in made}) == 1


@pytest.mark.req("IN-09")
@pytest.mark.parametrize("asynchronous", [False, True], ids=["threads", "asyncio"])
def test_its_cleanup_comes_before_the_commit_and_belongs_to_the_handler(asynchronous: bool) -> None:
    app, reported = an_app(), []

    if asynchronous:

        @app.service(per="message", outside=False)
        async def unit(session: AsyncSession) -> AsyncIterator[Customers]:
            try:
                yield Customers(session.sync_session)
            except ValueError as error:
                reported.append(str(error))
            else:
                await session.execute(text("INSERT INTO customers (name) VALUES ('cleanup')"))
                if session.info.get("bad"):
                    raise RuntimeError("the cleanup failed")

        @app.consumer("memory://orders", contract=contract(), policy=ONCE)
        async def take_async(order: dict[str, Any], unit: Customers) -> None:
            handle(order, unit)
    else:

        @app.service(per="message", outside=False)
        @contextmanager
        def unit(session: Session) -> Iterator[Customers]:
            try:
                yield Customers(session)
            except ValueError as error:
                reported.append(str(error))
            else:
                session.execute(text("INSERT INTO customers (name) VALUES ('cleanup')"))
                if session.info.get("bad"):
                    raise RuntimeError("the cleanup failed")

        @app.consumer("memory://orders", contract=contract(), policy=ONCE, name="take_async")
        def take(order: dict[str, Any], unit: Customers) -> None:
            handle(order, unit)

    def handle(order: dict[str, Any], unit: Customers) -> None:
        unit.add("ann")
        if order["id"] == 1:
            raise ValueError("no")
        unit.db.info["bad"] = order["id"] == 2

    with testing.app(app, setup=Base.metadata.create_all) as t:
        for number in (1, 2):
            t.send("take_async", {"id": number})
            assert t.drain().failed == 1
            assert names(t) == []
        assert reported == ["no"]  # and it was not allowed to swallow it
        t.send("take_async", {"id": 3})
        assert t.drain().succeeded == 1
        assert names(t) == ["ann", "cleanup"]


@pytest.mark.req("CC-148")
@pytest.mark.parametrize("asynchronous", [False, True], ids=["threads", "asyncio"])
def test_a_cleanup_that_fails_after_the_handler_is_in_the_log_and_the_dead_letter(
    asynchronous: bool, caplog: pytest.LogCaptureFixture
) -> None:
    app = an_app()

    @app.service(per="message", outside=False)
    @contextmanager
    def first() -> Iterator[Rates]:
        try:
            yield Rates()
        finally:
            raise LookupError("the first stays open")

    @app.service(per="message", outside=False)
    @contextmanager
    def second(first: Rates) -> Iterator[Customers]:
        try:
            yield Customers(None)  # type: ignore[arg-type]
        finally:
            raise RuntimeError("the second stays open")

    def fail() -> None:
        raise TransactionException("no money", "BUSINESS")

    if asynchronous:

        @app.consumer("memory://orders", contract=contract(), policy=ONCE, name="take")
        async def take_async(order: dict[str, Any], second: Customers, session: Any) -> None:
            fail()
    else:

        @app.consumer("memory://orders", contract=contract(), policy=ONCE)
        def take(order: dict[str, Any], second: Customers, session: Any) -> None:
            fail()

    with testing.app(app, setup=Base.metadata.create_all) as t:
        t.send("take", {})
        t.drain()
        letter = t.dead_letters[0]
    for shown in (letter.error, caplog.text):
        assert "no money" in shown
        assert "Then service second (" in shown
        assert ") could not be closed: RuntimeError: the second stays open" in shown
        assert ") could not be closed: LookupError: the first stays open" in shown


@pytest.mark.req("CC-148")
def test_a_cleanup_that_ends_the_process_is_not_only_noted() -> None:
    app = an_app()

    @app.service(per="message", outside=False)
    @contextmanager
    def rates() -> Iterator[Rates]:
        try:
            yield Rates()
        finally:
            raise SystemExit(7)

    @app.consumer("memory://orders", contract=contract(), policy=ONCE)
    def take(order: dict[str, Any], rates: Rates, session: Any) -> None:
        raise ValueError("no money")

    with testing.app(app, setup=Base.metadata.create_all) as t:
        t.send("take", {})
        with pytest.raises(SystemExit, match="7"):
            t.drain()


@pytest.mark.req("IN-09")
def test_a_factory_that_fails_fails_the_message() -> None:
    app, fine = Onceward("shop"), []

    @app.service(per="message")
    def broken() -> Rates:
        if not fine:
            raise LookupError("no rates today")
        return Rates()

    @app.service(per="message")
    def silent() -> Iterator[Customers]:
        if len(fine) < 2:
            return
        yield Customers(None)  # type: ignore[arg-type]

    @app.consumer("memory://orders", contract=None, policy=ONCE)
    def take(order: dict[str, Any], broken: Rates, silent: Customers) -> None: ...

    with open_task(app, app.consumers["take"]) as task:
        first = task.start_processing(Transaction(payload={}))
        fine.append(1)
        second = task.start_processing(Transaction(payload={}))
        fine.append(2)
        assert task.start_processing(Transaction(payload={})).error is None
    assert "no rates today" in str(first.error)
    assert "didn't yield" in str(second.error)


@pytest.mark.req("IN-10")
def test_what_cannot_be_made_is_refused_where_it_is_written() -> None:
    app = an_app()

    @app.service(per="message")
    def customers(db: Session) -> Customers:
        return Customers(db)

    @app.service
    def keeper(customers: Customers) -> Rates:
        return Rates()

    def refused(function: Any, **more: Any) -> str:
        with pytest.raises(ConfigurationError) as error:
            app.consumer("memory://refused", **{"contract": contract(), **more})(function)
        return str(error.value)

    def without(order: dict[str, Any], customers: Customers) -> None: ...
    async def in_asyncio(order: dict[str, Any], customers: Customers, session: Any) -> None: ...
    def kept(order: dict[str, Any], keeper: Rates, session: Any) -> None: ...

    assert "has no contract" in refused(without, contract=None)
    assert "annotate sqlalchemy.ext.asyncio.AsyncSession" in refused(in_asyncio)
    assert "add per='message' to it, too" in refused(kept)
    with pytest.raises(ConfigurationError, match="has per='thread'"):
        app.service(per="thread")(without)  # type: ignore[call-overload]

    @app.service(per="message")
    def one(other: Any) -> Any: ...
    @app.service(per="message")
    def other(one: Any) -> Any: ...

    def circle(order: dict[str, Any], one: Any, session: Any) -> None: ...

    assert "services need each other: one → other → one" in refused(circle)


@pytest.mark.req("IN-10")
def test_a_fake_takes_its_place() -> None:
    app = an_app()

    @app.service(per="message")
    def customers(db: Session) -> Customers:
        raise AssertionError("the real one")

    @app.consumer("memory://orders", contract=contract(), policy=ONCE)
    def take(order: dict[str, Any], customers: Customers, db: Session) -> None:
        customers.add("ann")

    class Fake(Customers):
        def __init__(self) -> None:
            self.added: list[str] = []

        def add(self, name: str) -> None:
            self.added.append(name)

    fake = Fake()
    for each in (fake, Fake):
        with testing.app(app, setup=Base.metadata.create_all, services={Customers: each}) as t:
            t.send(take, {})
            assert t.drain().succeeded == 1
    assert fake.added == ["ann"]


proven = Onceward("proven", database="sqlite:///proven.db")


@proven.service(per="message", outside=False)
def proven_customers(db: Session) -> Iterator[Customers]:
    yield Customers(db)
    db.execute(text("INSERT INTO orders (id, total, customer_id) SELECT max(id), 1, max(id) FROM customers"))


@proven.consumer("memory://proven-services", contract=contract(consumer_id="proven-services"))
def with_customers(order: dict[str, Any], customers: Customers) -> None:
    customers.add(order["name"])


@pytest.mark.long
@pytest.mark.req("IN-10")
def test_verify_proves_a_handler_with_a_service_for_each_message() -> None:
    events = [Transaction(payload={"name": "ann"}), Transaction(payload={"name": "bob"})]
    verify_consumer(with_customers, events=events, setup=Base.metadata.create_all)


@pytest.mark.req("IN-11")
def test_a_lifespan_surrounds_the_messages_of_a_process() -> None:
    app, reported = an_app(), []

    @app.service
    def rates() -> Iterator[Rates]:
        reported.append("rates open")
        yield Rates()
        reported.append("rates closed")

    @app.lifespan
    def setting(rates: Rates) -> Iterator[None]:
        reported.append("begin")
        yield
        reported.append("end")

    @app.lifespan
    async def in_loop() -> AsyncIterator[None]:
        reported.append(f"begin in {asyncio.get_running_loop().is_running()}")
        yield
        reported.append("end in loop")

    @app.consumer("memory://orders", contract=None)
    async def take(order: dict[str, Any]) -> None:
        reported.append("message")

    with testing.app(app) as t:
        t.send(take, {})
        t.drain()
    surrounded = ["rates open", "begin", "begin in True", "message", "end in loop", "end", "rates closed"]
    assert reported == surrounded

    reported.clear()
    consumers = list(app.consumers.values())

    async def in_worker() -> None:
        async with shared_services_async(app, consumers):
            reported.append("message")

    with shared_services(app, consumers):
        asyncio.run(in_worker())
    assert reported == surrounded


@pytest.mark.req("IN-11")
def test_a_lifespan_that_cannot_run_is_refused() -> None:
    app = an_app()

    @app.lifespan
    async def in_loop() -> AsyncIterator[None]:
        yield

    @app.consumer("memory://orders", contract=None)
    def take(order: dict[str, Any]) -> None: ...

    with (
        pytest.raises(ConfigurationError, match="no consumer of this process runs in asyncio"),
        testing.app(app),
    ):
        pass
    with pytest.raises(ConfigurationError, match="two lifespans are named 'in_loop'"):
        app.lifespan(in_loop)
    with pytest.raises(ConfigurationError, match="goes above a function"):
        app.lifespan(Rates)
