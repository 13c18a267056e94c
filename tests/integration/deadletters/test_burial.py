"""Nothing that is buried is lost, changed or duplicated; and people are alerted."""

from __future__ import annotations

import hashlib
import logging
import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from onceward.deadletters import Category, DeadLetters, Failure, Filter, Status
from onceward.errors import ConfigurationError
from onceward.testing.telemetry import record
from tests.support.deadletters.world import START, Letters, burial

if TYPE_CHECKING:
    from tests.support.databases import Database

pytest_plugins = ("tests.support.databases", "tests.support.deadletters.site")


def failures(*attempts: int, day: int = 1) -> tuple[Failure, ...]:
    return tuple(
        Failure(f"2026-01-{day:02}T00:00:{n:02}+00:00", f"failure {n}", n, "SYSTEM") for n in attempts
    )


@pytest.mark.req("CC-050")
@pytest.mark.parametrize(
    "body", [b"", b"\x00\xff\xfe binary \x00", os.urandom(10_000_000)], ids=["empty", "binary", "10MB"]
)
def test_a_letter_keeps_its_bytes_and_all_that_is_known(letters: Letters, body: bytes) -> None:
    buried = burial(
        body=body,
        history=failures(1, 2, 3),
        attempts=3,
        aggregate_id="order-1",
        sequence=4,
        trace_id="ab" * 16,
        first_failed_at=START - 60,
    )
    assert letters.bury(buried) == 1
    letter = letters.again().one()
    assert letters.body(letter.id) == body
    assert (letter.size, letter.digest) == (len(body), hashlib.sha256(body).hexdigest())
    assert (letter.attempts, letter.deaths, letter.history) == (3, 1, failures(1, 2, 3))
    assert (letter.category, letter.status, letter.error) == (
        Category.INFRASTRUCTURE,
        Status.OPEN,
        "no connection",
    )
    assert (letter.aggregate_id, letter.sequence, letter.trace_id) == ("order-1", 4, "ab" * 16)
    assert letter.first_failed_at.timestamp() == START - 60
    assert letter.died_at.timestamp() == START
    assert (letter.keep_until - letter.died_at).days == 90


@pytest.mark.req("CC-050")
def test_the_same_death_reported_twice_is_one_letter(letters: Letters) -> None:
    reported = burial(history=failures(1, 2), attempts=2)
    assert [letters.bury(reported), letters.bury(reported), letters.again().bury(reported, reported)] == [
        1,
        0,
        0,
    ]
    letter = letters.one()
    assert (letter.attempts, letter.deaths, len(letter.history)) == (2, 1, 2)


@pytest.mark.req("CC-055")
def test_a_letter_is_found_in_any_spelling_of_its_id(letters: Letters) -> None:
    canonical = "8b1c2e76-0f7e-4f0e-9a5d-3f6a1c2b4d5e"
    sent = (canonical.upper(), canonical.replace("-", ""))
    assert [letters.bury(burial(spelled, body=b"{}")) for spelled in sent] == [1, 0]
    for spelled in (canonical, f"{{{canonical}}}", f"urn:uuid:{canonical}"):
        assert letters.one(message_id=spelled).message_id == canonical


def test_the_same_death_reported_after_the_letter_was_settled_does_not_open_it(letters: Letters) -> None:
    """Killed between burying and acknowledging, a worker buries it again after everything is fixed."""
    reported = burial(history=failures(1))
    letters.bury(reported)
    letters.discard(Filter(message_id="m1"), reason="done by hand", operator="ann")
    assert letters.bury(reported) == 0
    assert letters.one().status is Status.DISCARDED


def test_another_death_of_the_same_message_is_kept_in_the_same_letter(letters: Letters) -> None:
    letters.bury(burial(history=failures(1, 2), attempts=2))
    letters.advance(86400)
    assert letters.bury(burial(history=failures(1, day=2), error="still no connection")) == 1
    letter = letters.one()
    assert (letter.attempts, letter.deaths, letter.history) == (3, 2, failures(1, 2) + failures(1, day=2))
    assert letter.error == "still no connection"
    assert (letter.keep_until - letter.died_at).days == 90


def test_without_a_history_an_open_letter_is_taken_for_the_same_death(letters: Letters) -> None:
    assert [letters.bury(burial(history=())), letters.bury(burial(history=()))] == [1, 0]
    assert letters.one().history[0].error == "no connection"
    letters.discard(Filter(message_id="m1"), reason="enough", operator="ann")
    letters.advance(1)
    assert letters.bury(burial(history=())) == 1
    assert (letters.one().status, letters.one().deaths) == (Status.OPEN, 2)


