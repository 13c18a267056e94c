"""The leases of a process that is known to be dead: ended at once, counted as crashes, and fenced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from onceward._sync import run_blocking
from onceward.deadletters import Status, redrive_leases
from onceward.inbox.stores import store_of
from onceward.inbox.stores.owners import release_owner
from onceward.inbox.stores.types import Attempts, Key
from tests.support.deadletters.world import Letters, burial

pytest_plugins = ("tests.support.databases", "tests.support.deadletters.site")

ONE, OTHER, BATCH = (Key("billing", name, 20_000) for name in ("one", "other", "batch"))


def transact(letters: Letters, operation: Callable[..., Any], *args: Any) -> Any:
    coroutine = letters.made.operations.ports.transact(operation, *args)
    return letters.database.run(coroutine) if letters.database.asynchronous else run_blocking(coroutine)


@pytest.mark.req("RN-01")
def test_ends_the_leases_of_one_owner_and_counts_them_as_crashes(letters: Letters) -> None:
    store = store_of(letters.database.default.dialect, letters.clock)
    store.owner = "dead"
    transact(letters, store.start, ONE, 5, 60.0)
    assert transact(letters, store.record_starts, "billing", [BATCH], 60.0)
    store.owner = "alive"
    transact(letters, store.start, OTHER, 5, 60.0)
    assert transact(letters, release_owner, store, "nobody") == 0
    assert transact(letters, store.start, ONE, 5, 60.0) is None, "it is still leased"
    assert transact(letters, release_owner, store, "dead") == 0
    assert transact(letters, store.attempts, BATCH) == Attempts(1, 0, 0.0)
    assert not transact(letters, store.finish, ONE, 1), "what the dead process had sent comes too late"
    assert not transact(letters, store.renew, ONE, 1, 60.0)
    assert transact(letters, store.start, ONE, 5, 60.0) == Attempts(2, 0)
    assert transact(letters, store.start, OTHER, 5, 60.0) is None, "its owner lives"


@pytest.mark.req("RN-01")
@pytest.mark.without("sqlite")  # there the operating system ends the transactions of a dead process
def test_does_not_wait_for_rows_that_the_server_still_uses_for_the_dead_process(letters: Letters) -> None:
    store = store_of(letters.database.default.dialect, letters.clock)
    store.owner = "dead"
    for key in (ONE, OTHER):
        transact(letters, store.start, key, 5, 60.0)
    with letters.database.session() as lingering:
        lingering.execute("UPDATE onceward_attempts SET last_at = 0 WHERE tracking_id = 'one'")
        assert transact(letters, release_owner, store, "dead") == 1
    assert transact(letters, release_owner, store, "dead") == 0
    assert transact(letters, store.start, ONE, 5, 60.0) == Attempts(2, 0)


@pytest.mark.req("RN-01")
def test_redriven_letters_of_a_dead_process_are_due_again_and_counted(letters: Letters) -> None:
    rows = letters.made.operations._rows
    letters.bury(burial())
    letters.send_again()
    for number in range(redrive_leases.LOST_AT_MOST):
        letters.made.operations.owner = f"worker-{number}"
        assert len(letters.deliver()) == 1
        assert letters.deliver() == []
        assert transact(letters, redrive_leases.release_owner, rows, f"worker-{number}") == 0
    assert letters.deliver() == []
    assert (letters.one().status, letters.one().category) == (Status.OPEN, "poison")
