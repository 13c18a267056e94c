"""What is kept, what may be purged, and the record of who did what."""

from __future__ import annotations

import json
import random

import pytest
from sqlalchemy.exc import DBAPIError

from onceward.deadletters import Category, Filter, Status
from onceward.errors import ConfigurationError
from tests.support.deadletters.world import BILLING, Letters, burial

pytest_plugins = ("tests.support.databases", "tests.support.deadletters.site")

DAY = 86400.0


def settle_all(letters: Letters, *names: str) -> None:
    """Some resolved, the others discarded."""
    letters.bury(*(burial(name) for name in names))
    half = len(names) // 2
    for name in names[:half]:
        letters.discard(Filter(message_id=name), reason="by hand", operator="ann")
    letters.send_again(rate=1000)
    letters.advance(60)
    for redelivered in letters.deliver(1000):
        letters.settle(redelivered, "done")


@pytest.mark.req("CC-050")
def test_open_held_and_young_letters_survive_every_purge(letters: Letters) -> None:
    settle_all(letters, "resolved", "discarded", "held")
    letters.hold(Filter(message_id="held"), reason="case 7", operator="ann")
    letters.bury(burial("open"), burial("waiting", event_type="order.sent"))
    letters.send_again(Filter(consumer="billing", event_type="order.sent"))
    letters.advance(89 * DAY)
    assert letters.purge(operator="ann") == 0
    letters.bury(burial("young"))
    letters.discard(Filter(message_id="young"), reason="by hand", operator="ann")
    letters.advance(2 * DAY)
    assert letters.purge(operator="ann") == 2
    assert {letter.message_id for letter in letters.find()} == {"held", "open", "waiting", "young"}
    letters.release(Filter(message_id="held"), reason="case closed", operator="ann")
    assert letters.one(message_id="held").hold is None
    assert letters.purge(operator="ann") == 1
    letters.advance(1000 * DAY)
    assert letters.purge(operator="ann") == 1
    assert {letter.status for letter in letters.find()} == {Status.OPEN, Status.REDRIVEN}


def test_whatever_happens_no_purge_takes_what_must_stay(letters: Letters) -> None:
    choice = random.Random(7)
    letters.bury(*(burial(f"m{number}") for number in range(12)))
    for _ in range(25):
        name = f"m{choice.randrange(12)}"
        match choice.randrange(5):
            case 0:
                letters.hold(Filter(message_id=name), reason="case", operator="ann")
            case 1:
                letters.discard(Filter(message_id=name), reason="by hand", operator="ann")
            case 2 if letters.count(Filter(message_id=name, status="open")):
                letters.send_again(Filter(consumer="billing", message_id=name))
            case 3:
                for redelivered in letters.deliver():
                    letters.settle(redelivered, choice.choice(["done", "failed"]))
            case _:
                letters.advance(choice.uniform(1, 40) * DAY)
        must_stay = {
            letter.id
            for letter in letters.find()
            if letter.hold is not None
            or letter.status in (Status.OPEN, Status.REDRIVEN)
            or letters.clock() < letter.died_at.timestamp() + 90 * DAY
        }
        letters.purge(operator="ann")
        assert {letter.id for letter in letters.find()} == must_stay


