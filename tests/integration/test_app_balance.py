"""`onceward balance`: conservation of messages on real sources, and what it says when somebody takes one away."""

from __future__ import annotations

import json
import sqlite3
import uuid
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
from redis import Redis
from sqlalchemy import create_engine, text
from typer.testing import CliRunner, Result

from onceward import Onceward, Transaction
from onceward.app.building import built
from onceward.app.sources import Address
from onceward.boundary import BoundaryClient
from onceward.cli.main import app as commands
from onceward.connectors.sqlite import SqliteConnector, statements
from onceward.deadletters import DeadLetters, Filter, Rca
from onceward.inbox import Contract, InboxSession
from onceward.task.report import Report
from tests.boundary_server import boundary_server
from tests.inbox_databases import Schema, schema

__all__ = ["schema"]


class Order(msgspec.Struct):
    total: int


class Shop:
    """An app with one consumer, and a hand in its source and its database."""

    def __init__(self, source: str, database: str, *, with_contract: bool = True) -> None:
        self.source, self.database = source, database
        self.app = Onceward("shop", database=database)
        contract = Contract(
            consumer_id="billing",
            event_types=["*"],
            owner_team="shop",
            idempotency_mechanism="one transaction",
        )
        if with_contract:

            @self.app.consumer(source, contract=contract)
            def charge(order: Any, session: InboxSession) -> None:
                self.fail_if_bad(order)

        else:

            @self.app.consumer(source, name="billing")
            def charge_without(order: Any) -> None:
                self.fail_if_bad(order)

    def fail_if_bad(self, payload: Any) -> None:
        msgspec.convert(payload.get("object", payload), Order)

    def send(self, *transactions: Transaction) -> None:
        with Address(self.source).open(asynchronous=False) as connector:
            connector.dispatch_transactions(transactions)

    def consume(self, limit: int | None = None) -> Report:
        [consumer] = self.app.consumers.values()
        policy = consumer.policy.model_validate({"loop": {"limit": limit, "batch": {"size": limit or 10}}})
        with built(self.app, consumer) as task:
            return task.consume_transactions(policy)

    def execute(self, statement: str) -> None:
        engine = create_engine(self.database)
        with engine.begin() as connection:
            connection.execute(text(statement))
        engine.dispose()

    def balanced(self) -> tuple[int, dict[str, Any]]:
        result = balance(
            "--source", self.source, "--database", self.database, "--consumer", "billing", "--json"
        )
        [struck] = json.loads(result.stdout)
        return result.exit_code, struck


def balance(*arguments: str) -> Result:
    return CliRunner().invoke(commands, ["balance", *arguments], env={"COLUMNS": "250", "NO_COLOR": "1"})


def order(total: Any, **more: Any) -> Transaction:
    return Transaction(payload={"total": total}, **more)


def numbers(struck: dict[str, Any]) -> dict[str, Any]:
    return {name: struck[name] for name in ("appended", "applied", "duplicate", "pending", "dead")}


