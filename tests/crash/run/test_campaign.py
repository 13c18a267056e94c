"""The campaign itself: a short one passes, and its verdict names whatever is wrong."""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from onceward import Transaction
from tests.campaign.__main__ import main
from tests.campaign.chain.count import disorder, published
from tests.campaign.field import Combination, Field, field
from tests.campaign.orders import Order, make_orders
from tests.campaign.tally import Tally, count, unfinished


@pytest.mark.req("CC-084")
def test_a_short_campaign_loses_and_doubles_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    short = "--source sqlite --database sqlite --mode threads --events 60 --kills 3 --pauses 1 --seconds 2"
    code = main([*short.split(), "--processes", "2", "--seed", "7"])
    said = capsys.readouterr().out
    assert code == 0, said
    assert "3 kills, 1 pauses" in said
    assert "lost 0, doubled 0, stuck 0, conflicts 0" in said


@pytest.fixture
def made() -> Iterator[Field]:
    with field(Combination("sqlite", "sqlite", "threads"), 1) as made:
        with made.engine() as engine, engine.begin() as connection:
            connection.execute(text("CREATE TABLE onceward_dead_letters (consumer TEXT, message_id TEXT)"))
        yield made


ORDERS = [order._replace(fate="innocent") for order in make_orders(5, random.Random(1))]


def effects(made: Field, *orders: Order) -> None:
    with made.engine() as engine, engine.begin() as connection:
        for order in orders:
            connection.execute(text("INSERT INTO charges VALUES (:number)"), {"number": order.number})
    with closing(sqlite3.connect(made.directory / "provider.db")) as book, book:
        for order in ORDERS:
            book.execute("INSERT INTO shipments VALUES (?, ?)", (order.number, order.number))


def bury(made: Field, order: Order) -> None:
    with made.engine() as engine, engine.begin() as connection:
        values = {"id": order.messages[0].id}
        connection.execute(text("INSERT INTO onceward_dead_letters VALUES ('charge', :id)"), values)


CLEAN = Tally([], [], [], [], [], [])


@pytest.mark.req("CC-084")
def test_the_verdict_names_what_is_lost_doubled_stuck_or_in_conflict(made: Field) -> None:
    one, two, three, four, five = ORDERS
    effects(made, one, two, two, three)
    bury(made, three)
    bury(made, four)
    assert unfinished(made, ORDERS) == 1
    found = count(made, ORDERS, finished=True)
    assert found == CLEAN._replace(
        lost=[f"charge {five.number}"],
        doubled=[f"charge {two.number}"],
        conflicts=[f"charge {three.number}"],
        innocent_dead=[f"charge {four.number}"],
    )
    assert not found.is_clean
    assert count(made, ORDERS, finished=False).stuck == [f"charge {five.number}"]


@pytest.mark.req("CC-084")
def test_an_effect_of_a_refused_order_is_wrong_and_its_dead_letter_is_right(made: Field) -> None:
    one, two, *others = ORDERS
    refused = [one._replace(fate="refused"), two._replace(fate="refused"), *others]
    effects(made, one, *others)
    bury(made, two)
    found = count(made, refused, finished=True)
    assert f"charge {one.number}" in found.wrong
    assert f"charge {two.number}" not in [*found.wrong, *found.innocent_dead, *found.lost]


# ── order, charge, ship ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.long
@pytest.mark.req("OB-21")
def test_a_short_campaign_against_three_services(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    short = "--chain sqlite --events 60 --kills 3 --pauses 0 --restarts 0 --seconds 3 --processes 1"
    code = main([*short.split(), "--seed", "7"])
    said = capsys.readouterr().out
    assert code == 0, said
    assert "3 kills" in said
    assert "lost 0, doubled 0, phantom 0, renamed 0, disorder 0, dead 0" in said


def event_of(what: str, number: int, id: str, **more: Any) -> Transaction:
    return Transaction(id=id, payload={"what": what, "customer": "c", "number": number, **more})


@pytest.mark.req("OB-21")
def test_the_feed_shows_copies_other_ids_and_phantoms() -> None:
    feed = published(
        [
            event_of("placed", 1, "a"),
            event_of("placed", 1, "a"),
            event_of("placed", 2, "b"),
            event_of("placed", 2, "c"),
            event_of("placed", 3, "d", phantom=True),
        ]
    )
    assert feed.copies == 1
    assert feed.ids["placed", ("c", 2)] == {"b", "c"}
    assert feed.phantoms == ["feed: placed ('c', 3)"]
    assert disorder([("c", 1), ("c", 3), ("c", 2), ("d", 1)]) == [("c", 2)]
