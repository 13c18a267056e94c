"""`onceward balance`: conservation of messages on real sources, and its report when a message is taken away."""

from __future__ import annotations

import asyncio
import json
import re
import sqlite3
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest
from redis import Redis
from sqlalchemy import create_engine, text
from typer.testing import CliRunner, Result

from onceward import Onceward, Transaction
from onceward.app.build import open_task
from onceward.boundary import BoundaryClient
from onceward.boundary.stores.sqlite import SqliteBoundaryStore
from onceward.cli.main import app as commands
from onceward.connectors.codec import encode
from onceward.connectors.sqlite import SqliteConnector, statements
from onceward.connectors.urls import Address
from onceward.deadletters import DeadLetters, Filter, Rca
from onceward.inbox import Contract, InboxSession
from onceward.task.report import Report
from onceward.testing.servers import nats_server
from tests.support.balance_world import copy_database
from tests.support.boundary.server import boundary_server
from tests.support.every_redis import every_redis
from tests.support.inbox.databases import schema
from tests.support.schema import Schema

__all__ = ["schema"]


class Order(msgspec.Struct):
    total: int


class Shop:
    """An app with one consumer, and access to its source and its database."""

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
        with open_task(self.app, consumer) as task:
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

    def of_app(self, *options: str) -> Result:
        """As the app's owner asks, even before its first run."""
        sys.modules["shop_of_this_test"] = self  # type: ignore[assignment]  # a module is what has an `app`
        try:
            return balance("shop_of_this_test:app", *options)
        finally:
            del sys.modules["shop_of_this_test"]


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
    assert shop.of_app().exit_code == 0
    copy = order(1)
    shop.send(copy, order(2), order("x"), copy, order(4), order(5))
    result = shop.of_app("--json")
    assert (result.exit_code, json.loads(result.stdout)[0]["pending"]) == (0, 6)
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
    assert struck["problems"][0].startswith(
        "1 message is missing: 3 were appended, but only 2 are accounted for"
    )
    result = balance("--source", shop.source)
    assert result.exit_code == 1
    assert "It does not hold: 1 message is missing" in result.stderr


def test_a_row_that_somebody_smuggled_in_is_found(shop: Shop, tmp_path: Path) -> None:
    shop.send(order(1))
    execute(tmp_path / "orders.db", "INSERT INTO messages (enqueued_at, body) VALUES (0, '')")
    result = balance("--source", shop.source)
    assert result.exit_code == 1
    assert "1 message is present but not counted as appended" in result.stderr


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
    assert struck["problems"] == [
        f"1 dead letter is missing: moved to the database, which does not have it: {third.message_id}"
    ]
    assert struck["missing"] == [third.message_id]
    engine.dispose()


@pytest.mark.req("CC-121")
def test_a_copy_that_failed_before_another_one_succeeded_is_a_duplicate(
    tmp_path: Path, database: str, redis_url: str
) -> None:
    name = uuid.uuid4().hex
    with nats_server() as nats:
        for source in (
            f"sqlite:///{tmp_path}/orders.db?",
            f"{redis_url}/{name}?group=g&",
            f"{nats.url}/{name}?consumer=g&",
        ):
            shop = Shop(f"{source}on_failure=dead_letter", f"{database}{source.partition(':')[0]}")
            payloads = iter([{"total": "x"}, {"total": 1}])
            fail_if_bad = shop.fail_if_bad
            shop.fail_if_bad = lambda _, payloads=payloads, check=fail_if_bad: check(next(payloads))  # type: ignore[method-assign, misc]
            copy = order(1)
            shop.send(copy, copy)
            shop.consume()
            code, struck = shop.balanced()
            assert code == 0, struck
            assert numbers(struck) == {"appended": 2, "applied": 1, "duplicate": 1, "pending": 0, "dead": 0}


@pytest.mark.req("CC-121")
def test_a_letter_that_is_gone_while_something_with_its_id_is_done_leaves_it_unknown(shop: Shop) -> None:
    shop.send(order(1, id="e1"))
    shop.consume()
    shop.send(order(2, id="e1"))
    shop.consume()
    shop.consume()
    assert shop.balanced()[1]["dead"] == 1
    shop.execute("DELETE FROM onceward_dead_letters")
    code, struck = shop.balanced()
    assert (code, struck["problems"]) == (3, [])
    assert struck["unknown"][0].startswith("1 dead letter is not in the database; the inbox has done")


@pytest.mark.req("CC-073")
def test_without_a_contract_nothing_is_said_to_be_applied(tmp_path: Path, database: str) -> None:
    plain = Shop(f"sqlite:///{tmp_path}/orders.db", database, with_contract=False)
    copy = order(1)
    plain.send(copy, copy, order(3))
    plain.consume()
    result = plain.of_app("--json")
    [struck] = json.loads(result.stdout)
    assert (result.exit_code, struck["applied"], struck["duplicate"], struck["done"]) == (0, None, 0, 3)
    text = plain.of_app().stdout
    assert "applied" not in text
    assert "It holds: 3 appended = 3 done." in text


