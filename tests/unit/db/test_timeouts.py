"""How long connections that onceward opens wait for a PostgreSQL that is gone."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import make_url, text
from typer.testing import CliRunner

from onceward import Onceward
from onceward.cli.main import app as cli
from onceward.db.calls import AnswerWatch, DatabaseCalls
from onceward.db.engines import DatabaseTimeouts, connect_arguments
from tests.support.wait import until

URL = "postgresql+psycopg://shop@db/shop"
DEFAULTS = {
    "connect_timeout": 10,
    "keepalives_idle": 10,
    "keepalives_interval": 3,
    "keepalives_count": 3,
    "tcp_user_timeout": 20_000,
}


@pytest.mark.req("RN-13")
def test_connections_do_not_wait_forever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PGCONNECT_TIMEOUT", raising=False)
    assert connect_arguments(make_url(URL)) == DEFAULTS
    assert connect_arguments(make_url("sqlite:///shop.db")) == {}
    given = connect_arguments(make_url(URL), DatabaseTimeouts(connect=0.5, silence=0.5), name="onceward")
    assert given == {
        "application_name": "onceward",
        "connect_timeout": 2,
        "keepalives_idle": 1,
        "keepalives_interval": 1,
        "keepalives_count": 3,
        "tcp_user_timeout": 500,
    }


@pytest.mark.req("RN-13")
def test_what_the_url_or_a_variable_says_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    url = make_url(f"{URL}?connect_timeout=60&tcp_user_timeout=0&application_name=mine")
    assert connect_arguments(url, name="onceward").keys() == {
        "keepalives_idle",
        "keepalives_interval",
        "keepalives_count",
    }
    monkeypatch.setenv("PGCONNECT_TIMEOUT", "60")
    assert "connect_timeout" not in connect_arguments(make_url(URL))


def parameters(connection: Any) -> dict[str, str]:
    driver = connection.connection.driver_connection
    return dict(driver.info.get_parameters())


@pytest.mark.req("RN-13")
def test_every_engine_of_an_app_has_them(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PGCONNECT_TIMEOUT", raising=False)
    app = Onceward("shop", database=postgres_url, database_silence_timeout=30)
    engine = app.create_engine()
    with engine.connect() as connection:
        found = parameters(connection)
        assert connection.execute(text("SHOW statement_timeout")).scalar_one() == "0", (
            "a handler may take long"
        )
    engine.dispose()
    assert {name: found[name] for name in ("connect_timeout", "tcp_user_timeout", "keepalives_idle")} == {
        "connect_timeout": "10",
        "tcp_user_timeout": "30000",
        "keepalives_idle": "15",
    }


@pytest.mark.req("RN-13")
def test_a_command_does_not_wait_for_a_server_that_says_nothing() -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"postgresql://127.0.0.1:{silent.getsockname()[1]}/shop?connect_timeout=2"
        result = CliRunner().invoke(cli, ["inbox", "stats", "--database", url])
    assert result.exit_code == 1
    assert "cannot reach the database" in result.stderr


# ── what has no answer ──────────────────────────────────────────────────────────────────────────────────


class OldCalls(DatabaseCalls):
    def __init__(self, age: float | None) -> None:
        super().__init__()
        self.age = age

    def oldest(self) -> float | None:
        return self.age


@pytest.mark.req("RN-14")
@pytest.mark.parametrize("age", [None, 0.1])
def test_nobody_is_asked_while_calls_are_answered(age: float | None) -> None:
    watch = AnswerWatch(lambda: pytest.fail("asked"), 2.0, OldCalls(age))
    watch.look()
    assert watch._asking is None


@pytest.mark.req("RN-14")
def test_a_database_that_answers_again_is_ready_again() -> None:
    answers = False

    def ask() -> None:
        if not answers:
            raise TimeoutError("connection timeout expired\nmore")

    calls = OldCalls(5.0)
    watch = AnswerWatch(ask, 2.0, calls)
    until(lambda: (watch.look(), watch.problem)[1])
    assert watch.problem == "the database does not answer: connection timeout expired"
    answers, calls.age = True, None
    until(lambda: (watch.look(), watch.problem is None)[1])


@pytest.mark.req("RN-14")
def test_every_call_ends_whatever_becomes_of_it(postgres_url: str) -> None:
    calls = DatabaseCalls()
    engine = Onceward("shop", database=postgres_url).create_engine()
    calls.watch(engine)
    with engine.connect() as connection:
        connection.execute(text("SELECT 1"))
        assert calls.oldest() is None
        with pytest.raises(Exception, match="division"):
            connection.execute(text("SELECT 1 / 0"))
        connection.rollback()
    assert calls.oldest() is None
    with engine.begin() as connection:
        connection.execute(text("SELECT 1"))
    assert calls.oldest() is None
    with engine.connect() as connection:
        pid = connection.execute(text("SELECT pg_backend_pid()")).scalar_one()
        with engine.connect() as other:
            other.execute(text(f"SELECT pg_terminate_backend({pid})"))
        with pytest.raises(Exception, match=r"terminating|closed"):
            connection.execute(text("SELECT 1"))
    assert calls.oldest() is None
    engine.dispose()
    nowhere = Onceward("shop", database="postgresql://127.0.0.1:1/shop").create_engine()
    calls.watch(nowhere)
    with pytest.raises(Exception, match="refused"):
        nowhere.connect()
    assert calls.oldest() is None
