"""A trigger's own message quotes a card number: no error that a handler's statement raises shows it."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from onceward import Onceward
from onceward.app.build import open_task, open_task_async
from tests.support.orm_shop import Customer, OrmShop, contract, order
from tests.support.schema import new_schema

pytestmark = pytest.mark.req("CC-146")

CARD = "4111111111111111"
ONCE = {"steps": {"process": {"retry": {"max_attempts": 1}}}}
ADD = "INSERT INTO customers (name) VALUES (%s)"
NAMED = text("INSERT INTO customers (name) VALUES (:name)")
MANY = [{"name": f"ann {number}"} for number in range(40)] + [{"name": CARD}]
DECLINE = (
    "CREATE FUNCTION decline() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF NEW.name LIKE '%%4111%%' THEN "
    "RAISE EXCEPTION 'customer %% declined', NEW.name; END IF; RETURN NEW; END $$",
    "CREATE TRIGGER decline BEFORE INSERT ON customers FOR EACH ROW EXECUTE FUNCTION decline()",
)


@pytest.fixture
def shop(postgres_url: str) -> Iterator[OrmShop]:
    with new_schema(postgres_url) as schema:
        made = OrmShop(schema.plain_url, asynchronous=False)
        with made.engine.begin() as connection:
            for each in DECLINE:
                connection.exec_driver_sql(each)
        yield made
        made.engine.dispose()


def error_of(url: str, function: Any) -> str:
    app = Onceward("shop", database=url)
    app.consumer("memory://raised", contract=contract(), policy=ONCE)(function)
    with open_task(app, app.consumers["take"]) as task:
        return str(task.start_processing(order(1)).error)


async def error_of_async(url: str, function: Any) -> str:
    app = Onceward("shop", database=url)
    app.consumer("memory://raised", contract=contract(), policy=ONCE)(function)
    async with open_task_async(app, app.consumers["take"]) as task:
        return str((await task.start_processing(order(1))).error)


def add_by_orm(db: Session) -> None:
    db.add_all([Customer(**each) for each in MANY])
    db.flush()


def add_many_by_driver(db: psycopg.Connection[Any]) -> None:
    with db.cursor() as cursor:
        cursor.executemany(ADD, [list(each.values()) for each in MANY])


WAYS: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "flush": (Session, add_by_orm),
    "executemany of a session": (Session, lambda db: db.execute(NAMED, MANY)),
    "driver": (psycopg.Connection, lambda db: db.execute(ADD, [CARD])),
    "driver by name": (psycopg.Connection, lambda db: db.execute(ADD.replace("%s", "%(a)s"), {"a": CARD})),
    "executemany of a driver": (psycopg.Connection, add_many_by_driver),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_value_is_hidden_on_the_way_of_a_library(shop: OrmShop, way: str) -> None:
    annotation, write = WAYS[way]

    def take(payload: dict[str, Any], db: Any) -> None:
        write(db)

    take.__annotations__["db"] = annotation
    shown = error_of(shop.url, take)
    assert "customer … declined" in shown
    assert CARD not in shown


def test_a_value_is_hidden_on_a_connection_of_the_handlers_own(shop: OrmShop) -> None:
    def take(payload: dict[str, Any], session: Any) -> None:
        with psycopg.connect(shop.url) as own:
            try:
                own.execute(ADD, [CARD])
            except psycopg.Error as error:
                raise ValueError(f"payment: {error}")  # noqa: B904

    shown = error_of(shop.url, take)
    assert "payment: customer … declined" in shown


@pytest.mark.parametrize("annotation", [AsyncSession, psycopg.AsyncConnection])
def test_a_value_is_hidden_in_asyncio(shop: OrmShop, annotation: Any) -> None:
    async def take(payload: dict[str, Any], db: Any) -> None:
        if annotation is AsyncSession:
            await db.execute(NAMED, MANY)
        else:
            await db.execute(ADD, [CARD])

    take.__annotations__["db"] = annotation
    shown = asyncio.run(error_of_async(shop.url, take))
    assert "customer … declined" in shown


def test_a_value_is_hidden_on_a_connection_of_sqlite3(tmp_path: Path) -> None:
    shop = OrmShop(f"sqlite:///{tmp_path}/shop.db", asynchronous=False)

    def take(payload: dict[str, Any], db: sqlite3.Connection) -> None:
        db.execute("SELECT json_extract('{}', ?)", [f"card-{CARD}"])

    take.__annotations__["db"] = sqlite3.Connection
    shown = error_of(shop.url, take)
    assert "JSON path" in shown
    assert CARD not in shown
    shop.engine.dispose()
