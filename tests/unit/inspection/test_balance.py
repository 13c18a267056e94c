"""Conservation of messages, computed from numbers alone."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from onceward.connectors.reports import SourceCounts
from onceward.inspection.balance import Balance, LetterCounts, RecordCounts, strike


def source(**changes: Any) -> SourceCounts:
    return SourceCounts(**{"appended": 10, "done": 6, "pending": 2, "dead": 1, "moved": 1, **changes})


def sums_up(balance: Balance) -> bool:
    parts = (balance.applied, balance.duplicate, balance.pending, balance.dead)
    return balance.appended == sum(part or 0 for part in parts) + sum(balance.dropped.values()) + balance.gone


LETTER = LetterCounts(open=1, deaths=1)


def test_without_a_contract_nobody_knows_what_was_a_copy() -> None:
    balance = strike(source(moved=0, done=7), LetterCounts(), None)
    assert (balance.applied, balance.duplicate, balance.holds) == (7, None, True)
    assert "without a contract" in balance.notes["duplicate"]
    assert sums_up(balance)


def test_with_a_contract_what_is_done_and_not_in_the_inbox_was_a_copy() -> None:
    balance = strike(source(), LETTER, RecordCounts(applied=4))
    assert (balance.applied, balance.duplicate, balance.pending, balance.dead) == (4, 2, 2, 2)
    assert balance.holds
    assert sums_up(balance)


def test_what_was_never_handed_out_is_not_taken_for_applied() -> None:
    """The inbox knows a consumer, not its source: these messages came from another one."""
    balance = strike(source(pending=2, untouched=2), LETTER, RecordCounts(applied=8))
    assert (balance.applied, balance.pending) == (6, 2)
    assert "2 more records" in balance.notes["applied"]
    assert sums_up(balance)


def test_what_was_superseded_or_discarded_is_dropped_with_its_reason() -> None:
    balance = strike(source(), LetterCounts(discarded=1, deaths=1), RecordCounts(applied=5, superseded=1))
    assert balance.dropped == {"discarded by an operator": 1, "superseded by a later event": 1}
    assert balance.holds
    assert sums_up(balance)


@pytest.mark.parametrize(
    ("letters", "applied", "pending"),
    [(LetterCounts(redriven=1, deaths=1), 6, 3), (LetterCounts(resolved=1, deaths=1), 7, 2)],
)
def test_a_redriven_letter_waits_and_a_resolved_one_is_applied(
    letters: LetterCounts, applied: int, pending: int
) -> None:
    balance = strike(source(), letters, RecordCounts(applied=applied))
    assert (balance.applied, balance.duplicate, balance.pending, balance.dead) == (applied, 0, pending, 1)
    assert sums_up(balance)


def test_a_copy_that_died_is_a_duplicate_of_its_letter() -> None:
    balance = strike(source(done=5, moved=2), LetterCounts(open=1, deaths=2), RecordCounts(applied=5))
    assert (balance.duplicate, balance.dead) == (1, 2)
    assert balance.holds
    assert sums_up(balance)


def test_a_letter_on_its_way_is_counted_once() -> None:
    balance = strike(source(dead=2, moved=0), LetterCounts(open=1, deaths=1), RecordCounts(applied=6))
    assert balance.dead == 2
    assert balance.holds
    assert sums_up(balance)


def test_what_is_applied_and_not_acknowledged_yet_is_applied() -> None:
    balance = strike(source(), LETTER, RecordCounts(applied=7))
    assert (balance.applied, balance.pending) == (7, 1)
    assert "not acknowledged yet" in balance.notes["pending"]
    assert balance.holds
    assert sums_up(balance)


def test_an_inbox_that_others_feed_too_is_no_proof_of_anything() -> None:
    balance = strike(source(), LETTER, RecordCounts(applied=100))
    assert "something else feeds or fed this consumer" in balance.notes["applied"]
    assert balance.holds


NOTHING = SourceCounts(appended=0, done=0, pending=0, dead=0, moved=0)


@pytest.mark.parametrize(
    ("letters", "records"),
    [
        (LetterCounts(), RecordCounts(applied=100)),
        (LetterCounts(), RecordCounts(superseded=1)),
        (LetterCounts(open=1, deaths=1), None),
        (LetterCounts(), RecordCounts(duplicate=0, beyond=100)),
        (LetterCounts(beyond=1), None),
    ],
)
def test_an_empty_source_of_a_consumer_that_had_messages_is_not_said_to_hold_nothing(
    letters: LetterCounts, records: RecordCounts | None
) -> None:
    balance = strike(NOTHING, letters, records)
    assert (balance.appended, balance.holds) == (None, True)
    assert "it was emptied or lost" in balance.notes["appended"]


def test_an_empty_source_of_a_consumer_that_had_none_holds() -> None:
    for records in (None, RecordCounts(), RecordCounts(duplicate=0)):
        assert strike(NOTHING, LetterCounts(elsewhere=1), records).appended == 0


def test_rows_that_nobody_appended_are_a_problem_also_where_the_rest_cannot_be_reported() -> None:
    balance = strike(msgspec.structs.replace(NOTHING, pending=1), LetterCounts(), RecordCounts(applied=100))
    assert "1 message is present but not counted as appended" in balance.problems[0]


def test_records_and_letters_of_messages_that_a_stream_does_not_have_are_noted() -> None:
    stream = SourceCounts(appended=10, done=7, pending=3, dead=0)
    balance = strike(stream, LetterCounts(beyond=2), RecordCounts(applied=7, duplicate=0, beyond=100))
    assert (balance.appended, balance.applied, balance.dead, balance.holds) == (10, 7, 0, True)
    assert "the inbox has 100 more records of this consumer" in balance.notes["applied"]
    assert "lost with Redis" in balance.notes["applied"]
    assert "the database has 2 more" in balance.notes["dead"]
    assert sums_up(balance)


def test_records_of_what_redis_knows_to_be_gone_are_no_riddle() -> None:
    stream = SourceCounts(appended=100, done=0, pending=0, dead=0, gone=100)
    balance = strike(stream, LetterCounts(), RecordCounts(duplicate=0, beyond=100))
    assert balance.notes["applied"].endswith("apparently of those that are gone")
    assert (balance.appended, balance.holds) == (100, True)


def test_a_new_source_of_a_consumer_that_had_messages_is_not_said_to_be_the_first() -> None:
    waiting = SourceCounts(appended=3, done=0, pending=3, untouched=3, dead=0, moved=0)
    balance = strike(waiting, LetterCounts(), RecordCounts(applied=100))
    assert "the inbox has 100 more records" in balance.notes["applied"]


def test_after_a_purge_applied_and_duplicate_are_one() -> None:
    balance = strike(source(), LETTER, RecordCounts(applied=2, purged_before="2026-01-01"))
    assert (balance.applied, balance.duplicate) == (6, None)
    assert "before 2026-01-01 were purged" in balance.notes["duplicate"]
    assert sums_up(balance)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"pending": 1}, "1 message is missing: 10 were appended, but only 9 are accounted for"),
        ({"appended": 13}, "3 messages are missing"),
        ({"pending": 4}, "2 messages are present but not counted as appended"),
    ],
)
def test_a_source_whose_own_books_do_not_balance_is_found_out(changes: dict[str, Any], problem: str) -> None:
    balance = strike(source(**changes), LETTER, RecordCounts(applied=6))
    assert not balance.holds
    assert problem in balance.problems[0]


def test_dead_letters_that_did_not_arrive_are_missing() -> None:
    balance = strike(source(done=5, moved=2), LETTER, RecordCounts(applied=5))
    assert balance.problems == ("1 dead letter is missing: 2 were moved to the database, but it has only 1",)


@pytest.mark.parametrize("more", [{"purged": True}, {"elsewhere": 1}])
def test_dead_letters_that_may_be_purged_or_under_another_name_are_not_called_missing(
    more: dict[str, Any],
) -> None:
    balance = strike(source(done=5, moved=2), LetterCounts(open=1, deaths=1, **more), RecordCounts(applied=5))
    assert balance.holds
    assert "1 more were moved" in balance.notes["dead"]


def test_without_a_database_nobody_knows_copies_nor_what_became_of_dead_letters() -> None:
    balance = strike(source(), None, None)
    assert (balance.dead, balance.duplicate, balance.holds) == (2, None, True)
    assert "1 of them in a database" in balance.notes["dead"]
    assert "without its database" in balance.notes["duplicate"]
    assert sums_up(balance)


@pytest.mark.parametrize("records", [None, RecordCounts(), RecordCounts(duplicate=0)])
def test_before_the_first_message_is_consumed_it_says_that_and_the_equation_is_checked(
    records: RecordCounts | None,
) -> None:
    balance = strike(source(done=0, dead=0, moved=0, pending=10), LetterCounts(), records)
    assert (balance.applied, balance.duplicate, balance.pending, balance.holds) == (0, 0, 10, True)
    assert balance.notes == {"applied": "nothing has been consumed yet"}
    assert not strike(source(done=0, dead=0, moved=0, pending=9), LetterCounts(), records).holds


def test_what_is_done_and_of_which_the_inbox_has_nothing_at_all_was_no_copy() -> None:
    balance = strike(source(moved=0, done=7), LetterCounts(), RecordCounts())
    assert (balance.applied, balance.duplicate) == (0, 0)
    assert "7 messages are acknowledged, but neither applied nor dead" in balance.problems[0]


def test_copies_of_which_all_died_are_no_messages_without_a_record() -> None:
    balance = strike(
        SourceCounts(appended=2, done=0, pending=0, dead=0, moved=2),
        LetterCounts(open=1, deaths=2),
        RecordCounts(),
    )
    assert (balance.dead, balance.duplicate, balance.holds) == (1, 1, True)
    assert sums_up(balance)


def facts(**changes: Any) -> SourceCounts:
    """A boundary: no copies, and dead letters are among the confirmed."""
    return SourceCounts(
        **{"appended": 10, "done": 8, "pending": 2, "dead": 0, "has_copies": False, **changes}
    )


def test_every_confirmed_fact_is_applied_or_dead() -> None:
    balance = strike(facts(), LETTER, RecordCounts(applied=7))
    assert (balance.applied, balance.dead, balance.holds) == (7, 1, True)
    assert sums_up(balance)


def test_a_fact_that_was_confirmed_and_not_applied_is_missing() -> None:
    balance = strike(facts(), LetterCounts(), RecordCounts(applied=6))
    assert "2 messages are confirmed, but neither applied nor dead" in balance.problems[0]


def test_a_fact_that_expired_is_dropped_with_its_reason() -> None:
    balance = strike(
        facts(pending=1, dropped={"expired before it was confirmed": 1}),
        LetterCounts(),
        RecordCounts(applied=8),
    )
    assert balance.holds
    assert sums_up(balance)


def test_messages_that_are_known_by_their_ids_are_looked_for_one_by_one() -> None:
    stream = SourceCounts(appended=10, done=7, pending=2, dead=0, gone=1)
    records = RecordCounts(applied=4, duplicate=1, unknown=("lost-1",))
    balance = strike(stream, LETTER, records)
    assert balance.problems == ("1 message is acknowledged, but neither applied nor dead: lost-1",)
    assert (balance.applied, balance.duplicate, balance.dead, balance.gone) == (4, 1, 1, 1)


def test_a_source_that_cannot_count_leaves_nothing_to_check() -> None:
    balance = strike(
        SourceCounts(notes={"appended": "it is in memory"}), LetterCounts(), RecordCounts(applied=3)
    )
    assert (balance.appended, balance.holds) == (None, True)
