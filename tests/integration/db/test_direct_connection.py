"""Calls of one statement: the server keeps them ready, but a pooler need not know of that."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import Engine, make_url

from onceward.connectors.postgresql.direct_connection import DirectConnection
from onceward.connectors.postgresql.store import open_engine
from tests.support.deaf_pooler import deaf_pooler

PREPARED = "SELECT count(*) FROM pg_prepared_statements"


@pytest.fixture
def engine(postgres_url: str) -> Iterator[Engine]:
    made = open_engine(make_url(postgres_url))
    yield made
    made.dispose()


@pytest.mark.req("PG-05")
def test_the_server_keeps_a_statement_ready(engine: Engine) -> None:
    direct = DirectConnection(engine)
    assert direct.execute(PREPARED, ()) == [(1,)]
    assert direct.execute("SELECT %s::int", (7,)) == [(7,)]
    assert direct.execute(PREPARED, ()) == [(2,)]
    direct.close()


@pytest.mark.req("PG-05")
def test_behind_a_pooler_nothing_is_prepared(postgres_url: str) -> None:
    url = make_url(postgres_url)
    with deaf_pooler(Path(str(url.query["host"])) / ".s.PGSQL.5432") as port:
        engine = open_engine(url.set(host="127.0.0.1", port=port, query={"sslmode": "disable"}))
        direct = DirectConnection(engine)
        for _ in range(10):
            assert direct.execute(PREPARED, ()) == [(0,)]
        direct.close()
        engine.dispose()