@pytest.mark.req("CC-071")
def test_a_source_alone_does_not_show_whether_what_it_acknowledged_was_applied(shop: Shop) -> None:
    shop.send(order(1), order(2))
    assert balance("--source", shop.source).exit_code == 0, "all of it is waiting"
    shop.consume()
    result = balance("--source", shop.source)
    assert result.exit_code == 3
    assert "2 messages are acknowledged; whether they were applied is in a database" in result.stderr


def test_a_file_from_before_the_counting_says_so_and_counts_from_its_next_opening_on(tmp_path: Path) -> None:
    path = tmp_path / "orders.db"
    with SqliteConnector(path) as queue:
        queue.dispatch_transactions([order(1), order(2)])
    later = ("tallies", "ended", "forgotten", "clock")
    execute(path, *(f"DROP TABLE {name}" for name in later), "PRAGMA user_version = 2")
    result = balance("--source", f"sqlite:///{path}", "--json")
    [struck] = json.loads(result.stdout)
    assert (result.exit_code, struck["appended"], struck["pending"]) == (3, None, 2)
    assert "an older onceward did not count" in struck["notes"]["appended"]
    with SqliteConnector(path) as queue:
        queue.dispatch_transactions([order(3)])
    [struck] = json.loads(balance("--source", f"sqlite:///{path}", "--json").stdout)
    assert (struck["appended"], struck["pending"]) == (3, 3)


# ── each message by its id ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.req("CC-070")
def test_a_record_that_somebody_deleted_is_missed_by_name(shop: Shop) -> None:
    shop.send(order(1, id="first"), order(2), order(2, id="third"))
    shop.consume()
    shop.execute("DELETE FROM onceward_dedup WHERE tracking_id = 'first'")
    code, struck = shop.balanced()
    assert (code, struck["missing"]) == (1, ["first"])
    assert struck["problems"] == ["1 message is acknowledged, but neither applied nor dead: first"]


@pytest.mark.req("CC-070")
def test_an_inbox_from_an_older_backup_lacks_messages_by_name(shop: Shop, tmp_path: Path) -> None:
    sent = [order(number) for number in range(12)]
    shop.send(*sent[:5])
    shop.consume()
    copy_database(tmp_path / "shop.db", tmp_path / "backup.db")
    shop.send(*sent[5:])
    shop.consume()
    assert shop.of_app().exit_code == 0
    copy_database(tmp_path / "backup.db", tmp_path / "shop.db")
    code, struck = shop.balanced()
    assert (code, struck["applied"]) == (1, 5)
    assert struck["missing"] == [each.id for each in sent[5:]]
    text = shop.of_app("--verbose").stdout
    assert all(f"missing: {each.id}" in text for each in sent[5:])


def consume_under_another_name(shop: Shop) -> None:
    shop.send(order(1, id="first"), order(2, id="second"))
    shop.consume()
    for table in ("onceward_dedup", "onceward_consumers"):
        shop.execute(f"UPDATE {table} SET consumer_id = 'charging'")


@pytest.mark.req("CC-153")
def test_what_a_consumer_did_under_an_earlier_name_is_not_said_to_be_missing(shop: Shop) -> None:
    consume_under_another_name(shop)
    result = shop.of_app("--json")
    [struck] = json.loads(result.stdout)
    assert (result.exit_code, struck["missing"]) == (3, [])
    assert struck["unknown"] == [
        "2 messages have a record of consumer charging, and billing has none at all: it was renamed, or its records "
        "are lost: first, second"
    ]
    shop.execute("DELETE FROM onceward_dedup WHERE tracking_id = 'first'")
    [struck] = json.loads(shop.of_app("--json").stdout)
    assert struck["missing"] == ["first"]


@pytest.mark.req("CC-153")
def test_records_of_another_consumer_do_not_stand_for_those_of_this_one(shop: Shop) -> None:
    consume_under_another_name(shop)
    shop.send(order(3))
    shop.consume()
    assert shop.balanced()[1]["missing"] == ["first", "second"]


@pytest.mark.req("CC-153")
def test_nor_do_those_of_a_name_that_the_app_no_longer_has(shop: Shop) -> None:
    consume_under_another_name(shop)
    shop.send(order(3))
    shop.consume()
    result = shop.of_app("--json")
    [struck] = json.loads(result.stdout)
    assert (result.exit_code, struck["missing"]) == (3, [])
    assert (
        "charging, which the app no longer has: it was renamed, or its records are lost"
        in struck["unknown"][0]
    )
    contract = Contract(
        consumer_id="charging", event_types=["*"], owner_team="x", idempotency_mechanism="one transaction"
    )

    @shop.app.consumer("memory://charging", contract=contract)
    def charging(order: Any, session: InboxSession) -> None: ...

    result = shop.of_app("--json", "--consumer", "charge")
    [struck] = json.loads(result.stdout)
    assert (result.exit_code, struck["missing"]) == (1, ["first", "second"])


