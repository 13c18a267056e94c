"""Stopping a redrive: exactly the letters that no worker has are open again, and nothing is counted twice."""

from __future__ import annotations

import json

import pytest

from onceward.deadletters import Filter, RedriveRefusedError, Status
from tests.support.deadletters.world import LEASE, Letters, burial

pytest_plugins = ("tests.support.databases", "tests.support.deadletters.site")

pytestmark = pytest.mark.req("UI-28")


def stop(letters: Letters, id_: str, reason: str = "the fix was wrong") -> int:
    return int(letters.stop_redrive(id_, reason=reason, operator="ann"))


def statuses(letters: Letters) -> dict[str, str]:
    return {each.message_id: str(each.status) for each in letters.find()}


def test_what_no_worker_has_is_open_again_and_what_one_has_ends_there(letters: Letters) -> None:
    letters.bury(*(burial(f"m{number}") for number in range(5)))
    made = letters.send_again()
    (done,) = letters.deliver(1)
    letters.advance(0.6)
    (failed,) = letters.deliver(1)
    letters.settle(done, "done")
    assert stop(letters, made.id) == 3
    assert list(statuses(letters).values()) == ["resolved", "redriven", "open", "open", "open"]
    letters.settle(failed, "failed")
    (row,) = letters.redrives()
    assert (row["letters"], row["waiting"], row["succeeded"], row["died_again"], row["withdrawn"]) == (
        5,
        0,
        1,
        1,
        3,
    )
    assert row["stopped_at"] is not None
    letters.advance(3600)
    assert letters.deliver() == []
    opened = letters.one(message_id="m4")
    assert (opened.redrives, opened.redrive_id, opened.deaths) == (0, None, 1)
    assert letters.rcas()[0]["closed_at"] is None, "its letters are not settled"


def test_the_next_redrive_begins_at_once(letters: Letters) -> None:
    letters.bury(*(burial(f"m{number}") for number in range(50)))
    stop(letters, letters.send_again(rate=1).id)
    letters.send_again(rate=1)
    assert len(letters.deliver()) == 1


def test_a_letter_that_is_given_back_after_the_stop_is_open(letters: Letters) -> None:
    letters.bury(burial("a"), burial("b"))
    made = letters.send_again()
    (held,) = letters.deliver(1)
    assert stop(letters, made.id) == 1
    letters.settle(held, "returned")
    assert set(statuses(letters).values()) == {"open"}
    assert letters.redrives()[0]["withdrawn"] == 2


def test_a_letter_whose_worker_dies_after_the_stop_is_open_and_its_history_says_so(letters: Letters) -> None:
    letters.bury(burial("a"))
    made = letters.send_again()
    letters.deliver(1)
    assert stop(letters, made.id) == 0
    assert letters.redrives()[0]["waiting"] == 1
    letters.advance(LEASE + 1)
    assert letters.deliver() == []
    (letter,) = letters.find()
    assert letter.status is Status.OPEN
    assert letter.history[-1].error == "delivered again, and never came to an end"
    assert letters.redrives()[0]["waiting"] == 0


def test_it_is_stopped_once_with_a_reason_and_the_audit_has_it(letters: Letters) -> None:
    letters.bury(burial("a"), burial("b"))
    made = letters.send_again()
    for id_, reason, says in ((made.id, " ", "say why"), ("other", "why", "there is no redrive 'other'")):
        with pytest.raises(RedriveRefusedError, match=says):
            stop(letters, id_, reason)
    assert stop(letters, made.id) == 2
    assert stop(letters, made.id) == 0
    entries = [each for each in letters.audit() if each["action"] == "stop_redrive"]
    assert [json.loads(each["details"]) for each in entries] == [
        {"redrive": made.id, "reason": "the fix was wrong", "letters": 2}
    ]
    assert entries[0]["operator"] == "ann"
    assert letters.verify_audit().broken is None


def test_one_that_is_over_is_refused(letters: Letters) -> None:
    letters.bury(burial("a"))
    made = letters.send_again()
    (held,) = letters.deliver()
    letters.settle(held, "done")
    with pytest.raises(RedriveRefusedError, match="is over: none of its letters waits"):
        stop(letters, made.id)


def test_others_go_on(letters: Letters) -> None:
    letters.bury(burial("a"), burial("b", event_type="order.sent"))
    stopped = letters.send_again()
    letters.send_again(Filter(consumer="billing", event_type="order.sent"))
    stop(letters, stopped.id)
    letters.advance(60)
    assert [each.message_id for each in letters.deliver()] == ["b"]
