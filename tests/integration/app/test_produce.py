"""An app's producers: all is sent or the caller gets an error, and telemetry uses their names."""

from __future__ import annotations

import asyncio
import pickle
import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from onceward import Onceward, Transaction
from onceward.connectors.urls import Address
from onceward.inbox import Inbox
from onceward.outbox import Delayed, OutboxError
from onceward.task.exceptions import InputException, LoopError, NotSentException
from onceward.task.report import Report, StopReason
from onceward.testing import record
from tests.support.world import World

AWAY = "redis://:hunter2@127.0.0.1:1/orders"
"""An address without a server."""


def producing(world: World, sink: Any, app: Onceward | None = None, **more: Any) -> Callable[..., Report]:
    """A producer `place` that sends its arguments, called in the way of the mode."""
    app = app or Onceward("shop")
    if world.asynchronous:

        async def place(*payloads: Any) -> Any:
            for payload in payloads:
                yield payload

    else:

        def place(*payloads: Any) -> Any:
            yield from payloads

    app.producer(sink, **more)(place)
    if world.asynchronous:
        return lambda *payloads: asyncio.run(app.produce_async(place, *payloads))
    return lambda *payloads: app.produce(place, *payloads)


def sent(url: str) -> list[Any]:
    with Address(url).open(asynchronous=False) as connector:
        return [each.payload for each in connector.fetch_transactions(100)]


@pytest.mark.parametrize("limit", [0, 1, 2])
def test_a_limit_that_leaves_messages_unsent_is_an_error_of_the_caller(
    world: World, tmp_path: Path, limit: int
) -> None:
    url = f"memory://{tmp_path}"
    place = producing(world, url, policy={"loop": {"limit": limit}})
    with pytest.raises(
        NotSentException, match=rf"place: loop\.limit is {limit}, but there was more to send"
    ) as raised:
        place("a", "b", "c")
    assert raised.value.report is not None
    assert raised.value.report.succeeded == limit
    assert sent(url) == ["a", "b", "c"][:limit]


@pytest.mark.parametrize("limit", [3, 4])
def test_a_limit_that_leaves_nothing_unsent_is_no_error(world: World, tmp_path: Path, limit: int) -> None:
    place = producing(world, f"memory://{tmp_path}", policy={"loop": {"limit": limit}})
    assert place("a", "b", "c").succeeded == 3


def test_a_message_that_cannot_be_sent_is_an_error_of_the_caller(world: World) -> None:
    place = producing(world, AWAY, policy={"steps": {"produce": {"retry": {"max_attempts": 2}}}})
    with pytest.raises(NotSentException) as raised:
        place("a", "b")
    text, report = str(raised.value), raised.value.report
    assert text.startswith(
        "place: 2 of 2 messages did not reach redis://:***@127.0.0.1:1/orders; the first: "
    )
    assert "ConnectionError" in text
    assert "hunter2" not in text
    assert report is not None
    assert (report.succeeded, report.failed, report.retries) == (0, 2, 2)
    assert report.stop_reason is StopReason.DONE, "all of it was tried"


def test_what_could_be_sent_is_sent_beside_what_could_not(world: World, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/orders.db"
    place = producing(world, url)
    with pytest.raises(LoopError, match="place: 1 of 3 messages did not reach sqlite:") as raised:
        place("a", Transaction(payload=object()), "c")
    assert raised.value.report is not None
    assert (raised.value.report.succeeded, raised.value.report.failed) == (2, 1)
    assert sent(url) == ["a", "c"]
    copied = pickle.loads(pickle.dumps(raised.value))
    assert copied.report == raised.value.report


def test_telemetry_knows_a_producer_by_its_name(world: World, caplog: pytest.LogCaptureFixture) -> None:
    with record() as recording:
        producing(world, f"memory://{uuid.uuid4().hex}")("a")
    tasks = {dict(span.attributes or {}).get("task") for span in recording.spans()}
    assert tasks == {"place"}
    with pytest.raises(NotSentException):
        producing(world, AWAY)("a")
    assert {vars(line)["task"] for line in caplog.records if line.name == "onceward.engine"} == {"place"}


@pytest.mark.parametrize("kind", ["redis", "sqlite"])
def test_one_setting_moves_a_consumer_and_the_producer_that_names_it(
    kind: str,
    world: World,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = request.getfixturevalue("redis_url") if kind == "redis" else f"sqlite:///{tmp_path}"
    elsewhere = f"{server}/{uuid.uuid4().hex}"
    monkeypatch.setenv("ONCEWARD_CONSUMERS__CHARGE__SOURCE", elsewhere)
    app = Onceward("shop")

    @app.consumer("memory://in-the-code")
    def charge(order: str) -> None: ...

    producing(world, charge, app)("a")
    assert sent(elsewhere) == ["a"]


def test_a_setting_of_its_own_moves_a_producer_alone(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = f"memory://{uuid.uuid4().hex}"
    monkeypatch.setenv("ONCEWARD_PRODUCERS__PLACE__SINK", elsewhere)
    app = Onceward("shop")

    @app.consumer("memory://in-the-code")
    def charge(order: str) -> None: ...

    producing(world, charge, app)("a")
    assert sent(elsewhere) == ["a"]
    assert app.consumers.charge.source.url == "memory://in-the-code"


# ── later ───────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.req("OB-23")
def test_a_delayed_message_is_held_by_the_outbox_and_can_be_canceled(world: World, tmp_path: Path) -> None:
    database = f"sqlite:///{tmp_path}/shop.db"
    app = Onceward("shop", database=database)
    engine = app.create_engine()
    Inbox(engine).migrate()
    url = f"sqlite:///{tmp_path}/queue.db"
    place = producing(world, url, app)
    held = Transaction(id="later", payload="b", metadata={"shape": "round"})
    report = place("a", Delayed(held, delay=3600, key="k"), Delayed("c", at=datetime(2099, 1, 1, tzinfo=UTC)))
    assert report.processed == 3
    assert sent(url) == ["a"]
    with engine.begin() as connection:
        rows = connection.execute(
            text("SELECT message_id, target, key, state FROM onceward_outbox ORDER BY seq")
        ).all()
        assert [tuple(row)[1:] for row in rows] == [
            ("producer:place", "k", "delayed"),
            ("producer:place", None, "delayed"),
        ]
        assert app.outbox(connection).cancel("later")
    engine.dispose()


@pytest.mark.req("OB-23")
def test_a_delayed_message_without_an_outbox_is_refused_and_nothing_is_sent(
    world: World, tmp_path: Path
) -> None:
    for url in (f"memory://{tmp_path}", f"sqlite:///{tmp_path}/queue.db", AWAY):
        place = producing(world, url, Onceward("shop"))
        with pytest.raises(InputException, match=r"the app's outbox does.*Onceward\('shop', database=…\)"):
            place(Delayed("a", delay=5))
    assert sent(f"memory://{tmp_path}") == []


@pytest.mark.req("OB-23")
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "needs delay=… or at=…"),
        ({"delay": -1}, "delay must be"),
        ({"at": datetime(2030, 1, 1)}, "a datetime with a time zone"),
        ({"delay": 1, "at": datetime.now(UTC)}, "not both"),
    ],
)
def test_a_wrong_time_is_an_error_where_it_is_written(given: dict[str, Any], message: str) -> None:
    with pytest.raises(OutboxError, match=message):
        Delayed("a", **given)
