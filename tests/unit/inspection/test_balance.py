"""Conservation of messages, computed from numbers and ids alone."""

from __future__ import annotations

from typing import Any

import pytest

from onceward.connectors.reports import Forgotten, Messages, Seen, SourceCounts
from onceward.inspection.balance import Balance, without_database
from onceward.inspection.fates import ConsumerLedger, InboxRecords, Letter, strike_by_id
from onceward.inspection.totals import LetterCounts, RecordCounts, strike_totals


def sums_up(balance: Balance) -> bool:
    parts = (balance.applied, balance.duplicate, balance.pending, balance.dead)
    rest = sum(balance.dropped.values()) + balance.done + balance.gone
    return balance.appended == sum(part or 0 for part in parts) + rest


# ── totals ──────────────────────────────────────────────────────────────────────────────────────────────


def source(**changes: Any) -> SourceCounts:
    return SourceCounts(**{"appended": 10, "done": 6, "pending": 2, "dead": 1, "moved": 1, **changes})


LETTER = LetterCounts(open=1, deaths=1)


def test_without_a_contract_nobody_knows_what_was_applied() -> None:
    balance = strike_totals(source(moved=0, done=7), LetterCounts(), None)
    assert (balance.applied, balance.done, balance.verdict) == (None, 7, "holds")
    assert "without a contract" in balance.notes["done"]
    assert sums_up(balance)


def test_as_many_records_as_messages_hold() -> None:
    balance = strike_totals(source(), LETTER, RecordCounts(applied=6))
    assert (balance.applied, balance.duplicate, balance.pending, balance.dead) == (6, 0, 2, 2)
    assert balance.holds
    assert sums_up(balance)


@pytest.mark.req("CC-071", "CC-073")
def test_fewer_records_than_messages_may_be_copies_or_losses() -> None:
    balance = strike_totals(source(), LETTER, RecordCounts(applied=4))
    assert (balance.applied, balance.done, balance.verdict) == (4, 2, "unknown")
    assert "2 messages are acknowledged and without a record" in balance.unknown[0]
    assert sums_up(balance)


def test_no_record_at_all_is_a_loss_because_not_all_can_be_copies() -> None:
    balance = strike_totals(source(moved=0, done=7), LetterCounts(), RecordCounts())
    assert "7 messages are acknowledged, but neither applied nor dead" in balance.problems[0]


def test_what_was_superseded_or_discarded_is_dropped_with_its_reason() -> None:
    balance = strike_totals(
        source(), LetterCounts(discarded=1, deaths=1), RecordCounts(applied=5, superseded=1)
    )
    assert balance.dropped == {"discarded by an operator": 1, "superseded by a later event": 1}
    assert (balance.applied, balance.holds) == (5, True)
    assert sums_up(balance)


@pytest.mark.parametrize(
    ("letters", "applied", "pending"),
    [(LetterCounts(redriven=1, deaths=1), 6, 3), (LetterCounts(resolved=1, deaths=1), 7, 2)],
)
def test_a_redriven_letter_waits_and_a_resolved_one_is_applied(
    letters: LetterCounts, applied: int, pending: int
) -> None:
    balance = strike_totals(source(), letters, RecordCounts(applied=applied))
    assert (balance.applied, balance.duplicate, balance.pending, balance.dead) == (applied, 0, pending, 1)
    assert sums_up(balance)


def test_a_copy_that_died_is_a_duplicate_of_its_letter() -> None:
    balance = strike_totals(source(done=5, moved=2), LetterCounts(open=1, deaths=2), RecordCounts(applied=5))
    assert (balance.duplicate, balance.dead, balance.holds) == (1, 2, True)
    assert sums_up(balance)


@pytest.mark.req("CC-072")
def test_more_deaths_than_letters_may_be_copies_that_died_at_the_same_time() -> None:
    balance = strike_totals(source(done=5, moved=2), LETTER, RecordCounts(applied=5))
    assert (balance.verdict, balance.problems) == ("unknown", ())
    assert "2 dead letters are in the database by the source's count" in balance.unknown[0]


