"""A message that may be what kills its processes runs while nothing else of its loop does."""

from __future__ import annotations

from typing import Any

import pytest

from onceward import Transaction
from onceward.task import loops
from onceward.transaction import Verdict
from tests.support.world import SettlingSource, Until, World, consuming, transactions

pytestmark = [pytest.mark.req("PF-03"), pytest.mark.timeout(60)]

SUSPECT = "t2"


class Source(SettlingSource):
    """Two ordinary messages, the suspect, and two more."""

    def __init__(self) -> None:
        batch = transactions(5)
        super().__init__(script=[batch[:2], [batch[2]], batch[3:]])

    def is_suspect(self, transaction: Transaction) -> bool:
        return transaction.id == SUSPECT


def slots(number: int) -> Any:
    return consuming(concurrency=number, mode="continuous")


def test_it_begins_after_the_end_of_the_others_and_nothing_is_fetched_before_its_own(world: World) -> None:
    source = Source()
    fetches: dict[str, int] = {}
    ended: list[str] = []

    def process(each: Transaction) -> Any:
        fetches[each.id] = len(source.asked)
        if each.id == SUSPECT:
            assert sorted(ended) == ["t0", "t1"]
            return None
        # The others are in flight until the suspect has been fetched.
        return Until(lambda: len(source.asked) > 1)

    def success(each: Transaction, _: Any) -> None:
        ended.append(each.id)

    world.consume(world.consumer(process, success=success, source=source), slots(4))
    assert source.verdicts() == dict.fromkeys(("t0", "t1", "t2", "t3", "t4"), Verdict.DONE)
    assert fetches[SUSPECT] == 2


def test_one_that_is_stuck_beside_it_does_not_hold_the_loop(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loops, "PATIENCE", 0.05)
    source = Source()
    begun = set()

    def process(each: Transaction) -> Any:
        begun.add(each.id)
        return Until(lambda: "t4" in begun) if each.id == "t0" else None

    world.consume(world.consumer(process, source=source), slots(4))
    assert begun == {"t0", "t1", "t3", "t4"}
    [given_back] = [each for each in source.reported if each.transaction.id == SUSPECT]
    assert (given_back.verdict, given_back.delay) == (Verdict.RETURNED, 0.05)


def test_a_stop_while_it_waits_gives_it_back_at_once(world: World) -> None:
    source = Source()

    def process(each: Transaction) -> Any:
        if each.id == "t0":
            return Until(lambda: len(source.asked) > 1 and not task.stop())
        return None

    task = world.consumer(process, source=source)
    world.consume(task, slots(4))
    [given_back] = [each for each in source.reported if each.transaction.id == SUSPECT]
    assert (given_back.verdict, given_back.delay) == (Verdict.RETURNED, 0.0)
