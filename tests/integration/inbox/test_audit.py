"""Holds, releases and purges of an inbox leave rows in the audit, in the transaction of what they record."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

from onceward.deadletters import AsyncDeadLetters, DeadLetters
from onceward.errors import ConfigurationError
from onceward.inbox import AsyncInbox, Event, Inbox
from onceward.storage import audit
from tests.support.inbox.contracts import contract
from tests.support.inbox.ids import uuid7_of
from tests.support.schema import new_schema

if TYPE_CHECKING:
    from tests.support.databases import Database

pytest_plugins = ("tests.support.databases",)

pytestmark = pytest.mark.req("CC-077")


class Site:
    def __init__(self, database: Database, **options: Any) -> None:
        self._run = database.run if database.asynchronous else lambda done: done
        engine = database.engine(**options) if options else database.default
        self._inbox: Any = (AsyncInbox if database.asynchronous else Inbox)(engine)
        self._letters: Any = (AsyncDeadLetters if database.asynchronous else DeadLetters)(engine)
        self.do("migrate")
        self.do("register", contract())

    def do(self, method: str, *args: Any, **more: Any) -> Any:
        return self._run(getattr(self._inbox, method)(*args, **more))

    def rows(self) -> list[tuple[str, str, dict[str, Any]]]:
        """Oldest first: action, operator, details."""
        found = self._run(self._letters.audit())
        return [(row["action"], row["operator"], json.loads(row["details"])) for row in reversed(found)]

    def is_intact(self) -> bool:
        return self._run(self._letters.verify_audit()).broken is None


@pytest.fixture
def site(database: Database) -> Site:
    return Site(database)


def old_event(name: str) -> Event:
    long_ago = datetime.now(UTC) - timedelta(days=200)
    tracking_id = uuid7_of(int(long_ago.timestamp()) // 86400, name)
    return Event(tracking_id=tracking_id, event_type="paid", created_at=long_ago, payload={})


def test_a_hold_and_its_release_name_who_why_and_what(site: Site) -> None:
    assert site.do("hold", "billing", "e1", reason="case 7", operator="anna")
    assert not site.do("hold", "billing", "e1", reason="again", operator="bob")
    assert site.do("hold", "billing", None, reason="audit", operator="anna")
    assert site.do("release", "billing", "e1", reason="case closed", operator="bob")
    assert not site.do("release", "billing", "e1", reason="again", operator="bob")
    assert site.rows() == [
        ("inbox hold", "anna", {"consumer": "billing", "tracking_id": "e1", "reason": "case 7"}),
        ("inbox hold", "anna", {"consumer": "billing", "tracking_id": None, "reason": "audit"}),
        ("inbox release", "bob", {"consumer": "billing", "tracking_id": "e1", "reason": "case closed"}),
    ]
    assert site.is_intact()


def test_a_purge_records_what_it_may_remove_and_what_it_removed(site: Site, database: Database) -> None:
    def handle(event: Event, session: Any) -> None: ...

    async def handle_async(event: Event, session: Any) -> None: ...

    for name in ("a", "b"):
        handler = handle_async if database.asynchronous else handle
        site.do("process", contract(), old_event(name), handler)
    report = site.do("purge", "billing", operator="anna", reason="disk is full")
    site.do("purge")
    begun, ended, *by_itself = site.rows()
    assert begun == (
        "inbox purge",
        "anna",
        {"consumer": "billing", "reason": "disk is full", "kept_from": report.floors, "skipped": {}},
    )
    assert ended[:2] == ("inbox purge ended", "anna")
    assert (ended[2]["rows"], ended[2]["ending"], ended[2]["consumers"]) == (2, "ended", ["billing"])
    assert [row[:2] for row in by_itself] == [("inbox purge", "system"), ("inbox purge ended", "system")]
    assert site.is_intact()


def test_an_interrupted_purge_says_what_it_removed(site: Site) -> None:
    def interrupt(_: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        site.do("purge", operator="anna", progress=interrupt)
    assert [row[0] for row in site.rows()] == ["inbox purge", "inbox purge ended"]
    assert site.rows()[1][2]["ending"] == "interrupted by KeyboardInterrupt"


def test_without_its_audit_row_nothing_changes(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.do("hold", "billing", "e1", reason="case 7", operator="anna")

    def fail(*_: Any) -> None:
        raise RuntimeError("the audit is broken")

    monkeypatch.setattr(audit, "note", fail)
    for method, more in (("hold", "e2"), ("release", "e1")):
        with pytest.raises(RuntimeError):
            site.do(method, "billing", more, reason="x", operator="anna")
    with pytest.raises(RuntimeError):
        site.do("purge", operator="anna")
    assert [hold["tracking_id"] for hold in site.do("holds")] == ["e1"]
    assert site.do("stats")[0]["floor_day"] is None, "the horizon did not move"


@pytest.mark.parametrize(
    ("method", "more"),
    [("hold", ("billing", "e1")), ("release", ("billing", "e1")), ("purge", ())],
)
def test_operator_and_reason_are_never_empty(site: Site, method: str, more: tuple[str, ...]) -> None:
    for values in ({"operator": " ", "reason": "x"}, {"operator": "anna", "reason": ""}):
        with pytest.raises(ConfigurationError, match="the audit records"):
            site.do(method, *more, **values)
    assert site.rows() == []


@pytest.mark.parametrize("isolation", ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"])
def test_operators_who_act_at_the_same_time_keep_one_chain(postgres_url: str, isolation: str) -> None:
    from tests.support.databases import Database

    with new_schema(postgres_url) as schema:
        database = Database("postgresql", "threads", schema.url, **schema.connect_args)
        site = Site(database, isolation_level=isolation)

        def hold(number: int) -> None:
            site.do("hold", "billing", f"e{number}", reason="case", operator=f"operator {number}")

        with ThreadPoolExecutor(4) as threads:
            list(threads.map(hold, range(12)))
        assert len(site.rows()) == 12
        assert site.is_intact()
        database.close()
