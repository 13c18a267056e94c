"""The leases of a process that is known to be dead: ended at once, counted as crashes, and fenced."""

from __future__ import annotations

import pytest

from onceward.deadletters import Status, redrive_leases
from onceward.inbox.stores import store_of
from onceward.inbox.stores.owners import release_owner
from onceward.inbox.stores.types import Attempts, Key
from tests.support.deadletters.world import Letters, burial

pytest_plugins = ("tests.support.databases", "tests.support.deadletters.site")

ONE, OTHER = Key("billing", "one", 20_000), Key("billing", "other", 20_000)


@pytest.mark.req("RN-01")
def test_ends_the_leases_of_one_owner_and_counts_them_as_crashes(letters: Letters) -> None:
    database = letters.database
    store = store_of(database.default.dialect, letters.clock)
    with database.session() as session:
        store.owner = "dead"
        session._run(store.start, ONE, 5, 60.0)
        assert session._run(store.record_starts, "billing", [Key("billing", "batch", 20_000)], 60.0)
        store.owner = "alive"
        session._run(store.start, OTHER, 5, 60.0)
    with database.session() as session:
        assert session._run(release_owner, store, "nobody") == 0
        assert session._run(store.start, ONE, 5, 60.0) is None, "it is still leased"
        assert session._run(release_owner, store, "dead") == 0
        assert session._run(store.attempts, Key("billing", "batch", 20_000)) == Attempts(1, 0, 0.0)
        assert not session._run(store.finish, ONE, 1), "what the dead process had sent comes too late"
        assert not session._run(store.renew, ONE, 1, 60.0)
        assert session._run(store.start, ONE, 5, 60.0) == Attempts(2, 0)
        assert session._run(store.start, OTHER, 5, 60.0) is None, "its owner lives"


@pytest.mark.req("RN-01")
def test_does_not_wait_for_rows_that_the_server_still_uses_for_the_dead_process(letters: Letters) -> None:
    database = letters.database
    store = store_of(database.default.dialect, letters.clock)
    store.owner = "dead"
    with database.session() as session:
        for key in (ONE, OTHER):
            session._run(store.start, key, 5, 60.0)
    if database.is_sqlite:
        left = 0  # the operating system has ended its transaction
    else:
        with database.session() as lingering:
            lingering._run(store.renew, ONE, 1, 60.0)
            with database.session() as session:
                left = session._run(release_owner, store, "dead")
    assert left == (0 if database.is_sqlite else 1)
    with database.session() as session:
        assert session._run(release_owner, store, "dead") == 0
        assert session._run(store.start, ONE, 5, 60.0) == Attempts(2, 0)


@pytest.mark.req("RN-01")
def test_redriven_letters_of_a_dead_process_are_due_again_and_counted(letters: Letters) -> None:
    rows = letters.made.operations._rows
    letters.bury(burial())
    letters.send_again()
    for number in range(redrive_leases.LOST_AT_MOST):
        letters.made.operations.owner = f"worker-{number}"
        assert len(letters.deliver()) == 1
        assert letters.deliver() == []
        with letters.database.session() as session:
            assert session._run(redrive_leases.release_owner, rows, f"worker-{number}") == 0
    assert letters.deliver() == []
    assert (letters.one().status, letters.one().category) == (Status.OPEN, "poison")
