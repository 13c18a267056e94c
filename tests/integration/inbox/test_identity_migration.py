"""Records from when an event's day was part of its identity are recognized now, and are not lost on the way back."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import Engine, create_engine, text

from onceward.deadletters import DeadLetters
from onceward.errors import ConfigurationError
from onceward.inbox import AsyncInbox, Breach, Contract, ContractError, Event, Inbox
from onceward.inbox.stores import partitions
from tests.support.inbox import earlier
from tests.support.inbox.ids import uuid7_of

if TYPE_CHECKING:
    from tests.support.databases import Database

pytest_plugins = ("tests.support.databases",)

CONTRACT = Contract(
    consumer_id="billing", event_types=["*"], owner_team="money", idempotency_mechanism="inbox"
)
DAY = 20_500
UUID4 = "8b1c2e76-0f7e-4f0e-9a5d-3f6a1c2b4d5e"
OTHER_UUID4 = "1111111a-2222-4333-8444-55555555555f"
UUID7 = uuid7_of(DAY, "a")
HEX7 = uuid7_of(DAY, "b")
BRACED7 = uuid7_of(DAY + 7, "c")
FROM_1970 = uuid7_of(0, "d")
FIRST, SECOND = {"amount": 1}, {"amount": 2}

RECORDS: list[tuple[str, int, float, dict[str, int]]] = [
    ("order-1", DAY, 10.0, FIRST),
    ("order-1", DAY + 1, 20.0, SECOND),
    ("order-1", DAY + 2, 5.0, FIRST),
    ("order-2", DAY, 10.0, FIRST),
    ("Order-2", DAY, 10.0, FIRST),
    (UUID4.upper(), DAY, 11.0, SECOND),
    (UUID4.replace("-", ""), DAY, 9.0, FIRST),
    (UUID4, DAY + 1, 12.0, SECOND),
    (f" {OTHER_UUID4}\u2003", DAY, 10.0, FIRST),
    (UUID7, DAY, 10.0, FIRST),
    (UUID7.replace("-", ""), DAY, 9.0, FIRST),
    (HEX7.replace("-", ""), DAY, 10.0, FIRST),
    (f"{{{BRACED7}}}", DAY + 1, 10.0, FIRST),
    (f"urn:uuid:{BRACED7.upper()}", DAY, 11.0, FIRST),
    (FROM_1970, 0, 10.0, FIRST),
    ("0" * 31, DAY, 10.0, FIRST),
    (f"{{{'0' * 32}", DAY, 10.0, FIRST),
]
KNOWN = ["order-1", "order-2", "Order-2", UUID4, OTHER_UUID4, UUID7, HEX7, BRACED7, FROM_1970]
"""The first time counts, with its payload: FIRST for each."""


def event(tracking_id: str, payload: dict[str, int], day: int = DAY + 3) -> Event:
    created_at = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(days=day)
    return Event(tracking_id=tracking_id, event_type="paid", created_at=created_at, payload=payload)


class OldInbox:
    def __init__(self, database: Database) -> None:
        self.database = database
        self.engine: Engine = create_engine(database.url, connect_args=database.connect_args)
        self.beside = Inbox(self.engine)
        self.inbox: Any = (AsyncInbox if database.asynchronous else Inbox)(database.default)
        with self.engine.begin() as connection:
            earlier.make_tables(connection)
        with self.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            earlier.make_days(connection, 0, DAY, DAY + 1, DAY + 2)

    def migrate(self, back_to: int | None = None) -> list[str]:
        result = self.inbox.migrate(back_to=back_to)
        names: list[str] = self.database.run(result) if self.database.asynchronous else result
        return names

    def fill(self) -> None:
        with self.engine.begin() as connection:
            earlier.insert(
                connection,
                "onceward_consumers",
                consumer_id="billing",
                contract="{}",
                registered_at=0,
                updated_at=time.time(),  # a time long ago would be a reason to doubt the clock
            )
            for consumer_id in ("billing", "mail"):
                for tracking_id, day, at, payload in RECORDS:
                    earlier.insert(
                        connection,
                        "onceward_dedup",
                        event_day=day,
                        consumer_id=consumer_id,
                        tracking_id=tracking_id,
                        payload_sha256=event("x", payload).digest.payload,
                        processed_at=at,
                        outcome="done",
                    )

    def everything(self) -> dict[str, list[tuple[Any, ...]]]:
        with self.engine.connect() as connection:
            return earlier.everything(connection)

    def count(self, table: str) -> int:
        with self.engine.connect() as connection:
            return int(connection.execute(text(f"SELECT count(*) FROM {table}")).scalar_one())


@pytest.fixture
def old(database: Database) -> Iterator[OldInbox]:
    made = OldInbox(database)
    yield made
    made.engine.dispose()


@pytest.fixture
def old_postgresql(postgresql: Database) -> Iterator[OldInbox]:
    made = OldInbox(postgresql)
    yield made
    made.engine.dispose()


def never(given: Event, session: Any) -> None:
    raise AssertionError(f"{given.tracking_id} ran again")


@pytest.mark.req("CC-054", "CC-055")
def test_all_earlier_records_are_recognized_on_any_day_and_in_any_spelling(old: OldInbox) -> None:
    old.fill()
    assert old.migrate()[0] == "0005 identity"
    old.beside.register(CONTRACT)
    for tracking_id in KNOWN:
        assert old.beside.process(CONTRACT, event(tracking_id, FIRST), never).duplicate, tracking_id
        if "order" not in tracking_id.lower():
            copy = event(f"{{{tracking_id.upper()}}}", FIRST, day=DAY - 5)
            assert old.beside.process(CONTRACT, copy, never).duplicate, tracking_id
    with pytest.raises(ContractError) as refused:
        old.beside.process(CONTRACT, event("order-1", SECOND), never)
    assert refused.value.kind is Breach.CONFLICT
    assert old.count("onceward_dedup") + old.count("onceward_copies") == 2 * len(RECORDS)


@pytest.mark.req("CC-054")
def test_the_way_back_restores_every_record_and_keeps_those_made_since(old: OldInbox) -> None:
    old.fill()
    before = old.everything()
    for _ in range(2):
        old.migrate()
        assert old.migrate(back_to=4)[-1] == "0005 identity"
        assert old.everything() == before
    old.migrate()
    old.beside.register(CONTRACT)
    handled: list[str] = []
    for tracking_id in ("new", "22222222-2222-4333-8444-555555555555", uuid7_of(DAY, "new")):
        old.beside.process(
            CONTRACT, event(tracking_id, FIRST), lambda given, _: handled.append(given.tracking_id)
        )
    old.migrate(back_to=4)
    after = old.everything()["onceward_dedup"]
    assert set(before["onceward_dedup"]) < set(after)
    made = {row[2]: row[0] for row in set(after) - set(before["onceward_dedup"])}
    assert made == {handled[0]: DAY + 3, handled[1]: DAY + 3, handled[2]: DAY}
    with pytest.raises(ConfigurationError, match="migration 5"):
        old.beside.check_tables()


@pytest.mark.req("CC-054", "CC-055")
def test_ledgers_holds_and_dead_letters_get_the_one_spelling_and_back(old: OldInbox) -> None:
    hexed, upper = UUID4.replace("-", ""), UUID4.upper()
    attempt = {"consumer_id": "billing", "event_day": DAY, "ends": 1, "last_at": 1.0}
    effect = {"consumer_id": "billing", "event_day": DAY, "lock_token": 1, "intended_at": 1.0}
    letter = {
        "consumer": "billing",
        "origin": "q",
        "event_type": "",
        "category": "business",
        "reason": "failed",
    }
    letter |= {
        "error": "",
        "attempts": 1,
        "history": "[]",
        "first_failed_at": 1,
        "died_at": 1,
        "keep_until": 2,
    }
    with old.engine.begin() as connection:
        for id_, starts in ((hexed, 2), (upper, 1), ("e1", 1), (OTHER_UUID4.upper(), 4), (OTHER_UUID4, 3)):
            earlier.insert(connection, "onceward_attempts", tracking_id=id_, starts=starts, **attempt)
        for id_, name, state in (
            (hexed, "charge", "intended"),
            (upper, "charge", "done"),
            (upper, "mail", "intended"),
            ("e1", "charge", "done"),
        ):
            earlier.insert(
                connection,
                "onceward_effects",
                tracking_id=id_,
                name=name,
                state=state,
                effect_key=f"{id_}-1",
                **effect,
            )
        for id_ in (hexed, "e1", ""):
            earlier.insert(
                connection,
                "onceward_holds",
                consumer_id="billing",
                tracking_id=id_,
                reason="r",
                operator="o",
                placed_at=1,
            )
            earlier.insert(
                connection,
                "onceward_parked",
                consumer_id="billing",
                aggregate_id="a",
                tracking_id=id_,
                sequence=1,
                since=1,
            )
        for number, id_ in enumerate((hexed, upper, UUID4, "e1")):
            body = bytes([number % 2])
            earlier.insert(
                connection, "onceward_dead_letters", message_id=id_, body=body, body_sha256=body, **letter
            )
    before = old.everything()
    old.migrate()
    found = {
        table: {str(cell) for row in rows for cell in row} for table, rows in everything_now(old).items()
    }
    assert all(UUID4 in cells and "e1" in cells for cells in found.values())
    with old.engine.connect() as connection:
        keys = connection.execute(
            text(
                "SELECT name, state, effect_key FROM onceward_effects WHERE tracking_id = :id ORDER BY name"
            ),
            {"id": UUID4},
        ).all()
    assert [tuple(row) for row in keys] == [
        ("charge", "done", f"{upper}-1"),
        ("mail", "intended", f"{upper}-1"),
    ]
    assert old.migrate(back_to=4)
    assert old.everything() == before


@pytest.mark.req("CC-054", "CC-055")
def test_what_stays_in_another_spelling_can_be_released_and_resolved(old: OldInbox) -> None:
    upper = UUID4.upper()
    hold = {"consumer_id": "billing", "reason": "r", "operator": "o", "placed_at": 1}
    effect = {"consumer_id": "billing", "event_day": DAY, "lock_token": 1, "intended_at": 1.0}
    with old.engine.begin() as connection:
        for id_ in (UUID4, upper):
            earlier.insert(connection, "onceward_holds", tracking_id=id_, **hold)
            earlier.insert(
                connection,
                "onceward_effects",
                tracking_id=id_,
                name="charge",
                state="intended",
                effect_key=f"{id_}-1",
                **effect,
            )
    old.migrate()
    assert old.beside.release("billing", UUID4.replace("-", ""), reason="closed", operator="ann")
    assert old.beside.holds() == []
    letters = DeadLetters(old.engine)
    for given, left in ((upper, [UUID4]), (f"{{{UUID4}}}", [])):
        letters.resolve_effect("billing", given, "charge", happened=True, reason="asked", operator="ann")
        assert [row["tracking_id"] for row in old.beside.effects()] == left
    with pytest.raises(ConfigurationError, match="it is done"):
        letters.resolve_effect("billing", upper, "charge", happened=True, reason="asked", operator="ann")


def everything_now(old: OldInbox) -> dict[str, list[tuple[Any, ...]]]:
    with old.engine.connect() as connection:
        return {
            table: [tuple(row) for row in connection.execute(text(f"SELECT * FROM {table}"))]
            for table in earlier.LEDGERS
        }


@pytest.mark.req("CC-054")
def test_many_records_go_forth_and_back(old: OldInbox) -> None:
    """`python -m bench inbox_migration` does the same with a million."""
    count = 5_000
    with old.engine.begin() as connection:
        connection.execute(
            text(
                "INSERT INTO onceward_dedup (event_day, consumer_id, tracking_id, payload_sha256, processed_at) VALUES "
                "(:day, 'billing', :id, :digest, "
                + (":at)" if old.database.is_sqlite else "to_timestamp(:at))")
            ),
            [
                {
                    "day": DAY + n % 3,
                    "id": f"{n // 2:032x}" if n % 4 < 2 else f"order-{n // 2}",
                    "digest": b"",
                    "at": n,
                }
                for n in range(count)
            ],
        )
    before = old.everything()
    old.migrate()
    assert old.count("onceward_dedup") == count // 2, "two records of each event"
    assert old.count("onceward_copies") == count // 2
    old.migrate(back_to=4)
    assert old.everything() == before


@pytest.mark.req("CC-054")
def test_days_that_a_purge_has_detached_and_rows_it_has_kept_are_not_lost(old_postgresql: OldInbox) -> None:
    old = old_postgresql
    old.fill()
    before = old.everything()
    with old.engine.begin() as connection:
        connection.exec_driver_sql(
            f"ALTER TABLE onceward_dedup DETACH PARTITION {partitions.partition_of(DAY)}"
        )
        connection.exec_driver_sql(
            f"WITH gone AS (DELETE FROM onceward_dedup WHERE event_day = {DAY + 1} RETURNING *) "
            f"INSERT INTO onceward_kept ({', '.join(earlier.DEDUP)}) SELECT {', '.join(earlier.DEDUP)} FROM gone"
        )
    old.migrate()
    old.beside.register(CONTRACT)
    for tracking_id in KNOWN:
        assert old.beside.process(CONTRACT, event(tracking_id, FIRST), never).duplicate, tracking_id
    old.migrate(back_to=4)
    assert old.everything()["onceward_dedup"] == before["onceward_dedup"]


@pytest.mark.req("CC-054")
def test_the_way_back_ends_where_records_would_be_lost(old: OldInbox) -> None:
    old.fill()
    old.migrate()
    with pytest.raises(ConfigurationError, match="back to migration 4, not to 3: that would delete records"):
        old.migrate(back_to=3)


@pytest.mark.req("CC-053")
def test_a_purge_forgets_the_way_back_of_what_it_removes(old: OldInbox) -> None:
    old.fill()
    old.migrate()
    old.beside.register(CONTRACT)
    report = old.beside.purge("billing")
    assert report.rows > 0
    with old.engine.connect() as connection:
        for table in ("onceward_dedup", "onceward_copies", "onceward_spellings"):
            consumers = set(connection.execute(text(f"SELECT consumer_id FROM {table}")).scalars())
            assert consumers == {"mail"}, table
