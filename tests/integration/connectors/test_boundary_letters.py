"""Facts that fail permanently, under the engine: first in the dead-letter store, and only then behind the cursor."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from onceward import Transaction
from onceward.boundary import StoredFact, envelope_for, fact_of
from onceward.connectors.codec import decode
from onceward.deadletters import Category, Filter, Status
from onceward.inbox import Contract
from onceward.task.exceptions import ExceptionCategory, TransactionException
from tests.support.boundary.connector_world import ConnectorWorld, made, site_at
from tests.support.deadletters.world import Letters
from tests.support.world import World

pytest_plugins = ("tests.support.databases", "tests.support.deadletters.site")

MADE = Filter(consumer="billing", event_type="made")
CONTRACT = Contract(
    consumer_id="billing",
    event_types=["made"],
    owner_team="payments",
    idempotency_mechanism="dedup row and bill in one transaction",
)


@pytest.fixture
def site(letters: Letters, tmp_path: Path) -> Iterator[ConnectorWorld]:
    mode = "asyncio" if letters.database.asynchronous else "threads"
    with site_at(World(mode), tmp_path / "boundary") as built:
        built.clock = letters.clock
        yield built


def fail(*_: Any) -> None:
    raise RuntimeError("no connection")


def refuse_second(transaction: Transaction, *_: Any) -> None:
    if transaction.id == "m2":
        raise TransactionException("no such batch", category=ExceptionCategory.BUSINESS)


def put(site: ConnectorWorld, *numbers: int) -> None:
    site.dispatch(site.connector(), *(made(number, "batch:one") for number in numbers))


@pytest.mark.req("BC-20")
def test_a_fact_that_fails_for_good_is_in_the_store_before_the_cursor_passes_it(
    site: ConnectorWorld, letters: Letters
) -> None:
    put(site, 1, 2, 3)
    source = letters.around(site.connector())
    in_store: list[tuple[int, int]] = []
    site.on_confirm = lambda offset: in_store.append((offset, letters_now(site, letters)))
    assert letters.consume(source, refuse_second, batch=1).failed == 1
    assert in_store == [(1, 0), (2, 1), (3, 1)]
    assert site.cursor() == 3
    letter = letters.one()
    assert (letter.message_id, letter.event_type, letter.aggregate_id) == ("m2", "made", "batch:one")
    assert (letter.category, letter.attempts, letter.deaths) == (Category.BUSINESS, 1, 1)
    assert decode(letters.body(letter.id)).payload == made(2, "batch:one").payload


def letters_now(site: ConnectorWorld, letters: Letters) -> int:
    """How many letters there are, asked during an asyncio run too."""
    query = "SELECT count(*) FROM onceward_dead_letters"
    if not site.world.asynchronous:
        return int(letters.database.scalar(query))
    from sqlalchemy import create_engine, text

    engine = create_engine(letters.database.url, connect_args=letters.database.connect_args)
    with engine.connect() as connection:
        count = connection.scalar(text(query))
    engine.dispose()
    return int(count or 0)


@pytest.mark.req("BC-20")
def test_a_fact_that_fails_repeatedly_is_buried_with_its_history(
    site: ConnectorWorld, letters: Letters
) -> None:
    put(site, 1, 2)
    source = letters.around(site.connector(max_deliveries=3))
    for _ in range(3):
        assert letters.count() == 0
        letters.consume(source, fail)
        letters.advance(60)
    assert letters.count() == 2
    letter = next(each for each in letters.find() if each.message_id == "m1")
    assert (letter.attempts, letter.reason, letter.category) == (3, "max_deliveries", Category.INFRASTRUCTURE)
    assert [each.attempt for each in letter.history] == [1, 2, 3]
    assert site.cursor() == 2


@pytest.mark.req("BC-20")
def test_without_a_store_the_cursor_stays_and_the_fact_is_tried_for_ever(
    site: ConnectorWorld, letters: Letters
) -> None:
    put(site, 1, 2, 3)
    connector = site.connector(max_deliveries=2)
    letters.consume(connector, refuse_second)
    for _ in range(5):
        letters.advance(60)
        assert letters.consume(connector, refuse_second).failed == 1
    assert site.cursor() == 1
    letters.advance(60)
    assert letters.consume(connector, lambda _: None).succeeded == 1
    assert site.cursor() == 3


@pytest.mark.req("BC-20")
def test_while_the_store_is_away_the_cursor_stays(
    site: ConnectorWorld, letters: Letters, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    put(site, 1, 2, 3)
    source = letters.around(site.connector())

    async def away(*_: Any) -> None:
        raise ConnectionError("the store is away")

    with monkeypatch.context() as patched, caplog.at_level(logging.ERROR):
        patched.setattr(letters.made.operations, "take_over", away)
        letters.consume(source, refuse_second)
    assert "the store is away" in caplog.text
    assert (site.cursor(), letters.count()) == (1, 0)
    letters.consume(source, refuse_second)
    assert (site.cursor(), letters.count()) == (3, 1)


@pytest.mark.req("BC-20")
def test_who_ends_between_burying_and_confirming_buries_it_in_the_same_letter_again(
    site: ConnectorWorld, letters: Letters
) -> None:
    put(site, 1, 2, 3)

    def away(offset: int) -> None:
        if offset > 1:
            raise ConnectionError("the boundary is away")

    site.on_confirm = away
    with pytest.raises(Exception, match="the boundary is away"):
        letters.consume(letters.around(site.connector()), refuse_second, batch=1)
    assert (site.cursor(), letters.count()) == (1, 1)
    site.on_confirm = lambda _: None
    letters.advance(1)
    letters.consume(letters.around(site.connector()), refuse_second)
    letter = letters.one()
    assert (site.cursor(), letter.deaths, letter.status) == (3, 2, Status.OPEN)


def bill(transaction: Transaction, session: Any) -> Any:
    values = {"id": transaction.id, "amount": transaction.payload["object"]["number"]}
    return session.execute("INSERT INTO bills VALUES (:id, :amount)", values)


def billed(letters: Letters) -> list[Any]:
    return [row["id"] for row in letters.rows("SELECT id FROM bills ORDER BY id")]


@pytest.mark.req("BC-20")
def test_a_redriven_fact_has_its_effect_once(site: ConnectorWorld, letters: Letters) -> None:
    letters.database.do("CREATE TABLE bills (id text, amount integer)")
    inbox = letters.inbox(CONTRACT)
    put(site, 1, 2, 3)
    source = letters.around(site.connector())

    def bill_others(transaction: Transaction, session: Any) -> Any:
        refuse_second(transaction)
        return bill(transaction, session)

    letters.consume(source, bill_others, inbox=inbox, promised=CONTRACT)
    assert (billed(letters), site.cursor()) == (["m1", "m3"], 3)
    letters.send_again(MADE)
    letters.advance(60)
    assert letters.consume(source, bill, inbox=inbox, promised=CONTRACT).succeeded == 1
    assert billed(letters) == ["m1", "m2", "m3"]
    assert letters.one().status is Status.RESOLVED


def test_facts_that_come_again_are_duplicates_for_the_inbox(site: ConnectorWorld, letters: Letters) -> None:
    """Two readers with one name, and one that begins again because nothing was confirmed."""
    letters.database.do("CREATE TABLE bills (id text, amount integer)")
    inbox = letters.inbox(CONTRACT)
    put(site, *range(1, 6))
    ending = "_async" if letters.database.asynchronous else ""
    one, two = site.connector(), site.connector()
    letters.run(
        getattr(two, f"fetch_transactions{ending}")(1)
    )  # `two` has the first in flight, and holds the rest back

    def away(_: int) -> None:
        raise ConnectionError("the boundary is away")

    site.on_confirm = away
    with pytest.raises(Exception, match="the boundary is away"):
        letters.consume(one, bill, inbox=inbox, promised=CONTRACT)
    site.on_confirm = lambda _: None
    done = len(
        billed(letters)
    )  # a slow machine may learn that the boundary is away before it has done all of them
    assert done > 0
    report = letters.consume(site.connector(), bill, inbox=inbox, promised=CONTRACT)
    assert (report.succeeded, report.duplicates) == (5, done)
    letters.advance(61)
    report = letters.consume(two, bill, inbox=inbox, promised=CONTRACT)
    assert report.failed == 0
    assert billed(letters) == [f"m{number}" for number in range(1, 6)]
    assert site.cursor() == 5


def test_a_fact_that_no_transaction_can_hold_is_buried_as_it_is_and_hides_nothing(
    site: ConnectorWorld, letters: Letters
) -> None:
    put(site, 1)
    nanoseconds = envelope_for(
        "odd", from_zone="a", to_zone="b", produced_at_unix_ms=1_700_000_000_000_000_000
    )
    letters.run(site.client.append(nanoseconds, fact_of("batch:one", "made", {"number": 2})))
    put(site, 3)
    connector = site.connector()
    assert letters.consume(connector, lambda _: None).succeeded == 2
    assert site.cursor() == 1, "without a store, it holds the cursor"
    letters.consume(letters.around(connector), lambda _: None)
    assert site.cursor() == 3
    letter = letters.one()
    assert (letter.category, letter.reason) == (Category.CONTRACT, "undecodable")
    assert msgspec.json.decode(letters.body(letter.id), type=StoredFact).message_id == "odd"