@pytest.mark.req("CC-070")
def test_an_event_is_followed_by_the_id_in_its_metadata(shop: Shop) -> None:
    shop.send(order(1, metadata={"tracking_id": "event-1"}), order(2))
    shop.consume()
    assert shop.balanced()[0] == 0
    shop.execute("DELETE FROM onceward_dedup WHERE tracking_id = 'event-1'")
    assert shop.balanced()[1]["missing"] == ["event-1"]


@pytest.mark.req("CC-070")
def test_ids_beyond_those_that_a_queue_keeps_are_compared_by_number(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(statements, "KEPT", 10)
    sent = [order(number) for number in range(30)]
    shop.send(*sent)
    shop.consume()
    code, struck = shop.balanced()
    assert (code, struck["applied"], struck["gone"]) == (0, 30, 0)
    shop.send(sent[0])
    shop.consume()
    code, struck = shop.balanced()
    assert code == 3, "a copy of one that it no longer lists looks the same as a lost record"
    assert "20 messages are done and no longer in the source, but only 19" in struck["unknown"][0]
    shop.execute(f"DELETE FROM onceward_dedup WHERE tracking_id = '{sent[-1].id}'")
    assert shop.balanced()[1]["missing"] == [sent[-1].id]


@pytest.mark.req("CC-070")
def test_ids_of_ended_messages_that_somebody_removed_leave_it_unknown(shop: Shop, tmp_path: Path) -> None:
    shop.send(order(1), order(2))
    shop.consume()
    execute(tmp_path / "orders.db", "UPDATE tallies SET done = done - 1")
    assert "the queue's file lists 1 message more than it has counted as ended" in str(shop.balanced()[1])
    execute(tmp_path / "orders.db", "UPDATE tallies SET done = done + 1")
    execute(tmp_path / "orders.db", "DELETE FROM ended")
    code, struck = shop.balanced()
    assert code == 3
    assert "2 ids of messages that ended were removed from the queue's file" in struck["unknown"]
    execute(tmp_path / "orders.db", "DELETE FROM tallies")
    code, struck = shop.balanced()
    assert (code, struck["appended"]) == (3, None)
    assert "its count was removed from the queue's file" in struck["unknown"][0]


@pytest.mark.req("CC-070")
def test_a_queue_from_before_ids_were_kept_is_compared_by_number(shop: Shop, tmp_path: Path) -> None:
    shop.send(order(1), order(2), order("x"))
    shop.consume()
    shop.consume()
    older = [f"DROP TABLE {name}" for name in ("ended", "forgotten", "clock")]
    execute(tmp_path / "orders.db", *older, "PRAGMA user_version = 3")
    assert numbers(shop.balanced()[1])["applied"] == 2
    shop.send(order(4))
    shop.consume()
    code, struck = shop.balanced()
    assert code == 0
    assert numbers(struck) == {"appended": 4, "applied": 3, "duplicate": 0, "pending": 0, "dead": 1}
    shop.execute(
        "DELETE FROM onceward_dedup WHERE tracking_id IN (SELECT min(tracking_id) FROM onceward_dedup)"
    )
    assert shop.balanced()[0] in (1, 3)


@pytest.mark.req("CC-072")
def test_copies_of_refused_messages_balance(shop: Shop) -> None:
    sent = [order("x") for _ in range(20)]
    shop.send(*(each for each in sent for _ in range(2)))
    shop.consume()
    shop.consume()
    code, struck = shop.balanced()
    assert (code, struck["problems"]) == (0, [])
    assert numbers(struck) == {"appended": 40, "applied": 0, "duplicate": 20, "pending": 0, "dead": 20}
    shop.send(*sent[:5])
    shop.consume()
    shop.consume()
    assert numbers(shop.balanced()[1])["duplicate"] == 25


@pytest.mark.req("CC-072")
def test_letters_that_were_purged_are_not_missed_and_younger_ones_are(shop: Shop) -> None:
    shop.send(order("x"), order("y"), order("x"))
    shop.consume()
    shop.consume()
    later = time.time() + 91 * 86400
    engine = create_engine(shop.database)
    letters = DeadLetters(engine, clock=lambda: later)
    first, second, _ = letters.find(Filter(), limit=10)
    letters.discard(Filter(ids=(first.id, second.id)), reason="a test order", operator="me")
    shop.execute(f"UPDATE onceward_dead_letters SET keep_until = {later + 9e6} WHERE id = {second.id}")
    assert letters.purge(operator="me") == 1
    engine.dispose()
    code, struck = shop.balanced()
    assert (code, struck["dead"], struck["gone"], struck["dropped"]) == (
        0,
        1,
        1,
        {"discarded by an operator": 1},
    )
    now = time.time()
    shop.execute("DROP TRIGGER onceward_audit_is_not_changed")
    shop.execute(f"UPDATE onceward_audit SET at = '{datetime.fromtimestamp(now, UTC).isoformat()}'")
    code, struck = shop.balanced()
    assert (code, struck["missing"]) == (1, [first.message_id]), "today's purge cannot have removed it"


# ── before the first message, and with mistyped names ───────────────────────────────────────────────────


def test_an_app_before_its_first_message_says_that_nothing_was_sent(shop: Shop, tmp_path: Path) -> None:
    result = shop.of_app()
    assert result.exit_code == 0
    assert "nothing has been sent yet: there is no file orders.db" in result.stdout
    assert "It holds: nothing was appended." in result.stdout
    assert list(tmp_path.iterdir()) == [], "it has only read"


def test_an_app_before_its_first_run_says_that_nothing_was_consumed_and_is_checked(
    shop: Shop, tmp_path: Path
) -> None:
    shop.send(order(1), order(2))
    result = shop.of_app()
    assert result.exit_code == 0
    assert "nothing has been consumed yet" in result.stdout
    assert "without a contract" not in result.stdout
    assert "It holds: 2 appended = 2 pending." in result.stdout
    execute(tmp_path / "orders.db", "DELETE FROM messages WHERE seq = 1")
    assert shop.of_app().exit_code == 1


def test_messages_that_are_done_without_a_trace_in_the_database_are_missed(
    shop: Shop, tmp_path: Path
) -> None:
    shop.send(order(1), order(2))
    shop.consume()
    assert shop.of_app().exit_code == 0
    (tmp_path / "shop.db").unlink()
    result = shop.of_app()
    assert result.exit_code == 1
    assert "2 messages are acknowledged, but neither applied nor dead" in result.stderr


def test_a_queue_that_nobody_has_used_holds(tmp_path: Path) -> None:
    SqliteConnector(tmp_path / "orders.db").close()
    result = balance("--source", f"sqlite:///{tmp_path}/orders.db")
    assert (result.exit_code, "It holds: nothing was appended." in result.stdout) == (0, True)


@pytest.mark.parametrize("made_again", [False, True], ids=["removed", "made-again"])
def test_a_queue_whose_file_was_removed_is_not_said_to_have_had_nothing(
    shop: Shop, tmp_path: Path, made_again: bool
) -> None:
    shop.send(order(1), order(2), order("x"))
    shop.consume()
    for left in tmp_path.glob("orders.db*"):
        left.unlink()
    if made_again:
        shop.consume()
    assert cannot_be_reported(shop.of_app())


def test_a_file_that_is_not_there_or_no_database_ends_with_2(tmp_path: Path) -> None:
    (tmp_path / "letter.db").write_text("Dear database, " * 100)
    for name, problem in (("nowhere.db", "there is no file"), ("letter.db", "cannot be read")):
        result = balance("--source", f"sqlite:///{tmp_path}/{name}")
        assert result.exit_code == 2
        assert problem in result.stderr
        assert str(tmp_path / name) in result.stderr
        assert result.stdout == ""


def test_a_database_that_is_not_there_or_has_no_inbox_ends_with_2(shop: Shop, tmp_path: Path) -> None:
    shop.send(order(1))
    execute(tmp_path / "other.db", "CREATE TABLE bills (id)")
    for name, problem in (("nowhere.db", "does not exist"), ("other.db", "has no tables of an inbox")):
        database = f"sqlite:///{tmp_path}/{name}"
        result = balance("--source", shop.source, "--consumer", "billing", "--database", database)
        assert result.exit_code == 2
        assert f"database {database} {problem}; check the URL" in result.stderr


def test_a_consumer_that_the_database_does_not_know_is_named(shop: Shop) -> None:
    shop.send(order(1))
    shop.consume()
    result = balance("--source", shop.source, "--consumer", "biling", "--database", shop.database)
    assert result.exit_code == 3
    assert "the database has nothing of consumer 'biling' (registered: billing)" in result.stderr


def test_a_stream_or_group_that_is_not_there_ends_with_2(redis_url: str, database: str) -> None:
    name = uuid.uuid4().hex
    result = balance("--source", f"{redis_url}/{name}?group=billing")
    assert (result.exit_code, f"there is no stream '{name}'" in result.stderr) == (2, True)
    shop = Shop(f"{redis_url}/{name}?group=billing", database)
    shop.send(order(1))
    assert balance("--source", shop.source).exit_code == 0, "no consumer has run yet, under any name"
    shop.consume()
    result = balance("--source", f"{redis_url}/{name}?group=biling")
    assert (result.exit_code, "has no group 'biling', only billing" in result.stderr) == (2, True)
    other = Shop(f"{redis_url}/{name}?group=mailing", database)
    assert "nothing has been consumed yet" in other.of_app().stdout


def test_an_app_counts_in_the_database_that_its_code_names(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop.send(order(1))
    shop.consume()
    monkeypatch.setenv("ONCEWARD_DATABASE", "sqlite:///elsewhere.db")
    result = shop.of_app()
    assert (result.exit_code, "It holds: 1 appended = 1 applied." in result.stdout) == (0, True)


def test_without_the_app_the_database_may_be_named_by_a_file(
    shop: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop.send(order(1))
    shop.consume()
    monkeypatch.chdir(tmp_path)
    Path("onceward.toml").write_text(f'database = "{shop.database}"')
    result = balance("--source", shop.source, "--consumer", "billing")
    assert "It holds: 1 appended = 1 applied." in result.stdout


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
    assert shop.of_app().exit_code == 0
    copy = order(1)
    shop.send(copy, order(2), order("x"), copy, order(4), order(5))
    assert json.loads(shop.of_app("--json").stdout)[0]["pending"] == 6
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


def cannot_be_reported(result: Result) -> bool:
    assert result.exit_code == 3, "it is unknown whether it was lost or never there"
    assert "It holds" not in result.stdout
    return "the source is empty, but this consumer has had messages" in result.stderr


def test_a_redis_that_lost_everything_is_not_said_to_have_had_nothing(
    stream: tuple[Shop, Redis, str],
) -> None:
    shop, redis, name = stream
    shop.send(order(1), order(2), order("x"))
    shop.consume()
    redis.delete(*redis.scan_iter(f"*{name}*"))
    assert cannot_be_reported(shop.of_app())
    shop.consume()
    assert redis.exists(name), "a consumer makes it again"
    assert cannot_be_reported(shop.of_app())
    assert cannot_be_reported(
        balance("--source", shop.source, "--database", shop.database, "--consumer", "billing")
    )
    shop.send(order(3))
    shop.consume()
    code, struck = shop.balanced()
    assert (code, struck["appended"], struck["applied"]) == (3, 1, 1)
    assert "the database has 3 more records of this consumer" in struck["unknown"][0]


def test_dead_letters_of_a_stream_that_was_lost_are_reported_of_without_a_contract(
    redis_url: str, database: str
) -> None:
    name = uuid.uuid4().hex
    plain = Shop(f"{redis_url}/{name}?on_failure=dead_letter", database, with_contract=False)
    plain.send(order("x"))
    plain.consume()
    plain.consume()
    with Redis.from_url(redis_url) as redis:
        redis.delete(*redis.scan_iter(f"*{name}*"))
    assert cannot_be_reported(plain.of_app())


@pytest.mark.req("CC-071")
@every_redis
@pytest.mark.parametrize("remove", ["xdel", "xtrim"])
@pytest.mark.parametrize("consumed", [0, 2])
def test_unread_entries_that_somebody_removed_are_missing_on_every_redis(
    stream: tuple[Shop, Redis, str], remove: str, consumed: int
) -> None:
    shop, redis, name = stream
    shop.send(*(order(number) for number in range(6)))
    if consumed:
        shop.consume(limit=consumed)
    entries = [entry for entry, _ in redis.xrange(name)]
    if remove == "xdel":
        redis.xdel(name, entries[-1], entries[-2])
    else:
        redis.xtrim(name, maxlen=4 - consumed, approximate=False)
    code, struck = shop.balanced() if consumed else (shop.of_app("--json").exit_code, {})
    assert code == 1
    if consumed:
        assert struck["problems"][0].startswith("2 messages are missing: 6 were appended, but only 4")
    shop.consume()
    assert shop.of_app().exit_code == 1, "also when the others are done"


@pytest.mark.req("CC-071")
@every_redis
def test_entries_that_somebody_removed_while_in_flight_leave_it_unknown(
    stream: tuple[Shop, Redis, str],
) -> None:
    shop, redis, name = stream
    shop.send(order(1), order(2), order(3))
    shop.consume(limit=1)
    [[_, [(entry, _)]]] = redis.xreadgroup("g", "somebody", {name: ">"}, count=1)
    assert shop.balanced()[0] == 0, "it is pending"
    redis.xdel(name, entry)
    code, struck = shop.balanced()
    assert (code, struck["pending"]) == (3, 2)
    assert "1 entry in flight cannot be delivered again" in struck["unknown"][0]


@pytest.mark.req("CC-071")
@every_redis
def test_entries_that_are_removed_after_they_were_done_are_not_missing(
    stream: tuple[Shop, Redis, str],
) -> None:
    shop, redis, name = stream
    shop.send(*(order(number) for number in range(6)), order("x"))
    shop.consume()
    shop.consume()
    shop.send(order(7))
    redis.xtrim(name, maxlen=1, approximate=False)
    code, struck = shop.balanced()
    assert code == 0
    assert numbers(struck) == {"appended": 8, "applied": 6, "duplicate": 0, "pending": 1, "dead": 1}
    shop.execute(
        "DELETE FROM onceward_dedup WHERE tracking_id IN (SELECT min(tracking_id) FROM onceward_dedup)"
    )
    code, struck = shop.balanced()
    assert code == 3, "a copy looks the same"
    assert (
        "7 messages are done and no longer in the source, but only 6 of them have a record"
        in struck["unknown"][0]
    )


@pytest.mark.req("CC-071")
@every_redis
@pytest.mark.parametrize("entry", ["0", "1", "2"])
def test_a_group_that_was_moved_back_gets_its_entries_again(
    stream: tuple[Shop, Redis, str], entry: str
) -> None:
    shop, redis, name = stream
    shop.send(*(order(number) for number in range(4)), order("x"))
    shop.consume()
    shop.send(order(7))
    entries = [b"0", *(each for each, _ in redis.xrange(name))]
    (group,) = (each["name"] for each in redis.xinfo_groups(name))
    redis.xgroup_setid(name, group, entries[int(entry)])
    code, struck = shop.balanced()
    assert (code, struck["appended"], struck["pending"]) == (3, 6, 6 - int(entry))
    assert len(struck["unknown"]) == 1
    assert "somebody moved the group back" in struck["unknown"][0]
    shop.consume()
    code, struck = shop.balanced()
    assert (code, numbers(struck)) == (
        0,
        {"appended": 6, "applied": 5, "duplicate": 0, "pending": 0, "dead": 1},
    )


@pytest.mark.req("CC-071")
@every_redis
def test_a_stream_that_was_deleted_is_missed_with_what_waited_in_it(stream: tuple[Shop, Redis, str]) -> None:
    shop, redis, name = stream
    shop.send(order(1), order(2))
    shop.consume()
    redis.delete(name)
    result = shop.of_app()
    assert (result.exit_code, "It holds: 2 appended = 2 applied." in result.stdout) == (0, True)
    shop.send(order(3), order(4))
    shop.consume(limit=1)
    redis.delete(name)
    shop.send(order(5))
    shop.consume()
    code, struck = shop.balanced()
    assert code == 1
    assert struck["problems"][0].startswith("1 message is missing: 5 were appended, but only 4")


@pytest.mark.req("CC-122")
@every_redis
@pytest.mark.parametrize("with_contract", [True, False], ids=["contract", "plain"])
def test_a_stream_that_was_deleted_before_anybody_read_it_is_missing(
    redis_url: str, database: str, with_contract: bool
) -> None:
    name = uuid.uuid4().hex
    shop = Shop(f"{redis_url}/{name}?group=g", database, with_contract=with_contract)
    shop.send(order(1), order(2), order(3))
    with Redis.from_url(redis_url) as redis:
        redis.delete(name)
    result = shop.of_app()
    assert result.exit_code == 1
    assert "3 messages are missing: 3 were appended, but only 0 are accounted for" in result.stderr
    assert balance("--source", shop.source).exit_code == 1


@pytest.mark.req("CC-122")
@every_redis
@pytest.mark.parametrize("with_contract", [True, False], ids=["contract", "plain"])
def test_what_a_group_may_have_had_of_a_deleted_stream_is_unknown_and_not_done(
    redis_url: str, database: str, with_contract: bool
) -> None:
    """Another group has had it, and nothing was counted for this one."""
    name = uuid.uuid4().hex
    other = Shop(f"{redis_url}/{name}?group=other", f"{database}.other")
    other.send(order(1), order(2), order(3))
    other.consume()
    with Redis.from_url(redis_url) as redis:
        redis.delete(name)
    shop = Shop(f"{redis_url}/{name}?group=g", database, with_contract=with_contract)
    result = shop.of_app("--json")
    [struck] = json.loads(result.stdout)
    assert (result.exit_code, struck["applied"] or 0, struck["done"], struck["gone"]) == (3, 0, 0, 3)
    assert struck["unknown"] == [
        "3 messages are no longer in the source, and nothing shows what became of them: they were consumed, or "
        "removed before that"
    ]
    assert other.of_app().exit_code == 0


@pytest.mark.req("CC-071")
@every_redis
def test_entries_of_other_programs_are_counted_by_redis_or_make_it_unknown(
    stream: tuple[Shop, Redis, str],
) -> None:
    shop, redis, name = stream
    shop.send(order(1))
    theirs = order(2)
    redis.xadd(name, {"id": theirs.id, "body": encode(theirs)})
    shop.send(order(3))
    shop.consume()
    code, struck = shop.balanced()
    if "entries-added" in redis.xinfo_stream(name):
        assert (code, struck["appended"], struck["applied"]) == (0, 3, 3)
    else:
        assert (code, struck["appended"], struck["applied"]) == (3, None, 3)
        assert "something other than onceward adds to this stream" in struck["unknown"][0]


@pytest.mark.req("CC-071")
@every_redis
def test_a_sink_that_trims_unread_entries_away_is_found_out(redis_url: str, database: str) -> None:
    shop = Shop(f"{redis_url}/{uuid.uuid4().hex}?group=g&maxlen=1", database)
    for _ in range(3):
        shop.send(*(order(number) for number in range(100)))
    shop.consume()
    code, struck = shop.balanced()
    assert (code, struck["appended"]) == (1, 300)
    assert "they were removed without being done" in struck["problems"][0]


@pytest.mark.req("CC-071")
@every_redis
def test_a_group_that_was_made_to_start_later_is_not_said_to_have_lost_anything(
    redis_url: str, database: str
) -> None:
    name = uuid.uuid4().hex
    Shop(f"{redis_url}/{name}?group=other", database).send(order(1), order(2))
    with Redis.from_url(redis_url) as redis:
        redis.xgroup_create(name, "g", id="$")
    shop = Shop(f"{redis_url}/{name}?group=g", database)
    shop.send(order(3))
    shop.consume()
    code, struck = shop.balanced()
    assert (code, struck["applied"], struck["problems"]) == (3, 1, [])
    assert "the group may have been set to start after them" in struck["unknown"][0]


@pytest.mark.req("CC-071")
@every_redis
def test_a_second_group_of_a_stream_is_not_told_of_entries_that_were_removed_before_it(
    redis_url: str, database: str
) -> None:
    name = uuid.uuid4().hex
    first = Shop(f"{redis_url}/{name}?group=first", database)
    first.send(order(1), order(2), order(3))
    first.consume()
    with Redis.from_url(redis_url) as redis:
        redis.xtrim(name, maxlen=1, approximate=False)
    second = Shop(f"{redis_url}/{name}?group=second", f"{database}.second")
    second.consume()
    code, struck = second.balanced()
    assert (code, struck["applied"], struck["problems"]) == (3, 1, [])


def test_records_of_what_waits_in_the_stream_are_not_taken_for_those_of_a_lost_one(
    stream: tuple[Shop, Redis, str],
) -> None:
    """A copy that waits, one in flight, and a redriven letter: all have records."""
    shop, redis, name = stream
    first, second, bad = order(1), order(2), order("x")
    shop.send(first, second, bad)
    shop.consume()
    shop.consume()
    shop.send(first, second)
    assert redis.xreadgroup("g", "somebody", {name: ">"}, count=1)
    shop.execute(f"UPDATE onceward_dead_letters SET status = 'resolved' WHERE message_id = '{bad.id}'")
    shop.execute(
        "INSERT INTO onceward_dedup SELECT consumer_id, "
        f"'{bad.id}', own_day, keep_day, payload_sha256, processed_at, outcome FROM onceward_dedup LIMIT 1"
    )
    code, struck = shop.balanced()
    assert code == 0
    assert numbers(struck) == {"appended": 5, "applied": 3, "duplicate": 0, "pending": 2, "dead": 0}
    assert "applied" not in struck["notes"]


def test_what_is_sent_and_done_while_it_is_counted_is_not_taken_for_lost(
    stream: tuple[Shop, Redis, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shop, _, _ = stream
    shop.send(order(1))
    shop.consume()
    count = Address.counts

    def count_and_let_others_work(source: Address) -> Any:
        counted = count(source)
        shop.send(order(2), order(3))
        shop.consume()
        return counted

    monkeypatch.setattr(Address, "counts", count_and_let_others_work)
    code, struck = shop.balanced()
    assert (code, struck["appended"], struck["applied"]) == (0, 1, 1)


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
        assert json.loads(shop.of_app("--json").stdout)[0]["pending"] == 3
        shop.consume()
        shop.consume()
        code, struck = shop.balanced()
        assert code == 0
        assert numbers(struck) == {"appended": 3, "applied": 2, "duplicate": 0, "pending": 0, "dead": 1}
        mistyped = balance("--source", f"boundary+{url}?consumer=biling")
        assert (mistyped.exit_code, "has no consumer 'biling', only billing" in mistyped.stderr) == (2, True)
        shop.send(fact(4), fact(5))
        with BoundaryClient(url) as client:
            client.confirm("billing", 4)
        code, struck = shop.balanced()
    assert code == 1
    assert "1 message is acknowledged, but neither applied nor dead" in struck["problems"][0]


def _expire(directory: Path, through: int) -> None:
    async def drop() -> None:
        store = SqliteBoundaryStore(directory)
        await store.drop(through)
        await store.close()

    asyncio.run(drop())


@pytest.mark.req("CC-156")
def test_facts_that_expired_before_they_were_confirmed_leave_it_open(tmp_path: Path, database: str) -> None:
    directory, settings = tmp_path / "boundary", "consumer=billing&from_zone=a&to_zone=b"
    with boundary_server(directory) as url:
        shop = Shop(f"boundary+{url}?{settings}", database)
        shop.send(*map(fact, range(6)))
        shop.consume(limit=2)
    _expire(directory, through=4)
    with boundary_server(directory) as url:
        shop = Shop(f"boundary+{url}?{settings}", database)
        code, struck = shop.balanced()
        assert (code, struck["problems"]) == (3, [])
        assert struck["unknown"] == [
            "2 facts expired before billing confirmed them: it has missed those that it was to get"
        ]
        shop.consume()
        code, struck = shop.balanced()
    assert (code, struck["problems"]) == (3, [])
    assert "2 messages are acknowledged and without a record: they expired" in struck["unknown"][0]


@pytest.mark.req("CC-156")
def test_a_name_that_is_registered_after_facts_expired_is_not_accused(tmp_path: Path, database: str) -> None:
    directory, settings = tmp_path / "boundary", "consumer=billing&from_zone=a&to_zone=b"
    with boundary_server(directory) as url:
        Shop(f"boundary+{url}?{settings}", database).send(*map(fact, range(4)))
    _expire(directory, through=2)
    with boundary_server(directory) as url:
        shop = Shop(f"boundary+{url}?{settings}", database)
        assert json.loads(shop.of_app("--json").stdout)[0]["unknown"] == [
            "2 facts had expired before billing ever fetched: it has missed them, unless it had another name then"
        ]
        shop.consume()
        code, struck = shop.balanced()
        assert (code, struck["problems"], struck["applied"]) == (3, [], 2)
        with BoundaryClient(url) as client:
            shop.send(*map(fact, range(4, 8)))
            client.confirm("billing", 8)  # more than can have expired
        code, struck = shop.balanced()
    assert code == 1


# ── the table ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.req("CC-074")
def test_all_consumers_are_in_one_table_each_note_once_then_the_verdict(
    tmp_path: Path, database: str
) -> None:
    shop = Shop(f"sqlite:///{tmp_path}/orders.db?on_failure=dead_letter", database)
    sent = [order(1), order("x"), order(3)]
    shop.send(*sent)
    shop.consume()
    shop.consume()
    for name in ("mail", "print"):
        other = Shop(f"sqlite:///{tmp_path}/{name}.db", database, with_contract=False)
        [consumer] = other.app.consumers.values()
        other.send(order(1), order(2))
        with open_task(other.app, consumer) as task:
            task.consume_transactions(consumer.policy)
        shop.app.consumer(other.source, name=name)(lambda order: None)
    shop.app.consumer("memory://scratch", name="scratch")(lambda order: None)
    result = shop.of_app()
    rows = [line.split() for line in result.stdout.splitlines() if line.strip()]
    assert [row[0] for row in rows] == [
        "consumer",
        "─" * len(rows[1][0]),
        "charge",
        "mail",
        "print",
        "scratch",
        "done",
        "It",
    ]
    assert rows[0][1:] == ["appended", "applied", "duplicate", "done", "pending", "dead", "holds"]
    assert rows[2][1:] == ["3", "2", "0", "0", "0", "1", "yes"]
    assert rows[3][1:] == ["2", "?", "0", "2", "0", "0", "yes"]
    assert rows[5][-1] == "?"
    assert result.stdout.count("without a contract nothing records") == 1
    assert "done of mail, print: without a contract" in result.stdout
    assert result.stdout.endswith("It holds for 3 of 4 consumers.\n")
    assert result.stderr.startswith("Unknown whether it holds: scratch: how many were appended is unknown")
    assert result.exit_code == 3
    shop.execute(f"DELETE FROM onceward_dedup WHERE tracking_id = '{sent[0].id}'")
    result = shop.of_app()
    assert result.exit_code == 1, "a loss matters more than what is unknown"
    assert (
        f"It does not hold: charge: 1 message is acknowledged, but neither applied nor dead: {sent[0].id}."
        in result.stderr
    )


@pytest.mark.req("CC-074")
def test_details_are_there_on_request(shop: Shop) -> None:
    shop.send(order(1), order("x"))
    shop.consume()
    shop.consume()
    engine = create_engine(shop.database)
    DeadLetters(engine).discard(Filter(consumer="billing"), reason="a test order", operator="me")
    engine.dispose()
    assert "discarded by an operator" not in shop.of_app().stdout
    text = shop.of_app("--verbose").stdout
    assert f"charge  {shop.source}" in text
    assert "2 appended = 1 applied + 1 dropped" in text
    assert "dropped: 1 discarded by an operator" in text


@pytest.mark.req("CC-074")
def test_a_table_fits_into_eighty_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from onceward.cli import balance as command
    from onceward.inspection.balance import Balance

    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")
    struck = Balance(
        appended=1_234_567,
        applied=1_000_000,
        duplicate=123_456,
        pending=1_111,
        dead=12,
        dropped={"x": 1_234},
        gone=12_345,
    )
    command._show({"charge": struck, "confirm_reservation": struck}, {}, False)
    lines = capsys.readouterr().out.splitlines()
    assert max(len(line) for line in lines) <= 80
    assert any("duplicate" in line for line in lines)
    assert any("1,000,000" in line for line in lines)


# ── unknown numbers, and unreachable sources ────────────────────────────────────────────────────────────


def test_memory_cannot_be_reported() -> None:
    result = balance("--source", "memory://orders")
    assert result.exit_code == 3
    assert re.search(r"source +\?", result.stdout)
    assert "how many were appended is unknown: it exists only in the memory of the process" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ((), "name an app"),
        (("shop:app", "--source", "memory://x"), "not both"),
        (("--source", "memory://x", "--database", "sqlite:///x.db"), "--consumer NAME"),
        (("--source", "redis://:hunter2@127.0.0.1:1/orders"), "cannot query Redis at 127.0.0.1:1/0"),
        (("--source", "boundary+http://127.0.0.1:1?consumer=c"), "cannot read http://127.0.0.1:1/stats"),
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
    assert "is not a queue of onceward" in result.stderr


def test_a_directory_is_neither_a_queue_nor_a_database(tmp_path: Path) -> None:
    (tmp_path / "folder.db").mkdir()
    result = balance("--source", f"sqlite:///{tmp_path}/folder.db")
    assert (result.exit_code, "is a directory, not a queue" in result.stderr) == (2, True)
    given = ("--database", f"sqlite:///{tmp_path}/folder.db", "--consumer", "charge")
    result = balance("--source", f"sqlite:///{tmp_path}/queue.db", *given)
    assert (result.exit_code, "unable to open database file" in result.stderr) == (2, True)