@pytest.mark.req("CC-050")
def test_one_id_with_two_payloads_is_two_letters(letters: Letters) -> None:
    """The inbox refuses the second one as a conflict; it must not disappear behind the first."""
    letters.bury(burial(body=b"one"), burial(body=b"two", category=Category.CONTRACT))
    assert sorted(letters.body(letter.id) for letter in letters.find()) == [b"one", b"two"]


def test_two_consumers_have_letters_of_their_own(letters: Letters) -> None:
    letters.bury(burial(), burial(consumer="shipping"))
    assert [letter.consumer for letter in letters.find()] == ["billing", "shipping"]


def test_burying_is_all_or_none(letters: Letters) -> None:
    broken = burial("m2")
    msgspec.structs.force_setattr(broken, "category", "nonsense")
    with pytest.raises(Exception, match="category"):
        letters.bury(burial("m1"), broken)
    assert letters.find() == []


def test_what_no_database_takes_is_buried_all_the_same(letters: Letters) -> None:
    """One letter that cannot be buried would block all others forever."""
    letters.bury(
        burial(
            "a\0b\ud800",
            error="zero \0 and half \udfff",
            event_type="t" * 5000,
            history=(Failure("now", "\0\ud800"),),
        ),
        burial("x" * 100_000),
    )
    first, second = letters.find()
    assert first.message_id == "a\\x00b\\ud800"
    assert first.error == "zero \\x00 and half \\udfff"
    assert len(first.event_type) == 200
    assert len(second.message_id) < 400
    assert letters.bury(burial("x" * 100_000)) == 0


@pytest.mark.without("asyncio")
def test_many_bury_the_same_at_once(letters: Letters) -> None:
    reported = [burial(f"m{number}") for number in range(5)]
    with ThreadPoolExecutor(8) as threads:
        new = sum(threads.map(lambda _: letters.made.bury(*reported), range(8)))
    assert new == 5
    assert letters.count() == 5


@pytest.mark.without("asyncio")
def test_those_who_bury_the_same_do_not_block_each_other(letters: Letters) -> None:
    """In whatever order each of them reports its letters, one of them always gets on."""
    reported = [burial(f"m{number}") for number in range(20)]
    with ThreadPoolExecutor(6) as threads:
        new = sum(
            threads.map(
                lambda shift: letters.made.bury(*reported[shift:], *reported[:shift]), range(0, 18, 3)
            )
        )
    assert new == letters.count() == 20


def test_letters_are_found_by_what_is_known_of_them(letters: Letters) -> None:
    letters.bury(burial("old", error="Timeout after 100%"))
    letters.advance(3600)
    letters.bury(
        burial(
            "new",
            error="no_such_account",
            event_type="order.sent",
            category=Category.BUSINESS,
            aggregate_id="a1",
        ),
        burial("other", consumer="shipping"),
    )

    def found(**wanted: Any) -> list[str]:
        names = [letter.message_id for letter in letters.find(Filter(**wanted))]
        assert letters.count(Filter(**wanted)) == len(names)
        return names

    assert found() == ["old", "new", "other"]
    assert found(consumer="billing") == ["old", "new"]
    assert found(event_type="order.sent") == ["new"]
    assert found(category="business") == ["new"]
    assert found(status="open", aggregate_id="a1") == ["new"]
    assert found(older_than=3600) == ["old"]
    assert found(younger_than=60) == ["new", "other"]
    assert found(text="TIMEOUT") == ["old"]
    assert found(text="100%") == ["old"]
    assert found(text="o_such") == ["new"]
    assert found(text="noXsuch") == []
    assert found(ids=[letters.one(message_id="new").id]) == ["new"]
    assert [letter.message_id for letter in letters.find(limit=1)] == ["old"]
    assert [(row["consumer"], row["letters"]) for row in letters.stats()] == [
        ("billing", 1),
        ("billing", 1),
        ("shipping", 1),
    ]


@pytest.mark.without("asyncio")
def test_missing_tables_are_reported_in_words_that_help(database: Database) -> None:
    with pytest.raises(ConfigurationError, match="onceward inbox migrate"):
        DeadLetters(database.default).find()


# ── alerts ──────────────────────────────────────────────────────────────────────────────────────────────


def alerts(caplog: pytest.LogCaptureFixture) -> list[tuple[str, int]]:
    found = [(getattr(each, "alert", ""), each.levelno) for each in caplog.records if hasattr(each, "alert")]
    caplog.clear()
    return found


def test_each_new_letter_is_reported(letters: Letters, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "onceward.deadletters")
    with record() as recording:
        letters.bury(burial("a"), burial("b"))
        letters.bury(burial("a"))
        assert alerts(caplog) == [("new", logging.INFO)] * 2
        assert (
            recording.metric("onceward.deadletters.buried", consumer="billing", category="infrastructure")
            == 2
        )
        assert recording.metric("onceward.deadletters.alerts", consumer="billing", alert="new") == 2