def test_a_purge_goes_in_steps_each_with_its_line(letters: Letters, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onceward.deadletters.operations.PURGE_STEP", 2)
    settle_all(letters, *(f"m{number}" for number in range(5)))
    letters.advance(91 * DAY)
    assert letters.purge(operator="ann") == 5
    lines = [json.loads(row["details"])["letters"] for row in letters.audit() if row["action"] == "purge"]
    assert sorted(lines) == [1, 2, 2]


@pytest.mark.req("CN-09")
def test_one_purge_removes_at_most_half_of_many_letters(
    letters: Letters, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onceward.deadletters.operations.PURGE_STEP", 1)
    monkeypatch.setattr("onceward.deadletters.operations.FEW_LETTERS", 2)
    settle_all(letters, *(f"m{number}" for number in range(8)))
    letters.advance(91 * DAY)
    assert [letters.purge(operator="ann") for _ in range(4)] == [4, 2, 2, 0]


def test_discarding_leaves_the_letter_and_passes_over_what_is_held(letters: Letters) -> None:
    letters.bury(burial("a"), burial("b"), burial("killer", category=Category.POISON))
    letters.hold(Filter(message_id="b"), reason="case", operator="ann")
    assert letters.discard(BILLING, reason="paid by hand", operator="ann") == 2
    assert letters.one(message_id="a").status is Status.DISCARDED
    assert letters.one(message_id="a").settled_at is not None
    assert letters.one(message_id="b").status is Status.OPEN
    assert letters.body(letters.one(message_id="a").id) == b'"body of a"'


@pytest.mark.parametrize("action", ["discard", "hold", "release"])
def test_operators_say_what_and_why_and_who(letters: Letters, action: str) -> None:
    letters.bury(burial())
    for wanted, reason, operator, says in (
        (Filter(), "why", "ann", "give a filter"),
        (BILLING, " ", "ann", "give a reason"),
        (BILLING, "why", "", "operator's name"),
    ):
        with pytest.raises(ConfigurationError, match=says):
            getattr(letters, action)(wanted, reason=reason, operator=operator)
    assert letters.audit() == []


# ── the audit ───────────────────────────────────────────────────────────────────────────────────────────


def test_every_action_of_an_operator_is_in_the_audit(letters: Letters) -> None:
    letters.bury(burial("a"), burial("b"))
    letters.hold(BILLING, reason="case 7", operator="ann")
    letters.release(BILLING, reason="closed", operator="bob\0")
    letters.send_again(Filter(consumer="billing", message_id="a"), operator="cid")
    letters.discard(Filter(message_id="b"), reason="by hand", operator="dan")
    letters.purge(operator="eve")
    lines = list(reversed(letters.audit()))
    assert [(row["operator"], row["action"]) for row in lines] == [
        ("ann", "hold"),
        ("bob\\x00", "release"),
        ("cid", "redrive"),
        ("dan", "discard"),
        ("eve", "purge"),
    ]
    assert json.loads(lines[0]["details"])["letters"] == 2
    assert json.loads(lines[0]["details"])["reason"] == "case 7"
    verdict = letters.verify_audit()
    assert (verdict.entries, verdict.broken, verdict.last_hash) == (5, None, lines[-1]["hash"])


@pytest.mark.parametrize(
    "statement", ["UPDATE onceward_audit SET operator = 'nobody'", "DELETE FROM onceward_audit"]
)
def test_the_audit_cannot_be_changed(letters: Letters, statement: str) -> None:
    letters.purge(operator="ann")
    with pytest.raises(DBAPIError, match="append-only"):
        letters.database.do(statement)
    assert letters.verify_audit() == (1, letters.audit()[0]["hash"], None)


@pytest.mark.req("RN-12")
@pytest.mark.without("postgresql")
@pytest.mark.parametrize("verb", ["INSERT OR REPLACE", "REPLACE", "INSERT OR IGNORE", "INSERT"])
@pytest.mark.parametrize("same", ["seq", "previous", "hash"])
def test_no_insert_takes_the_place_of_a_row_of_the_audit(letters: Letters, verb: str, same: str) -> None:
    for operator in ("ann", "bob"):
        letters.purge(operator=operator)
    before = letters.audit()
    values = {"seq": "77", "previous": "'other'", "hash": "'other'"} | {same: same}
    with pytest.raises(DBAPIError, match="append-only"):
        letters.database.do(
            f"{verb} INTO onceward_audit SELECT {values['seq']}, at, 'nobody', action, details, "
            f"{values['previous']}, {values['hash']} FROM onceward_audit WHERE seq = 1"
        )
    assert letters.audit() == before
    letters.purge(operator="cid")
    assert letters.verify_audit().entries == 3


def unguard(letters: Letters) -> None:
    if letters.database.is_sqlite:
        letters.database.do(
            "DROP TRIGGER onceward_audit_is_not_changed",
            "DROP TRIGGER onceward_audit_is_not_cut",
            "DROP TRIGGER onceward_audit_is_not_replaced",
        )
    else:
        letters.database.do("DROP TRIGGER onceward_audit_is_not_changed ON onceward_audit")


@pytest.mark.parametrize(
    ("statement", "row", "says"),
    [
        ("UPDATE onceward_audit SET operator = 'nobody' WHERE seq = 2", 2, "it was changed"),
        ("UPDATE onceward_audit SET details = '{}' WHERE seq = 3", 3, "it was changed"),
        ("UPDATE onceward_audit SET at = '2020' WHERE seq = 1", 1, "it was changed"),
        ("DELETE FROM onceward_audit WHERE seq = 1", 2, "before it"),
        ("DELETE FROM onceward_audit WHERE seq = 2", 3, "before it"),
        ("DELETE FROM onceward_audit WHERE seq = 3", 2, "after it"),
        ("DELETE FROM onceward_audit", 0, "after it"),
    ],
)
def test_tampering_is_found_and_the_row_named(letters: Letters, statement: str, row: int, says: str) -> None:
    for operator in ("ann", "bob", "cid"):
        letters.purge(operator=operator)
    unguard(letters)
    assert letters.verify_audit().broken is None
    letters.database.do(statement)
    broken = letters.again().verify_audit().broken
    assert broken is not None
    assert broken.seq == row
    assert says in broken.what


@pytest.mark.without("asyncio")
def test_many_write_to_the_audit_at_once(letters: Letters) -> None:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(lambda number: letters.purge(operator=f"operator {number}"), range(24)))
    verdict = letters.verify_audit()
    assert (verdict.entries, verdict.broken) == (24, None)
