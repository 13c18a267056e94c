"""What a failed attempt leaves of the objects and cursors of its handler."""

from __future__ import annotations

import gc
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import inspect, select, text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from onceward import Onceward, testing
from tests.support.databases import KINDS
from tests.support.orm_shop import Base, Customer, OrmShop, contract, order
from tests.support.schema import new_schema


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


@pytest.mark.req("IN-04")
@pytest.mark.parametrize("flushed", [True, False])
def test_an_object_of_a_failed_attempt_is_new_to_the_next_one(shop: OrmShop, flushed: bool) -> None:
    ann = Customer(id=1, name="ann")
    calls: list[Exception] = []

    def keep(payload: Any, db: Session, _: Any) -> None:
        gc.collect()
        db.add(ann)
        if flushed:
            db.flush()
        if not calls:
            calls.append(ConnectionError("blip"))  # the traceback keeps the session
            raise calls[0]

    failed, done = shop.process(shop.app(keep), order(1), order(1))
    assert "blip" in str(failed.error)
    assert done.error is None
    assert shop.rows("SELECT name FROM customers") == [("ann",)]


@pytest.mark.req("IN-04")
def test_what_a_failed_attempt_changed_is_read_again(shop: OrmShop) -> None:
    with Session(shop.engine) as session, session.begin():
        session.add(Customer(id=1, name="ann"))
    kept: list[Customer] = []

    def rename(payload: Any, db: Session, _: Any) -> None:
        if not kept:
            kept.append(db.scalars(select(Customer)).one())
            kept[0].name = "eve"
            db.flush()
            raise ConnectionError("blip")
        assert inspect(kept[0]).detached
        db.add(kept[0])
        assert kept[0].name == "ann"
        kept[0].name = "eve"

    _, done = shop.process(shop.app(rename), order(1), order(1))
    assert done.error is None
    assert shop.rows("SELECT name FROM customers") == [("eve",)]


@pytest.mark.req("IN-04")
@pytest.mark.parametrize("mode", ["threads", "asyncio"])
@pytest.mark.parametrize("commit", ["each", "group"])
def test_an_object_is_new_again_if_the_commit_fails(postgres_url: str, commit: Any, mode: str) -> None:
    late = "ALTER TABLE customers ADD CONSTRAINT late UNIQUE (name) DEFERRABLE INITIALLY DEFERRED"
    with new_schema(postgres_url) as schema:
        shop = OrmShop(schema.plain_url, asynchronous=mode == "asyncio")
        with shop.engine.begin() as connection:
            connection.exec_driver_sql("ALTER TABLE customers DROP CONSTRAINT customers_name_key")
            connection.exec_driver_sql(late)
            connection.exec_driver_sql("INSERT INTO customers VALUES (1, 'ann')")
        ann = Customer(id=2, name="ann")

        def add(payload: Any, db: Session, _: Any) -> None:
            gc.collect()
            db.add(ann)

        app = shop.app(add, "memory://orders", commit=commit)
        if commit == "group":
            assert shop.consume(app, order(1)).failed == 1
        else:
            (failed,) = shop.process(app, order(1))
            assert "late" in str(failed.error)
        with shop.engine.begin() as connection:
            connection.exec_driver_sql("DELETE FROM customers")
        (done,) = shop.process(app, order(1))
        assert done.error is None
        assert shop.rows("SELECT id FROM customers") == [(2,)]
        shop.engine.dispose()


@pytest.mark.req("IN-04", "IN-08")
@pytest.mark.parametrize("fails", [True, False])
@pytest.mark.parametrize("kind", ["orm", "scalars", "driver", "stream"])
def test_what_a_handler_leaves_unread_locks_nothing(kind: str, fails: bool, tmp_path: Path) -> None:
    app = Onceward("shop", database=f"sqlite:///{tmp_path}/shop.db")
    kept: list[Any] = []

    def leave(found: Any) -> None:
        kept.extend([found, next(iter(found))])
        if fails:
            raise ValueError("no stock")

    if kind == "driver":

        @app.consumer("memory://unread", contract=contract(), name="take")
        def with_driver(payload: dict[str, Any], db: sqlite3.Connection) -> None:
            leave(db.execute("SELECT id FROM customers"))
    elif kind == "stream":

        @app.consumer("memory://unread", contract=contract(), name="take")
        async def with_stream(payload: dict[str, Any], db: AsyncSession) -> None:
            found = await db.stream(text("SELECT id FROM customers"))
            leave([found, await anext(aiter(found))])
    else:

        @app.consumer("memory://unread", contract=contract(), name="take")
        def with_orm(payload: dict[str, Any], db: Session) -> None:
            query = select(Customer).execution_options(yield_per=1)
            leave(db.scalars(query) if kind == "scalars" else db.execute(text("SELECT id FROM customers")))

    def set_up(engine: Any) -> None:
        Base.metadata.create_all(engine)
        with Session(engine) as session, session.begin():
            session.add_all([Customer(name="ann"), Customer(name="bob")])

    with testing.app(app, setup=set_up) as t:
        t.send("take", {})
        t.drain()
        with t.engine.begin() as connection:
            connection.execute(text("DROP TABLE orders"))
        t.advance("24h")
        assert len(t.dead_letters) == fails
