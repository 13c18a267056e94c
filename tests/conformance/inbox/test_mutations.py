"""Every guard of the inbox is tested: remove one, and a test of the suite fails."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest

from onceward.db.transaction import BlockingSessionPort
from onceward.inbox import Breach, ContractError
from onceward.inbox.processor import EventProcessor
from onceward.inbox.purge import purge
from onceward.inbox.stores import base, postgresql, sqlite
from onceward.inbox.stores.base import Store
from onceward.inbox.stores.types import Found
from onceward.testing.inbox import InboxConformance
from onceward.testing.inbox.samples import contract, event, never, write
from tests.support.inbox import databases
from tests.support.inbox.databases import OnPostgreSql, OnSqlite, empty

schema = databases.schema

Mutation = Callable[[pytest.MonkeyPatch], None]


def no_on_conflict(patch: pytest.MonkeyPatch) -> None:
    """An existing row is written again, and the event counts as new."""
    patch.setattr(
        sqlite,
        "_ADMIT",
        sqlite._ADMIT.replace("INSERT INTO", "INSERT OR REPLACE INTO").replace("ON CONFLICT DO NOTHING", ""),
    )
    again = "ON CONFLICT (consumer_id, tracking_id, event_day) DO UPDATE SET outcome = excluded.outcome"
    admit = postgresql._ADMIT_AND_RESOLVE.replace("ON CONFLICT DO NOTHING", again)
    patch.setattr(postgresql, "_ADMIT_AND_RESOLVE", admit)


def no_fence(patch: pytest.MonkeyPatch) -> None:
    """The last attempt commits, whether it still has the lease or not."""
    patch.setattr(Store, "finish", lambda *_: True)


def no_rollback(patch: pytest.MonkeyPatch) -> None:
    """The writes of a handler that raised are committed."""

    async def commit(self: BlockingSessionPort, error: BaseException | None) -> None:
        self.__exit__(None, None, None)

    patch.setattr(BlockingSessionPort, "leave", commit)


def no_one_spelling(patch: pytest.MonkeyPatch) -> None:
    """A UUID in another spelling is another id."""
    patch.setattr(purge, "same_id", lambda text: text)


def no_horizon(patch: pytest.MonkeyPatch) -> None:
    """An event whose record may have been purged runs."""
    for store, name in ((sqlite, "_ADMIT"), (postgresql, "_ADMIT_AND_RESOLVE")):
        sql = getattr(store, name)
        condition = sql[sql.index(">= coalesce(") : sql.index("ON CONFLICT")]
        patch.setattr(store, name, sql.replace(condition, "IS NOT NULL\n    "))


def no_poison_count(patch: pytest.MonkeyPatch) -> None:
    """However often an event was started without an end, it is started again."""
    start = Store.start

    def unlimited(self: Store, transaction: Any, key: Any, at_most: int, lease: float) -> Any:
        return start(self, transaction, key, 10**9, lease)

    patch.setattr(Store, "start", unlimited)


def no_start_before_the_handler(patch: pytest.MonkeyPatch) -> None:
    """Starts are not counted: a crash leaves no trace."""
    patch.setattr(base, "_START", base._START.replace("starts = onceward_attempts.starts + 1", "starts = 1"))


def no_digest(patch: pytest.MonkeyPatch) -> None:
    """The same id with another payload counts as a duplicate."""

    class Alike(bytes):
        def __eq__(self, _: object) -> bool:
            return True

        def __ne__(self, _: object) -> bool:
            return False

        __hash__ = bytes.__hash__

    for store in (sqlite.SqliteStore, postgresql.PostgreSqlStore):
        look_up = store.look_up

        def careless(self: Any, transaction: Any, key: Any, look_up: Any = look_up) -> Found:
            found: Found = look_up(self, transaction, key)
            return found if found.digest is None else found._replace(digest=Alike(found.digest))

        patch.setattr(store, "look_up", careless)


def mark_before_run(patch: pytest.MonkeyPatch) -> None:
    """The record is committed before the handler runs: an event that fails then is lost."""
    in_transaction = EventProcessor.in_transaction

    async def marked(self: EventProcessor, attempt: Any, *more: Any) -> Any:
        try:
            return await in_transaction(self, attempt, *more)
        except Exception:
            self._marked = (attempt.key, attempt.digest)  # type: ignore[attr-defined]
            raise

    attempts = EventProcessor._attempts

    async def then_kept(self: EventProcessor, *args: Any) -> Any:
        try:
            return await attempts(self, *args)
        except Exception:
            await self.ports.transact(self.store.admit, *self._marked)  # type: ignore[attr-defined]
            raise

    patch.setattr(EventProcessor, "in_transaction", marked)
    patch.setattr(EventProcessor, "_attempts", then_kept)


class Horizon:
    """A short test of what the suite leaves to the tests of purging."""

    def test_an_event_below_the_horizon_is_refused(self: Any) -> None:
        with self.inbox() as inbox:
            old = event("old", created_at=datetime(2020, 1, 1, tzinfo=UTC))
            inbox.process(contract(), old, write)
            inbox.do(
                "INSERT INTO onceward_horizons VALUES (:consumer, 99999)", consumer=contract().consumer_id
            )
            inbox.do("DELETE FROM onceward_dedup")
            with pytest.raises(ContractError) as refused:
                inbox.process(contract(), old, never)
            assert refused.value.kind is Breach.TOO_OLD


MUTATIONS: list[tuple[Mutation, str]] = [
    (no_on_conflict, "test_the_row_of_a_done_event_survives_the_inbox_that_wrote_it"),
    (no_fence, "test_a_zombie_commits_nothing_while_another_attempt_still_runs"),
    (no_rollback, "test_a_handler_that_raises_after_writing_leaves_nothing_and_runs_again"),
    (no_one_spelling, "test_a_hold_names_the_event_in_any_spelling"),
    (no_horizon, "test_an_event_below_the_horizon_is_refused"),
    (no_poison_count, "test_starts_are_counted_over_all_processes"),
    (no_start_before_the_handler, "test_starts_are_counted_over_all_processes"),
    (no_digest, "test_the_same_id_with_another_payload_is_a_contract_failure_without_effect"),
    (mark_before_run, "test_a_failed_event_has_no_row_that_would_make_its_copy_a_duplicate"),
]
every_guard = pytest.mark.parametrize(
    ("mutation", "test"), MUTATIONS, ids=[mutation.__name__ for mutation, _ in MUTATIONS]
)


class SuiteOnSqlite(OnSqlite, InboxConformance, Horizon):
    __test__ = False


class SuiteOnPostgreSql(OnPostgreSql, InboxConformance, Horizon):
    __test__ = False


class Mutated:
    suite: type

    @every_guard
    def test_without_a_guard_a_test_fails(
        self, monkeypatch: pytest.MonkeyPatch, mutation: Mutation, test: str
    ) -> None:
        assert not self.fails(test), "it must pass with the guard in place"
        self.forget()
        mutation(monkeypatch)
        assert self.fails(test)

    def fails(self, test: str) -> bool:
        suite = self.suite()
        vars(suite).update(vars(self))
        try:
            getattr(suite, test)()
        except (Exception, pytest.fail.Exception):
            return True
        return False

    def forget(self) -> None:
        """Start again with an empty database."""
        raise NotImplementedError


class TestSqlite(Mutated, OnSqlite):
    suite = SuiteOnSqlite

    def forget(self) -> None:
        self.path = self.path.with_name("again.db")


class TestPostgreSql(Mutated, OnPostgreSql):
    suite = SuiteOnPostgreSql

    def forget(self) -> None:
        empty(self.schema)