def test_a_letter_on_its_way_is_counted_once() -> None:
    balance = strike_totals(
        source(dead=2, moved=0), LetterCounts(open=1, deaths=1), RecordCounts(applied=6, superseded=0)
    )
    assert (balance.dead, balance.holds) == (2, True)


@pytest.mark.req("CC-162")
@pytest.mark.parametrize("records", [None, RecordCounts(applied=0)])
def test_more_letters_than_the_source_has_counted_leave_it_unknown(records: RecordCounts | None) -> None:
    """Such as after its consumer was deleted: all messages are pending again, and their letters are still there."""
    again = source(appended=5, done=0, moved=0, dead=0, pending=5, untouched=5)
    balance = strike_totals(again, LetterCounts(open=2, discarded=1, deaths=3), records)
    assert balance.verdict == "unknown"
    assert "3 more dead letters of this consumer than the source has counted" in balance.unknown[0]


@pytest.mark.req("CC-162")
def test_a_letter_that_was_stored_while_its_message_was_counted_is_dead_and_not_pending() -> None:
    balance = strike_totals(source(moved=0, dead=0, pending=4), LETTER, RecordCounts(applied=6))
    assert balance.holds
    assert (balance.dead, balance.pending) == (1, 3)
    assert sums_up(balance)


def test_what_is_applied_and_not_acknowledged_yet_is_applied() -> None:
    balance = strike_totals(source(), LETTER, RecordCounts(applied=7))
    assert (balance.applied, balance.pending, balance.holds) == (7, 1, True)
    assert "not acknowledged yet" in balance.notes["pending"]
    assert sums_up(balance)


@pytest.mark.parametrize("changes", [{}, {"untouched": 2}])
def test_more_records_than_messages_leave_it_unknown(changes: dict[str, Any]) -> None:
    balance = strike_totals(source(**changes), LETTER, RecordCounts(applied=100))
    assert "something else feeds or fed it, too" in balance.unknown[0]
    assert balance.applied == 6


@pytest.mark.req("CC-071")
def test_after_a_purge_it_is_unknown() -> None:
    balance = strike_totals(source(), LETTER, RecordCounts(applied=2, is_purged=True))
    assert (balance.applied, balance.done, balance.verdict) == (2, 4, "unknown")
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
    balance = strike_totals(source(**changes), LETTER, RecordCounts(applied=6))
    assert not balance.holds
    assert problem in balance.problems[0]


def test_without_a_database_it_is_unknown_what_became_of_messages() -> None:
    balance = without_database(source())
    assert (balance.dead, balance.done, balance.verdict) == (2, 6, "unknown")
    assert "1 of them in a database" in balance.notes["dead"]
    assert sums_up(balance)
    assert without_database(source(done=0, moved=0, pending=9)).holds


def facts(**changes: Any) -> SourceCounts:
    """A boundary: no copies, and dead letters are among the confirmed."""
    return SourceCounts(
        **{"appended": 10, "done": 8, "pending": 2, "dead": 0, "has_copies": False, **changes}
    )


def test_every_confirmed_fact_is_applied_or_dead() -> None:
    balance = strike_totals(facts(), LETTER, RecordCounts(applied=7))
    assert (balance.applied, balance.dead, balance.holds) == (7, 1, True)
    assert sums_up(balance)


def test_a_fact_that_was_confirmed_and_not_applied_is_missing() -> None:
    balance = strike_totals(facts(), LetterCounts(), RecordCounts(applied=6))
    assert "2 messages are acknowledged, but neither applied nor dead" in balance.problems[0]


def test_a_fact_that_expired_is_dropped_with_its_reason() -> None:
    expired = facts(pending=1, dropped={"expired before it was confirmed": 1})
    balance = strike_totals(expired, LetterCounts(), RecordCounts(applied=8))
    assert balance.holds
    assert sums_up(balance)