def test_more_than_ten_of_a_type_and_a_surge_are_reported(
    letters: Letters, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "onceward.deadletters")
    with record() as recording:
        letters.bury(*(burial(f"m{number}") for number in range(10)))
        assert alerts(caplog) == []
        letters.bury(burial("eleventh"))
        assert set(alerts(caplog)) == {("many_of_a_type", logging.WARNING), ("surge", logging.CRITICAL)}
        letters.advance(600)
        letters.bury(burial("twelfth"))
        assert alerts(caplog) == [("many_of_a_type", logging.WARNING)]
        letters.bury(burial("other", event_type="order.sent"))
        assert alerts(caplog) == []
        assert recording.metric("onceward.deadletters.alerts", alert="many_of_a_type") == 2
        assert recording.metric("onceward.deadletters.alerts", alert="surge") == 1


def test_letter_after_letter_is_reported_when_it_passes_a_limit_and_when_it_has_doubled(
    letters: Letters, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "onceward.deadletters")
    with record() as recording:
        for number in range(1, 101):
            letters.bury(burial(f"m{number}", aggregate_id="x"))
        reported = [each.getMessage() for each in caplog.records]
        for kind, expected in (
            ("many_of_a_type", [11, 22, 44, 88]),
            ("surge", [11, 22, 44, 88]),
            ("same_aggregate", [3, 6, 12, 24, 48, 96]),
        ):
            of_kind = [each for each in reported if f"({kind})" in each]
            assert [int(each.partition("): ")[2].split()[0]) for each in of_kind] == expected
            assert recording.metric("onceward.deadletters.alerts", alert=kind) == len(expected)


def test_what_goes_on_is_reported_again_after_ten_minutes(
    letters: Letters, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "onceward.deadletters")
    many = ("many_of_a_type", logging.WARNING)
    letters.bury(*(burial(f"m{number}") for number in range(11)))
    assert many in alerts(caplog)
    letters.advance(599)
    letters.bury(burial("a"))
    assert alerts(caplog) == []
    letters.advance(1)
    letters.bury(burial("b"))
    assert alerts(caplog) == [many]
    letters.bury(burial("c"))
    assert alerts(caplog) == []


def test_after_letters_were_settled_the_limit_is_passed_anew(
    letters: Letters, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "onceward.deadletters")
    many = ("many_of_a_type", logging.WARNING)
    letters.bury(*(burial(f"m{number}") for number in range(50)))
    assert many in alerts(caplog)
    letters.discard(Filter(consumer="billing", status="open"), reason="tests", operator="ann")
    letters.bury(burial("a"))
    assert alerts(caplog) == []
    letters.bury(*(burial(f"n{number}") for number in range(10)))
    assert alerts(caplog) == [many]


def test_types_aggregates_and_consumers_are_notified_each_for_itself(
    letters: Letters, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "onceward.deadletters")
    for kind in ({}, {"event_type": "order.sent"}, {"consumer": "shipping"}):
        letters.bury(*(burial(f"m{number}{kind}", **kind) for number in range(11)))
        assert ("many_of_a_type", logging.WARNING) in alerts(caplog)
    for name in ("x", "y"):
        letters.bury(*(burial(f"{name}{number}", aggregate_id=name) for number in range(3)))
        assert ("same_aggregate", logging.CRITICAL) in alerts(caplog)


def test_a_surge_is_ten_times_what_is_usual(letters: Letters, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "onceward.deadletters")
    # 574 in the rest of a day are two in five minutes.
    letters.bury(*(burial(f"usual-{number}") for number in range(574)))
    letters.advance(3600)
    alerts(caplog)
    letters.bury(*(burial(f"m{number}") for number in range(20)))
    assert alerts(caplog) == []
    letters.bury(burial("one more"))
    assert alerts(caplog) == [("surge", logging.CRITICAL)]


def test_an_aggregate_that_fails_three_times_is_reported(
    letters: Letters, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "onceward.deadletters")
    letters.bury(burial("a", aggregate_id="x"), burial("b", aggregate_id="x"), burial("c", aggregate_id="y"))
    assert alerts(caplog) == []
    letters.bury(burial("d", aggregate_id="x"))
    assert alerts(caplog) == [("same_aggregate", logging.CRITICAL)]


def test_what_is_rolled_back_is_not_shown(letters: Letters, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "onceward.deadletters")
    broken = burial("m2")
    msgspec.structs.force_setattr(broken, "category", "nonsense")
    with pytest.raises(Exception, match="category"):
        letters.bury(burial("m1"), broken)
    assert alerts(caplog) == []