@pytest.fixture
def database(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/shop.db"


# ── a queue in a file ───────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def shop(tmp_path: Path, database: str) -> Shop:
    return Shop(f"sqlite:///{tmp_path}/orders.db?on_failure=dead_letter", database)


def execute(path: Path, *statements_: str) -> None:
    with closing(sqlite3.connect(path)) as connection:
        for statement in statements_:
            connection.execute(statement)
        connection.commit()


def test_a_queue_balances_before_between_and_after(shop: Shop) -> None:
    assert shop.balanced()[0] == 0
    copy = order(1)
    shop.send(copy, order(2), order("x"), copy, order(4), order(5))
    code, struck = shop.balanced()
    assert (code, struck["pending"]) == (0, 6)
    shop.consume(limit=4)
    code, struck = shop.balanced()
    assert code == 0
    assert numbers(struck) == {"appended": 6, "applied": 2, "duplicate": 1, "pending": 2, "dead": 1}
    shop.consume()
    code, struck = shop.balanced()
    assert code == 0
    assert numbers(struck) == {"appended": 6, "applied": 4, "duplicate": 1, "pending": 0, "dead": 1}


def test_a_row_that_somebody_deleted_is_missed(shop: Shop, tmp_path: Path) -> None:
    shop.send(order(1), order(2), order(3))
    shop.consume(limit=1)
    execute(tmp_path / "orders.db", "DELETE FROM messages WHERE seq = (SELECT max(seq) FROM messages)")
    code, struck = shop.balanced()
    assert code == 1
    assert struck["problems"][0].startswith("1 message is missing: 3 were appended, and 2 are accounted for")
    result = balance("--source", shop.source)
    assert result.exit_code == 1
    assert "It does not hold: 1 message is missing" in result.stderr


def test_a_row_that_somebody_smuggled_in_is_found(shop: Shop, tmp_path: Path) -> None:
    shop.send(order(1))
    execute(tmp_path / "orders.db", "INSERT INTO messages (enqueued_at, body) VALUES (0, '')")
    code, struck = shop.balanced()
    assert code == 1
    assert "1 messages more than the 1 that were appended" in struck["problems"][0]


def test_a_dead_letter_is_followed_through_redrive_discarding_and_loss(shop: Shop) -> None:
    shop.send(order(1), order("x"), order("y"), order("z"))
    shop.consume()
    shop.consume()
    engine = create_engine(shop.database)
    letters = DeadLetters(engine)
    first, second, third = letters.find(Filter(), limit=10)
    rca = Rca(category="infrastructure", root_cause="no number", fix_ref="#1")
    letters.redrive(Filter(consumer="billing", ids=(first.id,)), rca=rca, operator="me")
    letters.discard(Filter(ids=(second.id,)), reason="a test order", operator="me")
    code, struck = shop.balanced()
    assert (code, struck["pending"], struck["dead"]) == (0, 1, 1)
    assert struck["dropped"] == {"discarded by an operator": 1}
    shop.consume()
    code, struck = shop.balanced()
    assert (code, struck["pending"], struck["dead"]) == (0, 0, 2), "it has died again"
    shop.execute(f"DELETE FROM onceward_dead_letters WHERE id = {third.id}")
    code, struck = shop.balanced()
    assert code == 1
    assert "1 dead letter is missing: 3 were moved to the database, which has 2" in struck["problems"][0]
    engine.dispose()


def test_without_a_contract_applied_and_duplicate_are_one(tmp_path: Path, database: str) -> None:
    plain = Shop(f"sqlite:///{tmp_path}/orders.db", database, with_contract=False)
    copy = order(1)
    plain.send(copy, copy, order(3))
    plain.consume()
    code, struck = plain.balanced()
    assert code == 0
    assert numbers(struck) == {"appended": 3, "applied": 3, "duplicate": None, "pending": 0, "dead": 0}
    assert "applied or duplicate" in balance("--source", plain.source).stdout


def test_a_file_from_before_the_counting_says_so_and_counts_from_its_next_opening_on(tmp_path: Path) -> None:
    path = tmp_path / "orders.db"
    with SqliteConnector(path) as queue:
        queue.dispatch_transactions([order(1), order(2)])
    execute(path, "DROP TABLE tallies", "PRAGMA user_version = 2")
    result = balance("--source", f"sqlite:///{path}", "--json")
    [struck] = json.loads(result.stdout)
    assert (result.exit_code, struck["appended"], struck["pending"]) == (0, None, 2)
    assert "an older onceward did not count" in struck["untold"]["appended"]
    with SqliteConnector(path) as queue:
        queue.dispatch_transactions([order(3)])
    [struck] = json.loads(balance("--source", f"sqlite:///{path}", "--json").stdout)
    assert (struck["appended"], struck["pending"]) == (3, 3)
    assert statements.SCHEMA_VERSION == statements.TALLIED_SINCE


# ── an inbox in PostgreSQL ──────────────────────────────────────────────────────────────────────────────


def test_an_inbox_in_postgresql_is_counted_alike(schema: Schema, tmp_path: Path) -> None:
    separator = "&" if "?" in schema.url else "?"
    database = f"{schema.url}{separator}options=-csearch_path%3D{schema.name}"
    shop = Shop(f"sqlite:///{tmp_path}/orders.db?on_failure=dead_letter", database)
    copy = order(1)
    shop.send(copy, copy, order("x"), order(4))
    shop.consume()
    code, struck = shop.balanced()
    assert code == 0
    assert numbers(struck) == {"appended": 4, "applied": 2, "duplicate": 1, "pending": 0, "dead": 1}


# ── a stream ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def stream(redis_url: str, database: str) -> Iterator[tuple[Shop, Redis, str]]:
    name = uuid.uuid4().hex
    with Redis.from_url(redis_url) as redis:
        yield Shop(f"{redis_url}/{name}?group=g&on_failure=dead_letter", database), redis, name


def test_a_stream_balances_before_between_and_after(stream: tuple[Shop, Redis, str]) -> None:
    shop, _, _ = stream
    assert shop.balanced()[0] == 0
    copy = order(1)
    shop.send(copy, order(2), order("x"), copy, order(4), order(5))
    assert shop.balanced()[1]["pending"] == 6
    shop.consume(limit=4)
    code, struck = shop.balanced()
    assert code == 0
    assert numbers(struck) == {"appended": 6, "applied": 2, "duplicate": 1, "pending": 2, "dead": 1}
    shop.consume()
    code, struck = shop.balanced()
    assert numbers(struck) == {"appended": 6, "applied": 4, "duplicate": 1, "pending": 0, "dead": 1}


def test_an_entry_that_somebody_acknowledged_by_hand_is_missed_by_name(
    stream: tuple[Shop, Redis, str],
) -> None:
    shop, redis, name = stream
    shop.send(order(1))
    shop.consume()
    lost = order(2, id="lost-1")
    shop.send(lost, order(3))
    [[_, [(entry, _)]]] = redis.xreadgroup("g", "somebody", {name: ">"}, count=1)
    assert shop.balanced()[0] == 0, "it is pending"
    redis.xack(name, "g", entry)
    code, struck = shop.balanced()
    assert code == 1
    assert struck["problems"] == ["1 message is acknowledged, but neither applied nor dead: lost-1"]


def test_a_record_that_somebody_removed_from_the_inbox_is_missed(stream: tuple[Shop, Redis, str]) -> None:
    shop, _, _ = stream
    shop.send(order(1, id="first"), order(2))
    shop.consume()
    shop.execute("DELETE FROM onceward_dedup WHERE tracking_id = 'first'")
    code, struck = shop.balanced()
    assert (code, struck["problems"]) == (
        1,
        ["1 message is acknowledged, but neither applied nor dead: first"],
    )


def test_bytes_that_are_no_message_are_dead_and_accounted_for(stream: tuple[Shop, Redis, str]) -> None:
    shop, redis, name = stream
    redis.xadd(name, {"nonsense": "1"})
    shop.send(order(1))
    shop.consume()
    shop.consume()
    code, struck = shop.balanced()
    assert code == 0
    assert numbers(struck) == {"appended": 2, "applied": 1, "duplicate": 0, "pending": 0, "dead": 1}


# ── a boundary ──────────────────────────────────────────────────────────────────────────────────────────


def fact(total: Any) -> Transaction:
    return Transaction(
        payload={"subject": f"order:{total}", "predicate": "placed", "object": {"total": total}}
    )


def test_a_boundary_balances_until_somebody_confirms_what_was_not_applied(
    tmp_path: Path, database: str
) -> None:
    with boundary_server(tmp_path / "boundary") as url:
        shop = Shop(f"boundary+{url}?consumer=billing&from_zone=a&to_zone=b&on_failure=dead_letter", database)
        shop.send(fact(1), fact("x"), fact(3))
        assert shop.balanced()[1]["pending"] == 3
        shop.consume()
        shop.consume()
        code, struck = shop.balanced()
        assert code == 0
        assert numbers(struck) == {"appended": 3, "applied": 2, "duplicate": 0, "pending": 0, "dead": 1}
        shop.send(fact(4), fact(5))
        with BoundaryClient(url) as client:
            client.confirm("billing", 4)
        code, struck = shop.balanced()
    assert code == 1
    assert "1 message is confirmed, but neither applied nor dead" in struck["problems"][0]


# ── what cannot be told, or asked ───────────────────────────────────────────────────────────────────────


def test_memory_cannot_be_told() -> None:
    result = balance("--source", "memory://orders")
    assert result.exit_code == 0
    assert "cannot be told" in result.stdout
    assert "It cannot be told whether it holds" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ((), "name an app"),
        (("shop:app", "--source", "memory://x"), "not both"),
        (("--source", "memory://x", "--database", "sqlite:///x.db"), "--consumer NAME"),
        (("--source", "redis://:hunter2@127.0.0.1:1/orders"), "Redis at 127.0.0.1:1/0 cannot be asked"),
        (("--source", "boundary+http://127.0.0.1:1?consumer=c"), "/stats cannot be read"),
    ],
)
def test_what_cannot_be_asked_ends_with_2(arguments: tuple[str, ...], problem: str) -> None:
    result = balance(*arguments)
    assert result.exit_code == 2
    assert problem in result.stderr
    assert "hunter2" not in result.output


def test_a_database_of_another_program_is_no_queue(tmp_path: Path) -> None:
    execute(tmp_path / "other.db", "CREATE TABLE messages (a)")
    result = balance("--source", f"sqlite:///{tmp_path}/other.db")
    assert result.exit_code == 2
    assert "is no queue of onceward" in result.stderr
