"""Keys that a provider cannot tell apart, and effects that count as done although nothing was called or nobody has
answered, are found."""

from __future__ import annotations

import asyncio
import hashlib
import threading
import time
import uuid
from contextlib import suppress
from typing import Any

import pytest

from onceward import AsyncConsumerTask, ConsumerTask, EffectRefused, Transaction
from onceward.inbox import NOT_DONE, Done
from onceward.verify import ScenarioStatus, VerificationReport, examine_consumer
from tests.verification.consumers import EVENTS, INSERT, contract, setup, values

pytestmark = pytest.mark.req("CC-143")


class Cards:
    def __init__(self) -> None:
        self.charged: set[str] = set()

    def charge(self, total: int, key: str, kind: str = "order") -> str:
        self.charged.add(key)
        return "paid"

    def find(self, key: str) -> bool:
        return key in self.charged


class Charges(ConsumerTask):
    contract = contract(mode="effectful")

    def process_transaction(self, transaction: Transaction, session: Any) -> None:  # type: ignore[override]
        self.charge(session, self.services["cards"])
        session.execute(INSERT, values(transaction))

    def charge(self, session: Any, cards: Any) -> None:
        session.effect("charge", lambda key: cards.charge(5, key=key))


class WithAPrefix(Charges):
    def charge(self, session: Any, cards: Any) -> None:
        session.effect("charge", lambda key: cards.charge(5, key=key[:6]))


class WithTheEventsId(Charges):
    def charge(self, session: Any, cards: Any) -> None:
        session.effect("charge", lambda key: cards.charge(5, key=key[: len(session.event.tracking_id)]))


class WithTheEnd(Charges):
    def charge(self, session: Any, cards: Any) -> None:
        session.effect("charge", lambda key: cards.charge(5, key=key.rpartition("-")[2]))


class AlwaysDone(Charges):
    def charge(self, session: Any, cards: Any) -> None:
        session.effect(
            "charge", lambda key: cards.charge(5, key=key), reconcile=lambda key: Done("paid already")
        )


class Asks(Charges):
    def charge(self, session: Any, cards: Any) -> None:
        session.effect(
            "charge",
            lambda key: cards.charge(5, key=key),
            reconcile=lambda key: Done("paid already") if cards.find(key) else NOT_DONE,
        )


MADE_OF_KEYS = {
    "prefixed": lambda key: f"shop-{key}",
    "digest": lambda key: hashlib.sha256(key.encode()).hexdigest(),
    "uuid": lambda key: str(uuid.uuid5(uuid.NAMESPACE_URL, key)),
    "upper": str.upper,
    "new": lambda key: f"{key}-{uuid.uuid4()}",
}


