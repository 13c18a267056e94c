"""`onceward balance` on a PostgreSQL queue, in the application's database and in another."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from onceward.connectors.postgresql import PostgreSqlConnector
from tests.integration.inspection.test_balance import Shop, balance, numbers, order
from tests.support.schema import Schema, new_schema

pytestmark = pytest.mark.req("PG-09")


@pytest.fixture
def schema(postgres_url: str) -> Iterator[Schema]:
    with new_schema(postgres_url) as made:
        yield made


@pytest.fixture(params=["its database", "another database"])
def shop(request: pytest.FixtureRequest, schema: Schema, tmp_path: Path) -> Shop:
    server, _, options = schema.plain_url.partition("?")
    own = schema.plain_url.replace("postgresql://", "postgresql+psycopg://", 1)
    database = own if request.param == "its database" else f"sqlite:///{tmp_path}/shop.db"
    return Shop(f"{server}/orders?{options}&on_failure=dead_letter", database)


def test_a_queue_balances_before_between_and_after(shop: Shop) -> None:
    assert shop.of_app().exit_code == 0
    copy = order(1)
    shop.send(copy, order(2), order("x"), copy, order(4), order(5))
    shop.consume(limit=4)
    code, struck = shop.balanced()
    assert code == 0
    assert numbers(struck) == {"appended": 6, "applied": 2, "duplicate": 1, "pending": 2, "dead": 1}
    shop.consume()
    code, struck = shop.balanced()
    assert code == 0
    assert numbers(struck) == {"appended": 6, "applied": 4, "duplicate": 1, "pending": 0, "dead": 1}


def test_a_row_that_somebody_deleted_is_missed_and_one_that_somebody_added_is_found(
    shop: Shop, schema: Schema
) -> None:
    table = f"{schema.name}.onceward_queue_messages"
    shop.send(order(1), order(2), order(3))
    shop.consume(limit=1)
    schema.execute(f"DELETE FROM {table} WHERE seq = (SELECT max(seq) FROM {table})")
    code, struck = shop.balanced()
    assert code == 1
    assert struck["problems"][0].startswith(
        "1 message is missing: 3 were appended, but only 2 are accounted for"
    )
    schema.execute(
        f"INSERT INTO {table} (queue, seq, enqueued_at, body) VALUES ('orders', 1, 0, ''), ('orders', 2, 0, '')"
    )
    result = balance("--source", shop.source)
    assert result.exit_code == 1
    assert "1 message is present but not counted as appended" in result.stderr


def test_a_record_that_somebody_deleted_is_missed(shop: Shop) -> None:
    shop.send(order(1), order(2))
    shop.consume()
    shop.execute("DELETE FROM onceward_dedup")
    code, struck = shop.balanced()
    assert code == 1
    assert len(struck["missing"]) == 2


def test_what_ended_long_ago_is_known_by_its_number(shop: Shop, schema: Schema) -> None:
    for each in range(3):
        shop.send(order(each), order("x"), order(each))
        shop.consume()
    url = schema.plain_url
    with PostgreSqlConnector(url, "orders") as queue, queue._rows.transaction(10.0):
        queue._rows.fold(kept=2)
    [(left,)] = schema.execute(f"SELECT sum(ended) FROM {schema.name}.onceward_queue_log")
    assert 2 <= left < 9
    code, struck = shop.balanced()
    assert (code, struck["unknown"]) == (0, [])
    assert numbers(struck) == {"appended": 9, "applied": 6, "duplicate": 0, "pending": 0, "dead": 3}
    shop.send(order(7))
    assert shop.balanced()[1]["pending"] == 1


def test_a_queue_that_was_never_used_is_missing(schema: Schema) -> None:
    server, _, options = schema.plain_url.partition("?")
    result = balance("--source", f"{server}/oders?{options}")
    assert result.exit_code == 2
    assert "check" in result.stderr