@pytest.mark.req("CC-071")
def test_a_source_that_cannot_count_leaves_it_unknown() -> None:
    silent = SourceCounts(notes={"appended": "it is in memory"})
    balance = strike_totals(silent, LetterCounts(), RecordCounts(applied=3))
    assert (balance.appended, balance.verdict) == (None, "unknown")
    assert balance.unknown == ("how many were appended is unknown: it is in memory",)


def test_where_all_messages_wait_records_are_named() -> None:
    restored = SourceCounts(appended=3, done=0, pending=3, dead=0, moved=0)
    messages = Messages([], [], [seen(each) for each in "abc"])
    for applied, says in ((0, "nothing has been consumed yet"), (3, "the database has 3 records")):
        balance = strike_totals(restored, LetterCounts(), RecordCounts(applied=applied))
        assert balance.notes["applied"].startswith("nothing has been consumed yet")
        assert says in balance.notes["applied"]
        outcomes = dict.fromkeys("abc"[:applied], "done")
        ledger = ConsumerLedger(records=InboxRecords(outcomes=outcomes, before=applied, after=applied))
        assert says in strike_by_id(restored, messages, ledger).notes["applied"]


# ── each message by its id ──────────────────────────────────────────────────────────────────────────────


def seen(tracking_id: str, day: int = 100, at: float = 0.0) -> Seen:
    return Seen(tracking_id, day, at, tracking_id.encode())


def follow(
    done: str = "",
    moved: str = "",
    *,
    records: str | None = "",
    superseded: str = "",
    letters: dict[str, str] | None = None,
    extra: int = 0,
    floor: int | None = None,
    purged_before: float | None = None,
    **more: Any,
) -> Balance:
    """Each letter is a message; `extra` records are of messages that the source does not list."""
    messages = Messages([seen(each) for each in done], [seen(each) for each in moved], [], **more)
    ended = len(done) + len(moved) + messages.forgotten.total
    outcomes = dict.fromkeys(records or "", "done") | dict.fromkeys(superseded, "superseded")
    ledger = ConsumerLedger(
        letters=tuple(Letter(key.encode(), status, True) for key, status in (letters or {}).items()),
        purged_before=purged_before,
        records=None
        if records is None
        else InboxRecords(
            outcomes=outcomes,
            before=len(outcomes) + extra,
            after=len(outcomes) + extra,
            superseded=len(superseded),
            floor=floor,
        ),
    )
    counts = SourceCounts(
        appended=ended, done=ended - len(moved), moved=len(moved), pending=0, dead=0, messages=messages
    )
    return strike_by_id(counts, messages, ledger)


@pytest.mark.req("CC-070", "CC-073")
def test_each_event_is_applied_once_and_its_copies_are_duplicates() -> None:
    balance = follow("aabc", records="ab", superseded="c")
    assert (balance.applied, balance.duplicate, balance.holds) == (2, 1, True)
    assert balance.dropped == {"superseded by a later event": 1}
    assert sums_up(balance)


@pytest.mark.req("CC-070")
def test_a_message_without_a_record_is_missing_by_name() -> None:
    balance = follow("abb", records="a")
    assert balance.problems == ("1 message is acknowledged, but neither applied nor dead: b",)
    assert balance.missing == ("b",)


@pytest.mark.req("CC-072")
def test_copies_of_a_dead_letter_are_duplicates_of_it() -> None:
    balance = follow(moved="aaab", letters={"a": "open", "b": "discarded"})
    assert (balance.dead, balance.duplicate, balance.holds) == (1, 2, True)
    assert sums_up(balance)


@pytest.mark.req("CC-072")
@pytest.mark.parametrize(
    ("status", "records", "numbers"),
    [("open", "a", (1, 0, 1)), ("redriven", "a", (1, 1, 0)), ("resolved", "a", (1, 0, 0))],
)
def test_a_copy_may_be_applied_while_the_first_one_is_dead(
    status: str, records: str, numbers: tuple[int, int, int]
) -> None:
    balance = follow("a", "a", records=records, letters={"a": status})
    assert (balance.applied, balance.pending, balance.dead) == numbers
    assert balance.holds
    assert sums_up(balance)