class Keeps:
    """A fake that keeps the keys of its calls in a table."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def charge(self, key: str) -> None:
        with self.engine.begin() as connection:
            statement = "INSERT INTO bills SELECT ?, 5 WHERE NOT EXISTS (SELECT 1 FROM bills WHERE id = ?)"
            connection.exec_driver_sql(statement, (key, key))


class Derives(Charges):
    def charge(self, session: Any, cards: Any) -> None:
        session.effect("charge", lambda key: cards.charge(MADE_OF_KEYS[self.how](key)))


@pytest.mark.parametrize("how", MADE_OF_KEYS)
def test_keys_that_a_handler_makes_of_the_key_are_compared(how: str) -> None:
    report = examine_consumer(
        type("Derives", (Derives,), {"how": how, "__module__": __name__}),
        EVENTS[:1],
        setup=setup,
        services=lambda engine: {"cards": Keeps(engine)},
        exclude=[],
        only=["exceptions", "kills"],
    )
    failed = {each.name for each in report.scenarios if each.result is ScenarioStatus.FAILED}
    assert bool(failed) is (how == "new"), str(report)


def examine(consumer: Any, scenario: str) -> VerificationReport:
    return examine_consumer(
        consumer, EVENTS, setup=setup, services={"cards": Cards()}, outside=["cards"], only=[scenario]
    )


@pytest.mark.usual("WithAPrefix", "Charges")
@pytest.mark.parametrize(
    ("consumer", "found"), [(WithAPrefix, True), (WithTheEventsId, False), (Charges, False)]
)
def test_a_part_of_the_key_that_two_events_share_is_found(consumer: Any, found: bool) -> None:
    report = examine(consumer, "outside-calls")
    assert report["outside-calls"].result is (ScenarioStatus.FAILED if found else ScenarioStatus.PASSED)
    assert ("takes the second for a copy of the first" in str(report)) is found


@pytest.mark.parametrize(
    ("consumer", "found"), [(WithTheEnd, True), (WithTheEventsId, False), (Charges, False)]
)
@pytest.mark.parametrize("tracking_id", ["order-1", "1", "0198c1f2-aaaa-7bbb-8ccc-0123456789ab"])
def test_a_part_of_the_key_that_has_nothing_of_the_event_is_found_with_one_sample(
    consumer: Any, found: bool, tracking_id: str
) -> None:
    report = examine_consumer(
        consumer,
        [{**EVENTS[0], "tracking_id": tracking_id}],
        setup=setup,
        services={"cards": Cards()},
        outside=["cards"],
        only=["outside-calls"],
    )
    assert report["outside-calls"].result is (ScenarioStatus.FAILED if found else ScenarioStatus.PASSED)
    assert ("every event has the same" in str(report)) is found


@pytest.mark.parametrize(("consumer", "found"), [(AlwaysDone, True), (Asks, False)])
def test_reconcile_that_calls_everything_done_is_found(consumer: Any, found: bool) -> None:
    report = examine(consumer, "exceptions")
    assert report["exceptions"].result is (ScenarioStatus.FAILED if found else ScenarioStatus.PASSED), str(
        report
    )
    assert ("counts as done, and was never called" in str(report)) is found


class AssumesThatItIsDone(Charges):
    def charge(self, session: Any, cards: Any) -> None:
        def ask(key: str) -> Any:
            try:
                return Done("paid already") if cards.find(key) else NOT_DONE
            except TimeoutError:
                return self.without_an_answer()

        session.effect("charge", lambda key: cards.charge(5, key=key), reconcile=ask)

    def without_an_answer(self) -> Any:
        return Done("assumed")


class AssumesThatItIsRefused(AssumesThatItIsDone):
    def without_an_answer(self) -> Any:
        raise EffectRefused("not found")


class DoesNotKnow(AssumesThatItIsDone):
    def without_an_answer(self) -> Any:
        raise ConnectionError("ask again later")


@pytest.mark.req("CC-168")
@pytest.mark.parametrize(
    ("consumer", "found"),
    [(AssumesThatItIsDone, True), (AssumesThatItIsRefused, True), (DoesNotKnow, False), (Asks, False)],
)
def test_reconcile_that_knows_without_an_answer_is_found(consumer: Any, found: bool) -> None:
    result = examine(consumer, "exceptions")["exceptions"]
    assert result.result is (ScenarioStatus.FAILED if found else ScenarioStatus.PASSED), str(result)
    assert not found or "has an answer after a TimeoutError" in str(result)


class Declined(Exception): ...


class TakesSilenceForANo(Charges):
    def charge(self, session: Any, cards: Any) -> None:
        def call(key: str) -> str:
            try:
                return str(cards.charge(5, key=key))
            except Exception as error:
                raise EffectRefused("declined") from error

        with suppress(EffectRefused):
            session.effect("charge", call)


class TakesANoForANo(Charges):
    def charge(self, session: Any, cards: Any) -> None:
        def call(key: str) -> str:
            try:
                return str(cards.charge(5, key=key))
            except Declined as error:
                raise EffectRefused("declined") from error
            except TimeoutError:
                return str(cards.charge(5, key=key))  # again

        session.effect("charge", call)


class RefusesItself(Charges):
    def charge(self, session: Any, cards: Any) -> None:
        def call(key: str) -> str:
            if session.event.tracking_id == "order-2":
                raise EffectRefused("too high")
            return str(cards.charge(5, key=key))

        with suppress(EffectRefused):
            session.effect("charge", call)


class BestEffort(Charges):
    def charge(self, session: Any, cards: Any) -> None:
        def call(key: str) -> None:
            with suppress(TimeoutError):
                cards.charge(5, key=key)

        session.effect("charge", call)


@pytest.mark.req("CC-150")
def test_an_effect_that_takes_a_timeout_for_a_refusal_is_found() -> None:
    (finding,) = examine(TakesSilenceForANo, "exceptions")["exceptions"].findings
    assert "effect 'charge' of event 'order-1' raised EffectRefused after a TimeoutError" in finding.text


@pytest.mark.usual("TakesANoForANo")
@pytest.mark.req("CC-150")
@pytest.mark.parametrize(
    "consumer",
    [
        TakesANoForANo,
        RefusesItself,
        pytest.param(BestEffort, marks=pytest.mark.long),
        pytest.param(Charges, marks=pytest.mark.long),
    ],
)
def test_an_effect_may_decide_what_to_do_without_an_answer(consumer: Any) -> None:
    report = examine(consumer, "exceptions")
    assert report["exceptions"].result is ScenarioStatus.PASSED, str(report)


class TriesAgain(Charges):
    def charge(self, session: Any, cards: Any) -> None:
        session.effect("charge", lambda key: self.call(cards, key))

    def call(self, cards: Any, key: str) -> str:
        for _ in range(2):
            with suppress(TimeoutError):
                return str(cards.charge(5, key=key))
        raise TimeoutError


class TriesAgainWithAnotherKey(TriesAgain):
    def call(self, cards: Any, key: str) -> str:
        for attempt in range(2):
            with suppress(TimeoutError):
                return str(cards.charge(5, key=f"{key}-{attempt}"))
        raise TimeoutError


class GoesOnWithTheNextItem(TriesAgain):
    def call(self, cards: Any, key: str) -> str:
        errors = []
        for item in range(2):
            try:
                cards.charge(item, key=f"{key}-{item}")
            except TimeoutError as error:
                errors.append(error)
        if errors:
            raise errors[0]
        return "paid"


@pytest.mark.usual("TriesAgainWithAnotherKey", "GoesOnWithTheNextItem")
@pytest.mark.req("CC-154")
@pytest.mark.parametrize(
    ("consumer", "found"),
    [(TriesAgain, False), (TriesAgainWithAnotherKey, True), (GoesOnWithTheNextItem, False)],
)
def test_a_call_that_is_tried_again_with_another_key_is_found(consumer: Any, found: bool) -> None:
    report = examine(consumer, "exceptions")
    expected = ScenarioStatus.FAILED if found else ScenarioStatus.PASSED
    assert report["exceptions"].result is expected, str(report)
    assert ("again with another key" in str(report)) is found


class Ignores(TriesAgain):
    def call(self, cards: Any, key: str) -> str | None:  # type: ignore[override]
        with suppress(Exception):
            return str(cards.charge(5, key=key))
        return None


class IgnoresOnPurpose(Ignores):
    def charge(self, session: Any, cards: Any) -> None:
        session.effect("mail", lambda _: self.call(cards, session.event.tracking_id))


class GoesAnotherWay(Ignores):
    def charge(self, session: Any, cards: Any) -> None:
        if session.effect("charge", lambda key: self.call(cards, key)) is None:
            session.execute(INSERT, {"id": session.event.tracking_id, "total": -1})


@pytest.mark.usual("Ignores", "GoesAnotherWay")
@pytest.mark.req("CC-154")
@pytest.mark.parametrize(
    ("consumer", "found"), [(Ignores, True), (IgnoresOnPurpose, False), (GoesAnotherWay, False)]
)
def test_an_effect_that_ignores_that_nobody_answered_is_found(consumer: Any, found: bool) -> None:
    report = examine(consumer, "exceptions")
    expected = ScenarioStatus.FAILED if found else ScenarioStatus.PASSED
    assert report["exceptions"].result is expected, str(report)
    assert ("nobody will try again" in str(report)) is found


class Waits(Charges):
    def charge(self, session: Any, cards: Any) -> None:
        session.effect("charge", lambda key: self.begin(cards, key).join())

    def begin(self, cards: Any, key: str) -> threading.Thread:
        slow = threading.Thread(target=lambda: [time.sleep(0.2), cards.charge(5, key=key)])
        slow.start()
        return slow


class FiresAndForgets(Waits):
    def charge(self, session: Any, cards: Any) -> None:
        session.effect("charge", lambda key: self.begin(cards, key) and None)


class WaitsForATask(AsyncConsumerTask):
    contract = contract(mode="effectful")
    awaits = True

    async def process_transaction(self, transaction: Transaction, session: Any) -> None:  # type: ignore[override]
        async def charge(key: str) -> None:
            task = asyncio.create_task(asyncio.sleep(0.2))
            self.services["cards"].charge(5, key=key)
            if self.awaits:
                await task

        await session.effect("charge", charge)
        await session.execute(INSERT, values(transaction))


class ForgetsATask(WaitsForATask):
    awaits = False


@pytest.mark.usual("FiresAndForgets", "WaitsForATask")
@pytest.mark.req("CC-155")
@pytest.mark.parametrize(
    ("consumer", "found"),
    [(Waits, False), (FiresAndForgets, True), (WaitsForATask, False), (ForgetsATask, True)],
)
def test_what_an_effect_leaves_running_is_found(consumer: Any, found: bool) -> None:
    report = examine(consumer, "outside-calls")
    expected = ScenarioStatus.FAILED if found else ScenarioStatus.PASSED
    assert report["outside-calls"].result is expected, str(report)
    assert ("in effect 'charge' that was still running when the effect returned" in str(report)) is found
