"""Handlers that write through SQLAlchemy's ORM, on the inbox's own transaction."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event, select, text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from onceward import Onceward, Transaction
from onceward.app.build import open_task, open_task_async
from onceward.db import SessionError
from onceward.errors import ConfigurationError
from onceward.inbox import AsyncInboxSession, InboxSession
from onceward.verify import verify_consumer
from tests.support.databases import KINDS
from tests.support.orm_shop import Base, Customer, Order, OrmShop, contract, order
from tests.support.schema import new_schema

ONCE = {"steps": {"process": {"retry": {"max_attempts": 1}}}}


@pytest.fixture(params=KINDS, ids=[f"{name}-{mode}" for name, mode in KINDS])
def shop(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[OrmShop]:
    name, mode = request.param
    if name == "sqlite":
        made = OrmShop(f"sqlite:///{tmp_path}/shop.db", asynchronous=mode == "asyncio")
        yield made
        made.engine.dispose()
        return
    with new_schema(request.getfixturevalue("postgres_url")) as schema:
        made = OrmShop(schema.plain_url, asynchronous=mode == "asyncio")
        yield made
        made.engine.dispose()


def book(payload: Any, db: Session, _: Any = None) -> None:
    found = db.scalar(select(Customer).where(Customer.name == payload.get("name", "ann")))
    customer = found or Customer(name=payload.get("name", "ann"))
    db.add(Order(id=payload["id"], total=payload.get("total", 1), customer=customer))


@pytest.mark.req("IN-01")
def test_what_the_orm_writes_commits_with_the_record(shop: OrmShop) -> None:
    first, copy = shop.process(shop.app(book), order(1), order(1))
    assert first.error is None
    assert copy.duplicate
    assert shop.rows() == [(1, 1)]
    assert shop.done() == 1


@pytest.mark.req("IN-01")
def test_a_handler_that_raises_leaves_nothing(shop: OrmShop) -> None:
    def fail(payload: Any, db: Session, _: Any) -> None:
        book(payload, db)
        db.flush()
        raise ValueError("no stock")

    (outcome,) = shop.process(shop.app(fail), order(1))
    assert "no stock" in str(outcome.error)
    assert shop.rows() == []
    assert shop.done() == 0


@pytest.mark.req("IN-01")
def test_orm_and_inbox_session_share_the_transaction(shop: OrmShop) -> None:
    seen = []

    def both(payload: Any, db: Session, session: Any) -> None:
        book(payload, db)
        db.flush()
        count = "SELECT count(*) FROM onceward_dedup"
        seen.append(db.scalar(text(count)))

    shop.process(shop.app(both), order(1))
    assert seen == [1]


@pytest.mark.req("IN-02")
@pytest.mark.parametrize("name", ["commit", "begin", "close", "reset", "invalidate", "prepare"])
def test_what_would_end_the_transaction_fails_the_handler_even_if_it_is_caught(
    shop: OrmShop, name: str
) -> None:
    def misuse(payload: Any, db: Session, _: Any) -> None:
        book(payload, db)
        try:
            getattr(db, name)()
        except Exception:
            db.rollback()

    (outcome,) = shop.process(shop.app(misuse), order(1))
    assert f"{name}()" in str(outcome.error)
    assert "in test_orm.py:" in str(outcome.error)
    assert (shop.rows(), shop.done()) == ([], 0)


@pytest.mark.req("IN-02")
@pytest.mark.parametrize("name", ["commit", "rollback", "close", "begin"])
def test_its_connection_cannot_end_the_transaction(shop: OrmShop, name: str) -> None:
    def misuse(payload: Any, db: Session, _: Any) -> None:
        book(payload, db)
        db.flush()
        with suppress(SessionError):
            getattr(db.connection(), name)()

    def deeper(payload: Any, db: Session, _: Any) -> None:
        book(payload, db)
        db.flush()
        root: Any = db.connection().get_transaction()
        with suppress(SessionError):
            getattr(root, name if name != "begin" else "commit")()

    for each in (misuse, deeper):
        (outcome,) = shop.process(shop.app(each), order(1))
        assert "in test_orm.py:" in str(outcome.error)
        assert (shop.rows(), shop.done()) == ([], 0)


@pytest.mark.req("IN-02")
@pytest.mark.parametrize("how", ["transaction", "unbound"])
def test_a_commit_of_its_transaction_is_refused(shop: OrmShop, how: str) -> None:
    def misuse(payload: Any, db: Session, _: Any) -> None:
        book(payload, db)
        with db.begin_nested():
            book({"id": 2}, db)
        with suppress(SessionError):
            transaction: Any = db.get_transaction()
            transaction.commit() if how == "transaction" else Session.commit(db)

    (outcome,) = shop.process(shop.app(misuse), order(1))
    assert "commit() in test_orm.py:" in str(outcome.error)
    assert (shop.rows(), shop.done()) == ([], 0)


@pytest.mark.req("IN-02")
def test_a_commit_behind_sqlalchemy_fails_the_handler(shop: OrmShop) -> None:
    def misuse(payload: Any, db: Session, _: Any) -> None:
        db.flush()
        db.connection().connection.dbapi_connection.commit()  # type: ignore[union-attr]
        book(payload, db)

    (outcome,) = shop.process(shop.app(misuse), order(1))
    assert "has ended before its session" in str(outcome.error)
    assert shop.rows() == []


@pytest.mark.req("IN-02")
def test_sql_that_ends_the_transaction_is_refused(shop: OrmShop) -> None:
    (outcome,) = shop.process(shop.app(lambda payload, db, _: db.execute(text("COMMIT"))), order(1))
    assert "begins and ends its transaction itself" in str(outcome.error)
    assert shop.done() == 0


@pytest.mark.req("IN-02")
def test_a_commit_in_sql_whose_refusal_is_caught_fails_the_handler(shop: OrmShop) -> None:
    def misuse(payload: Any, db: Session, _: Any) -> None:
        book(payload, db)
        with suppress(SessionError):
            db.execute(text("COMMIT"))

    (outcome,) = shop.process(shop.app(misuse), order(1))
    assert "begins and ends its transaction itself" in str(outcome.error)
    assert (shop.rows(), shop.done()) == ([], 0)


@pytest.mark.req("IN-02")
def test_a_rollback_between_the_savepoints_of_the_session_fails_the_handler(shop: OrmShop) -> None:
    def misuse(payload: Any, db: Session, _: Any) -> None:
        book(payload, db)
        driver: Any = db.connection().connection.dbapi_connection
        db.rollback()
        driver.rollback()
        book(payload, db)

    (outcome,) = shop.process(shop.app(misuse), order(1))
    assert "has ended before its session" in str(outcome.error)
    assert (shop.rows(), shop.done()) == ([], 0)


@pytest.mark.req("IN-02")
def test_a_commit_in_a_listener_is_refused(shop: OrmShop) -> None:
    def listen(payload: Any, db: Session, _: Any) -> None:
        event.listen(db, "before_flush", lambda *_: db.commit())
        book(payload, db)

    (outcome,) = shop.process(shop.app(listen), order(1))
    assert "commit() in test_orm.py:" in str(outcome.error)
    assert shop.done() == 0


@pytest.mark.req("IN-02")
def test_work_for_after_the_commit_of_this_session_is_refused(shop: OrmShop) -> None:
    def listen(payload: Any, db: Session, _: Any) -> None:
        event.listen(db, "after_commit", lambda *_: None)
        book(payload, db)

    (outcome,) = shop.process(shop.app(listen), order(1))
    assert "after_commit" in str(outcome.error)
    assert shop.done() == 0


@pytest.mark.req("IN-02")
def test_listeners_of_all_sessions_may_wait_for_other_commits(shop: OrmShop) -> None:
    def unused(session: Session) -> None: ...

    event.listen(Session, "after_commit", unused)
    try:
        (outcome,) = shop.process(shop.app(book), order(1))
    finally:
        event.remove(Session, "after_commit", unused)
    assert outcome.error is None


@pytest.mark.req("IN-03")
def test_the_flush_at_the_end_is_part_of_the_handler(shop: OrmShop) -> None:
    shop.process(shop.app(book), order(1))
    (outcome,) = shop.process(shop.app(book), order(1, total=2), Transaction(id="x", payload={"id": 1}))[1:]
    assert "UNIQUE" in str(outcome.error).upper()
    assert shop.rows() == [(1, 1)]


@pytest.mark.req("IN-03")
def test_a_caught_failure_of_a_flush_needs_a_rollback(shop: OrmShop) -> None:
    def caught(payload: Any, db: Session, _: Any) -> None:
        book({**payload, "id": 0}, db)
        db.flush()
        db.add(Customer(name="ann"))
        with pytest.raises(IntegrityError):
            db.flush()
        if payload.get("undo"):
            db.rollback()
            book(payload, db)

    kept, undone = shop.process(shop.app(caught), order(1), order(2, undo=True))
    assert "a flush failed in this handler" in str(kept.error)
    assert undone.error is None
    assert shop.rows() == [(2, 1)]
    assert shop.done() == 1


@pytest.mark.req("IN-03")
def test_a_nested_block_fails_alone(shop: OrmShop) -> None:
    def nested(payload: Any, db: Session, _: Any) -> None:
        book(payload, db)
        twice = text("INSERT INTO customers (name) VALUES ('bob'), ('bob')")
        with pytest.raises(IntegrityError), db.begin_nested():
            db.execute(twice)
        with db.begin_nested():
            db.add(Customer(name="eve"))

    (outcome,) = shop.process(shop.app(nested), order(1))
    assert outcome.error is None
    assert [name for (name,) in shop.rows("SELECT name FROM customers ORDER BY name")] == ["ann", "eve"]


@pytest.mark.req("IN-04")
def test_a_session_that_outlives_its_handler_is_refused(shop: OrmShop) -> None:
    kept: list[Any] = []

    def keep(payload: Any, db: Session, _: Any) -> None:
        book(payload, db)
        db.flush()
        db.expire_all()
        kept.extend([db, db.scalars(select(Customer)).one(), db.connection()])

    (outcome,) = shop.process(shop.app(keep), order(1))
    assert outcome.error is None
    db, customer, connection = kept
    assert customer.name == "ann"
    for use in (
        lambda: customer.orders,
        lambda: db.execute(text("SELECT 1")),
        lambda: connection.execute(text("SELECT 1")),
        lambda: (db.add(Customer(name="late")), db.flush()),
    ):
        with pytest.raises(SessionError, match="has ended with its handler"):
            use()


@pytest.mark.req("IN-05")
def test_events_that_share_a_commit_have_sessions_of_their_own(shop: OrmShop, tmp_path: Path) -> None:
    def some(payload: Any, db: Session, _: Any) -> None:
        book(payload, db)
        if payload["id"] % 5 == 0:
            db.flush()
            raise ValueError("every fifth")

    app = shop.app(
        some,
        f"sqlite:///{tmp_path}/queue.db?max_deliveries=1",
        commit="group",
        policy={"loop": {"concurrency": {"value": 1}}, "steps": {"process": {"retry": {"max_attempts": 1}}}},
    )
    report = shop.consume(app, *(order(number) for number in range(1, 21)))
    assert (report.succeeded, report.failed) == (16, 4)
    assert [id_ for id_, _ in shop.rows()] == [number for number in range(1, 21) if number % 5]


@pytest.mark.req("IN-05")
def test_effects_come_before_what_the_orm_writes(shop: OrmShop) -> None:
    app = Onceward("shop", database=shop.url)
    paid: list[str] = []
    how: dict[str, Any] = {
        "contract": contract(mode="effectful"),
        "policy": {"steps": {"process": {"retry": {"max_attempts": 1}}}},
        "name": "take",
    }
    if shop.asynchronous:

        async def pay(key: str) -> str:
            paid.append(key)
            return "paid"

        @app.consumer("memory://paid", **how)
        async def take_async(payload: dict[str, Any], db: AsyncSession, inbox: AsyncInboxSession) -> None:
            if payload.get("early"):
                db.add(Customer(name="early"))
            customer = (await db.scalars(select(Customer))).first()
            assert await inbox.effect("pay", pay) == "paid"
            await db.run_sync(lambda plain: book(payload, plain))
            assert customer is None or customer.name == "ann"  # read again, in the transaction that commits
    else:

        @app.consumer("memory://paid", **how)
        def take(payload: dict[str, Any], db: Session, inbox: InboxSession) -> None:
            if payload.get("early"):
                db.add(Customer(name="early"))
            customer = db.scalars(select(Customer)).first()
            assert inbox.effect("pay", lambda key: paid.append(key) or "paid") == "paid"
            book(payload, db)
            assert customer is None or customer.name == "ann"

    done = shop.process(app, order(1), order(2), order(3, early=True))
    assert [each.error for each in done[:2]] == [None, None]
    assert "effects come before writes" in str(done[2].error)
    assert len(paid) == 2
    assert shop.rows() == [(1, 1), (2, 1)]


@pytest.mark.req("IN-02")
def test_an_async_session_names_the_line_that_would_end_it(tmp_path: Path) -> None:
    shop = OrmShop(f"sqlite:///{tmp_path}/shop.db", asynchronous=True)
    app = Onceward("shop", database=shop.url)

    @app.consumer(
        "memory://commits", contract=contract(), policy={"steps": {"process": {"retry": {"max_attempts": 1}}}}
    )
    async def take(payload: dict[str, Any], session: AsyncSession) -> None:
        how = payload["how"]
        if how == "with":
            async with session:
                pass
        called = getattr(session, how)()
        if how != "begin":
            await called

    async def run() -> list[str]:
        async with open_task_async(app, app.consumers["take"]) as task:
            done = [await task.start_processing(order(n, how=how)) for n, how in enumerate(WAYS)]
        return [str(each.error) for each in done]

    WAYS = ("commit", "begin", "close", "aclose", "reset", "invalidate", "with")
    for error in asyncio.run(run()):
        assert "in test_orm.py:" in error
    assert shop.done() == 0
    shop.engine.dispose()


@pytest.mark.req("IN-06")
def test_what_a_consumer_cannot_take_is_refused_where_it_is_written(tmp_path: Path) -> None:
    app = Onceward("shop", database=f"sqlite:///{tmp_path}/shop.db")

    def declare(function: Any, **more: Any) -> str:
        with pytest.raises(ConfigurationError) as refused:
            app.consumer("memory://refused", **{"contract": contract(), **more})(function)
        return str(refused.value)

    def blocking(payload: dict[str, Any], db: AsyncSession) -> None: ...
    async def asynchronous(payload: dict[str, Any], db: Session) -> None: ...
    def twice(payload: dict[str, Any], db: Session, session: Session) -> None: ...
    def one(payload: dict[str, Any], db: Session) -> None: ...
    def inbox_twice(payload: dict[str, Any], a: InboxSession, session: InboxSession) -> None: ...

    assert "runs in threads; annotate sqlalchemy.orm.Session" in declare(blocking)
    assert "annotate sqlalchemy.ext.asyncio.AsyncSession" in declare(asynchronous)
    assert "takes db and session, which would both be" in declare(twice)
    assert "has no contract, so nothing would commit it" in declare(one, contract=None)
    assert "takes the inbox's session twice" in declare(inbox_twice)


class OwnSession(Session):
    def book(self, payload: Any) -> None:
        book(payload, self)


@pytest.mark.req("IN-01")
def test_a_subclass_of_session_is_made_as_annotated(tmp_path: Path) -> None:
    shop = OrmShop(f"sqlite:///{tmp_path}/shop.db", asynchronous=False)
    app = Onceward("shop", database=shop.url)

    @app.consumer("memory://own", contract=contract())
    def take(payload: dict[str, Any], session: OwnSession) -> None:
        assert isinstance(session, OwnSession)
        session.book(payload)

    with open_task(app, app.consumers["take"]) as task:
        assert task.start_processing(order(1)).error is None
    assert shop.rows() == [(1, 1)]
    shop.engine.dispose()


proven = Onceward("proven", database="sqlite:///proven.db")


@proven.consumer("memory://proven", contract=contract(consumer_id="proven"))
def honest(payload: dict[str, Any], db: Session) -> None:
    book(payload, db)


@proven.consumer("memory://proven-async", contract=contract(consumer_id="proven-async"))
async def honest_async(payload: dict[str, Any], db: AsyncSession) -> None:
    await db.run_sync(lambda plain: book(payload, plain))


@proven.consumer("memory://swallows", contract=contract(consumer_id="swallows"))
def swallows(payload: dict[str, Any], db: Session) -> None:
    try:
        book(payload, db)
        db.flush()
    except Exception:
        db.rollback()


HONEST = [pytest.param(honest, marks=pytest.mark.long), honest_async]
EVENTS = [order(1), order(2, name="bob")]


@pytest.mark.req("IN-07")
@pytest.mark.parametrize(
    ("consumer", "only"),
    [
        pytest.param(honest, [], marks=pytest.mark.long),
        pytest.param(honest_async, [], marks=pytest.mark.long),
        (honest_async, ["exceptions", "kills", "groups", "outside-calls"]),  # where the session matters
    ],
    ids=["every scenario, threads", "every scenario, asyncio", "asyncio"],
)
def test_verify_proves_a_handler_with_an_orm_session(consumer: Any, only: list[str]) -> None:
    verify_consumer(consumer, events=EVENTS, setup=Base.metadata.create_all, only=only)


@pytest.mark.req("IN-07")
def test_verify_finds_a_handler_that_swallows_the_failure_of_a_flush() -> None:
    with pytest.raises(AssertionError, match=r"swallow|caught|lost"):
        verify_consumer(swallows, events=EVENTS, setup=Base.metadata.create_all, only=["exceptions"])