@pytest.mark.req("CC-073")
@pytest.mark.parametrize(("status", "dead", "dropped"), [("open", 1, 0), ("discarded", 0, 1)])
def test_what_an_edited_letter_applied_is_applied_when_a_copy_opens_the_letter_again(
    status: str, dead: int, dropped: int
) -> None:
    balance = follow(moved="aa", records="a", letters={"a": status})
    assert (balance.applied, balance.duplicate, balance.dead) == (1, 0, dead)
    assert sum(balance.dropped.values()) == dropped
    assert balance.holds
    assert sums_up(balance)


def test_a_copy_that_was_done_needs_a_record_whatever_letters_there_are() -> None:
    assert follow("a", "a", letters={"a": "open"}).missing == ("a",)
    assert follow(moved="a", letters={"a": "resolved"}).missing == ("a",)


def test_a_letter_that_is_gone_is_missing_unless_a_purge_can_have_removed_it() -> None:
    assert "1 dead letter is missing" in follow(moved="aa").problems[0]
    purged = follow(moved="a", purged_before=1.0)
    assert (purged.gone, purged.holds) == (1, True)
    assert follow(moved="a", records="a", purged_before=1.0).applied == 1
    assert follow(moved="a", purged_before=-1.0).missing == ("a",)


@pytest.mark.req("CC-073")
def test_a_record_that_was_purged_is_not_counted_as_applied() -> None:
    balance = follow("ab", records="a", floor=101)
    assert (balance.applied, balance.gone, balance.holds) == (1, 1, True)
    assert follow("ab", records="a", floor=100).missing == ("b",)


def test_where_a_source_does_not_know_what_was_moved_letters_are_found_by_their_bytes() -> None:
    balance = follow("aab", records="b", letters={"a": "open"}, is_complete=False)
    assert (balance.applied, balance.duplicate, balance.dead, balance.holds) == (1, 1, 1, True)
    balance = follow("aab", records="ab", letters={"a": "open"}, is_complete=False)
    assert (balance.applied, balance.duplicate, balance.dead, balance.holds) == (2, 0, 1, True)


def test_messages_that_are_no_longer_listed_are_compared_by_number() -> None:
    forgotten = Forgotten({(90, 90): 3, (99, 101): 2}, copies=1)
    balance = follow("a", records="a", extra=5, forgotten=forgotten)
    assert (balance.applied, balance.duplicate, balance.holds) == (6, 1, True)
    assert sums_up(balance)
    assert follow("a", records="a", extra=4, forgotten=forgotten).verdict == "unknown"
    assert follow("a", records="a", extra=6, forgotten=forgotten).verdict == "unknown"
    for extra in (0, 1, 2):
        balance = follow("a", records="a", extra=extra, floor=100, forgotten=forgotten)
        assert (balance.applied, balance.gone, balance.holds) == (1 + extra, 5 - extra, True)
        assert sums_up(balance)


def test_letters_of_messages_that_are_no_longer_listed_are_still_dead() -> None:
    balance = follow(extra=1, letters={"x": "open", "y": "discarded"}, forgotten=Forgotten(undated=3))
    assert (balance.applied, balance.dead, balance.holds) == (1, 1, True)
    assert sums_up(balance)


def test_more_records_than_messages_leave_it_unknown_by_id_too() -> None:
    balance = follow("a", records="a", extra=2)
    assert (
        "the database has 2 more records of this consumer than messages of this source have ended"
        in balance.unknown[0]
    )
    empty = follow(extra=2)
    assert (empty.appended, empty.verdict) == (None, "unknown")
    assert "it was emptied or lost" in empty.unknown[0]


def test_without_a_contract_all_that_ended_is_done() -> None:
    balance = follow("aab", "c", records=None, letters={"c": "open"})
    assert (balance.applied, balance.done, balance.dead, balance.holds) == (None, 3, 1, True)
    assert sums_up(balance)
